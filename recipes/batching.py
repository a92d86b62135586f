"""From samples to what each rank trains on: minibatches, data-parallel shares, packed micro-batches.

Everything here is a deterministic function of its arguments: the same samples give the same packs on every machine.
Per-token quantities of a response (``old_logp``, ``advantages``, ...) are arrays [n]; in a pack they are aligned with
``PackedBatch.target_ids``: position p - 1 + i, whose target is response token i, holds element i.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from recipes.engines.types import PackedBatch, Sample
from recipes.errors import DataError


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


def gather(packed: PackedBatch, values: torch.Tensor) -> dict[int, np.ndarray]:
    """The inverse of :func:`scatter`: float32 [n] of each sample in the pack, bits kept, by ``sample_index``."""
    flat = values.detach().to("cpu").numpy()
    targets = packed.active.cpu().numpy()
    out: dict[int, np.ndarray] = {}
    for row, index in enumerate(packed.sample_index.tolist()):
        if index >= 0:
            a, b = int(packed.cu_seqlens[row]), int(packed.cu_seqlens[row + 1])
            out[index] = flat[a:b][targets[a:b]].copy()
    return out


def micro_batches(
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[np.ndarray | float]],
    *,
    data_parallel_size: int,
    budget: int,
    indices: Sequence[int] | None = None,
    pad_to_multiple: int = 1,
) -> list[list[MicroBatch]]:
    """Packs of each data-parallel rank.

    Args:
        samples: all samples of the step.
        columns: per-response values, see :func:`scatter`.
        data_parallel_size: number of ranks; one without a sequence gets an empty list.
        budget: tokens of a pack.
        indices: the samples to use, all when absent. ``PackedBatch.sample_index`` refers to ``samples``.
        pad_to_multiple: see ``PackedBatch.from_samples``.
    """
    chosen = list(range(len(samples)) if indices is None else indices)
    lengths = [samples[i].num_tokens for i in chosen]
    ranks: list[list[MicroBatch]] = []
    for share in split_by_tokens(lengths, data_parallel_size):
        batches = []
        for pack in pack_by_tokens([lengths[i] for i in share], budget):
            members = [chosen[share[i]] for i in pack]
            packed = PackedBatch.from_samples(
                [samples[i] for i in members], indices=members, pad_to_multiple=pad_to_multiple
            )
            batches.append(MicroBatch(packed, {k: scatter(packed, samples, v) for k, v in columns.items()}))
        ranks.append(batches)
    return ranks
