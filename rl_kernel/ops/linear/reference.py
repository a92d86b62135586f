"""Specification of the linear operator of the cpu family, in plain torch.

``y[m, n] = round(tree_s(dot16(x[m, segment s], w[n, segment s])))``. Gradients use one accumulator an output,
ascending.
"""

from __future__ import annotations

import torch

from rl_kernel.ops._common import supports_cpu as supports
from rl_kernel.ops._primitives import ascending_matmul, dot16, tree_sum

__all__ = ["dgrad", "matmul", "supports", "wgrad"]


def matmul(
    x: torch.Tensor, weight: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [M, K], weight [N, K] -> [M, N]; K in ``segments`` equal parts; one rounding to ``out_dtype`` (default x's)."""
    parts = [dot16(a[:, None, :], b[None, :, :]) for a, b in zip(x.chunk(segments, 1), weight.chunk(segments, 1))]
    return tree_sum(torch.stack(parts, -1)).to(out_dtype or x.dtype)


def dgrad(
    dy: torch.Tensor,
    weight: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """dy [M, N], weight [N, K] -> dx [M, K].

    N has ``segments`` leaves in a tree; leaf s is slice s of each of the ``parts`` equal parts of N (gate and up), the
    parts one after the other in one accumulator.
    """
    m, n = dy.shape
    k = weight.shape[1]
    size = n // (parts * segments)
    dy_leaves = dy.reshape(m, parts, segments, size)
    w_leaves = weight.reshape(parts, segments, size, k)
    leaves = [
        ascending_matmul(dy_leaves[:, :, s].reshape(m, parts * size), w_leaves[:, s].reshape(parts * size, k))
        for s in range(segments)
    ]
    return tree_sum(torch.stack(leaves, -1)).to(out_dtype or dy.dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """dy [T, N], x [T, K] -> dw [N, K], tokens ascending."""
    return ascending_matmul(dy.t(), x).to(out_dtype or x.dtype)
