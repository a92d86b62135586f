"""Compiled rope of the cpu family (csrc/cpu/elementwise.cpp)."""

from __future__ import annotations

import torch

from rl_kernel import _C  # noqa: F401 - registers the compiled operators
from rl_kernel.ops._common import as_contract_errors
from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["backward", "forward", "supports"]


def forward(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """See :func:`rl_kernel.ops.rope.reference.forward`."""
    with as_contract_errors():
        return torch.ops.rlk.rope(x, positions, cache, False)


def backward(dy: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """See :func:`rl_kernel.ops.rope.reference.backward`."""
    with as_contract_errors():
        return torch.ops.rlk.rope(dy, positions, cache, True)
