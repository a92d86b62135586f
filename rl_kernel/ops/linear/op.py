"""Public linear operators: column- and row-parallel, with gradients whose order does not depend on the TP size."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rl_kernel import registry
from rl_kernel.errors import ContractError
from rl_kernel.ops._common import group_size, local_segments
from rl_kernel.ops._operator import Operator
from rl_kernel.ops.collectives import op as collectives

__all__ = ["column_parallel_linear", "linear"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("linear", x.device, x.dtype).module


def _matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    segments: int,
    grad_segments: int,
    parts: int,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    return _module(x).matmul(x, weight, segments=segments, out_dtype=out_dtype)


def _matmul_dgrad(
    dy: torch.Tensor, weight: torch.Tensor, segments: int, parts: int, out_dtype: torch.dtype | None
) -> torch.Tensor:
    return _module(weight).dgrad(dy, weight, segments=segments, parts=parts, out_dtype=out_dtype)


def _matmul_wgrad(dy: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    return _module(x).wgrad(dy, x, out_dtype=out_dtype)


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, weight, _, ctx.grad_segments, ctx.parts, _ = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.dtypes = x.dtype, weight.dtype

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _dgrad(dy, weight, ctx.grad_segments, ctx.parts, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dw = _wgrad(dy, x, ctx.dtypes[1])
        return dx, dw, None, None, None, None


_linear = Operator(
    "linear",
    _matmul,
    lambda x, weight, segments, grad_segments, parts, out_dtype: x.new_empty(
        (x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype
    ),
    _Gradient,
)
_dgrad = Operator(
    "linear_dgrad",
    _matmul_dgrad,
    lambda dy, weight, segments, parts, out_dtype: dy.new_empty(
        (dy.shape[0], weight.shape[1]), dtype=out_dtype or dy.dtype
    ),
)
_wgrad = Operator(
    "linear_wgrad",
    _matmul_wgrad,
    lambda dy, x, out_dtype: x.new_empty((dy.shape[1], x.shape[1]), dtype=out_dtype or x.dtype),
)


class _RowParallel(torch.autograd.Function):
    """The rank's subtree in fp32, then the collective continues the tree and rounds once."""

    @staticmethod
    def forward(ctx, x, weight, segments, group, out_dtype, sequence_parallel):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        partial = _linear(x, weight, segments, 1, 1, torch.float32)
        reduce = collectives.reduce_scatter if sequence_parallel else collectives.all_reduce
        return reduce(partial, group, out_dtype=out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = collectives.all_gather(dy, ctx.group)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _dgrad(dy, weight, 1, 1, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _wgrad(dy, x, weight.dtype)
        return dx, dw, None, None, None, None


class _ColumnParallel(torch.autograd.Function):
    """Forward is local; dX is the rank's subtree over N in fp32, continued by the collective."""

    @staticmethod
    def forward(ctx, x, weight, segments, parts, group, out_dtype, sequence_parallel):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel, ctx.segments, ctx.parts = group, sequence_parallel, segments, parts
        if sequence_parallel:
            x = collectives.all_gather(x, group)
        return _linear(x, weight, 1, segments, parts, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _dgrad(dy, weight, ctx.segments, ctx.parts, torch.float32)
            reduce = collectives.reduce_scatter if ctx.sequence_parallel else collectives.all_reduce
            dx = reduce(dx, ctx.group, out_dtype=x.dtype)
        if ctx.needs_input_grad[1]:
            full = collectives.all_gather(x, ctx.group) if ctx.sequence_parallel else x
            dw = _wgrad(dy, full, weight.dtype)
        return dx, dw, None, None, None, None, None


def _rows(x: torch.Tensor, weight: torch.Tensor, name: str, out_dtype: torch.dtype | None) -> torch.Tensor:
    if weight.dim() != 2 or weight.shape[1] == 0:
        raise ContractError(f"{name}: weight must be [N, K] with K above 0, got shape {tuple(weight.shape)}")
    if not (x.dim() >= 1 and x.shape[-1] == weight.shape[1]):
        raise ContractError(
            f"{name}: last dimension of x {tuple(x.shape)} must equal K={weight.shape[1]} of weight [N, K]"
        )
    if x.dtype != weight.dtype:
        raise ContractError(f"{name}: x is {x.dtype} and weight is {weight.dtype}; use one dtype on both sides")
    if x.device != weight.device:
        raise ContractError(f"{name}: x is on {x.device} and weight on {weight.device}; move one of them")
    if out_dtype is not None and out_dtype != torch.float32 and out_dtype != torch.bfloat16:
        raise ContractError(f"{name}: out_dtype={out_dtype} must be float32 or bfloat16")
    return x.reshape(-1, x.shape[-1])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    segments: int = 1,
    tp_group: Any = None,
    out_dtype: torch.dtype | None = None,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """``y = x @ weight.T`` with K in ``segments`` equal segments that merge in a balanced binary tree.

    With ``tp_group`` of t ranks it is the row-parallel linear: x and weight hold this rank's K / t columns,
    ``segments`` is still the number of segments of the whole K, the rank computes its ``segments / t`` leaves and the
    collective continues the tree in fp32 and rounds once. The result has the same bits for every t that divides
    ``segments``.

    Args:
        x: [..., K] float32 or bfloat16 (cpu family).
        weight: [N, K], same dtype.
        segments: 1, 2, 4 or 8; a multiple of the group's size; divides K.
        tp_group: tensor-parallel process group, or None.
        out_dtype: dtype of the result, default x's. float32 means no rounding at all.
        sequence_parallel: row-parallel only: the result is this rank's 1/t of the rows (first dimension).

    Returns:
        [..., N].

    Raises:
        ContractError: shapes, dtypes or ``segments`` do not fit.

    Guarantee: a row's bits depend on that row, the weight and ``segments`` only. Backward: dX takes n ascending, dW
    tokens ascending, each in one fp32 accumulator an output.
    """
    rows = _rows(x, weight, "linear", out_dtype)
    ranks = group_size(tp_group)
    local = local_segments("segments", segments, ranks)
    if weight.shape[1] % local:
        raise ContractError(f"linear: K={weight.shape[1]} is not divisible by {local} local segments")
    if ranks == 1:
        y = _linear(rows, weight, local, 1, 1, out_dtype)
    else:
        y = _RowParallel.apply(rows, weight, local, tp_group, out_dtype or x.dtype, sequence_parallel)
    if sequence_parallel and ranks > 1:
        return y.reshape(x.shape[0] // ranks, *x.shape[1:-1], weight.shape[0])
    return y.reshape(*x.shape[:-1], weight.shape[0])


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    grad_segments: int = 1,
    parts: int = 1,
    tp_group: Any = None,
    sequence_parallel: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``y = x @ weight.T`` with K in one segment; ``weight`` holds this rank's rows of the whole [N, K].

    The gradient of x reduces over the whole N in ``grad_segments`` leaves: leaf s is what rank s of a group of
    ``grad_segments`` ranks would own. ``parts=2`` says that the local rows are a gate half and an up half, each
    sharded on its own: leaf s is then gate slice s followed by up slice s.

    Args:
        x: [..., K]; with ``sequence_parallel`` this rank's 1/t of the rows (first dimension), gathered here.
        weight: [N / t, K], same dtype.
        grad_segments: 1, 2, 4 or 8; a multiple of the group's size.
        parts: equal parts of the local rows, see above.
        tp_group: tensor-parallel process group, or None.
        sequence_parallel: gather x in forward, reduce-scatter its gradient in backward.
        out_dtype: dtype of the result, default x's.

    Returns:
        [..., N / t].

    Raises:
        ContractError: shapes, dtypes, ``grad_segments`` or ``parts`` do not fit.

    Guarantee: forward bits depend on the row of x and the row of weight only; dX has the same bits for every group
    size that divides ``grad_segments``.
    """
    rows = _rows(x, weight, "column_parallel_linear", out_dtype)
    ranks = group_size(tp_group)
    local = local_segments("grad_segments", grad_segments, ranks)
    if parts < 1 or weight.shape[0] % (local * parts):
        raise ContractError(
            f"column_parallel_linear: {weight.shape[0]} local rows are not divisible by {local} leaves times "
            f"parts={parts}"
        )
    if ranks == 1:
        y = _linear(rows, weight, 1, local, parts, out_dtype)
    else:
        y = _ColumnParallel.apply(rows, weight, local, parts, tp_group, out_dtype, sequence_parallel)
    if sequence_parallel and ranks > 1:
        return y.reshape(x.shape[0] * ranks, *x.shape[1:-1], weight.shape[0])
    return y.reshape(*x.shape[:-1], weight.shape[0])
