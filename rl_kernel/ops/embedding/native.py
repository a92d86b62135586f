"""Compiled embedding of the cpu family (csrc/cpu/elementwise.cpp)."""

from __future__ import annotations

import torch

from rl_kernel import _C  # noqa: F401 - registers the compiled operators
from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["backward", "forward", "supports"]


def forward(ids: torch.Tensor, weight: torch.Tensor, vocab_start_index: int = 0) -> torch.Tensor:
    """See :func:`rl_kernel.ops.embedding.reference.forward`."""
    return torch.ops.rlk.embedding_forward(ids, weight, vocab_start_index)


def backward(dy: torch.Tensor, ids: torch.Tensor, num_rows: int, vocab_start_index: int = 0) -> torch.Tensor:
    """See :func:`rl_kernel.ops.embedding.reference.backward`."""
    return torch.ops.rlk.embedding_backward(dy, ids, num_rows, vocab_start_index)
