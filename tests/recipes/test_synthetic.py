"""The task without data and tokenizer: functions of seed and index, lengths as asked for, a reward on token ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipes.config import DataConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig, TrainerConfig
from recipes.data.synthetic import SyntheticPrompts
from recipes.engines.types import Sample
from recipes.errors import ConfigError
from recipes.reward import build_reward
from recipes.reward.synthetic import score
from recipes.task import SyntheticTask, make_task

VOCAB = 151936


def config(**rollout) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=VOCAB),
        rollout=RolloutConfig(max_prompt_len=512, **rollout),
        data=DataConfig(path="synthetic"),
        reward=RewardConfig(name="synthetic"),
        trainer=TrainerConfig(seed=5),
    )


def prompts(seed: int = 5, **data) -> SyntheticPrompts:
    return SyntheticPrompts(DataConfig(**data), seed=seed, max_prompt_len=512, vocab_size=VOCAB)


def test_prompts_are_functions_of_seed_and_index():
    some = prompts().take(0, 40)
    assert prompts().take(7, 3) == some[7:10]
    assert prompts(seed=6).take(0, 40) != some
    assert len({p.prompt_ids for p in some}) == 40 and [p.index for p in some] == list(range(40))
    # Pinned: a resumed run, and the same run elsewhere, must see these.
    assert some[1].prompt_ids[:3] == (150210, 78036, 140149) and len(some[1].prompt_ids) == 124


def test_lengths_and_ids_cover_their_ranges():
    many = prompts(min_len=3).take(0, 2000)
    lengths = np.array([len(p.prompt_ids) for p in many])
    ids = np.array([t for p in many for t in p.prompt_ids])
    assert (lengths.min(), lengths.max()) == (3, 512) and abs(lengths.mean() - 257.5) < 12
    assert ids.min() >= 0 and ids.max() < VOCAB and abs((2 * ids < VOCAB).mean() - 0.5) < 0.02


def test_every_second_prompt_shares_a_prefix():
    made = prompts()
    for prompt in made.take(0, 20):
        shared = min(256, len(prompt.prompt_ids) - 1)
        assert (prompt.prompt_ids[:shared] == made.prefix[:shared]) == (prompt.index % 2 == 0)


def test_stop_tokens_end_a_uniform_walk_at_the_mean_length():
    stops = prompts(mean_response_len=500).stop_token_ids()
    assert len(stops) == len(set(stops)) == 304 and min(stops) >= 0 and max(stops) < VOCAB
    assert sum(2 * t < VOCAB for t in stops) == 152  # ending early is worth nothing
    assert VOCAB / len(stops) == pytest.approx(500, rel=1e-2)


def test_task_and_reward():
    task = make_task(config())
    assert isinstance(task, SyntheticTask) and len(task.eos_token_ids) == 297
    assert make_task(config(ignore_eos=True)).eos_token_ids == ()
    half = VOCAB // 2
    assert [score(ids, VOCAB) for ids in ([0, half - 1], [half], [1, half, half, 2])] == [1.0, 0.0, 0.5]
    rng = np.random.default_rng(0)
    drawn = [tuple(rng.integers(0, VOCAB, n).tolist()) for n in (400, 700)]
    samples = [Sample((1,), ids, np.zeros(len(ids), np.float32), 0, i, 0, "stop") for i, ids in enumerate(drawn)]
    result = task.score(task.take(0, 2), samples)
    assert result.rewards == [score(ids, VOCAB) for ids in drawn]
    assert result.rewards[0] != result.rewards[1] and result.metrics["reward/std"] > 0
    assert task.info()["sha256"] != SyntheticTask(replace(config(), trainer=TrainerConfig(seed=6))).info()["sha256"]
    task.close()


def test_refusals():
    with pytest.raises(ConfigError, match="data.min_len"):
        prompts(min_len=600)
    with pytest.raises(ConfigError, match="data.mean_response_len"):
        prompts(mean_response_len=VOCAB + 1)
    with pytest.raises(ConfigError, match="data=synthetic"):
        build_reward("synthetic")
