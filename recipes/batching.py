"""From samples to what each rank trains on: minibatches, data-parallel shares, packed micro-batches.

Everything here is a deterministic function of its arguments: the same samples give the same packs on every machine.
Per-token quantities of a response (``old_logp``, ``advantages``, ...) are arrays [n]; in a pack they are aligned with
``PackedBatch.target_ids``: position p - 1 + i, whose target is response token i, holds element i.

The ranks of a context-parallel group get the same packs, each computes some rows of them (the engine says which), and
:func:`gather` and :func:`join` put the parts of a response together again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from recipes.config import TrainConfig
from recipes.engines.types import PackedBatch, Sample
from recipes.errors import DataError, EngineError

Part = tuple[np.ndarray, np.ndarray]  # some tokens of a response: int64 [k] which, float32 [k] their values


@dataclass(eq=False)
class MicroBatch:
    """One forward/backward pass of one rank: a pack, and per-token columns (float32 [T], 0 where no target is)."""

    packed: PackedBatch
    columns: dict[str, torch.Tensor] = field(default_factory=dict)


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part and on nothing else (not on engine, batch or order)."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def split_by_tokens(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide sequences among ``parts`` ranks so that token counts are close: longest first, to the least loaded.

    Ties go to the earlier sequence and the lower rank. Every rank gets at least one sequence when there are enough.

    Returns:
        ``parts`` lists of indices, each ascending.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(parts), key=lambda r: (load[r], len(shares[r]), r))
        shares[rank].append(index)
        load[rank] += max(lengths[index], 1)
    return [sorted(share) for share in shares]


def pack_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequences, in order, into packs of at most ``budget`` tokens.

    A sequence longer than the budget gets a pack of its own: it cannot be cut.
    """
    packs: list[list[int]] = []
    used = budget + 1
    for index, length in enumerate(lengths):
        if used + length > budget:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += length
    return packs


def chunk(count: int, parts: int) -> list[range]:
    """``parts`` contiguous ranges over ``count`` items whose sizes differ by at most one; empty ones are left out."""
    borders = [count * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in zip(borders, borders[1:]) if b > a]


def scatter(packed: PackedBatch, samples: Sequence[Sample], values: Sequence[np.ndarray | float]) -> torch.Tensor:
    """Lay per-response values (arrays [n] or one number each) out along a pack.

    Args:
        packed: made from a subset of ``samples``; ``packed.sample_index`` says which.
        samples: all samples.
        values: one entry per sample of ``samples``.

    Returns:
        float32 [T], 0 where there is no target.

    Raises:
        DataError: an array's length is not the response's.
    """
    out = torch.zeros(packed.num_tokens, dtype=torch.float32)
    for row, index in enumerate(packed.sample_index.tolist()):
        if index < 0:
            continue
        sample, value = samples[index], values[index]
        n = len(sample.response_ids)
        start = int(packed.cu_seqlens[row]) + len(sample.prompt_ids) - 1
        array = np.full(n, value, np.float32) if np.ndim(value) == 0 else np.array(value, np.float32)
        if array.shape != (n,):
            raise DataError(f"{array.shape[0]} values for {n} response tokens", where=f"sample {index}")
        out[start : start + n] = torch.from_numpy(array)
    return out


def gather(packed: PackedBatch, values: torch.Tensor, rows: torch.Tensor | None = None) -> dict[int, Part]:
    """Per-response values out of a pack, by ``sample_index``; bits are kept.

    Args:
        packed: the pack, on any device.
        values: float32 [T], or [T_local] of the positions ``rows``.
        rows: int64 [T_local], positions of the pack; all of them when absent.

    Returns:
        The response tokens that ``rows`` cover, and their values. A sample without one is left out.
    """
    flat = values.detach().to("cpu").numpy()
    where = np.arange(packed.num_tokens) if rows is None else rows.to("cpu").numpy()
    sampled = packed.active.cpu().numpy()[where]
    flat, where = flat[sampled], where[sampled]
    borders = packed.cu_seqlens.cpu().numpy().astype(np.int64)
    sequence = np.searchsorted(borders, where, side="right") - 1
    token = where - borders[sequence] - (packed.prompt_lens.cpu().numpy()[sequence] - 1)
    indices = packed.sample_index.tolist()
    out: dict[int, Part] = {}
    for found in np.unique(sequence).tolist():
        mine = sequence == found
        out[indices[found]] = (token[mine], flat[mine])
    return out


def join(parts: Iterable[Mapping[int, Part]], count: int, what: str = "the engine") -> list[np.ndarray]:
    """Whole responses 0 .. count-1 from what the ranks gathered: float32 [n] each.

    Raises:
        EngineError: a response is missing, or one of its tokens is missing or came twice.
    """
    found: dict[int, list[Part]] = {}
    for part in parts:
        for index, piece in part.items():
            found.setdefault(index, []).append(piece)
    missing = [index for index in range(count) if index not in found]
    if missing:
        raise EngineError(f"{what} returned nothing for samples {missing[:5]}", where="train")
    whole = []
    for index in range(count):
        token = np.concatenate([piece[0] for piece in found[index]])
        order = np.argsort(token, kind="stable")
        if not np.array_equal(token[order], np.arange(token.size)):
            raise EngineError(
                f"{what} returned tokens {token[order].tolist()[:8]} of sample {index}, not one value for each",
                where="train",
                fix="The engine's local_rows do not partition the pack over the context-parallel ranks.",
            )
        whole.append(np.concatenate([piece[1] for piece in found[index]])[order])
    return whole


def padding_of(train: TrainConfig) -> tuple[int, int]:
    """``(sequence_multiple, pad_to_multiple)`` of the packs of a training group.

    Context parallelism cuts every sequence into ``2 * cp`` equal chunks; sequence parallelism then cuts the tokens of a
    context-parallel rank into tensor-parallel shares. ``train.pack_multiple`` asks for round numbers.
    """
    cp = train.context_parallel_size
    sequence = 2 * cp if cp > 1 else 1
    share = cp * train.tensor_parallel_size if train.sequence_parallel else 1
    return sequence, math.lcm(sequence, share, train.pack_multiple)


def micro_batches(
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[np.ndarray | float]],
    *,
    data_parallel_size: int,
    budget: int,
    indices: Sequence[int] | None = None,
    pad_to_multiple: int = 1,
    sequence_multiple: int = 1,
) -> list[list[MicroBatch]]:
    """Packs of each data-parallel rank.

    Args:
        samples: all samples of the step.
        columns: per-response values, see :func:`scatter`.
        data_parallel_size: number of ranks; one without a sequence gets an empty list.
        budget: tokens of a pack.
        indices: the samples to use, all when absent. ``PackedBatch.sample_index`` refers to ``samples``.
        pad_to_multiple, sequence_multiple: see ``PackedBatch.from_samples`` and :func:`padding_of`.
    """
    chosen = list(range(len(samples)) if indices is None else indices)
    lengths = [-(-samples[i].num_tokens // sequence_multiple) * sequence_multiple for i in chosen]
    ranks: list[list[MicroBatch]] = []
    for share in split_by_tokens(lengths, data_parallel_size):
        batches = []
        for pack in pack_by_tokens([lengths[i] for i in share], budget):
            members = [chosen[share[i]] for i in pack]
            packed = PackedBatch.from_samples(
                [samples[i] for i in members],
                indices=members,
                pad_to_multiple=pad_to_multiple,
                sequence_multiple=sequence_multiple,
            )
            batches.append(MicroBatch(packed, {k: scatter(packed, samples, v) for k, v in columns.items()}))
        ranks.append(batches)
    return ranks
