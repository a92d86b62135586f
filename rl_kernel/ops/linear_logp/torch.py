"""Stock formula, 4096 columns at a time with torch's own matrix products. Keeps no contract."""

from __future__ import annotations

import torch

from rl_kernel.ops.logp import torch as logp_torch
from rl_kernel.ops.logp.vocab_tree import leaves_of

supports = logp_torch.supports
CHUNK = 4096


def leaf_stats(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor, targets: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    stats = [hidden.new_zeros(3, hidden.shape[0], leaves_of(0), dtype=torch.float32)]
    z_target = torch.zeros_like(temperature)
    for first in range(0, columns, CHUNK):
        last = min(first + CHUNK, columns)
        x = hidden.float() @ weight[first:last].float().t()
        stats.append(logp_torch.leaf_stats(x, temperature, last - first))
        here = torch.where((targets >= first) & (targets < last), targets - first, -1)
        z_target = z_target + logp_torch.target_logits(x, temperature, here)
    return torch.cat(stats, dim=2), z_target


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
    dh = torch.zeros_like(hidden, dtype=torch.float32)
    dw = torch.zeros_like(weight)
    columns = segments[-1][1]
    for first in range(0, columns, CHUNK):
        last = min(first + CHUNK, columns)
        x = hidden.float() @ weight[first:last].float().t()
        here = torch.where((targets >= first) & (targets < last), targets - first, -1)
        d = logp_torch.dlogits(x, temperature, here, state, grads, last - first)
        dh += d @ weight[first:last].float()
        dw[first:last] = (d.t() @ hidden.float()).to(weight.dtype)
    return dh if need_hidden else None, dw if need_weight else None
