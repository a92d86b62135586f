"""Compiled CPU kernels (csrc/cpu/linear_logp.cpp) with the functions of the reference."""

from __future__ import annotations

import torch

from rl_kernel.ops.collectives.native import supports as _built
from rl_kernel.ops.logp.vocab_tree import leaves_of
from rl_kernel.registry import Request


def supports(request: Request) -> str | None:
    """CPU tensors in float32 or bfloat16, when the extension is built."""
    if request.dtype not in (torch.float32, torch.bfloat16):
        return f"hidden states must be float32 or bfloat16, not {request.dtype}"
    return _built(request)


def leaf_stats(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor, targets: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    stats = torch.empty(3, hidden.shape[0], leaves_of(columns))
    z_target = torch.empty(hidden.shape[0])
    torch.ops.rlk.linear_logp_leaf_stats(
        hidden.contiguous(), weight.contiguous(), temperature, targets, columns, stats, z_target
    )
    return stats, z_target


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    segments: list[tuple[int, int]],
    need_hidden: bool = True,
    need_weight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dh = torch.empty(hidden.shape if need_hidden else (0,), dtype=torch.float32)
    dw = torch.empty(weight.shape if need_weight else (0,), dtype=weight.dtype)
    torch.ops.rlk.linear_logp_backward(
        hidden.contiguous(),
        weight.contiguous(),
        temperature,
        targets,
        state,
        grads,
        torch.tensor(segments, dtype=torch.int64),
        dh,
        dw,
    )
    return dh if need_hidden else None, dw if need_weight else None
