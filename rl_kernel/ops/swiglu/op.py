"""Public swiglu."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.ops._common import need

__all__ = ["swiglu"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("swiglu", x.device, x.dtype).module


@torch.library.custom_op("rl_kernel::swiglu", mutates_args=())
def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return _module(gate_up).forward(gate_up)


@torch.library.custom_op("rl_kernel::swiglu_backward", mutates_args=())
def _swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return _module(gate_up).backward(dy, gate_up)


@_swiglu.register_fake
def _(gate_up):  # type: ignore[no-untyped-def]
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@_swiglu_backward.register_fake
def _(dy, gate_up):  # type: ignore[no-untyped-def]
    return gate_up.new_empty(gate_up.shape)


def _setup(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    return torch.ops.rl_kernel.swiglu_backward(dy, *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_setup)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` with gate and up the two halves of the last dimension.

    Args:
        gate_up: [..., 2 F] float32 or bfloat16 (cpu family).

    Returns:
        [..., F]: fp32 inside with every operation rounded, one rounding to the input's dtype.

    Raises:
        ContractError: the last dimension is odd.

    Guarantee: an element's bits depend on its gate and its up value only.
    """
    need(
        gate_up.dim() >= 1 and gate_up.shape[-1] % 2 == 0,
        f"swiglu: last dimension of gate_up {tuple(gate_up.shape)} must be even",
    )
    width = gate_up.shape[-1]
    y = torch.ops.rl_kernel.swiglu(gate_up.reshape(-1, width))
    return y.reshape(*gate_up.shape[:-1], width // 2)
