"""Splits, packs and per-token columns: nothing lost, nothing doubled, bits kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.algorithms.common import token_weights
from recipes.batching import (
    MicroBatch,
    chunk,
    derive_seed,
    gather,
    join,
    micro_batches,
    pack_by_tokens,
    padding_of,
    scatter,
    split_by_tokens,
)
from recipes.config import TrainConfig, build_config
from recipes.engines.megatron_cp import build_layout
from recipes.engines.types import PackedBatch, Sample
from recipes.errors import DataError, EngineError
from recipes.losses import make_loss


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
    values = zip(join([found], len(samples)), join([advantages], len(samples)))
    for i, (sample, (logp, advantage)) in enumerate(zip(samples, values)):
        assert logp.view(np.int32).tolist() == sample.rollout_logp.view(np.int32).tolist()
        assert (advantage == i).all()


@given(LENGTHS, st.sampled_from((2, 4, 8)), st.sampled_from((1, 2, 4, 8)), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_context_parallel_ranks_partition_every_response(lengths, cp, tp, budget):
    """Megatron's zig-zag rows: every token on one rank, chunks and sequence-parallel shares of equal size."""
    samples = make_samples(lengths)
    train = TrainConfig(context_parallel_size=cp, tensor_parallel_size=tp, sequence_parallel=tp > 1)
    sequence, total = padding_of(train)
    columns = {"old_logp": [s.rollout_logp for s in samples]}
    (share,) = micro_batches(
        samples, columns, data_parallel_size=1, budget=budget, sequence_multiple=sequence, pad_to_multiple=total
    )
    parts = []
    for batch in share:
        packed = batch.packed
        assert not ((packed.cu_seqlens[1:] - packed.cu_seqlens[:-1]) % (2 * cp)).any()
        assert packed.num_tokens % (cp * tp) == 0 or not train.sequence_parallel
        ranks = [build_layout(packed.cu_seqlens, rank, cp) for rank in range(cp)]
        assert len({r.tokens.numel() for r in ranks}) == 1
        assert torch.cat([r.tokens for r in ranks]).sort().values.tolist() == list(range(packed.num_tokens))
        for layout in ranks:
            assert torch.equal(layout.positions, packed.position_ids[layout.tokens])
            parts.append(gather(packed, batch.columns["old_logp"][layout.tokens], layout.tokens))
    for sample, logp in zip(samples, join(reversed(parts), len(samples))):
        assert logp.view(np.int32).tolist() == sample.rollout_logp.view(np.int32).tolist()


def test_join_names_what_is_missing():
    whole = {0: (np.arange(2), np.zeros(2, np.float32))}
    with pytest.raises(EngineError, match=r"logp returned nothing for samples \[1\]"):
        join([whole], 2, "logp")
    for bad in ([0, 2], [0, 0], [1]):
        with pytest.raises(EngineError, match="sample 0"):
            join([{0: (np.array(bad), np.zeros(len(bad), np.float32))}], 1)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_losses_of_context_parallel_ranks_add_up(role, aggregation):
    """Loss, metrics and gradient of the minibatch, whoever holds which token."""
    rng = np.random.default_rng(0)
    samples = make_samples([(3, 9), (5, 2), (1, 1), (7, 8)])
    n = [len(s.response_ids) for s in samples]
    names = ("old_logp", "ref_logp", "advantages", "values", "returns")
    columns = {name: [rng.normal(size=k).astype(np.float32) for k in n] for name in names}
    columns["weight"] = token_weights(n, [True, True, False, True], aggregation)
    config = build_config(
        {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01, "loss_aggregation": aggregation, "dual_clip": 3.0}}
    )
    packed = PackedBatch.from_samples(samples, sequence_multiple=8)
    batch = MicroBatch(packed, {name: scatter(packed, samples, column) for name, column in columns.items()})
    computed = torch.from_numpy(rng.normal(size=(2, packed.num_tokens)).astype(np.float32))

    def results(ranks):
        x = computed.clone().requires_grad_()
        total, metrics = torch.zeros(()), {}
        for rows in ranks:
            own = x if rows is None else x[:, rows]
            inputs = (own[0],) if role == "critic" else (own[0], own[1])
            loss, found = make_loss(role, batch, config, rows)(*inputs, packed)
            total = total + loss
            for key, value in found.items():
                metrics[key] = metrics.get(key, 0.0) + float(value)
        total.backward()
        return total.detach(), metrics, x.grad

    loss, metrics, grad = results([None])
    assert loss != 0 and grad.abs().sum() > 0 and len(metrics) >= 4
    for cp in (2, 4):
        parts = results([build_layout(packed.cu_seqlens, rank, cp).tokens for rank in range(cp)])
        torch.testing.assert_close(parts[0], loss)
        assert parts[1] == pytest.approx(metrics, rel=1e-6)
        assert torch.equal(parts[2], grad)  # each token's own gradient does not even see the others


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
    assert set(got) == {0, 2}
    assert got[2][1].tolist() == [9.0] and got[0][1].tolist() == [7.0, 7.0] and got[0][0].tolist() == [0, 1]


def test_padding_inside_a_pack_has_no_target():
    samples = make_samples([(3, 2), (1, 4), (2, 2)])
    packed = PackedBatch.from_samples(samples, sequence_multiple=4, pad_to_multiple=8, pad_id=7)
    assert packed.cu_seqlens.tolist() == [0, 8, 16, 20, 24]
    assert packed.tokens[5:8].tolist() == [7, 7, 7] and packed.position_ids[:8].tolist() == list(range(8))
    assert packed.sample_index.tolist() == [0, 1, 2, -1]
    assert int(packed.active.sum()) == 8 and not packed.active[20:].any() and not packed.active[4:8].any()
    assert packed.rollout_logp[packed.active].tolist() == np.concatenate([s.rollout_logp for s in samples]).tolist()


def test_padding_of_parallel_layouts():
    def padding(cp, tp=1, sp=False):
        return padding_of(TrainConfig(context_parallel_size=cp, tensor_parallel_size=tp, sequence_parallel=sp))

    assert padding(1) == (1, 1) and padding(1, 4, True) == (1, 4) and padding(1, 4) == (1, 1)
    assert padding(2) == (4, 4) and padding(2, 4, True) == (4, 8) and padding(4, 2, True) == (8, 8)


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
