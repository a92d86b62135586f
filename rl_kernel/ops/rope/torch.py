"""Stock rope in the dtype of x: no contract, used by the modes fast and native and as a negative control."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request

__all__ = ["backward", "forward", "supports"]


def supports(request: Request) -> str | None:
    return None


def _rotate(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, sign: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    rows = cache[positions.long()][:, None, :].to(x.dtype)
    cos, sin = torch.cat((rows[..., :half],) * 2, -1), torch.cat((rows[..., half:],) * 2, -1)
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + sign * turned * sin


def forward(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return _rotate(x, positions, cache, 1.0)


def backward(dy: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return _rotate(dy, positions, cache, -1.0)
