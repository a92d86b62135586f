"""Prompts, tokenizer and reward behind one object: what the loop asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from recipes.config import RunConfig
from recipes.data import Prompt
from recipes.engines.types import Sample


class Task(Protocol):
    """An endless stream of prompts and a reward for responses to them."""

    eos_token_ids: tuple[int, ...]

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts ``start`` to ``start + count`` of the stream, a function of data set and seed only."""
        ...

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
        """Rewards; ``samples[i]`` answers ``prompts[i]``."""
        ...

    def close(self) -> None:
        """End worker processes."""
        ...


def load_task(config: RunConfig) -> Task:
    """The task of ``config.data`` and ``config.reward``."""
    raise NotImplementedError
