"""The leaf tree of the vocabulary, and how ranks share it.

The vocabulary is cut into leaves of 128 columns; leaf ``i`` holds the global columns ``[128 i, 128 i + 128)`` below
``global_vocab_size``. Sums over the vocabulary are a balanced binary tree over the leaves, filled up to a power of two
with +0.0. Node ``(level, index)`` of the tree covers the leaves ``[index * 2^level, (index + 1) * 2^level)``.

A rank owns a contiguous range of leaves. The nodes that lie completely inside its range, and whose parents do not, are
its *maximal aligned subtrees*: at most two a level, about ``2 log2(leaves)`` in all, and their leaves make up the whole
range. A rank computes their values alone; once all ranks have exchanged them, every rank finishes the remaining adds of
the very same tree. So the bits do not depend on the number of ranks or on where the shards meet::

    leaves    0   1   2   3   4   5   6   7        rank 0 owns 0..4, rank 1 owns 5..7
    level 1   [ 0-1 ] [ 2-3 ] ( 4-5 ) [ 6-7 ]      rank 0 sends (2, 0) and (0, 4)
    level 2   [    0-3      ] (    4-7      )      rank 1 sends (0, 5) and (1, 3)
    level 3   (            0-7              )      everybody: 4 + 5, then + 6-7, then 0-3 + 4-7
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.errors import ContractError

ZERO = -1  # operand of a merge: a subtree without any leaf, +0.0


def leaves_of(columns: int) -> int:
    """Leaves that hold ``columns`` columns."""
    return (columns + VOCAB_LEAF - 1) // VOCAB_LEAF


def aligned_nodes(first: int, last: int) -> list[tuple[int, int]]:
    """Maximal aligned subtrees ``(level, index)`` of the leaves ``[first, last)``, from left to right."""
    nodes = []
    while first < last:
        level = (first & -first).bit_length() - 1 if first else (last - first).bit_length() - 1
        while first + (1 << level) > last:
            level -= 1
        nodes.append((level, first >> level))
        first += 1 << level
    return nodes


@dataclass(frozen=True)
class VocabLayout:
    """Which columns each rank owns: rank ``r`` has ``[borders[r], borders[r + 1])`` of the padded vocabulary.

    Attributes:
        borders: R + 1 ascending column numbers from 0; all but the last are multiples of 128.
        global_vocab_size: columns from here on are padding and never enter.
    """

    borders: tuple[int, ...]
    global_vocab_size: int

    def __post_init__(self) -> None:
        for rank, (begin, end) in enumerate(zip(self.borders[:-1], self.borders[1:], strict=True)):
            if begin % VOCAB_LEAF:
                raise ContractError(
                    f"vocab_start_index={begin} of rank {rank} must be a multiple of {VOCAB_LEAF}: shards meet at the "
                    "borders of leaves; pad the vocabulary (padded_vocab_size) before splitting it"
                )
            if end < begin:
                raise ContractError(f"vocabulary shard of rank {rank} is [{begin}, {end}): shards must ascend")
        if not 0 < self.global_vocab_size <= self.borders[-1]:
            raise ContractError(
                f"global_vocab_size={self.global_vocab_size} must lie in [1, {self.borders[-1]}], the columns that the "
                f"ranks own together"
            )

    @property
    def ranks(self) -> int:
        return len(self.borders) - 1

    def columns(self, rank: int) -> int:
        """Columns of ``rank`` that are not padding; they come first in its shard."""
        return max(0, min(self.borders[rank + 1], self.global_vocab_size) - self.borders[rank])

    def leaves(self, rank: int) -> int:
        """Leaves of ``rank``."""
        return leaves_of(self.columns(rank))

    def max_leaves(self) -> int:
        """Leaves of the rank with the most."""
        return max(self.leaves(rank) for rank in range(self.ranks))

    def nodes(self, rank: int) -> list[tuple[int, int]]:
        """Subtrees that ``rank`` computes, ``(level, index)``."""
        first = self.borders[rank] // VOCAB_LEAF
        return aligned_nodes(first, first + self.leaves(rank))

    def max_nodes(self) -> int:
        """Slots of one rank in the exchange."""
        return max(len(self.nodes(rank)) for rank in range(self.ranks))

    def local_ranges(self, rank: int) -> list[tuple[int, int]]:
        """The same subtrees as ranges of the leaves of ``rank``, counted from its first one."""
        first = self.borders[rank] // VOCAB_LEAF
        return [((i << level) - first, ((i + 1) << level) - first) for level, i in self.nodes(rank)]

    def merges(self) -> list[tuple[int, int]]:
        """The remaining adds: each ``(left, right)`` makes the next slot, the last one is the root.

        Slot ``r * max_nodes + i`` is subtree ``i`` of rank ``r``; results continue after ``ranks * max_nodes``.
        :data:`ZERO` stands for +0.0. A list without merges means that slot :meth:`first_slot` is the root.
        """
        return _merges(self)

    def first_slot(self) -> int:
        """Slot of the leftmost subtree."""
        rank = next(rank for rank in range(self.ranks) if self.leaves(rank))
        return rank * self.max_nodes()

    def segment_columns(self, segments: int) -> int:
        """Columns of one of the S segments over which the gradient of the hidden states is reduced."""
        step = VOCAB_LEAF * segments
        return (self.borders[-1] + step - 1) // step * VOCAB_LEAF

    def local_segments(self, rank: int, segments: int) -> list[tuple[int, int]]:
        """The segments of ``rank`` as ranges of its columns that are not padding (possibly empty).

        Raises:
            ContractError: shards do not consist of S / R whole segments each.
        """
        return list(_local_segments(self, rank, segments))


@functools.lru_cache(maxsize=256)
def _local_segments(layout: VocabLayout, rank: int, segments: int) -> list[tuple[int, int]]:
    ranks, borders = layout.ranks, layout.borders
    if segments < 1:
        raise ContractError(f"grad_segments={segments} must be a power of two and a multiple of {ranks} ranks")
    width, own = layout.segment_columns(segments), segments // ranks
    ends = [min(r * own * width, borders[-1]) for r in range(ranks + 1)]
    if segments & (segments - 1) or segments % ranks or list(borders) != ends:
        raise ContractError(
            f"grad_segments={segments} must be a power of two and a multiple of the {ranks} ranks, and each "
            f"rank must own {own} segments of {width} columns; its shards are {list(borders)}. Pad the "
            f"vocabulary to a multiple of {VOCAB_LEAF * segments} (padded_vocab_size)"
        )
    start, columns = borders[rank], layout.columns(rank)
    clip = [min(max((rank * own + s) * width - start, 0), columns) for s in range(own + 1)]
    return list(zip(clip[:-1], clip[1:], strict=True))


def blocks(segments: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The blocks [begin, end) of ``size`` columns, from where a segment begins; its last one may be short."""
    return [(first, min(first + size, end)) for begin, end in segments for first in range(begin, end, size)]


@functools.lru_cache(maxsize=64)
def whole_vocabulary(size: int, global_vocab_size: int) -> VocabLayout:
    """Layout of one rank that owns all ``size`` columns."""
    return VocabLayout((0, size), global_vocab_size)


@functools.lru_cache(maxsize=64)
def _merges(layout: VocabLayout) -> list[tuple[int, int]]:
    slots = {
        node: rank * layout.max_nodes() + i for rank in range(layout.ranks) for i, node in enumerate(layout.nodes(rank))
    }
    total = leaves_of(layout.global_vocab_size)
    merges: list[tuple[int, int]] = []

    def slot(level: int, index: int) -> int:
        if (index << level) >= total:
            return ZERO
        if (level, index) in slots:
            return slots[level, index]
        pair = slot(level - 1, 2 * index), slot(level - 1, 2 * index + 1)
        merges.append(pair)
        return layout.ranks * layout.max_nodes() + len(merges) - 1

    slot((total - 1).bit_length(), 0)
    return merges
