"""Proximal policy optimisation: generalised advantage estimation and the critic's loss. The policy loss is GRPO's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recipes.algorithms.common import Metrics, default_weight, masked_sum, metric
from recipes.algorithms.grpo import loss as policy_loss
from recipes.errors import DataError

__all__ = ["gae", "policy_loss", "value_loss", "whiten"]


def gae(reward: float, values: np.ndarray, *, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of one response whose only reward comes with its last token.

    Formula: delta_t = r_t + gamma V_{t+1} - V_t with V_n = 0 and r_t = 0 except r_{n-1} = reward;
    A_t = delta_t + gamma lam A_{t+1}; returns R_t = A_t + V_t. Computed in float64.

    Args:
        reward: of the whole response.
        values: float32 [n], V_t = the critic's value of the state in which token t is chosen. n may be 0.

    Returns:
        (advantages, returns), float32 [n] each.

    Raises:
        DataError: the reward or a value is not finite.
    """
    v = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(v).all() and np.isfinite(reward)):
        raise DataError("the reward or a value is not finite", where="gae", fix="Lower train.critic_lr; check rewards.")
    advantages = np.zeros_like(v)
    following, next_value = 0.0, 0.0
    for t in range(v.size - 1, -1, -1):
        delta = (reward if t == v.size - 1 else 0.0) + gamma * next_value - v[t]
        following = delta + gamma * lam * following
        advantages[t], next_value = following, v[t]
    return advantages.astype(np.float32), (advantages + v).astype(np.float32)


def whiten(advantages: Sequence[np.ndarray], *, eps: float = 1e-8) -> list[np.ndarray]:
    """Shift and scale all tokens of a step to mean 0 and standard deviation 1; equal values become 0.

    Args:
        advantages: float32 [n_i] of each response.

    Returns:
        float32 [n_i] each, in the same order.
    """
    if not advantages:
        return []
    flat = np.concatenate(advantages).astype(np.float64)
    if flat.size < 2 or (flat == flat[0]).all():
        return [np.zeros_like(a) for a in advantages]
    mean, std = flat.mean(), flat.std()
    return [((a.astype(np.float64) - mean) / (std + eps)).astype(np.float32) for a in advantages]


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    clip: float | None = 0.2,
) -> tuple[torch.Tensor, Metrics]:
    """Squared error of the critic, clipped around the values of the rollout.

    Formula: L = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); loss = sum_t w_t L_t.

    Args:
        values: float32 [N], with gradient.
        old_values: float32 [N].
        returns: float32 [N].
        mask: bool [N].
        weight: float32 [N]; None: token mean over ``mask``.
        clip: c, or None for the plain squared error.

    Returns:
        The loss and weighted sums for the log; ``loss/value`` is the unclipped 1/2 (V - R)^2.
    """
    mask = mask.to(torch.bool)
    weight = default_weight(mask) if weight is None else weight
    values = torch.where(mask, values, 0.0)
    error = (values - torch.where(mask, returns, 0.0)) ** 2
    worst = error
    fraction = torch.zeros_like(error)
    if clip is not None:
        near = torch.clamp(values - old_values, -clip, clip) + old_values
        clipped = (near - returns) ** 2
        fraction = (clipped > error).float()
        worst = torch.maximum(error, clipped)
    loss = masked_sum(0.5 * worst, mask, weight)
    return loss, {
        "loss/value": metric(0.5 * error, mask, weight),
        "loss/value_clip_fraction": metric(fraction, mask, weight),
        "loss/value_mean": metric(values, mask, weight),
        "loss/return_mean": metric(returns, mask, weight),
    }
