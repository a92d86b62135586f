"""Specification of embedding, in plain torch."""

from __future__ import annotations

import torch

from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["backward", "forward", "supports"]


def forward(ids: torch.Tensor, weight: torch.Tensor, vocab_start_index: int = 0) -> torch.Tensor:
    """ids [T], weight [V_local, H] -> [T, H]: row ``ids - vocab_start_index`` plus +0.0; +0.0 outside the shard."""
    local = ids.long() - vocab_start_index
    inside = (local >= 0) & (local < weight.shape[0])
    rows = (
        weight[torch.where(inside, local, 0)] + 0.0 if weight.shape[0] else weight.new_zeros(len(ids), weight.shape[1])
    )
    return torch.where(inside[:, None], rows, torch.zeros_like(rows))


def backward(dy: torch.Tensor, ids: torch.Tensor, num_rows: int, vocab_start_index: int = 0) -> torch.Tensor:
    """dy [T, H] -> dweight [num_rows, H]: fp32 sum over the tokens of a row, ascending, rounded once to dy's dtype."""
    dw = torch.zeros(num_rows, dy.shape[1], dtype=torch.float32)
    for t, row in enumerate((ids.long() - vocab_start_index).tolist()):
        if 0 <= row < num_rows:
            dw[row] += dy[t].float()
    return dw.to(dy.dtype)
