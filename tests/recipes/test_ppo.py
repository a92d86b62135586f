"""PPO: generalised advantage estimation against its definition, whitening, value loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipes.algorithms.ppo import gae, value_loss, whiten
from recipes.errors import DataError


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_is_the_discounted_sum_of_errors(gamma, lam):
    rng = np.random.default_rng(0)
    v = rng.normal(size=7).astype(np.float32)
    advantages, returns = gae(0.7, v, gamma=gamma, lam=lam)
    nxt = np.append(v[1:].astype(np.float64), 0.0)
    reward = np.array([0.0] * 6 + [0.7])
    delta = reward + gamma * nxt - v
    want = [sum((gamma * lam) ** k * delta[t + k] for k in range(7 - t)) for t in range(7)]
    np.testing.assert_allclose(advantages, want, rtol=1e-5)
    np.testing.assert_allclose(returns, want + v, rtol=1e-5)
    assert advantages.dtype == returns.dtype == np.float32


def test_lambda_one_is_reward_minus_value():
    v = np.array([0.1, 0.5, -0.2], np.float32)
    advantages, returns = gae(1.0, v, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantages, 1.0 - v, rtol=1e-6)
    np.testing.assert_allclose(returns, 1.0, rtol=1e-6)


def test_empty_response_and_bad_values():
    advantages, returns = gae(1.0, np.zeros(0, np.float32), gamma=1.0, lam=0.95)
    assert advantages.shape == returns.shape == (0,)
    with pytest.raises(DataError, match="not finite"):
        gae(1.0, np.array([0.0, np.nan], np.float32), gamma=1.0, lam=1.0)
    with pytest.raises(DataError, match="not finite"):
        gae(float("inf"), np.zeros(2, np.float32), gamma=1.0, lam=1.0)


def test_whiten():
    rng = np.random.default_rng(1)
    parts = [rng.normal(3, 2, n).astype(np.float32) for n in (4, 1, 9)]
    out = whiten(parts)
    flat = np.concatenate(out)
    assert [p.shape for p in out] == [p.shape for p in parts]
    assert abs(flat.mean()) < 1e-6 and abs(flat.std() - 1) < 1e-6
    assert all((p == 0).all() for p in whiten([np.ones(3, np.float32), np.ones(2, np.float32)]))
    assert whiten([]) == []


def test_value_loss_clips_around_the_old_value():
    values = torch.tensor([0.0, 0.1, 1.0, 5.0], requires_grad=True)
    old = torch.zeros(4)
    returns = torch.tensor([1.0, 1.0, 1.0, float("nan")])
    mask = torch.tensor([True, True, True, False])
    loss, metrics = value_loss(values, old, returns, mask, clip=0.2)
    # Third: unclipped error 0, clipped to 0.2 the error is 0.64, the larger one counts and has no gradient.
    assert float(loss) == pytest.approx((0.5 * 1.0 + 0.5 * 0.81 + 0.5 * 0.64) / 3)
    loss.backward()
    np.testing.assert_allclose(values.grad, [-1 / 3, -0.9 / 3, 0.0, 0.0], rtol=1e-6)
    assert float(metrics["loss/value_clip_fraction"]) == pytest.approx(1 / 3)
    assert float(metrics["loss/value"]) == pytest.approx((0.5 + 0.405) / 3)
    plain, _ = value_loss(values.detach(), old, returns, mask, clip=None)
    assert float(plain) == pytest.approx((0.5 + 0.405) / 3)
