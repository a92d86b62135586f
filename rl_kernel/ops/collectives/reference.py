"""Specification of the sum over ranks.

A collective gathers one payload of every rank, in rank order, and then every rank computes the same local sum::

    out = round_to(out_dtype, ((p0 + p1) + (p2 + p3)) + ...)

The sum is a balanced binary tree over adjacent ranks in fp32, filled up to a power of two with +0.0: the continuation
of the tree over the S segments of a row-parallel reduction (a rank of TP size t owns S/t neighbouring leaves). The
transport only moves bytes, so the bits do not depend on the backend, the algorithm or the network.
"""

from __future__ import annotations

import torch

from rl_kernel.registry import Request


def supports(request: Request) -> str | None:
    """Runs everywhere."""
    return None


def reduce_parts(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Sum the payloads of all ranks.

    Args:
        parts: [R, ...] one payload a rank; float32, or a narrower dtype that is widened exactly.
        out_dtype: dtype of the result; the single rounding.

    Returns:
        [...] the tree sum.
    """
    level = list(parts.to(torch.float32).unbind(0))
    while len(level) & (len(level) - 1):
        level.append(torch.zeros_like(level[0]))
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(out_dtype)
