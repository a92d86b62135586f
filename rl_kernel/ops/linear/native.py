"""Compiled linear operator of the cpu family (csrc/cpu/linear.cpp)."""

from __future__ import annotations

import torch

from rl_kernel import _C  # noqa: F401 - registers the compiled operators
from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["dgrad", "matmul", "supports", "wgrad"]

_ops = torch.ops.rlk


def matmul(
    x: torch.Tensor, weight: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See :func:`rl_kernel.ops.linear.reference.matmul`."""
    return _ops.linear_forward(x, weight, segments, out_dtype)


def dgrad(
    dy: torch.Tensor,
    weight: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`rl_kernel.ops.linear.reference.dgrad`."""
    return _ops.linear_dgrad(dy, weight, segments, parts, out_dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """See :func:`rl_kernel.ops.linear.reference.wgrad`."""
    return _ops.linear_wgrad(dy, x, out_dtype)
