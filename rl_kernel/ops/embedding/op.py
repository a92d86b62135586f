"""Public embedding, whole or vocabulary-parallel."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.errors import ContractError
from rl_kernel.ops._common import group_size
from rl_kernel.ops._operator import Operator
from rl_kernel.ops.collectives import op as collectives

__all__ = ["embedding"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("embedding", x.device, x.dtype).module


def _forward(ids: torch.Tensor, weight: torch.Tensor, vocab_start_index: int) -> torch.Tensor:
    return _module(weight).forward(ids, weight, vocab_start_index)


def _backward(dy: torch.Tensor, ids: torch.Tensor, num_rows: int, vocab_start_index: int) -> torch.Tensor:
    return _module(dy).backward(dy, ids, num_rows, vocab_start_index)


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ids, weight, ctx.vocab_start_index = inputs
        ctx.save_for_backward(ids)
        ctx.num_rows = weight.shape[0]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        (ids,) = ctx.saved_tensors
        return None, _embedding_backward(dy, ids, ctx.num_rows, ctx.vocab_start_index), None


_embedding = Operator(
    "embedding",
    _forward,
    lambda ids, weight, vocab_start_index: weight.new_empty((ids.shape[0], weight.shape[1])),
    _Gradient,
)
_embedding_backward = Operator(
    "embedding_backward",
    _backward,
    lambda dy, ids, num_rows, vocab_start_index: dy.new_empty((num_rows, dy.shape[1])),
)


class _ReduceRows(torch.autograd.Function):
    """Sum of the ranks' rows: exact, at most one summand is not zero. Every rank holds the whole gradient already,
    or, with sequence parallelism, gathers it."""

    @staticmethod
    def forward(ctx, rows, group, sequence_parallel):  # type: ignore[no-untyped-def]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        reduce = collectives.reduce_scatter if sequence_parallel else collectives.all_reduce
        return reduce(rows, group, out_dtype=rows.dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return (collectives.all_gather(dy, ctx.group) if ctx.sequence_parallel else dy), None, None


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    tp_group: Any = None,
    vocab_start_index: int = 0,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """Rows of ``weight``; with ``tp_group``, ``weight`` holds the rows of ids from ``vocab_start_index`` on.

    Args:
        ids: [...] int64 or int32.
        weight: [V_local, H] float32 or bfloat16 (cpu family).
        tp_group: tensor-parallel process group over the vocabulary, or None.
        vocab_start_index: first global id of this rank's rows.
        sequence_parallel: the result is this rank's 1/t of the ids (first dimension); needs ``tp_group``.

    Returns:
        [..., H]. -0.0 becomes +0.0, so that the sum over ranks has the same bytes as the lookup in one table.

    Raises:
        ContractError: shapes do not fit, or (cpu, no group) an id lies outside the table.

    Guarantee: same bits for every tensor-parallel size. Backward: a row's tokens ascending in fp32, one rounding.
    """
    if weight.dim() != 2:
        raise ContractError(f"embedding: weight must be [V, H], got shape {tuple(weight.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ContractError(f"embedding: ids must be int64 or int32, got {ids.dtype}")
    ranks = group_size(tp_group)
    if ids.device.type == "cpu" and tp_group is None and ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if not (vocab_start_index <= low and high < vocab_start_index + weight.shape[0]):
            raise ContractError(
                f"embedding: ids from {low} to {high} must lie in "
                f"[{vocab_start_index}, {vocab_start_index + weight.shape[0]}), the rows of weight"
            )
    rows = _embedding(ids.reshape(-1), weight, vocab_start_index)
    if ranks > 1:
        rows = _ReduceRows.apply(rows, tp_group, sequence_parallel)
        if sequence_parallel:
            return rows.reshape(ids.shape[0] // ranks, *ids.shape[1:], weight.shape[1])
    return rows.reshape(*ids.shape, weight.shape[1])
