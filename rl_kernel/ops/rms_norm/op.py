"""Public rms_norm."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.ops._common import need

__all__ = ["rms_norm"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("rms_norm", x.device, x.dtype).module


@torch.library.custom_op("rl_kernel::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = _module(x).forward(x, weight, eps, None)
    return y, rstd


@torch.library.custom_op("rl_kernel::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _module(x).forward(x, weight, eps, residual)


@torch.library.custom_op("rl_kernel::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor, dres: torch.Tensor | None, x_in: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _module(x_in).backward(dy, dres, x_in, weight, rstd)


@_rms_norm.register_fake
def _(x, weight, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


@_add_rms_norm.register_fake
def _(x, residual, weight, eps):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


@_rms_norm_backward.register_fake
def _(dy, dres, x_in, weight, rstd):  # type: ignore[no-untyped-def]
    return x_in.new_empty(x_in.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple:
    x, weight, rstd = ctx.saved_tensors
    dx, dw = torch.ops.rl_kernel.rms_norm_backward(dy, None, x, weight, rstd)
    return dx, dw, None


def _setup_add(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[1], inputs[2], output[2])


def _backward_add(ctx: Any, dy: torch.Tensor, dres: torch.Tensor, _: Any) -> tuple:
    z, weight, rstd = ctx.saved_tensors
    dx, dw = torch.ops.rl_kernel.rms_norm_backward(dy, dres, z, weight, rstd)
    return dx, dx, dw, None


_rms_norm.register_autograd(_backward, setup_context=_setup)
_add_rms_norm.register_autograd(_backward_add, setup_context=_setup_add)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; with ``residual``, of ``x + residual``.

    Args:
        x: [..., H] float32 or bfloat16 (cpu family); H = head_dim gives the q/k norm.
        weight: [H], the dtype of x: a weight kept in another dtype rounds elsewhere and changes every bit.
        eps: added to the mean of squares, as float32.
        residual: [..., H] or None. The sum rounds to the dtype once, and that rounded sum is normalised and returned.

    Returns:
        y, or (y, residual_out) when ``residual`` is given. fp32 inside, one rounding of y.

    Raises:
        ContractError: shapes or dtypes do not fit.

    Guarantee: a row's bits depend on that row and the weight only.
    """
    need(
        weight.dim() == 1 and x.dim() >= 1 and x.shape[-1] == weight.shape[0],
        f"rms_norm: weight {tuple(weight.shape)} must be [H] with H = last dimension of x {tuple(x.shape)}",
    )
    need(
        x.dtype == weight.dtype,
        f"rms_norm: x is {x.dtype} and weight is {weight.dtype}; keep norm weights in the model's dtype on both sides",
    )
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        return torch.ops.rl_kernel.rms_norm(rows, weight, eps)[0].reshape(x.shape)
    need(
        residual.shape == x.shape and residual.dtype == x.dtype,
        f"rms_norm: residual {tuple(residual.shape)} {residual.dtype} must match x {tuple(x.shape)} {x.dtype}",
    )
    y, total, _ = torch.ops.rl_kernel.add_rms_norm(rows, residual.reshape(rows.shape), weight, eps)
    return y.reshape(x.shape), total.reshape(x.shape)
