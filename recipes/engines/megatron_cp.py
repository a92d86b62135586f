"""Context parallelism for packed sequences, with the bits of the run without it.

Layout (Megatron's zig-zag): every sequence, padded to a multiple of ``2 * cp``, is cut into ``2 * cp`` equal chunks;
rank r holds chunks r and ``2 * cp - 1 - r`` of each sequence, so causal work is balanced. ``cu_seqlens`` counts the
tokens of all ranks.

Forward: keys and values are gathered over the group and laid out from absolute position 0, then each local chunk
attends to everything up to its own end. The key blocks of the contract start at absolute position 0, so a query sees
the same blocks in the same order as without context parallelism. Backward: a key's gradient is the sum over this rank's
two chunks, then over the ranks, in fp32 and in a fixed tree.

Guarantee: log-probabilities, log-sum-exps, entropies and values have the bits of the run without context parallelism,
and so of the rollout. Gradients are sums over tokens; here each rank sums its own tokens and the collective of the
data-parallel group (gloo or NCCL) adds the ranks in fp32. Weights after an update are therefore bitwise equal from run
to run and on every rank, and not those of another context-parallel size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch

import rl_kernel
from recipes.errors import EngineError

_LAYOUT = "rl_kernel_cp_layout"


def group_of(packed: Any) -> Any:
    """The context-parallel group, or None for one rank. ``packed.cp_group`` overrides Megatron's global one."""
    from megatron.core import parallel_state

    group = getattr(packed, "cp_group", None)
    if group is None and parallel_state.model_parallel_is_initialized():
        group = parallel_state.get_context_parallel_group()
    return None if group is None or group.size() == 1 else group


@dataclass(frozen=True)
class Layout:
    """Index tensors of one micro-batch on one rank.

    Attributes:
        tokens: int64 [T_local], packed index of each local token in the whole batch.
        positions: int64 [T_local], logical positions.
        gathered: int64 [T], where token g of the whole batch sits in the concatenation over ranks.
        cu_q, cu_k: int32 [2B + 1], local chunks as sequences of their own, and the keys they see.
        keys: int64 [K], packed index of every key of every chunk.
        sources: int64 [K], where each of them sits in the concatenation over ranks.
        lower, upper: int64, elements of ``keys`` that the lower and the upper chunks see; within either of the two no
            packed index occurs twice.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    gathered: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    keys: torch.Tensor
    sources: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor


def build_layout(cu_seqlens: torch.Tensor, rank: int, size: int) -> Layout:
    """Layout of ``rank`` of ``size`` for sequences with borders ``cu_seqlens`` [B + 1].

    Raises:
        EngineError: a sequence length is not a multiple of ``2 * size``.
    """
    found = _layout(tuple(cu_seqlens.tolist()), rank, size)
    if cu_seqlens.device.type == "cpu":
        return found
    return Layout(**{f.name: getattr(found, f.name).to(cu_seqlens.device) for f in fields(Layout)})


@functools.lru_cache(maxsize=64)  # a pack is asked for several times a step: logp, reference, every update
def _layout(borders: tuple[int, ...], rank: int, size: int) -> Layout:
    per_rank: list[list[torch.Tensor]] = [[] for _ in range(size)]
    positions: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    first: list[torch.Tensor] = []
    len_q, len_k = [0], [0]
    for start, stop in zip(borders[:-1], borders[1:]):
        if (stop - start) % (2 * size):
            raise EngineError(
                f"a packed sequence has {stop - start} tokens, not a multiple of {2 * size}",
                where="context parallelism",
                fix="Pad every sequence to a multiple of twice the context-parallel size.",
            )
        chunk = (stop - start) // (2 * size)
        for r in range(size):
            for j in (r, 2 * size - 1 - r):
                per_rank[r].append(torch.arange(start + j * chunk, start + (j + 1) * chunk))
        for n, j in enumerate((rank, 2 * size - 1 - rank)):
            positions.append(torch.arange(j * chunk, (j + 1) * chunk))
            seen = torch.arange(start, start + (j + 1) * chunk)
            keys.append(seen)
            first.append(torch.full_like(seen, n == 0, dtype=torch.bool))
            len_q.append(chunk)
            len_k.append(seen.numel())
    order = torch.cat([torch.cat(parts) for parts in per_rank])
    gathered = torch.empty_like(order)
    gathered[order] = torch.arange(order.numel())

    def borders_of(lengths: list[int]) -> torch.Tensor:
        return torch.tensor(lengths).cumsum(0).to(torch.int32)

    is_lower = torch.cat(first)
    return Layout(
        tokens=torch.cat(per_rank[rank]),
        positions=torch.cat(positions),
        gathered=gathered,
        cu_q=borders_of(len_q),
        cu_k=borders_of(len_k),
        keys=torch.cat(keys),
        sources=gathered[torch.cat(keys)],
        lower=is_lower.nonzero().squeeze(1),
        upper=(~is_lower).nonzero().squeeze(1),
    )


def layout_of(packed: Any, group: Any, tokens: int) -> Layout:
    """Layout of this micro-batch, built once and kept on ``packed``.

    Raises:
        EngineError: the batch does not hold ``tokens`` local tokens.
    """
    found = getattr(packed, _LAYOUT, None)
    if found is None:
        cu = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
        found = build_layout(cu, group.rank(), group.size())
        setattr(packed, _LAYOUT, found)
    if found.tokens.numel() != tokens:
        raise EngineError(
            f"cu_seqlens gives this rank {found.tokens.numel()} tokens, the batch has {tokens}",
            where="packed_seq_params",
            fix="cu_seqlens counts the tokens of all context-parallel ranks.",
        )
    return found


class _GatherKeys(torch.autograd.Function):
    """[T_local, ...] of every rank -> the rows each local chunk attends to, [K, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Layout, group: Any) -> torch.Tensor:
        from rl_kernel.ops.collectives.op import gather_bytes

        ctx.layout, ctx.group, ctx.dtype = layout, group, x.dtype
        everyone = gather_bytes(x, group).view(-1, *x.shape[1:])
        return everyone.index_select(0, layout.sources)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, group = ctx.layout, ctx.group
        halves = []
        for seen in (layout.lower, layout.upper):
            half = grad.new_zeros(layout.gathered.numel(), *grad.shape[1:], dtype=torch.float32)
            # Each key occurs once in the chunks of one half.
            half.index_copy_(0, layout.sources[seen], grad.index_select(0, seen).float())
            halves.append(half)
        return rl_kernel.reduce_scatter(halves[0] + halves[1], group, out_dtype=ctx.dtype), None, None


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any, group: Any, softmax_scale: float | None
) -> torch.Tensor:
    """Causal attention of this rank's chunks; query [T_local, Hq, D], key and value [T_local, Hkv, D], RoPE applied."""
    layout = layout_of(packed, group, query.shape[0])
    key = _GatherKeys.apply(key, layout, group)
    value = _GatherKeys.apply(value, layout, group)
    out = rl_kernel.attention_varlen(query, key, value, layout.cu_q, layout.cu_k, softmax_scale=softmax_scale)
    assert isinstance(out, torch.Tensor)  # a pair only with return_lse
    return out
