"""Rewards: chosen by name or dotted path, called with decoded responses."""

from __future__ import annotations

import importlib
import math as _math
from collections.abc import Callable, Sequence
from typing import Any

from recipes.errors import ConfigError, DataError
from recipes.reward.types import RewardFunction, RewardItem, RewardResult, RewardSettings, summarize

__all__ = [
    "RewardFunction",
    "RewardItem",
    "RewardResult",
    "build_reward",
    "compute_rewards",
    "decode_response",
    "summarize",
]

BUILT_IN = ("arithmetic", "math")


class _FunctionReward:
    """A user's ``function(items) -> list of floats or RewardResult``, checked."""

    def __init__(self, function: Callable[[Sequence[RewardItem]], Any], name: str) -> None:
        self._function, self._name = function, name

    def __call__(self, items: Sequence[RewardItem]) -> RewardResult:
        result = self._function(items)
        rewards = result.rewards if isinstance(result, RewardResult) else result
        try:
            rewards = [float(r) for r in rewards]
        except (TypeError, ValueError) as error:
            raise DataError(f"returned {type(result).__name__}: {error}", where=f"reward {self._name}") from error
        bad = [i for i, r in enumerate(rewards) if not _math.isfinite(r)]
        if len(rewards) != len(items) or bad:
            what = f"item {bad[0]} got {rewards[bad[0]]}" if bad else f"{len(rewards)} rewards for {len(items)} items"
            raise DataError(what, where=f"reward {self._name}", fix="Return one finite number for each item.")
        summary = summarize(rewards, sum(r >= 1.0 for r in rewards))
        extra = result.metrics if isinstance(result, RewardResult) else {}
        return RewardResult(rewards, {**summary.metrics, **extra})

    def close(self) -> None:
        close = getattr(self._function, "close", None)
        if callable(close):
            close()


def build_reward(cfg: RewardSettings | str) -> RewardFunction:
    """The reward function that ``cfg.name`` (or the string) names.

    ``arithmetic`` and ``math`` are built in. Anything with a dot is a path such as ``my_package.rewards.score`` to a
    ``function(items: Sequence[RewardItem])`` that returns one float for each item, or a :class:`RewardResult`. It
    runs in the calling process and answers for its own time; 1 or more counts as correct.

    Raises:
        ConfigError: the name is unknown, cannot be imported or is no function.
    """
    name = cfg if isinstance(cfg, str) else cfg.name
    if name == "arithmetic":
        from recipes.reward.arithmetic import ArithmeticReward

        return ArithmeticReward()
    if name == "math":
        from recipes.reward.math import MathReward

        return (
            MathReward() if isinstance(cfg, str) else MathReward(timeout_s=cfg.timeout_s, num_workers=cfg.num_workers)
        )
    if name == "synthetic":
        raise ConfigError("it scores token ids, not text", where="reward.name", fix="Use it with data=synthetic.")
    module, dot, attribute = name.rpartition(".")
    fix = f"Use {', '.join(BUILT_IN)} or a dotted path to a function."
    if not dot:
        raise ConfigError(f"{name!r} is unknown", where="reward.name", fix=fix)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}", where="reward.name", fix=fix) from error
    if not callable(function):
        raise ConfigError(f"{name!r} is a {type(function).__name__}, not a function", where="reward.name", fix=fix)
    return _FunctionReward(function, name)


def compute_rewards(items: Sequence[RewardItem], reward: RewardSettings | str = "arithmetic") -> RewardResult:
    """Score one batch with a reward function built for it alone; a run builds it once with :func:`build_reward`."""
    function = build_reward(reward)
    try:
        return function(items)
    finally:
        function.close()


def decode_response(tokenizer: Any, response_ids: Sequence[int], finish_reason: str) -> str:
    """The text of a response without the token that ended it. Other special tokens stay visible: they are mistakes."""
    ids = list(response_ids[:-1] if finish_reason == "stop" else response_ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
