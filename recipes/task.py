"""Prompts, tokenizer and reward behind one object: what the loop asks for. :func:`make_task` chooses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from recipes.config import RunConfig
from recipes.data import Prompt, PromptDataset, load_tokenizer
from recipes.data.synthetic import SYNTHETIC, SyntheticPrompts
from recipes.engines.types import Sample
from recipes.errors import ConfigError
from recipes.reward import RewardItem, RewardResult, build_reward, decode_response
from recipes.reward.synthetic import score_all


class Task(Protocol):
    """An endless stream of prompts and a reward for responses to them."""

    eos_token_ids: tuple[int, ...]  # tokens that end a response

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts ``start`` to ``start + count`` of the stream, a function of data set and seed only."""
        ...

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards; ``samples[i]`` answers ``prompts[i]``."""
        ...

    def info(self) -> dict[str, Any]:
        """For the manifest. ``sha256``, where there is one, identifies the data: a run resumes on the same only."""
        ...

    def close(self) -> None:
        """End worker processes."""
        ...


class DataTask:
    """The task of ``config.data``, ``config.model.tokenizer`` and ``config.reward``.

    Raises:
        ConfigError: the tokenizer has more tokens than the model, or the reward is unknown.
        DataError: the data set cannot be used, see :class:`recipes.data.PromptDataset`.
    """

    def __init__(self, config: RunConfig) -> None:
        model = config.model
        self.tokenizer = load_tokenizer(model.tokenizer or model.path)
        if len(self.tokenizer) > model.vocab_size:
            raise ConfigError(
                f"{model.vocab_size} is less than the {len(self.tokenizer)} tokens of the tokenizer",
                where="model.vocab_size",
                fix=f"Use at least {len(self.tokenizer)}, or another model.tokenizer.",
            )
        end = self.tokenizer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if end is None else (int(end),)
        self.data = PromptDataset(
            config.data,
            self.tokenizer,
            seed=config.trainer.seed,
            max_prompt_len=config.rollout.max_prompt_len,
            vocab_size=model.vocab_size,
        )
        self.reward = build_reward(config.reward)

    def take(self, start: int, count: int) -> list[Prompt]:
        """See :meth:`recipes.data.PromptDataset.take`."""
        return self.data.take(start, count)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Decode the responses and score them."""
        items = [
            RewardItem(
                response=decode_response(self.tokenizer, sample.response_ids, sample.finish_reason),
                answer=prompt.answer,
                finish_reason=sample.finish_reason,
                prompt=prompt.text,
            )
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
        return self.reward(items)

    def info(self) -> dict[str, Any]:
        """For the manifest."""
        return self.data.info()

    def close(self) -> None:
        """End the reward's workers."""
        self.reward.close()


class SyntheticTask:
    """Random prompts and a reward on token ids (``data=synthetic``); no tokenizer is loaded.

    Raises:
        ConfigError: a length contradicts the model or the rollout.
    """

    def __init__(self, config: RunConfig) -> None:
        self.vocab_size = config.model.vocab_size
        self.data = SyntheticPrompts(
            config.data,
            seed=config.trainer.seed,
            max_prompt_len=config.rollout.max_prompt_len,
            vocab_size=self.vocab_size,
        )
        self.eos_token_ids = () if config.rollout.ignore_eos else self.data.stop_token_ids()

    def take(self, start: int, count: int) -> list[Prompt]:
        """See :meth:`recipes.data.synthetic.SyntheticPrompts.take`."""
        return self.data.take(start, count)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """See :mod:`recipes.reward.synthetic`."""
        return score_all([sample.response_ids for sample in samples], self.vocab_size)

    def info(self) -> dict[str, Any]:
        """For the manifest."""
        return self.data.info()

    def close(self) -> None:
        """Nothing to end."""


def make_task(config: RunConfig) -> Task:
    """The task that ``config.data`` and ``config.reward`` name."""
    return SyntheticTask(config) if config.data.path == SYNTHETIC else DataTask(config)
