"""Log-probabilities by the compiled CPU kernels of logp; weights and search as in the reference."""

from __future__ import annotations

import torch

from rl_kernel.ops.logp import native as logp
from rl_kernel.ops.logp.native import supports
from rl_kernel.ops.sampling.reference import draw, fill_uniforms, tokens_of

__all__ = ["draw", "fill_uniforms", "sample", "supports"]


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    t = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    logits = logits[:, :columns].contiguous()
    m, out = logp.whole_rows(logp.leaf_stats(logits, t, columns), torch.zeros_like(t))
    y = logp.log_softmax(logits, t, torch.stack([m, out[3]]), columns)
    tokens = tokens_of(y, logits, temperature, uniforms)
    return tokens, y.gather(1, tokens[:, None])[:, 0], out[1].clone()
