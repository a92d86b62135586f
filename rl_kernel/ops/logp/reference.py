"""Specification of logp, lse and entropy over a vocabulary that is split over ranks.

For one row of fp32 logits x [V], temperature t and target y, with z_j = x_j / t (one fp32 division):

1. Leaves (:func:`leaf_stats`). Leaf i holds the global columns [128 i, 128 i + 128) below global_vocab_size::

       m_i = max z_j                          (NaN if any z_j is NaN; a zero is +0.0)
       s_i = tree_j(exp(z_j - m_i))           (tree over 128 places, absent columns are +0.0)
       u_i = tree_j(e * (z_j - m_i))          with e = exp(z_j - m_i); the product is +0.0 where e is zero

2. Maximum: m = max m_i over all leaves of all ranks, exact in any order.

3. Vocabulary (:func:`tree_nodes`, :func:`finish`). w_i = exp(m_i - m)::

       l = tree_i(s_i * w_i)                  (both products are +0.0 where w_i is zero)
       u = tree_i(w_i * (u_i + (m_i - m) * s_i))

   over the leaf tree of :mod:`rl_kernel.ops.logp.vocab_tree`: each rank sums its maximal aligned subtrees, the ranks
   exchange them and finish the same tree.

4. Results::

       logp = (z_y - m) - log(l)    lse = m + log(l)    entropy = log(l) - u / l

5. Gradient (:func:`dlogits`), for upstream gradients g_logp, g_lse, g_ent::

       y_j = (z_j - m) - log(l)     p_j = exp(y_j)
       c_j = (g_lse - g_logp) - g_ent * (y_j + entropy)    (without the last term if g_ent or p_j is zero)
       dx_j = (p_j * c_j [+ g_logp if j is the target]) / t

exp, log and tree are the primitives of :mod:`rl_kernel.ops._primitives`; every other operation is one fp32 rounding.
Rows are independent. Every backend has the same functions. Shapes: T rows, ``columns`` leading columns of the local
shard that are not padding, L = ceil(columns / 128) leaves.
"""

from __future__ import annotations

import torch

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.ops import _primitives as rlk
from rl_kernel.registry import Request


def supports(request: Request) -> str | None:
    """Defined with the primitives of the cpu family."""
    return None if request.family == "cpu" else f"the reference computes the cpu family, not {request.family}"


def one_leaf(z: torch.Tensor) -> torch.Tensor:
    """(m, s, u) [3, T] of one leaf z [T, 1..128]."""
    m = z.amax(-1) + 0.0
    d = z - m[:, None]
    e = rlk.exp(d)
    t = torch.where(e == 0, torch.zeros_like(e), e * d)
    pad = (0, VOCAB_LEAF - z.shape[-1])
    s, u = (rlk.tree_sum(torch.nn.functional.pad(x, pad)) for x in (e, t))
    return torch.stack([m, s, u])


def leaf_stats(logits: torch.Tensor, temperature: torch.Tensor, columns: int) -> torch.Tensor:
    """Step 1: logits [T, V_local] f32, temperature [T] f32 -> (m, s, u) of every leaf, [3, T, L] f32."""
    z = logits[:, :columns] / temperature[:, None]
    leaves = [one_leaf(part) for part in z.split(VOCAB_LEAF, dim=1)] if columns else []
    return torch.stack(leaves, dim=2) if leaves else logits.new_zeros(3, logits.shape[0], 0)


def target_logits(logits: torch.Tensor, temperature: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """z_y [T]: targets [T] i64 are local columns, or -1 where another rank owns the target (+0.0 there)."""
    z = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] / temperature
    return torch.where(targets < 0, torch.zeros_like(z), z)


def tree_nodes(stats: torch.Tensor, m: torch.Tensor, ranges: list[tuple[int, int]], slots: int) -> torch.Tensor:
    """Step 3, local part: (l, u) of the aligned subtrees ``ranges`` (local leaves), [slots, 2, T] (unused slots 0)."""
    m_leaf, s, u = stats.unbind(0)
    d = m_leaf - m[:, None]
    w = rlk.exp(d)
    zero = torch.zeros_like(w)
    terms = torch.stack([torch.where(w == 0, zero, s * w), torch.where(w == 0, zero, w * (u + d * s))])
    nodes = stats.new_zeros(slots, 2, stats.shape[1])
    for slot, (begin, end) in enumerate(ranges):
        nodes[slot] = rlk.tree_sum(terms[:, :, begin:end])
    return nodes


def finish(
    nodes: torch.Tensor, merges: list[tuple[int, int]], first_slot: int, m: torch.Tensor, z_target: torch.Tensor
) -> torch.Tensor:
    """Step 3, remaining adds, and step 4: nodes of all ranks [N, 2, T] -> (logp, lse, entropy, log l) [4, T]."""
    slots = list(nodes.unbind(0))
    zero = torch.zeros_like(slots[0])
    for left, right in merges:
        slots.append((zero if left < 0 else slots[left]) + (zero if right < 0 else slots[right]))
    l, u = slots[-1] if merges else slots[first_slot]  # noqa: E741
    log_l = rlk.log(l)
    return torch.stack([(z_target - m) - log_l, m + log_l, log_l - u / l, log_l])


def dlogits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """Step 5 -> [T, V_local] f32, zero in padded columns.

    Args:
        logits: [T, V_local] f32.
        temperature: [T] f32.
        targets: [T] i64 local columns, -1 where another rank owns the target.
        state: (m, log l, entropy) [3, T] f32 of the forward pass.
        grads: upstream (g_logp, g_lse, g_ent) [3, T] f32.
        columns: columns that are not padding.
    """
    t = temperature[:, None]
    m, log_l, entropy = state[:, :, None]
    g_logp, g_lse, g_ent = grads[:, :, None]
    y = (logits[:, :columns] / t - m) - log_l
    p = rlk.exp(y)
    c = (g_lse - g_logp).expand_as(p)
    c = torch.where((g_ent == 0) | (p == 0), c, c - g_ent * (y + entropy))
    dz = p * c
    rows = torch.nonzero(targets >= 0)[:, 0]
    dz[rows, targets[rows]] += g_logp[rows, 0]
    return torch.nn.functional.pad(dz / t, (0, logits.shape[1] - columns))


def log_softmax(logits: torch.Tensor, temperature: torch.Tensor, state: torch.Tensor, columns: int) -> torch.Tensor:
    """(z_j - m) - log l [T, V] with state (m, log l) [2, T]; padded columns are -inf."""
    m, log_l = state[:, :, None]
    y = (logits[:, :columns] / temperature[:, None] - m) - log_l
    return torch.nn.functional.pad(y, (0, logits.shape[1] - columns), value=-torch.inf)
