"""Clipped policy-gradient loss on top of linear_logp, in one operator."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import untraced
from rl_kernel.ops.linear_logp.op import check_operands, linear_logp
from rl_kernel.ops.logp import shards
from rl_kernel.registry import resolve


def divisor(weights: torch.Tensor) -> torch.Tensor:
    """What divides the loss of tokens of these weights: their sum, 1 where it is 0."""
    total = weights.sum()
    return total + (total == 0)


def linear_policy_loss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    normalizer: float | torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_weight: float = 0.0,
    temperature: float | torch.Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start_index: int = 0,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    grad_segments: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """PPO / GRPO token loss of the log-probabilities of :func:`rl_kernel.linear_logp`.

    For each token with r = exp(logp - old_logp), advantage A and mask w::

        loss = sum(w * (-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - entropy_weight * entropy)) / normalizer

    On Hopper the gradients are made in the forward pass, one chunk of tokens at a time: 6 THV operations and bounded
    memory instead of the logits, or the 8 THV of a recomputing backward pass. Elsewhere it is the formula above on
    linear_logp. Both give the same bits for logp and gradients; the loss and the metrics are sums of the same values,
    in an order that differs between them and is the same in every run.

    Args:
        hidden_states, lm_head_weight, target_ids, temperature, tp_group, vocab_start_index, global_vocab_size,
            ignore_index, grad_segments, backend: as for :func:`rl_kernel.linear_logp`.
        old_logp, advantages: [T] fp32.
        mask: [T] weights, default one; tokens with ``ignore_index`` do not take part.
        normalizer: divides the sum, default the sum of the weights of the tokens that take part (1 where that is 0, so
            that a batch of no tokens has the loss 0 and no gradient). Pass the count of the whole batch when it is
            split over ranks or micro-batches.

    Returns:
        (loss, logp [T], metrics): metrics are detached sums over tokens: ``tokens``, ``clipped``, ``ratio``,
        ``k1_kl`` (old - new), ``entropy``.

    Raises:
        ContractError: an argument is out of range, shapes or devices do not fit, or the ranks disagree.
    """
    check_operands("linear_policy_loss", hidden_states, lm_head_weight)
    tokens, device = hidden_states.shape[0], hidden_states.device
    for name, value in (("old_logp", old_logp), ("advantages", advantages), ("mask", mask)):
        if value is None:
            continue
        if value.shape != (tokens,):
            raise ContractError(f"linear_policy_loss: {name} {tuple(value.shape)} must be ({tokens},)")
        if value.device != device:
            raise ContractError(f"linear_policy_loss: {name} is on {value.device}, hidden_states are on {device}")

    @functools.cache
    def shared() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights [T], which tokens are ignored [T], and what divides the sum.

        A number becomes a tensor: torch on a GPU multiplies by the reciprocal of a number, rounded in a way that
        depends on its version, but divides by a tensor.
        """
        weights = torch.ones_like(advantages, dtype=torch.float32) if mask is None else mask.to(torch.float32)
        ignored = target_ids == ignore_index
        weights = weights.masked_fill(ignored, 0.0)
        if isinstance(normalizer, torch.Tensor):
            return weights, ignored, normalizer
        if normalizer is None:
            return weights, ignored, divisor(weights)
        return weights, ignored, torch.full((), normalizer, dtype=torch.float32, device=weights.device)

    def loss(
        rows: slice | torch.Tensor, logp: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights, ignored, scale = shared()
        w, out = weights[rows], ignored[rows]  # what stands in ignored rows may be NaN
        a = advantages[rows].masked_fill(out, 0.0)
        difference = (logp - old_logp[rows]).masked_fill(out, 0.0)
        ratio = torch.exp(difference)
        plain, clipped = ratio * a, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * a
        objective = torch.minimum(plain, clipped)
        if entropy_weight:
            objective = objective + entropy_weight * entropy
        metrics = {
            "tokens": w.sum(),
            "clipped": (w * (clipped < plain)).sum(),
            "ratio": (w * ratio).sum(),
            "k1_kl": -(w * difference).sum(),
            "entropy": (w * entropy).sum(),
        }
        return (w * -objective / scale).masked_fill(out, 0.0).sum(), {
            name: value.detach() for name, value in metrics.items()
        }

    operands = (hidden_states, lm_head_weight)
    wanted = torch.is_grad_enabled() and all(x.requires_grad for x in operands)
    # Made in the forward pass, gradients are those of the operands alone.
    others = (old_logp, advantages, mask, normalizer)
    wanted = wanted and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in others)
    if (
        hidden_states.is_cuda
        and wanted
        and untraced(*operands, target_ids)
        and resolve("linear_logp", hidden_states.device, hidden_states.dtype, backend).backend == "sm90"
    ):
        from rl_kernel.ops.linear_logp import sm90_schedules

        layout = shards.vocab_layout(
            tp_group, vocab_start_index, lm_head_weight.shape[0], global_vocab_size, tokens, hidden_states.shape[1]
        )
        segments = layout.ranks if grad_segments is None else grad_segments
        layout.local_segments(0, segments)  # fail here, not after the first products
        call = sm90_schedules.Call(
            shards.check_targets(target_ids, tokens, layout.global_vocab_size, ignore_index, device),
            None
            if isinstance(temperature, float) and temperature == 1.0
            else shards.temperature_rows(temperature, tokens, hidden_states.device),
            layout,
            ignore_index,
            segments,
            tp_group if tp_group is not None and tp_group.size() > 1 else None,
        )
        weights = None if mask is None else mask.to(torch.float32)
        clip = (1.0 - clip_low, 1.0 + clip_high)
        once = sm90_schedules.ClippedLoss.of(
            old_logp, advantages, weights, normalizer, clip, entropy_weight, hidden_states.device
        )
        return sm90_schedules.fused_loss(*operands, call, loss, once)
    out = linear_logp(
        *operands,
        target_ids,
        tp_group=tp_group,
        vocab_start_index=vocab_start_index,
        global_vocab_size=global_vocab_size,
        temperature=temperature,
        ignore_index=ignore_index,
        grad_segments=grad_segments,
        backend=backend,
    )
    active = (target_ids != ignore_index).nonzero()[:, 0]
    value, metrics = loss(active, out.logp[active], out.entropy[active])
    return value, out.logp.detach(), metrics
