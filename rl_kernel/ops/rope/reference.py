"""Specification of rope of the cpu family, in plain torch."""

from __future__ import annotations

import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["backward", "forward", "supports"]


def _tables(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = x.shape[-1] // 2
    if positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= cache.shape[0]:
            raise ContractError(f"rope: position {low if low < 0 else high} must lie in [0, {cache.shape[0]})")
    rows = cache[positions.long()][:, None, :]
    x1, x2 = x.float().split(half, -1)
    return x1, x2, rows[..., :half], rows[..., half:]


def forward(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """x [T, h, D], positions [T], cache [max_pos, D] fp32 = cat(cos, sin) -> [T, h, D].

    y1 = (x1 * c) - (x2 * s); y2 = (x2 * c) + (x1 * s); fp32 with every operation rounded, one rounding to x's dtype.
    """
    x1, x2, c, s = _tables(x, positions, cache)
    return torch.cat(((x1 * c) - (x2 * s), (x2 * c) + (x1 * s)), -1).to(x.dtype)


def backward(dy: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The inverse rotation: dx1 = (dy1 * c) + (dy2 * s); dx2 = (dy2 * c) - (dy1 * s)."""
    y1, y2, c, s = _tables(dy, positions, cache)
    return torch.cat(((y1 * c) + (y2 * s), (y2 * c) - (y1 * s)), -1).to(dy.dtype)
