"""Stock matrix products: no contract, used by the modes fast and native and as a negative control."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request

__all__ = ["dgrad", "matmul", "supports", "wgrad"]


def supports(request: Request) -> str | None:
    return None


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if a.dtype == b.dtype == out_dtype:
        return a @ b
    return (a.float() @ b.float()).to(out_dtype)


def matmul(
    x: torch.Tensor, weight: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _product(x, weight.t(), out_dtype or x.dtype)


def dgrad(
    dy: torch.Tensor,
    weight: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return _product(dy, weight, out_dtype or dy.dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return _product(dy.t(), x, out_dtype or x.dtype)
