"""Gradients of kept logits made beside the products: bytes of those of a kernel of its own, and of the products."""

from __future__ import annotations

import math

import pytest
import torch

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.ops.linear_logp import sm90
from tests.ops.gpu_harness import differing
from tests.ops.sm90_harness import need_hopper

need_hopper()

pytestmark = pytest.mark.gpu

# tokens, hidden, vocabulary, share of ignored rows, segments. Units of work are 1024 x 512, in jobs of 32 x 256.
CASES = [
    (1, 256, 1000, 0.0, 1),
    (7, 512, 5001, 0.0, 1),
    (33, 320, 520, 0.0, 2),
    (300, 512, 70001, 1.0, 1),
    (796, 2048, 75968, 0.0, 1),
    (796, 512, 20001, 0.9, 1),
    (796, 1024, 40000, 0.2, 4),
    (900, 4096, 37984, 0.0, 1),
    (1024, 512, 16384, 0.0, 1),
    (1025, 512, 40000, 0.3, 1),
    (1100, 1024, 20000, 0.5, 8),
    (1820, 2048, 30000, 0.0, 1),
    (2100, 512, 33000, 0.0, 1),
    (3000, 1024, 50000, 0.2, 2),
    (5000, 512, 9000, 0.1, 1),
    (6827, 2048, 20001, 0.05, 1),
    (9000, 2048, 70000, 0.0, 1),  # dH and dW in launches of their own
]


def kept_logits(tokens, width, columns, share, temperature=1.0):
    """A forward pass: weight, slots, statistics, results, kept values; and upstream gradients of logp and lse."""
    g = torch.Generator(device="cuda").manual_seed(tokens + columns)
    weight = torch.empty(columns, width, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02, generator=g)
    hidden = torch.randn(tokens, width, device="cuda", generator=g).bfloat16()
    targets = torch.randint(0, columns, (tokens,), device="cuda", generator=g)
    targets[torch.rand(tokens, device="cuda", generator=g) < share] = -100
    rows = torch.full((tokens,), temperature, device="cuda")
    rows[::3] = 0.7
    out, slots, stats, kept = sm90.forward(hidden, weight, targets, rows, 0, columns, -100, math.nan, columns, True)
    upstream = [torch.randn(tokens, device="cuda", generator=g) for _ in range(2)]
    return weight, slots, stats, out, kept, (upstream[0], upstream[1], None)


def beside(weight, slots, stats, out, kept, upstream, segments):
    """(gradients of the logits, dH by slot, dW)."""
    kept, columns = kept.clone(), weight.shape[0]
    dw = sm90.new_weight_gradient(weight, columns)
    dh = sm90.gradients(weight, slots, kept, stats, out, upstream, 0, columns, segments, True, False, dw)
    return kept, dh, dw


def kept_products(weight, slots, stats, out, kept, upstream, segments):
    """The same of values as they are."""
    columns, (count, size) = weight.shape[0], segments
    dw = sm90.new_weight_gradient(weight, columns)
    ranges = [(min(i * size, columns), min((i + 1) * size, columns)) for i in range(count)]
    hidden = slots.whole if int(slots.active[0]) == len(slots.order) else slots.hidden
    dh = sm90.both_products(hidden, weight, kept[:, :columns], ranges, dw, None, slots.active, 0)
    return kept, dh, dw


def apart(weight, slots, stats, out, kept, upstream, segments):
    """The same by a pass of its own in front of the products."""
    kept = kept.clone()
    sm90.make_gradients(kept[:, : weight.shape[0]], stats, out, upstream, slots, 0)
    return kept_products(weight, slots, stats, out, kept, upstream, segments)


def different(left, right, active):
    """Of the rows that take part, and zeros of the logits up to where dW reads; what stands behind means nothing."""
    read = -(-active // 64) * 64
    parts = [(left[0][:read], right[0][:read]), (left[1][:active], right[1][:active]), (left[2], right[2])]
    return [differing(a, b) for a, b in parts]


def of_segments(columns, count):
    return count, columns if count == 1 else -(-columns // (count * VOCAB_LEAF)) * VOCAB_LEAF


@pytest.mark.parametrize(("tokens", "width", "columns", "share", "segments"), CASES)
def test_equals_a_pass_of_its_own(tokens, width, columns, share, segments):
    made = kept_logits(tokens, width, columns, share)
    cut, active = of_segments(columns, segments), int(made[1].active[0])
    right = apart(*made, cut)
    assert different(beside(*made, cut), right, active) == [0, 0, 0]
    if active:
        other = kept_logits(tokens, width, columns, share, temperature=1.001)
        assert min(different(beside(*other, cut), right, active)) > 0 or tokens < 2


def test_nothing_is_read_before_it_is_made():
    """Many passes over values that are not gradients yet: a tile that comes too early multiplies those, which shows."""
    made = kept_logits(796, 1024, 36000, 0.1)
    cut, active = of_segments(36000, 1), int(made[1].active[0])
    right = apart(*made, cut)
    early = kept_products(*made, cut)  # before any of them is a gradient
    assert min(different(early, right, active)) > 0
    for _ in range(100):
        assert different(beside(*made, cut), right, active) == [0, 0, 0]


def test_values_that_are_not_finite_stay_in_their_rows():
    made = kept_logits(1100, 512, 20000, 0.0)
    kept = made[4]
    kept[3, 5], kept[700, 19000] = math.nan, math.inf
    kept[1050] = -0.0
    found, right = beside(*made, (1, 20000)), apart(*made, (1, 20000))
    assert bool(right[1][3].isnan().any()) and not bool(right[1][4].isnan().any())
    assert different(found, right, 1100) == [0, 0, 0]
    kept[1050] = 0.0  # its gradients have the other sign of zero
    assert different(beside(*made, (1, 20000)), right, 1100)[0] > 0
