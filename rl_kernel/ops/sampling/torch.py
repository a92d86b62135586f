"""Stock log-softmax, then the draw of the contract's backends. Keeps no contract; for the modes fast and native."""

from __future__ import annotations

import torch

from rl_kernel.ops.sampling import reference
from rl_kernel.registry import Request

__all__ = ["draw", "fill_uniforms", "sample", "supports"]


def supports(request: Request) -> str | None:
    """Runs everywhere."""
    return None


def fill_uniforms(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    if seeds.is_cuda:
        from rl_kernel.ops.sampling import triton

        triton.fill_uniforms(seeds, positions, out)
    else:
        reference.fill_uniforms(seeds, positions, out)


def draw(y: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    if y.is_cuda:  # integers either way; the kernels make no [B, V] temporaries
        from rl_kernel.ops.sampling import triton

        return triton.draw(y, uniforms)
    return reference.draw(y, uniforms)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits[:, :columns]
    z = logits / torch.where(temperature == 0, torch.ones_like(temperature), temperature)[:, None]
    y = z.log_softmax(-1)
    tokens = torch.where(temperature == 0, logits.argmax(-1), draw(y, uniforms))
    return tokens, y.gather(1, tokens[:, None])[:, 0], z.logsumexp(-1)
