"""GRPO and PPO token losses on a GPU: the same bits in every run, and float64's gradients as closely as on the CPU.

The losses are elementwise functions of tokens and one sum. torch's sum over [N] on a GPU adds the partial sums of its
blocks in a fixed order, without atomics: the loss has the same bits in every run (of one N), and a token's gradient
depends on that token and the weights alone.
"""

from __future__ import annotations

import pytest
import torch

from recipes.algorithms.common import policy_loss
from recipes.algorithms.ppo import value_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU"),
]
DEVICE = "cuda"
POLICY = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "dual_clip": 3.0},
    "k1": {"kl_coef": 0.01, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.01, "kl_estimator": "k2"},
    "k3 and entropy": {"kl_coef": 0.01, "kl_estimator": "k3", "entropy_coef": 0.001},
}
CASES = [*POLICY, "critic", "critic without clip"]


def tokens(count):
    """Columns of a minibatch in which the policy has moved far enough for both clips to act."""
    generator = torch.Generator().manual_seed(count)

    def normal(scale):
        return torch.randn(count, generator=generator) * scale

    old = -normal(1.0).abs() - 0.1
    mask = torch.rand(count, generator=generator) < 0.9
    mask[0] = True
    weight = torch.where(mask, 1.0 / mask.sum(), 0.0)
    columns = {
        "logp": old + normal(0.3), "old_logp": old, "ref_logp": old + normal(0.2), "advantages": normal(1.0),
        "entropy": normal(1.0).abs(), "values": normal(1.0), "old_values": normal(1.0), "returns": normal(1.0),
    }  # fmt: skip
    # What stands in masked positions may be anything.
    columns = {name: torch.where(mask, column, torch.nan) for name, column in columns.items()}
    columns["advantages"] = columns["advantages"].nan_to_num(0.0)
    return columns, mask, weight


def run(case, columns, mask, weight, device, dtype=torch.float32):
    """(loss, gradients) of one case."""
    mask, weight = mask.to(device), weight.to(device, dtype)
    c = {name: column.to(device, dtype) for name, column in columns.items()}
    if case.startswith("critic"):
        leaves = [c["values"].requires_grad_()]
        clip = 0.2 if case == "critic" else None
        loss, metrics = value_loss(*leaves, c["old_values"], c["returns"], mask, weight=weight, clip=clip)
    else:
        options = POLICY[case]
        leaves = [c["logp"].requires_grad_()]
        entropy = None
        if "entropy_coef" in options:
            entropy = c["entropy"].requires_grad_()
            leaves.append(entropy)
        loss, metrics = policy_loss(
            leaves[0], c["old_logp"], c["ref_logp"], c["advantages"], mask, entropy=entropy, weight=weight, **options
        )
    gradients = torch.autograd.grad(loss, leaves)
    return [loss.detach(), *(g.detach() for g in gradients)], metrics


def bits(tensors):
    return [t.view({4: torch.int32, 8: torch.int64}[t.element_size()]).cpu() for t in tensors]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(bits(left), bits(right), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 777, 32768, 400_001])
def test_every_run_has_the_same_bits(case, count):
    columns, mask, weight = tokens(count)
    first, metrics = run(case, columns, mask, weight, DEVICE)
    assert all(bool(t.isfinite().all()) for t in first)
    for _ in range(5):
        again, other = run(case, columns, mask, weight, DEVICE)
        assert same(first, again) and same(metrics.values(), other.values())


@pytest.mark.parametrize("case", CASES)
def test_a_tokens_gradient_does_not_notice_the_others(case):
    columns, mask, weight = tokens(5000)
    full = run(case, columns, mask, weight, DEVICE)[0][1:]
    part = slice(1234, 3210)
    some = run(case, {k: v[part] for k, v in columns.items()}, mask[part], weight[part], DEVICE)[0][1:]
    assert same([g[part] for g in full], some)
    heavier = run(case, columns, mask, weight * 3, DEVICE)[0][1:]  # negative control
    assert not same(full, heavier)


@pytest.mark.parametrize("case", CASES)
def test_errors_against_float64_are_those_of_the_cpu(case):
    columns, mask, weight = tokens(32768)
    exact = run(case, columns, mask, weight, "cpu", torch.float64)[0]
    cpu = run(case, columns, mask, weight, "cpu")[0]
    gpu = run(case, columns, mask, weight, DEVICE)[0]
    for name, e, c, g in zip(("loss", "gradient", "gradient of the entropy"), exact, cpu, gpu):
        # A ratio at a border of the clip may fall on either side in fp32; those tokens are no matter of rounding.
        size = 1.0 if e.dim() == 0 else float(e.abs().max())  # the loss is a sum of terms that cancel
        error = (c.double() - e).abs()
        near = error <= 1e-3 * size
        assert int((~near).sum()) <= 8
        allowed = 4 * float(error[near].max()) + 2.0**-22 * size
        far = (g.double().cpu() - e).abs() > allowed
        assert int((far & near).sum()) <= 2, name
