"""linear_logp of the GPU families from matrix products and leaf kernels, tile by tile of the vocabulary.

Forward: fp32 logits of a tile of columns (one ascending chain over H), their leaf statistics, next tile. Backward: for
each block of the contract, the logits of a tile again, their gradient (from the rounded exponentials that a kept
schedule would hold) rounded once to the hidden dtype, then the block's share of dH (one fp32 addition a block) and its
rows of dW (all tokens in one chain).

The logits of a tile and the dlogits of a block are all that exists at a time: at most ``TILE_BYTES`` (1024 columns at
the least) and ``tokens * VOCAB_BLOCK * 2`` bytes. Rows of both are padded to 128 columns, so that they start at
multiples of 16 bytes for every vocabulary size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rl_kernel.contract import VOCAB_BLOCK, VOCAB_LEAF
from rl_kernel.ops.linear_logp import kept
from rl_kernel.ops.logp import triton as leaves

TILE_BYTES = 448 << 20


class Products(Protocol):
    """The two matrix products a backend brings."""

    def product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor: ...

    def add_product(self, a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor: ...


def _tile_columns(tokens: int) -> int:
    columns = TILE_BYTES // (4 * max(tokens, 1))
    return min(VOCAB_BLOCK, max(1024, columns // 1024 * 1024))


def _padded(width: int, available: int) -> int:
    """``width`` rounded up to whole leaves as far as the weight has rows for it."""
    return min(-(-width // VOCAB_LEAF) * VOCAB_LEAF, available)


def leaf_stats(
    products: Products,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, s, u) of every leaf [3, T, L] fp32, and z of the target [T] (+0.0 where another rank owns it)."""
    tokens = hidden.shape[0]
    stats = torch.empty((3, tokens, -(-columns // VOCAB_LEAF)), dtype=torch.float32, device=hidden.device)
    z_target = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
    step = _tile_columns(tokens)
    rows = weight.shape[0]
    buffer = torch.empty(tokens * min(step, _padded(columns, rows)), dtype=torch.float32, device=hidden.device)
    for first in range(0, columns, step):
        width = min(step, columns - first)
        wide = _padded(width, rows - first)
        logits = buffer[: tokens * wide].view(tokens, wide)
        products.product(hidden, weight[first : first + wide].t(), logits)
        leaves.write_leaf_stats(logits, temperature, width, stats, first // VOCAB_LEAF, targets, first, z_target)
    return stats, z_target


def backward(
    products: Products,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    segments: list[tuple[int, int]],
    need_hidden: bool = True,
    need_weight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dH as the fp32 subtree over the rank's ``segments``, and dW in the dtype of ``weight``.

    Args:
        state: (m, log l, entropy) [3, T] of the forward pass; grads: upstream (g_logp, g_lse, g_ent) [3, T].
        segments: ranges of columns that are not padding, a power of two of them.
    """
    tokens, width = hidden.shape
    state, grads = state.contiguous(), grads.contiguous()
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
    if dw is not None:
        dw[max((end for _, end in segments), default=0) :].zero_()
    step = _tile_columns(tokens)
    logits_buffer = torch.empty(tokens * step, dtype=torch.float32, device=hidden.device)
    grad_buffer = torch.empty(tokens * VOCAB_BLOCK, dtype=hidden.dtype, device=hidden.device)
    finished: list[tuple[int, torch.Tensor]] = []  # subtrees waiting for their right neighbour, with their sizes
    for begin, end in segments:
        total = None
        for block in range(begin, end, VOCAB_BLOCK):
            block_end = min(block + VOCAB_BLOCK, end)
            stride = -(-(block_end - block) // VOCAB_LEAF) * VOCAB_LEAF
            dlogits = grad_buffer[: tokens * stride].view(tokens, stride)[:, : block_end - block]
            for first in range(block, block_end, step):
                last = min(first + step, block_end)
                wide = _padded(last - first, weight.shape[0] - first)
                logits = logits_buffer[: tokens * wide].view(tokens, wide)
                products.product(hidden, weight[first : first + wide].t(), logits)
                part = dlogits[:, first - block : last - block]
                kept.write_dlogits(logits, temperature, targets, state, grads, last - first, part, first)
            if dw is not None:
                products.product(dlogits.t(), hidden, dw[block:block_end])
            if need_hidden:
                if total is None:
                    total = torch.empty((tokens, width), dtype=torch.float32, device=hidden.device)
                    products.product(dlogits, weight[block:block_end], total)
                else:
                    products.add_product(dlogits, weight[block:block_end], total)
        if need_hidden:
            if total is None:
                total = torch.zeros((tokens, width), dtype=torch.float32, device=hidden.device)
            size = 1
            while finished and finished[-1][0] == size:
                total = finished.pop()[1].add_(total)
                size *= 2
            finished.append((size, total))
    return finished[0][1] if need_hidden else None, dw
