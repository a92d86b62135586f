"""GRPO: advantages, the clipped loss against a float64 loop, KL estimators, aggregation across micro-batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recipes.algorithms.common import kl_estimate, policy_loss, token_weights
from recipes.algorithms.grpo import group_advantages, informative_groups, loss
from recipes.config import AlgorithmConfig
from recipes.errors import DataError

N = 64


def inputs(seed=0, n=N):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, generator=g) * 3
    return {
        "logp": (old + 0.5 * torch.randn(n, generator=g)).requires_grad_(),
        "old_logp": old,
        "ref_logp": old + 0.3 * torch.randn(n, generator=g),
        "advantages": torch.randn(n, generator=g),
        "mask": torch.rand(n, generator=g) > 0.3,
    }


def by_hand(x, low=0.2, high=0.28, dual=None, kl=0.0, est="k3"):
    """The formula of the docstring, token by token in float64."""
    total, count = 0.0, int(x["mask"].sum())
    for t in range(x["logp"].numel()):
        if not x["mask"][t]:
            continue
        lp, old, ref, a = (float(x[k][t].detach()) for k in ("logp", "old_logp", "ref_logp", "advantages"))
        r = math.exp(lp - old)
        value = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
        if dual is not None and a < 0:
            value = min(value, -a * dual)
        d = ref - lp
        total += value + kl * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[est]
    return total / count


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("est", ["k1", "k2", "k3"])
def test_loss_is_the_formula(dual, est):
    x = inputs()
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=dual, kl_coef=0.1, kl_estimator=est)
    value, metrics = loss(**x, config=config)
    assert value.item() == pytest.approx(by_hand(x, dual=dual, kl=0.1, est=est), rel=1e-6)
    assert metrics["loss/total"].item() == pytest.approx(value.item())


def test_gradient_is_zero_where_clipped_or_masked_and_survives_nan():
    x = inputs()
    with torch.no_grad():
        x["logp"][~x["mask"]] = float("nan")
        x["old_logp"][~x["mask"]] = float("inf")
    value, metrics = loss(**x, config=AlgorithmConfig(kl_coef=0.1))
    value.backward()
    grad = x["logp"].grad
    assert torch.isfinite(value) and all(torch.isfinite(v) for v in metrics.values())
    assert (grad[~x["mask"]] == 0).all() and (grad[x["mask"]] != 0).any()
    # Without KL: a token whose ratio left the range in the direction of its advantage does not move.
    y = inputs(1)
    policy_loss(y["logp"], y["old_logp"], None, y["advantages"], y["mask"])[0].backward()
    ratio = torch.exp(y["logp"] - y["old_logp"])
    outside = ((ratio > 1.2) & (y["advantages"] > 0)) | ((ratio < 0.8) & (y["advantages"] < 0))
    assert outside.any() and (y["logp"].grad[outside] == 0).all()


def test_gradient_at_ratio_one_is_minus_the_advantage():
    x = inputs()
    logp = x["old_logp"].clone().requires_grad_()
    policy_loss(logp, x["old_logp"], None, x["advantages"], x["mask"])[0].backward()
    want = torch.where(x["mask"], -x["advantages"] / x["mask"].sum(), 0.0)
    torch.testing.assert_close(logp.grad, want)


def test_entropy_bonus_and_missing_inputs():
    x = inputs()
    entropy = torch.rand(N, requires_grad=True)
    with_bonus, _ = loss(**x, entropy=entropy, config=AlgorithmConfig(entropy_coef=0.5))
    without, metrics = loss(**x, entropy=entropy, config=AlgorithmConfig())
    mean = entropy[x["mask"]].mean()
    assert float(with_bonus) == pytest.approx(float(without - 0.5 * mean), rel=1e-5)
    assert float(metrics["loss/entropy"]) == pytest.approx(float(mean), rel=1e-5)
    with pytest.raises(DataError, match="entropy_coef"):
        loss(**x, config=AlgorithmConfig(entropy_coef=0.5))
    with pytest.raises(DataError, match="kl_coef"):
        loss(**{**x, "ref_logp": None}, config=AlgorithmConfig(kl_coef=0.5))


def test_empty_mask_gives_zero_loss_and_zero_gradient():
    x = inputs()
    value, metrics = loss(**{**x, "mask": torch.zeros(N, dtype=torch.bool)}, config=AlgorithmConfig(kl_coef=0.1))
    value.backward()
    assert float(value) == 0.0 and (x["logp"].grad == 0).all()
    assert all(float(v) == 0.0 for v in metrics.values())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_micro_batches_add_up(aggregation):
    lengths, kept = [5, 20, 1, 38], [True, True, False, True]
    x = inputs()
    x["mask"] = torch.ones(N, dtype=torch.bool)
    weight = torch.cat(
        [torch.full((n,), w) for n, w in zip(lengths, token_weights(lengths, kept, aggregation), strict=True)]
    )
    whole, metrics = loss(**x, weight=weight, config=AlgorithmConfig(kl_coef=0.1))
    parts = [
        loss(**{k: v[a:b] for k, v in x.items()}, weight=weight[a:b], config=AlgorithmConfig(kl_coef=0.1))
        for a, b in ((0, 25), (25, 64))
    ]
    assert float(whole) == pytest.approx(sum(float(p[0]) for p in parts), rel=1e-5)
    for key, value in metrics.items():
        assert float(value) == pytest.approx(sum(float(p[1][key]) for p in parts), rel=1e-5, abs=1e-7)
    # Against the definition: mean over tokens, or mean over responses of the mean over their tokens.
    per_token = torch.tensor([by_hand({k: v[i : i + 1] for k, v in x.items()}, high=0.2, kl=0.1) for i in range(N)])
    rows = [r for r, keep in zip(per_token.split(lengths), kept, strict=True) if keep]
    want = torch.cat(rows).mean() if aggregation == "token_mean" else torch.stack([r.mean() for r in rows]).mean()
    assert float(whole) == pytest.approx(float(want), rel=1e-5)


def test_weights_sum_to_one_or_zero():
    for aggregation in ("token_mean", "sequence_mean"):
        weights = token_weights([3, 7, 2], [True, False, True], aggregation)
        assert sum(n * w for n, w in zip([3, 7, 2], weights)) == pytest.approx(1.0)
        assert token_weights([3, 7], [False, False], aggregation) == [0.0, 0.0]


def test_kl_estimators():
    torch.manual_seed(0)
    p, q = torch.randn(50, dtype=torch.float64).log_softmax(0), torch.randn(50, dtype=torch.float64).log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    for name in ("k1", "k3"):  # both are unbiased: the mean over the policy's own distribution is the KL
        assert float((p.exp() * kl_estimate(p, q, name)).sum()) == pytest.approx(float(exact), rel=1e-9)
    assert (kl_estimate(p, q, "k3") >= 0).all() and (kl_estimate(p, q, "k2") >= 0).all()
    assert (kl_estimate(p, p, "k3") == 0).all()
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(p, q, "k4")


def test_group_advantages():
    a = group_advantages([1.0, 0.0, 0.0, 0.0, 0.3, 0.3, 0.3, 0.3, 0.1, 0.2, 0.3, 0.4], 4)
    assert a.dtype == np.float32 and a.shape == (12,)
    np.testing.assert_allclose(a.reshape(3, 4).sum(1), 0.0, atol=1e-6)
    np.testing.assert_allclose(a[[0, 1]], [1.5, -0.5], rtol=1e-4)
    assert (a[4:8] == 0).all() and not np.signbit(a[4:8]).any()
    # 0.1 + 0.1 + 0.1 is not 0.3: equal rewards whose mean rounds must still give exactly 0.
    assert (group_advantages([0.1] * 3, 3) == 0).all()
    plain = group_advantages([1.0, 0.0, 0.0, 0.0], 4, normalize_std=False)
    np.testing.assert_allclose(plain, [0.75, -0.25, -0.25, -0.25])


def test_group_advantages_refuse_bad_rewards():
    with pytest.raises(DataError, match="response 2 is not finite"):
        group_advantages([0.0, 1.0, float("nan"), 0.0], 2)
    with pytest.raises(DataError, match="groups of 4"):
        group_advantages([0.0] * 6, 4)


def test_informative_groups():
    assert informative_groups([1, 0, 1, 1, 0, 0, 0.5, 0.5], 2) == [True, False, False, False]
