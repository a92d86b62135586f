"""all_reduce, reduce_scatter and all_gather with autograd, for tensor-parallel linears.

Forward and backward of the pairs that tensor parallelism needs:

    =================  ==========================  ==========================
    function           forward                     backward
    =================  ==========================  ==========================
    all_reduce         tree sum over ranks         identity (dY is replicated)
    copy_to_group      identity                    tree sum over ranks
    reduce_scatter     tree sum, own slice         all_gather
    all_gather         concatenation along dim 0   tree sum, own slice
                       (``reduce_grad=False``)     own slice only
    =================  ==========================  ==========================

Guarantee: bits depend only on the payloads in rank order (see the reference). ``group=None`` or a group of one rank is
the identity and the rounding. Errors: :class:`ContractError` for a dtype or a shape that the operation does not define.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator
from rl_kernel.ops.collectives import peer
from rl_kernel.registry import get_mode, resolve

_DTYPES = (torch.float32, torch.bfloat16)
# From this payload on, every rank sums one slice and the rounded slices are gathered: less traffic and less arithmetic,
# and the same bits, since the sum is elementwise.
_SLICED_NUMEL = 1 << 16
_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in ``group``; 1 without a group."""
    return 1 if group is None else group.size()


def group_name(group: dist.ProcessGroup | None) -> str:
    """Name under which a custom operator finds ``group`` again; empty for no group or a group of one rank."""
    if group is None or group.size() == 1:
        return ""
    group = peer.plain(group)
    _groups[group.group_name] = group
    return group.group_name


def group_of(name: str) -> dist.ProcessGroup:
    """The group registered by :func:`group_name`."""
    try:
        return _groups[name]
    except KeyError:
        raise ContractError(f"process group {name!r} is gone; pass a live tp_group") from None


def gather_bytes(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R, ...] payloads of all ranks in rank order, moved as bytes: any dtype, any backend, NaN payloads included."""
    group = peer.plain(group)
    peers = peer.of(group, x, "all_gather")
    if peers is not None:
        return peers.all_gather(x)
    return _gather_by_group(x, group)


def _gather_by_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device)
    if x.numel():
        dist.all_gather_into_tensor(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)
    return out


def _exchange_slices(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x [R * n, ...] -> [R, n, ...]: slice ``rank`` of every rank's x, in rank order."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        dist.all_to_all_single(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)
    return out.view(group.size(), x.shape[0] // group.size(), *x.shape[1:])


def _peers(group: dist.ProcessGroup, x: torch.Tensor, call: str) -> peer.Peers | None:
    """Peer memory adds in the contract's tree only; mode native wants torch's own sum."""
    return None if get_mode() == "native" else peer.of(group, x, call)


def _reduce_parts(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return resolve("collectives", parts.device, parts.dtype).module.reduce_parts(parts, out_dtype)


def _check(name: str, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if x.dtype not in _DTYPES or out_dtype not in _DTYPES:
        raise ContractError(f"{name}: x is {x.dtype}, out_dtype is {out_dtype}; both must be float32 or bfloat16")
    return out_dtype


def _check_rows(name: str, x: torch.Tensor, size: int) -> None:
    if x.dim() == 0 or x.shape[0] % size:
        raise ContractError(f"{name}: dimension 0 of x {tuple(x.shape)} must be a multiple of the group size {size}")


def _all_reduce_bytes(x: torch.Tensor, group: str, out_dtype: torch.dtype) -> torch.Tensor:
    process_group = group_of(group)
    peers = _peers(process_group, x, "all_reduce")
    if peers is not None:
        return peers.all_reduce(x, out_dtype)
    size = process_group.size()
    if size > 2 and x.numel() >= _SLICED_NUMEL and x.numel() % size == 0:
        own = _reduce_parts(_exchange_slices(x.reshape(-1), process_group), out_dtype)
        return _gather_by_group(own, process_group).view(x.shape)
    return _reduce_parts(_gather_by_group(x, process_group), out_dtype)


def _reduce_scatter_bytes(x: torch.Tensor, group: str, out_dtype: torch.dtype) -> torch.Tensor:
    process_group = group_of(group)
    peers = _peers(process_group, x, "reduce_scatter")
    if peers is not None:
        return peers.reduce_scatter(x, out_dtype)
    return _reduce_parts(_exchange_slices(x, process_group), out_dtype)


def _all_gather_bytes(x: torch.Tensor, group: str, reduce_grad: bool) -> torch.Tensor:
    return gather_bytes(x, group_of(group)).flatten(0, 1)


class _Gradient:
    """``flag`` is out_dtype, or reduce_grad of all_gather."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, ctx.group, ctx.flag = inputs
        ctx.dtype = x.dtype


class _AllReduceGradient(_Gradient):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad.to(ctx.dtype), None, None


class _ReduceScatterGradient(_Gradient):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _all_gather(grad, ctx.group, False).to(ctx.dtype), None, None


class _AllGatherGradient(_Gradient):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        if ctx.flag:
            return _reduce_scatter(grad, ctx.group, ctx.dtype), None, None
        group = group_of(ctx.group)
        return grad.chunk(group.size())[group.rank()].clone(), None, None


_all_reduce = Operator(
    "all_reduce",
    _all_reduce_bytes,
    lambda x, group, out_dtype: x.new_empty(x.shape, dtype=out_dtype),
    _AllReduceGradient,
)
_reduce_scatter = Operator(
    "reduce_scatter",
    _reduce_scatter_bytes,
    lambda x, group, out_dtype: x.new_empty((x.shape[0] // group_of(group).size(), *x.shape[1:]), dtype=out_dtype),
    _ReduceScatterGradient,
)
_all_gather = Operator(
    "all_gather",
    _all_gather_bytes,
    lambda x, group, reduce_grad: x.new_empty((x.shape[0] * group_of(group).size(), *x.shape[1:])),
    _AllGatherGradient,
)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _all_reduce(grad, ctx.group, grad.dtype), None


def all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum of ``x`` over the ranks of ``group``: fp32 tree in rank order, rounded once to ``out_dtype``.

    Args:
        x: partial result, any shape; float32, or a narrower dtype that is widened exactly before the sum.
        group: process group; ``None`` or one rank is the identity and the rounding.
        out_dtype: dtype of the result, ``x.dtype`` by default.
    """
    out_dtype = _check("all_reduce", x, out_dtype)
    name = group_name(group)
    return _all_reduce(x, name, out_dtype) if name else x.to(out_dtype)


def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rows ``[rank * n/R, (rank + 1) * n/R)`` of :func:`all_reduce` of ``x`` [n, ...]."""
    out_dtype = _check("reduce_scatter", x, out_dtype)
    _check_rows("reduce_scatter", x, group_size(group))
    name = group_name(group)
    return _reduce_scatter(x, name, out_dtype) if name else x.to(out_dtype)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None = None, *, reduce_grad: bool = True) -> torch.Tensor:
    """Concatenation of every rank's ``x`` [n, ...] along dimension 0 -> [R * n, ...].

    ``reduce_grad``: the gradient is a partial result on each rank and is summed (True), or it is already the full
    gradient on every rank and only the own rows are taken (False).
    """
    if x.dim() == 0:
        raise ContractError("all_gather: x needs at least one dimension")
    name = group_name(group)
    return _all_gather(x, name, reduce_grad) if name else x


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Identity whose gradient is summed over ``group`` with the fixed tree."""
    name = group_name(group)
    return _CopyToGroup.apply(x, name) if name else x
