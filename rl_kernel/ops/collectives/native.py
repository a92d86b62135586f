"""Compiled CPU kernel of the sum over ranks: one pass over the payloads."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request

try:
    import rl_kernel._C  # noqa: F401 - registers torch.ops.rlk
except ImportError as error:
    _MISSING: str | None = f"the compiled operators are not built ({error}); run pip install with RLK_BUILD=cpu"
else:
    _MISSING = None


def supports(request: Request) -> str | None:
    """CPU tensors, when the extension is built."""
    return "CPU tensors only" if request.family != "cpu" else _MISSING


def reduce_parts(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """As in the reference: tree sum of [R, ...] over ranks, one rounding."""
    out = torch.empty(parts.shape[1:], dtype=out_dtype)
    torch.ops.rlk.collectives_reduce_parts(parts.contiguous(), out)
    return out
