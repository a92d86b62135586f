"""Compiled rms_norm of the cpu family (csrc/cpu/rms_norm.cpp)."""

from __future__ import annotations

import torch

from rl_kernel import _C  # noqa: F401 - registers the compiled operators
from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["backward", "forward", "supports"]


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """See :func:`rl_kernel.ops.rms_norm.reference.forward`."""
    y, z, rstd = torch.ops.rlk.rms_norm_forward(x, weight, eps, residual)
    return y, (z if residual is not None else None), rstd


def backward(
    dy: torch.Tensor, dres: torch.Tensor | None, x_in: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rl_kernel.ops.rms_norm.reference.backward`."""
    return torch.ops.rlk.rms_norm_backward(dy, dres, x_in, weight, rstd)
