"""Public swiglu."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator

__all__ = ["swiglu"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("swiglu", x.device, x.dtype).module


def _forward(gate_up: torch.Tensor) -> torch.Tensor:
    return _module(gate_up).forward(gate_up)


def _backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return _module(gate_up).backward(dy, gate_up)


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return _swiglu_backward(dy, *ctx.saved_tensors)


_swiglu = Operator(
    "swiglu", _forward, lambda gate_up: gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)), _Gradient
)
_swiglu_backward = Operator("swiglu_backward", _backward, lambda dy, gate_up: gate_up.new_empty(gate_up.shape))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` with gate and up the two halves of the last dimension.

    Args:
        gate_up: [..., 2 F] float32 or bfloat16 (cpu family).

    Returns:
        [..., F]: fp32 inside with every operation rounded, one rounding to the input's dtype.

    Raises:
        ContractError: the last dimension is odd or 0.

    Guarantee: an element's bits depend on its gate and its up value only.
    """
    if not (gate_up.dim() >= 1 and gate_up.shape[-1] % 2 == 0 and gate_up.shape[-1] > 0):
        raise ContractError(f"swiglu: last dimension of gate_up {tuple(gate_up.shape)} must be even and above 0")
    width = gate_up.shape[-1]
    y = _swiglu(gate_up.reshape(-1, width))
    return y.reshape(*gate_up.shape[:-1], width // 2)
