"""Reward without text: the share of response tokens in the lower half of the vocabulary.

A model of random weights starts near 0.5 with a spread of about ``0.5 / sqrt(length)`` between responses, so groups are
never equal, advantages and gradients are real from the first step on, and pushing the reward up is a matter of one
direction of the LM head.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipes.reward.types import RewardResult, summarize


def score(response_ids: Sequence[int], vocab_size: int) -> float:
    """``|{t : t < vocab_size / 2}| / |response|``, in [0, 1]."""
    return sum(2 * token < vocab_size for token in response_ids) / max(len(response_ids), 1)


def score_all(responses: Sequence[Sequence[int]], vocab_size: int) -> RewardResult:
    """:func:`score` of every response; ``reward/accuracy`` is the share of responses with every token below."""
    rewards = [score(ids, vocab_size) for ids in responses]
    return summarize(rewards, sum(r >= 1.0 for r in rewards))
