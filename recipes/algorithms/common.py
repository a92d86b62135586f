"""Pieces shared by GRPO and PPO. Pure functions of tensors; N = tokens in any layout (packed or padded).

Normalisation: a step's tokens are spread over micro-batches and data-parallel ranks, so no piece may divide by its own
token count. Each token carries a weight w with ``sum(w) = 1`` over the whole minibatch (:func:`token_weights`); a piece
returns ``sum(w * x)``, and adding the pieces gives the minibatch's mean. Metrics follow the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipes.errors import DataError

Metrics = dict[str, torch.Tensor]


def token_weights(lengths: Sequence[int], kept: Sequence[bool], aggregation: str) -> list[float]:
    """The weight of each token of each response of one minibatch.

    Formula: ``token_mean``: 1 / (tokens of all kept responses). ``sequence_mean``: 1 / (kept responses * tokens of the
    response). A response that is not kept has weight 0; when none is kept every weight is 0.

    Args:
        lengths: response tokens of each response of the minibatch, on all ranks.
        kept: whether the response takes part in the loss.
        aggregation: ``token_mean`` or ``sequence_mean``.
    """
    tokens = sum(n for n, keep in zip(lengths, kept, strict=True) if keep)
    responses = sum(1 for n, keep in zip(lengths, kept, strict=True) if keep and n)
    if aggregation == "token_mean":
        return [1.0 / tokens if keep and tokens else 0.0 for keep in kept]
    return [1.0 / (responses * n) if keep and n else 0.0 for n, keep in zip(lengths, kept, strict=True)]


def masked_sum(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``sum(weight * x)`` over the tokens of ``mask``; values elsewhere never enter, not even NaN."""
    return (torch.where(mask, x, 0.0) * torch.where(mask, weight, 0.0)).sum()


def metric(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """:func:`masked_sum` in float64, without gradient."""
    return masked_sum(x.detach().double(), mask, weight.double())


def default_weight(mask: torch.Tensor) -> torch.Tensor:
    """Token-mean weights of a minibatch that is this one piece."""
    count = mask.sum()
    return torch.where(mask, 1.0 / count.clamp(min=1), 0.0).to(torch.float32)


def kl_estimate(logp: torch.Tensor, ref_logp: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy.

    Formula, with d = ref_logp - logp: k1 = -d; k2 = d^2 / 2; k3 = exp(d) - 1 - d (>= 0, low variance).

    As a loss, k1 has a zero-mean gradient (it does not pull towards the reference), k2 has the exact KL gradient, k3 an
    approximation of it.

    Args:
        logp: float32 [N], with gradient.
        ref_logp: float32 [N].
        estimator: ``k1``, ``k2`` or ``k3``.
    """
    d = ref_logp - logp
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"kl_estimator={estimator!r} must be k1, k2 or k3")


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    entropy: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """Clipped surrogate with optional dual clip, KL penalty and entropy bonus.

    Formula, with r = exp(logp - old_logp) and A the advantage:
        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));  A < 0 and dual clip c: L = min(L, -A c)
        loss = sum_t w_t (L_t + kl_coef KL_t - entropy_coef H_t)

    Args:
        logp: float32 [N], with gradient.
        old_logp: float32 [N], of the policy that sampled.
        ref_logp: float32 [N], of the frozen reference; None when ``kl_coef`` is 0.
        advantages: float32 [N].
        mask: bool [N], sampled tokens that take part.
        entropy: float32 [N], with gradient when ``entropy_coef`` is not 0.
        weight: float32 [N], see :func:`token_weights`; None: token mean over ``mask``.

    Returns:
        The loss (a scalar; 0 with a zero gradient when the mask is empty) and weighted sums for the log.

    Raises:
        DataError: ``kl_coef`` > 0 without ``ref_logp``, or ``entropy_coef`` != 0 without ``entropy``.
    """
    mask = mask.to(torch.bool)
    weight = default_weight(mask) if weight is None else weight
    # Masked positions may hold anything (padding has logp 0, a stale row may have NaN): replace before arithmetic, so
    # that neither the value nor the gradient of 0 * NaN leaks.
    delta = torch.where(mask, logp - old_logp, 0.0)
    ratio = torch.exp(delta)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain, bound = -advantages * ratio, -advantages * clipped
    surrogate = torch.maximum(plain, bound)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.minimum(surrogate, -advantages * dual_clip), surrogate)
    loss = masked_sum(surrogate, mask, weight)
    metrics: Metrics = {
        "loss/policy": metric(surrogate, mask, weight),
        "loss/ratio_mean": metric(ratio, mask, weight),
        "loss/approx_kl": metric(torch.expm1(delta) - delta, mask, weight),
        "loss/clip_fraction_low": metric(((ratio < 1.0 - clip_low) & (advantages < 0)).float(), mask, weight),
        "loss/clip_fraction_high": metric(((ratio > 1.0 + clip_high) & (advantages > 0)).float(), mask, weight),
    }
    if kl_coef:
        if ref_logp is None:
            raise DataError("ref_logp is missing", where="algorithm.kl_coef", fix="Pass the reference's logp.")
        kl = kl_estimate(torch.where(mask, logp, 0.0), torch.where(mask, ref_logp, 0.0), kl_estimator)
        loss = loss + kl_coef * masked_sum(kl, mask, weight)
        metrics["loss/kl_ref"] = metric(kl, mask, weight)
    if entropy is not None:
        if entropy_coef:
            loss = loss - entropy_coef * masked_sum(entropy, mask, weight)
        metrics["loss/entropy"] = metric(entropy, mask, weight)
    elif entropy_coef:
        raise DataError("entropy is missing", where="algorithm.entropy_coef", fix="Pass the engine's entropy.")
    metrics["loss/total"] = loss.detach().double()
    return loss, metrics
