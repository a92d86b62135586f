"""A task without data and tokenizer (``data=synthetic``): random token ids, for runs from random weights.

Prompts, stop tokens and rewards are functions of ``(seed, index)``, the vocabulary and the settings alone.

Prompt i has a length drawn evenly from ``data.min_len`` to ``rollout.max_prompt_len`` and token ids drawn evenly from
the vocabulary. Every second prompt starts with one prefix of half the longest prompt, so a prefix cache has hits
between prompts, not only between the responses to one.

Responses end at a stop token. A model of random weights gives each token about the same probability on average, so
``vocab_size / data.mean_response_len`` stop tokens, spread evenly over the vocabulary, make lengths geometric with
about that mean (cut at ``rollout.max_response_len``): a batch has short and long responses.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

import numpy as np

from recipes.data.prompts import Prompt
from recipes.errors import ConfigError

SYNTHETIC = "synthetic"


class SyntheticSettings(Protocol):
    """What the generator needs; ``recipes.config.DataConfig`` has these fields."""

    min_len: int
    mean_response_len: int


def _draw(count: int, *key: int) -> np.ndarray:
    """uint64 [count], raw output of PCG64: the same in every NumPy version."""
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)


class SyntheticPrompts:
    """An endless stream of random prompts; see the module.

    Args:
        cfg: lengths.
        seed: of the stream.
        max_prompt_len: longest prompt in tokens.
        vocab_size: ids are below it.

    Raises:
        ConfigError: the settings contradict each other.
    """

    def __init__(self, cfg: SyntheticSettings, *, seed: int, max_prompt_len: int, vocab_size: int) -> None:
        if not 1 <= cfg.min_len <= max_prompt_len:
            raise ConfigError(
                f"{cfg.min_len} is not between 1 and rollout.max_prompt_len={max_prompt_len}",
                where="data.min_len",
                fix="Lower it, or raise rollout.max_prompt_len.",
            )
        if not 1 <= cfg.mean_response_len <= vocab_size:
            raise ConfigError(
                f"{cfg.mean_response_len} is not between 1 and model.vocab_size={vocab_size}",
                where="data.mean_response_len",
                fix="A response ends at one of vocab_size / mean_response_len stop tokens.",
            )
        self.cfg, self.seed, self.longest, self.vocab_size = cfg, seed, max_prompt_len, vocab_size
        self.prefix = self._ids(_draw(max_prompt_len // 2, seed, 0))

    def _ids(self, raw: np.ndarray) -> tuple[int, ...]:
        return tuple((raw % np.uint64(self.vocab_size)).tolist())

    def stop_token_ids(self) -> tuple[int, ...]:
        """Evenly spaced, so that as many lie in the lower half of the vocabulary as in the upper."""
        count = max(1, round(self.vocab_size / self.cfg.mean_response_len))
        return tuple((2 * i + 1) * self.vocab_size // (2 * count) for i in range(count))

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts ``start`` to ``start + count``; every index is another prompt."""
        return [self._prompt(index) for index in range(start, start + count)]

    def _prompt(self, index: int) -> Prompt:
        raw = _draw(self.longest + 1, self.seed, 1, index)
        length = self.cfg.min_len + int(raw[-1] % np.uint64(self.longest - self.cfg.min_len + 1))
        ids = self._ids(raw[:length])
        if index % 2 == 0:  # the last token is always the prompt's own
            shared = min(len(self.prefix), length - 1)
            ids = self.prefix[:shared] + ids[shared:]
        return Prompt(ids, "", index)

    def info(self) -> dict[str, Any]:
        """For the manifest; a resumed run must have the same ``sha256``."""
        settings = {
            "path": SYNTHETIC,
            "seed": self.seed,
            "vocab_size": self.vocab_size,
            "min_len": self.cfg.min_len,
            "max_len": self.longest,
            "mean_response_len": self.cfg.mean_response_len,
        }
        digest = hashlib.sha256(json.dumps([settings, self.take(0, 4)[3].prompt_ids]).encode()).hexdigest()
        return {**settings, "sha256": digest}
