"""Specification of swiglu of the cpu family, in plain torch."""

from __future__ import annotations

import torch

from rl_kernel.ops._common import supports_cpu as supports
from rl_kernel.ops._primitives import divide, exp

__all__ = ["backward", "forward", "supports"]


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 F] -> [T, F]: round((g / (1 + exp(-g))) * u), every operation rounded in fp32."""
    g, u = gate_up.float().chunk(2, -1)
    return (divide(g, 1.0 + exp(-g)) * u).to(gate_up.dtype)


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """dy [T, F] -> [T, 2 F]. d = 1 + exp(-g); s = 1 / d; dg = (dy * u) * (s * (1 + g * (1 - s))); du = dy * (g / d)."""
    g, u = gate_up.float().chunk(2, -1)
    dy = dy.float()
    d = 1.0 + exp(-g)
    s = divide(1.0, d)
    dg = (dy * u) * (s * (1.0 + g * (1.0 - s)))
    return torch.cat((dg, dy * divide(g, d)), -1).to(gate_up.dtype)
