"""Compiled swiglu of the cpu family (csrc/cpu/elementwise.cpp)."""

from __future__ import annotations

import torch

from rl_kernel import _C  # noqa: F401 - registers the compiled operators
from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["backward", "forward", "supports"]


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """See :func:`rl_kernel.ops.swiglu.reference.forward`."""
    return torch.ops.rlk.swiglu_forward(gate_up)


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """See :func:`rl_kernel.ops.swiglu.reference.backward`."""
    return torch.ops.rlk.swiglu_backward(dy, gate_up)
