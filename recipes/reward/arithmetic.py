"""Reward of the arithmetic set: the exact answer, with partial credit so that a model of random weights can start.

For a response text y, the answer a (digits) and L = max(len(y), len(a)):

    digits    share of characters of y that are digits
    places    positions i with y[i] == a[i], divided by L
    stopped   1 when the model ended the response itself, else 0
    exact     1 when y == a and the model stopped, else 0

    reward = 0.2 * digits + 0.1 * digits * stopped + 0.5 * places + 0.2 * exact        in [0, 1]; 1 exactly when exact

From random weights the terms are learned in that order: write digits, stop, stop at the right length, be right.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipes.reward.types import RewardItem, RewardResult, summarize

WEIGHT_DIGITS = 0.2
WEIGHT_STOPPED = 0.1
WEIGHT_PLACES = 0.5
WEIGHT_EXACT = 0.2
_DIGITS = frozenset("0123456789")


def score(response: str, answer: str, *, stopped: bool) -> float:
    """The reward of one response (see the module)."""
    if stopped and response == answer:
        return 1.0
    length = max(len(response), len(answer), 1)
    digits = sum(c in _DIGITS for c in response) / max(len(response), 1)
    places = sum(a == b for a, b in zip(response, answer)) / length
    return WEIGHT_DIGITS * digits + WEIGHT_STOPPED * digits * stopped + WEIGHT_PLACES * places


class ArithmeticReward:
    """The arithmetic reward as a :class:`recipes.reward.types.RewardFunction`; no worker, no state."""

    def __call__(self, items: Sequence[RewardItem]) -> RewardResult:
        """Score ``items``; ``reward/digit_fraction`` and ``reward/stopped_fraction`` show the early stages."""
        rewards, correct, digits, stopped = [], 0, 0.0, 0
        for item in items:
            ended = item.finish_reason == "stop"
            rewards.append(score(item.response, item.answer, stopped=ended))
            correct += ended and item.response == item.answer
            digits += sum(c in _DIGITS for c in item.response) / max(len(item.response), 1)
            stopped += ended
        n = max(len(items), 1)
        extra = {"reward/digit_fraction": digits / n, "reward/stopped_fraction": stopped / n}
        return summarize(rewards, correct, extra)

    def close(self) -> None:
        """Nothing to end."""
