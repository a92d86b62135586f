"""One call of linear_logp on one rank, without its operands: what all schedules share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_kernel.ops.logp.vocab_tree import VocabLayout


@dataclass(frozen=True)
class LogpCall:
    """Everything but the operands of one call, on one rank."""

    targets: torch.Tensor  # [T] global ids
    temperature: torch.Tensor | None  # [T], None for 1
    layout: VocabLayout
    ignore_index: int
    segments: int
    group: dist.ProcessGroup | None  # None for one rank

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group is not None else 0

    @property
    def columns(self) -> int:
        return self.layout.columns(self.rank)

    @property
    def start(self) -> int:
        return self.layout.borders[self.rank]

    def local_segments(self) -> list[tuple[int, int]]:
        return self.layout.local_segments(self.rank, self.segments)
