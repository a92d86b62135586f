"""The mismatch hook on rollout data shaped as vime's."""

from __future__ import annotations

import json

import pytest
import torch

from recipes.errors import EngineError
from recipes.metrics.mismatch import MismatchStats
from recipes.vime import mismatch


def rollout_data(lengths: list[tuple[int, int]], cp_size: int, cp_rank: int, change: int | None = None) -> dict:
    generator = torch.Generator().manual_seed(0)
    data: dict = {k: [] for k in ("log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")}
    data["sample_indices"] = list(range(len(lengths)))
    for i, (total, response) in enumerate(lengths):
        logp = -torch.rand(response, generator=generator) - 0.1
        rollout = logp.clone()
        if change == i:
            rollout[response // 2] = torch.nextafter(rollout[response // 2], torch.tensor(0.0))
        rows = mismatch._positions(total, response, cp_size, cp_rank)
        data["log_probs"].append(logp[rows])
        data["rollout_log_probs"].append(rollout[rows])
        data["loss_masks"].append(torch.ones(response, dtype=torch.int))
        data["total_lengths"].append(total)
        data["response_lengths"].append(response)
    return data


LENGTHS = [(20, 13), (7, 1), (64, 40), (9, 8)]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_context_parallel_ranks_partition_the_tokens(cp_size: int) -> None:
    for total, response in LENGTHS:
        rows = torch.cat([mismatch._positions(total, response, cp_size, rank) for rank in range(cp_size)])
        assert sorted(rows.tolist()) == list(range(response))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("change", [None, 2])
def test_counts_do_not_depend_on_context_parallelism(cp_size: int, change: int | None) -> None:
    parts = [
        mismatch.local_stats(rollout_data(LENGTHS, cp_size, rank, change), cp_size, rank) for rank in range(cp_size)
    ]
    merged = MismatchStats.merge_all(parts)
    assert merged.active_tokens == sum(response for _, response in LENGTHS)
    assert merged.mismatch_count == (change is not None)
    assert merged.metrics() == mismatch.local_stats(rollout_data(LENGTHS, 1, 0, change), 1, 0).metrics()
    if change is not None:
        assert merged.first == (2, 20)


def test_zeros_in_place_of_missing_logprobs_are_refused() -> None:
    data = rollout_data(LENGTHS, 1, 0)
    data["rollout_log_probs"][2] = torch.zeros(40)
    with pytest.raises(EngineError, match="all 40 rollout log-probabilities of sample 2 are 0.0"):
        mismatch.local_stats(data, 1, 0)


@pytest.mark.parametrize("key", ["log_probs", "rollout_log_probs"])
def test_missing_side_is_named(key: str) -> None:
    data = rollout_data(LENGTHS, 1, 0)
    del data[key]
    with pytest.raises(EngineError, match=key):
        mismatch.local_stats(data, 1, 0)


def test_masked_tokens_do_not_count() -> None:
    data = rollout_data(LENGTHS, 1, 0, change=2)
    data["loss_masks"][2][20] = 0
    stats = mismatch.local_stats(data, 1, 0)
    assert stats.mismatch_count == 0 and stats.active_tokens == 13 + 1 + 39 + 8


def test_every_step_leaves_a_line(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("RL_KERNEL_RUN_DIR", str(tmp_path / "run"))
    for step, change in enumerate((None, 2)):
        mismatch.append(step, mismatch.local_stats(rollout_data(LENGTHS, 1, 0, change), 1, 0).metrics())
    lines = [json.loads(line) for line in (tmp_path / "run" / "consistency.jsonl").read_text().splitlines()]
    assert [(line["rollout"], line["consistency/mismatch_count"]) for line in lines] == [(0, 0), (1, 1)]
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL_KERNEL_RUN_DIR", str(tmp_path / "file"))
    mismatch.append(0, {})
    assert "cannot be written" in caplog.text
    monkeypatch.delenv("RL_KERNEL_RUN_DIR")
    mismatch.append(0, {})  # nobody asked
