"""Stock formula in torch's own sums and functions. Keeps no contract; for the modes fast and native."""

from __future__ import annotations

import torch

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.ops.logp.reference import target_logits
from rl_kernel.registry import Request

__all__ = ["dlogits", "finish", "leaf_stats", "log_softmax", "supports", "target_logits", "tree_nodes"]


def supports(request: Request) -> str | None:
    """Runs everywhere."""
    return None


def leaf_stats(logits: torch.Tensor, temperature: torch.Tensor, columns: int) -> torch.Tensor:
    z = logits[:, :columns] / temperature[:, None]
    z = torch.nn.functional.pad(z, (0, -columns % VOCAB_LEAF), value=-torch.inf).unflatten(1, (-1, VOCAB_LEAF))
    m = z.amax(-1) if columns else z.new_zeros(z.shape[:2])
    d = z - m[..., None]
    e = d.exp()
    return torch.stack([m, e.sum(-1), torch.where(e == 0, 0.0, e * d).sum(-1)])


def tree_nodes(stats: torch.Tensor, m: torch.Tensor, ranges: list[tuple[int, int]], slots: int) -> torch.Tensor:
    m_leaf, s, u = stats.unbind(0)
    d = m_leaf - m[:, None]
    w = d.exp()
    nodes = stats.new_zeros(slots, 2, stats.shape[1])
    nodes[0] = torch.where(w == 0, 0.0, torch.stack([s * w, w * (u + d * s)])).sum(-1)
    return nodes


def finish(
    nodes: torch.Tensor, merges: list[tuple[int, int]], first_slot: int, m: torch.Tensor, z_target: torch.Tensor
) -> torch.Tensor:
    l, u = nodes.sum(0)  # noqa: E741
    log_l = l.log()
    return torch.stack([z_target - m - log_l, m + log_l, log_l - u / l, log_l])


def dlogits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    t = temperature[:, None]
    m, log_l, entropy = state[:, :, None]
    g_logp, g_lse, g_ent = grads[:, :, None]
    y = logits[:, :columns] / t - m - log_l
    p = y.exp()
    dz = p * (g_lse - g_logp - torch.where((g_ent == 0) | (p == 0), 0.0, g_ent * (y + entropy)))
    rows = torch.nonzero(targets >= 0)[:, 0]
    dz[rows, targets[rows]] += g_logp[rows, 0]
    return torch.nn.functional.pad(dz / t, (0, logits.shape[1] - columns))


def log_softmax(logits: torch.Tensor, temperature: torch.Tensor, state: torch.Tensor, columns: int) -> torch.Tensor:
    y = torch.log_softmax(logits[:, :columns] / temperature[:, None], dim=-1)
    return torch.nn.functional.pad(y, (0, logits.shape[1] - columns), value=-torch.inf)
