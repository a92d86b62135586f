"""Specification of rms_norm of the cpu family, in plain torch."""

from __future__ import annotations

import torch

from rl_kernel.ops._common import supports_cpu as supports
from rl_kernel.ops._primitives import divide, dot16, fma, sqrt

__all__ = ["backward", "forward", "supports"]


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x [T, H], weight [H], residual [T, H] or None -> (y [T, H], residual_out [T, H] | None, rstd [T] fp32).

    residual_out = round(x + residual); v = dot16(z, z) / H; rstd = 1 / sqrt(v + eps); y = round((z * rstd) * weight).
    """
    z = x
    if residual is not None:
        z = (x.float() + residual.float()).to(x.dtype)
    f = z.float()
    v = divide(dot16(f, f), float(x.shape[-1]))
    rstd = divide(1.0, sqrt(v + torch.tensor(eps, dtype=torch.float32)))
    y = ((f * rstd[:, None]) * weight.float()).to(x.dtype)
    return y, (z if residual is not None else None), rstd


def backward(
    dy: torch.Tensor, dres: torch.Tensor | None, x_in: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x (and, the same, of the residual) and of weight.

    Args:
        dy: [T, H]; dres: gradient of residual_out [T, H] or None; x_in: what was normalised (residual_out or x) [T, H].

    h = x_in * rstd; g = dy * weight; c = dot16(g, h) / H; dx = round((g - h * c) * rstd + dres);
    dweight = fma of dy * h over tokens ascending, rounded once.
    """
    f = x_in.float()
    h = f * rstd[:, None]
    g = dy.float() * weight.float()
    c = divide(dot16(g, h), float(x_in.shape[-1]))
    dx = (g - h * c[:, None]) * rstd[:, None]
    if dres is not None:
        dx = dx + dres.float()
    dw = torch.zeros(weight.shape, dtype=torch.float32)
    for t in range(x_in.shape[0]):
        dw = fma(dy[t].float(), h[t], dw)
    return dx.to(x_in.dtype), dw.to(weight.dtype)
