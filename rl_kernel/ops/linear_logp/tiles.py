"""linear_logp of the GPU families from matrix products and leaf kernels, tile by tile of the vocabulary.

Forward: fp32 logits of a tile of columns (one ascending chain over H), their leaf statistics, next tile. Backward: for
each block of the contract, the logits of a tile again, their gradient (from the rounded exponentials that a kept
schedule would hold) rounded once to the hidden dtype, then the block's share of dH (one fp32 addition a block) and its
rows of dW (all tokens in one chain).

A forward pass that will be differentiated keeps the rounded exponentials of the first blocks (:class:`Kept`), as many
as :data:`KEPT_BYTES` hold. Backward turns them into gradients where they are, and recomputes the other blocks in their
memory. So every forward pass that waits for its backward pass holds that much; the peak of one pair of them hardly
grows, since the kept values stand where tiles of logits and dlogits stood.

What exists otherwise are the logits of a tile, at most :data:`TILE_BYTES` (:data:`KEEPING_TILE_BYTES` beside kept
values; 1024 columns at the least), and in backward the dlogits of a block, ``2 * tokens * VOCAB_BLOCK`` bytes. Rows of
both are padded to 128 columns, so that they start at multiples of 16 bytes for every vocabulary size. Tiles are powers
of two, so that token counts share the probes of :mod:`rl_kernel.cublaslt`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rl_kernel.contract import VOCAB_BLOCK, VOCAB_LEAF
from rl_kernel.ops.linear_logp import kept as kernels
from rl_kernel.ops.linear_logp.workspace import workspace_bytes
from rl_kernel.ops.logp import triton as leaves
from rl_kernel.ops.logp.vocab_tree import blocks

TILE_BYTES = 448 << 20
KEEPING_TILE_BYTES = 228 << 20
KEPT_BYTES = workspace_bytes(672)  # three blocks of 7168 tokens
ONE_MATRIX = 1 << 28  # elements up to which all columns are one product for dW: what a probe of tokens may span
LEAST_COLUMNS = 8192  # of a tile in borrowed memory; products of narrower ones are slow


class Products(Protocol):
    """The two matrix products a backend brings."""

    def product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor: ...

    def add_product(self, a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor: ...


def _tile_columns(tokens: int, size: int) -> int:
    """Columns of fp32 logits that ``size`` bytes hold, a power of two."""
    columns = size // (4 * max(tokens, 1))
    return 1 << max(10, columns.bit_length() - 1)


def _whole(width: int) -> int:
    return -(-width // VOCAB_LEAF) * VOCAB_LEAF


def _padded(width: int, available: int) -> int:
    """``width`` rounded up to whole leaves as far as the weight has rows for it."""
    return min(_whole(width), available)


class Kept:
    """bf16 exp(z - m_leaf) of the first ``columns`` of the vocabulary, and m_leaf, from forward to backward.

    Attributes:
        ranges: columns [begin, end) of each matrix, ascending and without gaps; rows are padded to whole leaves.
        memory: all matrices, one after another; ``None`` once released.
        maxima: m_leaf [T, L] fp32.
    """

    def __init__(self, tokens: int, ranges: list[tuple[int, int]], device: torch.device) -> None:
        self.tokens, self.ranges, self.columns = tokens, ranges, ranges[-1][1]
        self._offsets: dict[int, int] = {}
        size = 0
        for begin, end in ranges:
            self._offsets[begin] = size
            size += tokens * _whole(end - begin)
        self.memory: torch.Tensor | None = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.maxima = torch.empty((tokens, -(-self.columns // VOCAB_LEAF)), dtype=torch.float32, device=device)

    @staticmethod
    def of(hidden: torch.Tensor, segments: list[tuple[int, int]]) -> Kept | None:
        """Memory for the first blocks of ``segments``, all that :data:`KEPT_BYTES` hold; ``None`` if that is none."""
        tokens, parts = hidden.shape[0], blocks(segments, VOCAB_BLOCK)
        if not (tokens and parts) or hidden.dtype is not torch.bfloat16:  # dlogits replace bf16 values in place
            return None
        columns, row = parts[-1][1], KEPT_BYTES // (2 * tokens)
        if _whole(columns) <= row and columns * (tokens + tokens // 8 + 16) <= ONE_MATRIX:
            return Kept(tokens, [(0, columns)], hidden.device)
        ranges = []
        for begin, end in parts:
            row -= _whole(end - begin)
            if row < 0:
                break
            ranges.append((begin, end))
        return Kept(tokens, ranges, hidden.device) if ranges else None

    def matrix(self, begin: int, end: int) -> torch.Tensor:
        """[T, end - begin] of the range that starts at ``begin``."""
        assert self.memory is not None
        stride, offset = _whole(end - begin), self._offsets[begin]
        return self.memory[offset : offset + self.tokens * stride].view(self.tokens, stride)[:, : end - begin]

    def release(self) -> None:
        self.memory = None


def _borrowed(memory: torch.Tensor, tokens: int, width: int) -> tuple[torch.Tensor, int] | None:
    """``memory`` as fp32 logits of ``width`` columns (whole leaves), and the columns of a tile that it holds.

    ``None`` where that would be less than :data:`LEAST_COLUMNS` and less than ``width``.
    """
    size = memory.numel() * memory.element_size()
    if size // (4 * tokens) < min(LEAST_COLUMNS, width):
        return None
    return memory.view(torch.float32), _tile_columns(tokens, size)


def leaf_stats(
    products: Products,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    columns: int,
    kept: Kept | None = None,
    first_row: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, s, u) of every leaf [3, T, L] fp32, and z of the target [T] (+0.0 where another rank owns it).

    ``kept`` receives its columns, in the rows from ``first_row`` on.
    """
    tokens, rows = hidden.shape[0], weight.shape[0]
    stats = torch.empty((3, tokens, -(-columns // VOCAB_LEAF)), dtype=torch.float32, device=hidden.device)
    z_target = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)

    def run(begin: int, end: int, step: int, buffer: torch.Tensor, into: torch.Tensor | None = None) -> None:
        for first in range(begin, end, step):
            width = min(step, end - first)
            wide = _padded(width, rows - first)
            logits = buffer[: tokens * wide].view(tokens, wide)
            products.product(hidden, weight[first : first + wide].t(), logits)
            part = None if into is None else into[:, first - begin : first - begin + width]
            leaves.write_leaf_stats(
                logits, temperature, width, stats, first // VOCAB_LEAF, targets, first, z_target, part
            )

    def new(step: int, widest: int) -> torch.Tensor:
        return torch.empty(tokens * min(step, _padded(widest, rows)), dtype=torch.float32, device=hidden.device)

    if kept is None:
        step = _tile_columns(tokens, TILE_BYTES)
        run(0, columns, step, new(step, columns))
        return stats, z_target
    if kept.columns < columns:
        # These columns come first: their logits pass through the memory that the others will be kept in.
        rest, found = columns - kept.columns, None
        if kept.tokens == tokens and kept.memory is not None:  # else other rows are there already, or will be
            found = _borrowed(kept.memory, tokens, _whole(rest))
        if found is None:
            step = _tile_columns(tokens, KEEPING_TILE_BYTES)
            found = new(step, rest), step
        run(kept.columns, columns, found[1], found[0])
        del found
    step = _tile_columns(tokens, KEEPING_TILE_BYTES)
    buffer = new(step, max(end - begin for begin, end in kept.ranges))
    for begin, end in kept.ranges:
        run(begin, end, step, buffer, kept.matrix(begin, end)[first_row : first_row + tokens])
    kept.maxima[first_row : first_row + tokens] = stats[0][:, : kept.maxima.shape[1]]
    return stats, z_target


def _scratch(tokens: int, width: int, like: torch.Tensor, kept: Kept | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Memory of dlogits and of a tile of logits, and the columns of a tile.

    That of ``kept`` where it holds both; otherwise it is released, so that new memory may take its place.
    """
    size = tokens * width
    if kept is not None and kept.memory is not None:
        found = _borrowed(kept.memory[size:], tokens, width)
        if found is not None:
            return kept.memory[:size], *found
        kept.release()
    step = min(width, _tile_columns(tokens, TILE_BYTES))
    logits = torch.empty(tokens * step, dtype=torch.float32, device=like.device)
    return torch.empty(size, dtype=like.dtype, device=like.device), logits, step


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
    kept: Kept | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dH as the fp32 subtree over the rank's ``segments``, and dW in the dtype of ``weight``.

    Args:
        state: (m, log l, entropy) [3, T] of the forward pass; grads: upstream (g_logp, g_lse, g_ent) [3, T].
        segments: ranges of columns that are not padding, a power of two of them.
        kept: what the forward pass kept for these ``segments``; used up.
    """
    tokens, width = hidden.shape
    state, grads = state.contiguous(), grads.contiguous()
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
    if dw is not None:
        dw[max((end for _, end in segments), default=0) :].zero_()
    held, ranges = (0, []) if kept is None else (kept.columns, list(kept.ranges))
    dlogits, start, done = hidden.new_empty(0), 0, 0  # of columns ``start`` to ``done``
    memory: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def from_kept() -> tuple[torch.Tensor, int, int]:
        assert kept is not None
        begin, end = ranges.pop(0)
        matrix = kept.matrix(begin, end)
        kernels.make_dlogits(matrix, kept.maxima, temperature, targets, state, grads, begin)
        return matrix, begin, end

    def recomputed(begin: int, end: int, memory: tuple[torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
        flat, buffer, step = memory
        stride = _whole(end - begin)
        out = flat[: tokens * stride].view(tokens, stride)[:, : end - begin]
        for first in range(begin, end, step):
            last = min(first + step, end)
            wide = _padded(last - first, weight.shape[0] - first)
            logits = buffer[: tokens * wide].view(tokens, wide)
            products.product(hidden, weight[first : first + wide].t(), logits)
            part = out[:, first - begin : last - begin]
            kernels.write_dlogits(logits, temperature, targets, state, grads, last - first, part, first)
        return out

    finished: list[tuple[int, torch.Tensor]] = []  # subtrees waiting for their right neighbour, with their sizes
    for segment in segments:
        total = None
        for block, block_end in blocks([segment], VOCAB_BLOCK):
            if block >= done:
                if block < held:
                    dlogits, start, done = from_kept()
                else:
                    dlogits = hidden.new_empty(0)  # nothing may refer to kept memory that _scratch releases
                    if memory is None:
                        widest = max(end - begin for begin, end in blocks(segments, VOCAB_BLOCK) if begin >= held)
                        memory = _scratch(tokens, _whole(widest), hidden, kept)
                    dlogits, start, done = recomputed(block, block_end, memory), block, block_end
                if dw is not None:
                    products.product(dlogits.t(), hidden, dw[start:done])
            if need_hidden:
                product = products.product if total is None else products.add_product
                if total is None:
                    total = torch.empty((tokens, width), dtype=torch.float32, device=hidden.device)
                product(dlogits[:, block - start : block_end - start], weight[block:block_end], total)
        if need_hidden:
            if total is None:
                total = torch.zeros((tokens, width), dtype=torch.float32, device=hidden.device)
            size = 1
            while finished and finished[-1][0] == size:
                total = finished.pop()[1].add_(total)
                size *= 2
            finished.append((size, total))
    if kept is not None:
        kept.release()
    return finished[0][1] if need_hidden else None, dw
