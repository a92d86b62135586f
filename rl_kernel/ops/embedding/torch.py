"""Stock embedding: used by the modes fast and native."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request

__all__ = ["backward", "forward", "supports"]


def supports(request: Request) -> str | None:
    return None


def forward(ids: torch.Tensor, weight: torch.Tensor, vocab_start_index: int = 0) -> torch.Tensor:
    local = ids.long() - vocab_start_index
    outside = (local < 0) | (local >= weight.shape[0])
    return torch.nn.functional.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[:, None], 0.0)


def backward(dy: torch.Tensor, ids: torch.Tensor, num_rows: int, vocab_start_index: int = 0) -> torch.Tensor:
    local = ids.long() - vocab_start_index
    inside = (local >= 0) & (local < num_rows)
    return dy.new_zeros(num_rows, dy.shape[1]).index_add_(0, local[inside], dy[inside])
