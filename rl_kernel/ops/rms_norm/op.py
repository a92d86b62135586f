"""Public rms_norm."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator

__all__ = ["rms_norm"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("rms_norm", x.device, x.dtype).module


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = _module(x).forward(x, weight, eps, None)
    return y, rstd


def _forward_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _module(x).forward(x, weight, eps, residual)


def _backward(
    dy: torch.Tensor, dres: torch.Tensor | None, x_in: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _module(x_in).backward(dy, dres, x_in, weight, rstd)


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, weight, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple:
        x, weight, rstd = ctx.saved_tensors
        return *_rms_norm_backward(dy, None, x, weight, rstd), None


class _GradientAdd:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[1], inputs[2], output[2])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, dres: torch.Tensor, _: Any) -> tuple:
        total, weight, rstd = ctx.saved_tensors
        dx, dw = _rms_norm_backward(dy, dres, total, weight, rstd)
        return dx, dx, dw, None


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:1], dtype=torch.float32)


_rms_norm = Operator("rms_norm", _forward, lambda x, weight, eps: (x.new_empty(x.shape), _rows_of(x)), _Gradient)
_add_rms_norm = Operator(
    "add_rms_norm",
    _forward_add,
    lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape), _rows_of(x)),
    _GradientAdd,
)
_rms_norm_backward = Operator(
    "rms_norm_backward",
    _backward,
    lambda dy, dres, x_in, weight, rstd: (x_in.new_empty(x_in.shape), weight.new_empty(weight.shape)),
)


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
    if not (weight.dim() == 1 and x.dim() >= 1 and x.shape[-1] == weight.shape[0] > 0):
        raise ContractError(
            f"rms_norm: weight {tuple(weight.shape)} must be [H] with H = last dimension of x {tuple(x.shape)}, above 0"
        )
    if x.dtype != weight.dtype:
        raise ContractError(
            f"rms_norm: x is {x.dtype} and weight is {weight.dtype}; keep norm weights in the model's dtype on both "
            "sides"
        )
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        return _rms_norm(rows, weight, eps)[0].reshape(x.shape)
    if not (residual.shape == x.shape and residual.dtype == x.dtype):
        raise ContractError(
            f"rms_norm: residual {tuple(residual.shape)} {residual.dtype} must match x {tuple(x.shape)} {x.dtype}"
        )
    y, total, _ = _add_rms_norm(rows, residual.reshape(rows.shape), weight, eps)
    return y.reshape(x.shape), total.reshape(x.shape)
