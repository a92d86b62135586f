"""Stock rms_norm: no contract, used by the modes fast and native and as a negative control."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request

__all__ = ["backward", "forward", "supports"]


def supports(request: Request) -> str | None:
    return None


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    z = x if residual is None else x + residual
    f = z.float()
    rstd = torch.rsqrt(f.pow(2).mean(-1) + eps)
    y = (f * rstd[:, None]).to(x.dtype) * weight
    return y, (z if residual is not None else None), rstd


def backward(
    dy: torch.Tensor, dres: torch.Tensor | None, x_in: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h = x_in.float() * rstd[:, None]
    g = dy.float() * weight.float()
    dx = (g - h * (g * h).mean(-1, keepdim=True)) * rstd[:, None]
    if dres is not None:
        dx = dx + dres.float()
    return dx.to(x_in.dtype), (dy.float() * h).sum(0).to(weight.dtype)
