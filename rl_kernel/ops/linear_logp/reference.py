"""Specification of linear_logp: logp of hidden_states @ lm_head_weight.T without the logits in memory.

Forward (:func:`leaf_stats`). The logit of token i and column j is one dot product, as in lm_head::

    x_ij = dot16(hidden_i, weight_j)                 fp32, not rounded

and everything after it is :mod:`rl_kernel.ops.logp.reference`, leaf by leaf. A backend may tile tokens and columns as
it likes: a logit depends on one row of each operand, and a leaf on its own 128 logits.

Backward (:func:`backward`). The logits are computed again, with the same bits; with dx_ij from step 5 of the logp
reference::

    d_ij = round_to(dtype of hidden, dx_ij)
    dW_j = round_to(dtype of weight, sum_i d_ij * hidden_i)     over the tokens that take part, ascending
    dH_i = round_to(dtype of hidden, tree_s(sum_j d_ij * W_j))  over columns ascending inside each of S segments

Both sums are one fp32 accumulator with fma from +0.0. The S segments cut the padded vocabulary; a rank of TP size t
owns S / t neighbouring ones, computes that subtree in fp32, and the all-reduce continues the tree before the one
rounding.
Rows with ignore_index are removed before any of this, so they cannot reach a result.

Memory: leaf by leaf, so [T, 128] is the largest piece of the logits that exists.
"""

from __future__ import annotations

import torch

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.ops import _primitives as rlk
from rl_kernel.ops.logp import reference as logp_reference

supports = logp_reference.supports


def _leaf_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rlk.dot16(hidden[:, None, :], weight[None, :, :])


def leaf_stats(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor, targets: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward part of one rank.

    Args:
        hidden: [T, H] float32 or bfloat16.
        weight: [V_local, H], same dtype.
        temperature: [T] f32.
        targets: [T] i64 local columns, -1 where another rank owns the target.
        columns: leading rows of ``weight`` that are not padding.

    Returns:
        (m, s, u) of every leaf [3, T, L] f32, and z of the target [T] f32 (+0.0 where another rank owns it).
    """
    stats = torch.zeros(3, hidden.shape[0], (columns + VOCAB_LEAF - 1) // VOCAB_LEAF)
    z_target = torch.zeros(hidden.shape[0])
    for leaf, first in enumerate(range(0, columns, VOCAB_LEAF)):
        last = min(first + VOCAB_LEAF, columns)
        z = _leaf_logits(hidden, weight[first:last]) / temperature[:, None]
        stats[:, :, leaf] = logp_reference.one_leaf(z)
        rows = torch.nonzero((targets >= first) & (targets < last))[:, 0]
        z_target[rows] = z[rows, targets[rows] - first]
    return stats, z_target


def _accumulate(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """acc + a [M, R] @ b [R, N], r ascending."""
    for r in range(a.shape[1]):
        acc = rlk.fma(a[:, r, None], b[r].float(), acc)
    return acc


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
    """Backward part of one rank.

    Args:
        state: (m, log l, entropy) [3, T] f32 of the forward pass.
        grads: upstream (g_logp, g_lse, g_ent) [3, T] f32.
        segments: the rank's segments as ranges of columns; together they are the columns that are not padding.
        need_hidden, need_weight: which gradients to compute.

    Returns:
        fp32 [T, H], the subtree of dH over the rank's segments, and dW [V_local, H] in the dtype of weight.
    """
    tokens, width = hidden.shape
    dw = torch.zeros_like(weight)
    sums = []
    for begin, end in segments:
        dh = torch.zeros(tokens, width)
        for first in range(begin, end, VOCAB_LEAF):
            last = min(first + VOCAB_LEAF, end)
            here = torch.where((targets >= first) & (targets < last), targets - first, -1)
            x = _leaf_logits(hidden, weight[first:last])
            d = logp_reference.dlogits(x, temperature, here, state, grads, last - first).to(hidden.dtype).float()
            if need_hidden:
                dh = _accumulate(dh, d, weight[first:last])
            if need_weight:
                dw[first:last] = _accumulate(torch.zeros(last - first, width), d.t(), hidden).to(weight.dtype)
        sums.append(dh)
    return rlk.tree_sum(torch.stack(sums), dim=0) if need_hidden else None, dw if need_weight else None
