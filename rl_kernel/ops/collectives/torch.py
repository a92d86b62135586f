"""Stock formula: torch's own sum, in an order that torch chooses. Keeps no contract."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request


def supports(request: Request) -> str | None:
    """Runs everywhere."""
    return None


def reduce_parts(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Sum of [R, ...] over ranks, accumulated in fp32."""
    return parts.to(torch.float32).sum(0).to(out_dtype)
