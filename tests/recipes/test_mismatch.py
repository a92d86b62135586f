"""Consistency metrics: exact counts, exact sums, and negative controls for every zero."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from recipes.engines.types import PackedBatch, Sample
from recipes.errors import DataError, EngineError
from recipes.metrics.mismatch import (
    PREFIX,
    VIME_ABS_DIFF,
    MismatchStats,
    exact_sum,
    metric_names,
    ordered_int,
)

NAN, INF = float("nan"), float("inf")


def draw(seed: int = 0, lengths: tuple[int, ...] = (5, 1, 17, 3, 40), noise: float = 1e-2) -> tuple:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    q = (-rng.exponential(2.0, n) - 1e-3).astype(np.float32)
    p = (q + noise * rng.standard_normal(n)).astype(np.float32)
    return p, q, rng.random(n) < 0.8, lengths


def metrics(p: object, q: object, mask: object = None, lengths: tuple[int, ...] | None = None) -> dict:
    p, q = np.asarray(p, np.float32), np.asarray(q, np.float32)
    mask = np.ones(p.size, bool) if mask is None else mask
    return MismatchStats.from_batch(p, q, mask, (p.size,) if lengths is None else lengths).metrics()


def test_equal_bits_give_zero_and_one_ulp_does_not() -> None:
    _, q, mask, lengths = draw()
    same = metrics(q, q.copy(), mask, lengths)
    assert same[PREFIX + "mismatch_count"] == 0
    assert same[PREFIX + "active_tokens"] == int(mask.sum())
    assert (same[PREFIX + "max_abs_diff"], same[PREFIX + "max_ulp"], same[VIME_ABS_DIFF]) == (0.0, 0, 0.0)
    assert (same[PREFIX + "ratio_mean"], same[PREFIX + "ess"], same[PREFIX + "token_mult_prob_error"]) == (
        1.0,
        1.0,
        1.0,
    )
    assert same[PREFIX + "first_mismatch_sample"] == -1

    changed = q.copy()
    target = int(np.flatnonzero(mask)[7])
    changed[target] = np.nextafter(changed[target], np.float32(0))
    one = metrics(changed, q, mask, lengths)
    assert (one[PREFIX + "mismatch_count"], one[PREFIX + "max_ulp"]) == (1, 1)
    assert one[PREFIX + "max_abs_diff"] == abs(float(changed[target]) - float(q[target])) > 0
    assert one[PREFIX + "clipfrac0"] == 1 / int(mask.sum())


def test_definitions_against_float64() -> None:
    p, q, mask, lengths = draw()
    got = metrics(p, q, mask, lengths)
    d = p[mask].astype(np.float64) - q[mask].astype(np.float64)
    r = np.exp(d)
    expected = {
        "mismatch_rate": np.mean(p[mask].view(np.int32) != q[mask].view(np.int32)),
        "max_abs_diff": np.abs(d).max(),
        "mean_abs_diff": np.abs(d).mean(),
        "ratio_mean": r.mean(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        "k1_kl": -d.mean(),
        "k3_kl": ((r - 1) - d).mean(),
        "token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "ess": r.sum() ** 2 / (r.size * (r * r).sum()),
        "clipfrac0": np.mean(d != 0),
    }
    for name, value in expected.items():
        assert got[PREFIX + name] == pytest.approx(value, rel=1e-9), name
    edges = np.cumsum((0, *lengths))
    parts = [
        np.abs(p[a:b].astype(float) - q[a:b])[mask[a:b]].mean() for a, b in zip(edges, edges[1:]) if mask[a:b].any()
    ]
    assert got[VIME_ABS_DIFF] == pytest.approx(np.mean(parts), rel=1e-12)
    first = [
        (s, i - a)
        for s, (a, b) in enumerate(zip(edges, edges[1:]))
        for i in range(a, b)
        if mask[i] and p[i].view(np.int32) != q[i].view(np.int32)
    ][0]
    assert (got[PREFIX + "first_mismatch_sample"], got[PREFIX + "first_mismatch_position"]) == first


def test_prefill_is_the_first_token_of_each_response() -> None:
    p, q, _, lengths = draw()
    p = q.copy()
    starts = np.cumsum((0, *lengths))[:-1]
    p[starts[2]] += np.float32(0.5)
    got = metrics(p, q, None, lengths)
    assert got[PREFIX + "prefill_active_tokens"] == len(lengths)
    assert got[PREFIX + "decode_active_tokens"] == sum(lengths) - len(lengths)
    assert (got[PREFIX + "prefill_mismatch_count"], got[PREFIX + "decode_mismatch_count"]) == (1, 0)
    p = q.copy()
    p[starts[2] + 3] += np.float32(0.5)
    got = metrics(p, q, None, lengths)
    assert (got[PREFIX + "prefill_mismatch_count"], got[PREFIX + "decode_mismatch_count"]) == (0, 1)
    assert (got[PREFIX + "first_mismatch_sample"], got[PREFIX + "first_mismatch_position"]) == (2, 3)


@pytest.mark.parametrize(
    ("p", "q", "mismatch", "nonfinite"),
    [
        (0.0, -0.0, 1, 0),
        (NAN, NAN, 1, 1),
        (-1.0, NAN, 1, 1),
        (-INF, -INF, 1, 1),
        (-INF, -1.0, 1, 1),
        (-1.0, -1.0, 0, 0),
        (-1e-45, 0.0, 1, 0),
    ],
)
def test_special_values(p: float, q: float, mismatch: int, nonfinite: int) -> None:
    got = metrics([p, -2.0], [q, -2.0])
    assert (got[PREFIX + "mismatch_count"], got[PREFIX + "nonfinite_count"]) == (mismatch, nonfinite)
    assert all(math.isfinite(v) for v in got.values())
    assert got[PREFIX + "active_tokens"] == 2
    only = metrics([p], [q])
    assert all(math.isfinite(v) for v in only.values())


def test_a_distant_pair_keeps_every_metric_finite() -> None:
    got = metrics([0.0, -3e38], [-3e38, 0.0])
    assert all(math.isfinite(v) for v in got.values())
    assert got[PREFIX + "max_abs_diff"] == float(np.float32(3e38))


def test_ulp_distance_crosses_zero() -> None:
    x = np.array([-1e-45, -0.0, 0.0, 1e-45, 1.0], np.float32)
    assert ordered_int(x).tolist()[:4] == [-1, 0, 0, 1]
    assert metrics([-1e-45], [1e-45])[PREFIX + "max_ulp"] == 2
    assert metrics([0.0], [-0.0])[PREFIX + "max_ulp"] == 0


@pytest.mark.parametrize("mask", [np.zeros(0, bool), np.zeros(4, bool)])
def test_nothing_active_is_zero_not_nan(mask: np.ndarray) -> None:
    p, q = np.full(mask.size, NAN, np.float32), np.zeros(mask.size, np.float32)
    got = metrics(p, q, mask)
    assert tuple(got) == metric_names()
    assert all(v == (-1 if "first_mismatch" in k else 0) for k, v in got.items())


def test_exact_sum_is_exact() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(500) * 10.0 ** rng.integers(-300, 300, 500)
    x = np.concatenate([x, [5e-324, -5e-324, 1e308, -1e308, 2.0**-1074]])
    assert Fraction(exact_sum(x), 1 << 1126) == sum((Fraction(float(v)) for v in x), Fraction(0))
    assert exact_sum(np.zeros(0)) == 0


def test_any_partition_gives_the_same_bits() -> None:
    lengths = tuple(int(n) for n in np.random.default_rng(5).integers(0, 9, 60))
    p, q, mask, _ = draw(1, lengths)
    p[3], q[11] = NAN, INF
    whole = MismatchStats.from_batch(p, q, mask, lengths)
    edges = np.cumsum((0, *lengths))
    rng = np.random.default_rng(2)
    for _ in range(5):
        cuts = np.unique(np.concatenate([[0, len(lengths)], rng.integers(0, len(lengths), 7)]))
        parts = [
            MismatchStats.from_batch(
                p[edges[a] : edges[b]], q[edges[a] : edges[b]], mask[edges[a] : edges[b]], lengths[a:b],
                sample_indices=range(a, b),
            )
            for a, b in zip(cuts, cuts[1:])
        ]  # fmt: skip
        order = rng.permutation(len(parts))
        left = MismatchStats.merge_all(parts[i] for i in order)
        assert left == whole
        half = len(parts) // 2
        right = MismatchStats.merge_all(parts[:half]).merge(MismatchStats.merge_all(parts[half:]))
        assert right.metrics() == whole.metrics()


def test_shards_of_one_sequence_merge() -> None:
    """Context parallelism gives each rank two pieces of every sequence."""
    p, q, mask, lengths = draw(4)
    index = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    pick = np.arange(p.size) % 3 == 0
    parts = [MismatchStats.from_tokens(p[s], q[s], mask[s], index[s], position[s]) for s in (pick, ~pick)]
    assert MismatchStats.merge_all(parts).metrics() == metrics(p, q, mask, lengths)


def test_packed_batch() -> None:
    samples = [
        Sample((1, 2, 3), (4, 5), np.array([-1.0, -2.0], np.float32), 0, 0, 0, "stop"),
        Sample((1,), (6, 7, 8), np.array([-3.0, -4.0, -5.0], np.float32), 1, 0, 0, "length"),
    ]
    packed = PackedBatch.from_samples(samples, indices=[10, 3], pad_to_multiple=4)
    logp = packed.rollout_logp.clone()
    stats = MismatchStats.from_packed(logp, packed)
    assert (stats.active_tokens, stats.mismatch_count) == (5, 0)
    stats.require_tokens(5)
    with pytest.raises(EngineError, match="5 log-probabilities were compared, 10 tokens"):
        stats.require_tokens(10)  # as if both tensor-parallel ranks had been expected
    logp[packed.active] += torch.tensor([0.0, 0.5, 0.0, 0.0, 0.25])
    stats = MismatchStats.from_packed(logp, packed)
    assert stats.first == (3, 2) and stats.mismatch_count == 2
    ignored = MismatchStats.from_packed(logp, packed, mask=torch.zeros(packed.num_tokens))
    assert ignored.active_tokens == 0


def test_refuses_what_it_cannot_compare() -> None:
    p, q, mask, lengths = draw()
    with pytest.raises(DataError, match="rollout_logp is float64, float32 is needed"):
        MismatchStats.from_batch(p, q.astype(np.float64), mask, lengths)
    with pytest.raises(DataError, match="add up to"):
        MismatchStats.from_batch(p, q, mask, lengths[:-1])
    with pytest.raises(DataError, match="lengths differ"):
        MismatchStats.from_batch(p, q[:-1], mask, lengths)
