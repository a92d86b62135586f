"""Stock swiglu: no contract, used by the modes fast and native and as a negative control."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request

__all__ = ["backward", "forward", "supports"]


def supports(request: Request) -> str | None:
    return None


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    g, u = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(g) * u


def backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    g, u = gate_up.float().chunk(2, -1)
    s = torch.sigmoid(g)
    dy = dy.float()
    return torch.cat((dy * u * s * (1 + g * (1 - s)), dy * g * s), -1).to(gate_up.dtype)
