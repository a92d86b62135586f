"""Public linear operators: column- and row-parallel, with gradients whose order does not depend on the TP size."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.ops._common import group_size, local_segments, need

__all__ = ["column_parallel_linear", "linear"]


@torch.library.custom_op("rl_kernel::linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    segments: int,
    grad_segments: int,
    parts: int,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    module: Any = registry.resolve("linear", x.device, x.dtype).module
    return module.matmul(x, weight, segments=segments, out_dtype=out_dtype)


@_linear.register_fake
def _(x, weight, segments, grad_segments, parts, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype)


@torch.library.custom_op("rl_kernel::linear_dgrad", mutates_args=())
def _dgrad(
    dy: torch.Tensor, weight: torch.Tensor, segments: int, parts: int, out_dtype: torch.dtype | None
) -> torch.Tensor:
    module: Any = registry.resolve("linear", weight.device, weight.dtype).module
    return module.dgrad(dy, weight, segments=segments, parts=parts, out_dtype=out_dtype)


@_dgrad.register_fake
def _(dy, weight, segments, parts, out_dtype):  # type: ignore[no-untyped-def]
    return dy.new_empty((dy.shape[0], weight.shape[1]), dtype=out_dtype or dy.dtype)


@torch.library.custom_op("rl_kernel::linear_wgrad", mutates_args=())
def _wgrad(dy: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    module: Any = registry.resolve("linear", x.device, x.dtype).module
    return module.wgrad(dy, x, out_dtype=out_dtype)


@_wgrad.register_fake
def _(dy, x, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((dy.shape[1], x.shape[1]), dtype=out_dtype or x.dtype)


def _setup(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, _, ctx.grad_segments, ctx.parts, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
    ctx.dtypes = x.dtype, weight.dtype


def _backward(ctx: Any, dy: torch.Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.rl_kernel.linear_dgrad(dy, weight, ctx.grad_segments, ctx.parts, ctx.dtypes[0])
    if ctx.needs_input_grad[1]:
        dw = torch.ops.rl_kernel.linear_wgrad(dy, x, ctx.dtypes[1])
    return dx, dw, None, None, None, None


_linear.register_autograd(_backward, setup_context=_setup)


class _RowParallel(torch.autograd.Function):
    """The rank's subtree in fp32, then the collective continues the tree and rounds once."""

    @staticmethod
    def forward(ctx, x, weight, segments, group, out_dtype, sequence_parallel):  # type: ignore[no-untyped-def]
        from rl_kernel.ops.collectives import op as collectives

        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        partial = torch.ops.rl_kernel.linear(x, weight, segments, 1, 1, torch.float32)
        reduce = collectives.reduce_scatter if sequence_parallel else collectives.all_reduce
        return reduce(partial, group, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        from rl_kernel.ops.collectives import op as collectives

        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = collectives.all_gather(dy, ctx.group)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.rl_kernel.linear_dgrad(dy, weight, 1, 1, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = torch.ops.rl_kernel.linear_wgrad(dy, x, weight.dtype)
        return dx, dw, None, None, None, None


class _ColumnParallel(torch.autograd.Function):
    """Forward is local; dX is the rank's subtree over N in fp32, continued by the collective."""

    @staticmethod
    def forward(ctx, x, weight, segments, parts, group, out_dtype, sequence_parallel):  # type: ignore[no-untyped-def]
        from rl_kernel.ops.collectives import op as collectives

        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel, ctx.segments, ctx.parts = group, sequence_parallel, segments, parts
        if sequence_parallel:
            x = collectives.all_gather(x, group)
        return torch.ops.rl_kernel.linear(x, weight, 1, segments, parts, out_dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        from rl_kernel.ops.collectives import op as collectives

        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.rl_kernel.linear_dgrad(dy, weight, ctx.segments, ctx.parts, torch.float32)
            reduce = collectives.reduce_scatter if ctx.sequence_parallel else collectives.all_reduce
            dx = reduce(dx, ctx.group, out_dtype=x.dtype)
        if ctx.needs_input_grad[1]:
            full = collectives.all_gather(x, ctx.group) if ctx.sequence_parallel else x
            dw = torch.ops.rl_kernel.linear_wgrad(dy, full, weight.dtype)
        return dx, dw, None, None, None, None, None


def _rows(x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    need(weight.dim() == 2, f"{name}: weight must be [N, K], got shape {tuple(weight.shape)}")
    need(
        x.dim() >= 1 and x.shape[-1] == weight.shape[1],
        f"{name}: last dimension of x {tuple(x.shape)} must equal K={weight.shape[1]} of weight [N, K]",
    )
    need(x.dtype == weight.dtype, f"{name}: x is {x.dtype} and weight is {weight.dtype}; use one dtype on both sides")
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
    rows = _rows(x, weight, "linear")
    ranks = group_size(tp_group)
    local = local_segments("segments", segments, ranks)
    need(weight.shape[1] % local == 0, f"linear: K={weight.shape[1]} is not divisible by {local} local segments")
    if ranks == 1:
        y = torch.ops.rl_kernel.linear(rows, weight, local, 1, 1, out_dtype)
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
    rows = _rows(x, weight, "column_parallel_linear")
    ranks = group_size(tp_group)
    local = local_segments("grad_segments", grad_segments, ranks)
    need(
        weight.shape[0] % (local * parts) == 0,
        f"column_parallel_linear: {weight.shape[0]} local rows are not divisible by {local} leaves times parts={parts}",
    )
    if ranks == 1:
        y = torch.ops.rl_kernel.linear(rows, weight, 1, local, parts, out_dtype)
    else:
        y = _ColumnParallel.apply(rows, weight, local, parts, tp_group, out_dtype, sequence_parallel)
    if sequence_parallel and ranks > 1:
        return y.reshape(x.shape[0] * ranks, *x.shape[1:-1], weight.shape[0])
    return y.reshape(*x.shape[:-1], weight.shape[0])
