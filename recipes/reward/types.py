"""What goes into a reward function and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RewardItem:
    """One response to score.

    Attributes:
        response: decoded text, without the token that ended it (see :func:`recipes.reward.decode_response`).
        answer: the reference answer of the prompt.
        finish_reason: ``stop`` when the model ended the response itself, ``length`` when it was cut.
        prompt: the prompt's text.
    """

    response: str
    answer: str
    finish_reason: str = "stop"
    prompt: str = ""


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch.

    Attributes:
        rewards: one finite float for each item, in their order.
        metrics: at least ``reward/mean``, ``reward/std`` (of the population), ``reward/min``, ``reward/max`` and
            ``reward/accuracy`` (share of fully correct responses).
    """

    rewards: list[float]
    metrics: dict[str, float | int] = field(default_factory=dict)


class RewardSettings(Protocol):
    """What a reward function needs to know; ``recipes.config.RewardConfig`` has these fields."""

    name: str
    timeout_s: float
    num_workers: int


class RewardFunction(Protocol):
    """Scores batches; holds worker processes, perhaps."""

    def __call__(self, items: Sequence[RewardItem]) -> RewardResult:
        """Score ``items``."""
        ...

    def close(self) -> None:
        """End the workers. Idempotent."""
        ...


def summarize(rewards: Sequence[float], correct: int, extra: Mapping[str, Any] | None = None) -> RewardResult:
    """A :class:`RewardResult` with the common metrics; zeros for an empty batch."""
    n = len(rewards)
    mean = sum(rewards) / n if n else 0.0
    variance = sum((r - mean) ** 2 for r in rewards) / n if n else 0.0
    metrics: dict[str, float | int] = {
        "reward/mean": mean,
        "reward/std": variance**0.5,
        "reward/min": min(rewards, default=0.0),
        "reward/max": max(rewards, default=0.0),
        "reward/accuracy": correct / n if n else 0.0,
        **(extra or {}),
    }
    return RewardResult(list(rewards), metrics)
