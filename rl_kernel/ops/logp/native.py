"""Compiled CPU kernels (csrc/cpu/logp.cpp) with the functions of the reference."""

from __future__ import annotations

import torch

from rl_kernel.ops.collectives.native import supports
from rl_kernel.ops.logp.reference import target_logits
from rl_kernel.ops.logp.vocab_tree import leaves_of

__all__ = ["dlogits", "finish", "leaf_stats", "log_softmax", "supports", "target_logits", "tree_nodes", "whole_rows"]


def leaf_stats(logits: torch.Tensor, temperature: torch.Tensor, columns: int) -> torch.Tensor:
    stats = torch.empty(3, logits.shape[0], leaves_of(columns))
    torch.ops.rlk.logp_leaf_stats(logits.contiguous(), temperature, columns, stats)
    return stats


def tree_nodes(stats: torch.Tensor, m: torch.Tensor, ranges: list[tuple[int, int]], slots: int) -> torch.Tensor:
    nodes = torch.zeros(slots, 2, stats.shape[1])
    torch.ops.rlk.logp_tree_nodes(stats, m, torch.tensor(ranges, dtype=torch.int64).view(-1, 2), nodes)
    return nodes


def finish(
    nodes: torch.Tensor, merges: list[tuple[int, int]], first_slot: int, m: torch.Tensor, z_target: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(4, m.shape[0])
    program = torch.tensor(merges, dtype=torch.int64).view(-1, 2)
    torch.ops.rlk.logp_finish(nodes.contiguous(), program, first_slot, m, z_target, out)
    return out


def whole_rows(stats: torch.Tensor, z_target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum, :func:`tree_nodes` and :func:`finish` in one pass where one rank owns every leaf."""
    out = torch.empty(5, z_target.shape[0])
    torch.ops.rlk.logp_whole_rows(stats, z_target, out)
    return out[4], out[:4]


def dlogits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    out = torch.empty(logits.shape)
    torch.ops.rlk.logp_dlogits(logits.contiguous(), temperature, targets, state, grads, columns, out)
    return out


def log_softmax(logits: torch.Tensor, temperature: torch.Tensor, state: torch.Tensor, columns: int) -> torch.Tensor:
    out = torch.empty(logits.shape)
    torch.ops.rlk.logp_log_softmax(logits.contiguous(), temperature, state, columns, out)
    return out
