"""Compiled attention of the cpu family (csrc/cpu/attention.cpp)."""

from __future__ import annotations

import torch

from rl_kernel import _C  # noqa: F401 - registers the compiled operators
from rl_kernel.ops._common import as_contract_errors
from rl_kernel.ops._common import supports_cpu as supports

__all__ = ["paged_forward", "supports", "varlen_backward", "varlen_forward"]

_ops = torch.ops.rlk


def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rl_kernel.ops.attention.reference.varlen_forward`."""
    with as_contract_errors():
        return _ops.attention_varlen_forward(q, k, v, cu_q, cu_k, scale)


def varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`rl_kernel.ops.attention.reference.varlen_backward`."""
    with as_contract_errors():
        return _ops.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale)


def paged_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See :func:`rl_kernel.ops.attention.reference.paged_forward`."""
    with as_contract_errors():
        return _ops.attention_paged_forward(q, k_cache, v_cache, block_table, cu_q, seq_lens, scale)
