"""Splits, packs and per-token columns: nothing lost, nothing doubled, bits kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.batching import chunk, derive_seed, gather, micro_batches, pack_by_tokens, scatter, split_by_tokens
from recipes.engines.types import PackedBatch, Sample
from recipes.errors import DataError


def make_samples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Sample(
            tuple(rng.integers(0, 50, p).tolist()),
            tuple(rng.integers(0, 50, r).tolist()),
            rng.normal(size=r).astype(np.float32),
            i,
            0,
            0,
            "stop",
        )
        for i, (p, r) in enumerate(lengths)
    ]


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 40), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_token_travels_exactly_once(lengths, ranks, budget, multiple):
    samples = make_samples(lengths)
    columns = {"old_logp": [s.rollout_logp for s in samples], "advantages": [float(i) for i in range(len(samples))]}
    shares = micro_batches(samples, columns, data_parallel_size=ranks, budget=budget, pad_to_multiple=multiple)
    assert len(shares) == ranks
    found, advantages = {}, {}
    for share in shares:
        for batch in share:
            assert batch.packed.num_tokens % multiple == 0
            one = (batch.packed.sample_index >= 0).sum() == 1
            assert one or batch.packed.num_tokens - multiple < budget
            part = gather(batch.packed, batch.columns["old_logp"])
            assert not set(part) & set(found)
            found |= part
            advantages |= gather(batch.packed, batch.columns["advantages"])
            assert (batch.columns["old_logp"][~batch.packed.active] == 0).all()
            torch.testing.assert_close(batch.packed.rollout_logp, batch.columns["old_logp"], rtol=0, atol=0)
    assert sorted(found) == list(range(len(samples)))
    for i, sample in enumerate(samples):
        assert found[i].view(np.int32).tolist() == sample.rollout_logp.view(np.int32).tolist()
        assert (advantages[i] == i).all()


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_split_is_a_balanced_partition(lengths, parts):
    shares = split_by_tokens(lengths, parts)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert shares == split_by_tokens(lengths, parts)
    if len(lengths) >= parts:
        assert all(shares)
    loads = [sum(max(lengths[i], 1) for i in share) for share in shares]
    if lengths:
        assert max(loads) - min(loads) <= max(max(lengths), 1)


def test_packs_respect_the_budget_and_keep_the_order():
    packs = pack_by_tokens([5, 5, 5, 20, 1, 0, 9], 10)
    assert packs == [[0, 1], [2], [3], [4, 5, 6]]
    assert pack_by_tokens([], 10) == []


def test_scatter_follows_target_ids():
    samples = make_samples([(3, 2), (1, 4)])
    packed = PackedBatch.from_samples(samples, pad_to_multiple=4)
    values = [np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0, 5.0, 6.0], np.float32)]
    out = scatter(packed, samples, values)
    assert out.tolist() == [0, 0, 1, 2, 0, 3, 4, 5, 6, 0, 0, 0]
    assert ((packed.target_ids != -100) == (out != 0)).all()
    with pytest.raises(DataError, match="3 values for 2 response tokens"):
        scatter(packed, samples, [np.zeros(3, np.float32), values[1]])


def test_scatter_of_a_subset_uses_step_wide_indices():
    samples = make_samples([(2, 2), (2, 3), (4, 1)])
    packed = PackedBatch.from_samples([samples[2], samples[0]], indices=[2, 0])
    got = gather(packed, scatter(packed, samples, [7.0, 8.0, 9.0]))
    assert got[2].tolist() == [9.0] and got[0].tolist() == [7.0, 7.0] and set(got) == {0, 2}


def test_more_ranks_than_samples_leaves_empty_shares():
    samples = make_samples([(2, 2)])
    shares = micro_batches(samples, {}, data_parallel_size=3, budget=100)
    assert [len(s) for s in shares] == [1, 0, 0]


def test_chunks():
    assert [list(r) for r in chunk(5, 2)] == [[0, 1], [2, 3, 4]]
    assert [list(r) for r in chunk(2, 4)] == [[0], [1]]


def test_derived_seeds():
    seeds = {derive_seed(a, b, c, d) for a in range(3) for b in range(3) for c in range(3) for d in range(3)}
    assert len(seeds) == 81 and all(0 <= s < 2**63 for s in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3) != derive_seed(12, 3)


def test_an_empty_response_is_named():
    with pytest.raises(DataError, match="the response is empty"):
        Sample((1,), (), np.zeros(0, np.float32), 0, 0, 0, "stop")
