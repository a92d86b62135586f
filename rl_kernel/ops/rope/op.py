"""Public rope and the table that both engines build the same way."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator

__all__ = ["build_cos_sin_cache", "rope"]


def build_cos_sin_cache(
    max_pos: int, dim: int, base: float, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Table [max_pos, dim] float32 = cat(cos, sin) of ``position * base^(-2 i / dim)``, i < dim / 2.

    Built on the CPU in float64 and rounded once, so that every engine and device holds the same bytes.
    """
    if not (dim % 2 == 0 and dim > 0):
        raise ContractError(f"build_cos_sin_cache: dim={dim} must be even and positive")
    inverse = torch.tensor(base, dtype=torch.float64) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(max_pos, dtype=torch.float64)[:, None] * inverse[None, :]
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("rope", x.device, x.dtype).module


def _forward(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    return _module(x).forward(x, positions, cos_sin_cache)


def _backward(dy: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    return _module(dy).backward(dy, positions, cos_sin_cache)


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        return _rope_backward(dy, *ctx.saved_tensors), None, None


def _fake(x, positions, cos_sin_cache):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


_rope = Operator("rope", _forward, _fake, _Gradient)
_rope_backward = Operator("rope_backward", _backward, lambda dy, positions, cos_sin_cache: dy.new_empty(dy.shape))


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of every head by the angle of the token's position.

    Args:
        x: [T, h, D] float32 or bfloat16 (cpu family).
        positions: [T] int64 or int32, each in [0, max_pos).
        cos_sin_cache: [max_pos, D] float32 from :func:`build_cos_sin_cache`.

    Returns:
        [T, h, D]: fp32 with every product and sum rounded, one rounding to x's dtype.

    Raises:
        ContractError: shapes or dtypes do not fit, or (cpu) a position lies outside the table.

    Guarantee: a head's bits depend on that head and its position only.
    """
    if x.dim() != 3 or x.shape[2] % 2:
        raise ContractError(f"rope: x must be [T, heads, D] with D even, got shape {tuple(x.shape)}")
    if not (cos_sin_cache.dim() == 2 and cos_sin_cache.shape[1] == x.shape[2] and cos_sin_cache.dtype == torch.float32):
        raise ContractError(
            f"rope: cos_sin_cache {tuple(cos_sin_cache.shape)} {cos_sin_cache.dtype} must be "
            f"[max_pos, {x.shape[2]}] float32"
        )
    if positions.shape != x.shape[:1]:
        raise ContractError(f"rope: positions {tuple(positions.shape)} must be [{x.shape[0]}]")
    return _rope(x, positions, cos_sin_cache)
