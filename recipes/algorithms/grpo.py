"""Group-relative policy optimisation, with the DAPO options (asymmetric clip, token mean, dynamic sampling)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from recipes.algorithms.common import Metrics, policy_loss
from recipes.config import AlgorithmConfig
from recipes.errors import DataError


def group_advantages(
    rewards: Sequence[float], group_size: int, *, normalize_std: bool = True, eps: float = 1e-6
) -> np.ndarray:
    """Advantage of each response relative to the other responses of its prompt.

    Formula: A = (r - mean) / (std + eps), std with n - 1; A = r - mean without ``normalize_std``. A group whose rewards
    are all equal has A = 0 exactly (it says nothing about which response is better).

    Args:
        rewards: [P * group_size], responses of one prompt next to each other.
        group_size: at least 2.

    Returns:
        float32 [P * group_size].

    Raises:
        DataError: a reward is not finite, or the count is not a multiple of ``group_size``.
    """
    r = np.asarray(rewards, dtype=np.float64)
    if group_size < 2 or r.size % group_size:
        raise DataError(f"{r.size} rewards do not form groups of {group_size}", where="rollout.n_samples_per_prompt")
    if not np.isfinite(r).all():
        bad = int(np.flatnonzero(~np.isfinite(r))[0])
        raise DataError(f"reward {r[bad]} of response {bad} is not finite", where="reward", fix="Check the reward.")
    groups = r.reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if normalize_std:
        centred = centred / (groups.std(axis=1, ddof=1, keepdims=True) + eps)
    # The mean of equal numbers may round away from them, and eps would blow that up.
    equal = (groups == groups[:, :1]).all(axis=1, keepdims=True)
    return np.where(equal, 0.0, centred).astype(np.float32).reshape(-1)


def informative_groups(rewards: Sequence[float], group_size: int) -> list[bool]:
    """DAPO's dynamic sampling filter: False for each group whose rewards are all equal (its gradient is zero)."""
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    return [bool(x) for x in (groups != groups[:, :1]).any(axis=1)]


def loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    entropy: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, Metrics]:
    """:func:`recipes.algorithms.common.policy_loss` with the coefficients of ``config``."""
    return policy_loss(
        logp,
        old_logp,
        ref_logp,
        advantages,
        mask,
        entropy=entropy,
        weight=weight,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
    )
