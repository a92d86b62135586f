"""Prompts of a run: read, checked, tokenized once, and drawn by step number alone."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from recipes.data.sources import Row, lookup, read_rows
from recipes.errors import ConfigError, DataError

log = logging.getLogger(__name__)

OVERLONG = ("drop", "error")
DUPLICATES = ("drop", "keep", "error")


class DataSettings(Protocol):
    """What a data set needs to know; ``recipes.config.DataConfig`` has these fields."""

    path: str
    split: str
    prompt_key: str
    label_key: str
    chat_template: bool
    system_prompt: str | None
    shuffle: bool
    limit: int | None


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        prompt_ids: token ids, at least one.
        answer: the reference answer, as text.
        index: position in the data set after filtering: the identity of the prompt within a run.
        text: what was tokenized.
    """

    prompt_ids: tuple[int, ...]
    answer: str
    index: int
    text: str = ""


@dataclass
class Counts:
    """What happened to the rows."""

    rows: int = 0
    kept: int = 0
    dropped_overlong: int = 0
    dropped_duplicate: int = 0
    longest_prompt: int = 0


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """int64 [size]: the order of the data set in one epoch, a function of ``(size, seed, epoch)`` only.

    It sorts the raw 64-bit output of PCG64, the same in every NumPy version (``Generator.permutation`` may change).
    """
    if not shuffle:
        return np.arange(size)
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(keys, kind="stable")


class PromptDataset:
    """All prompts of a run.

    Args:
        cfg: path, keys and template settings. A prompt is a string or a list of chat messages ``{"role", "content"}``.
            Messages always go through the tokenizer's chat template; a string does when ``cfg.chat_template`` is set
            (as one user message), else it is tokenized as it stands. ``cfg.system_prompt`` is put before messages that
            have no system message.
        tokenizer: a Hugging Face tokenizer.
        seed: order of the epochs.
        max_prompt_len: longest prompt in tokens; None: no limit.
        vocab_size: size of the model's vocabulary, to catch a tokenizer of another model; None: not checked.
        overlong: ``drop`` prompts above the limit and say how many, or ``error``.
        duplicates: ``drop`` rows whose prompt and answer both occurred before (DAPO-Math-17k repeats each 100 times),
            ``keep`` or ``error``.
        template_kwargs: passed to the chat template, such as ``{"enable_thinking": False}``.

    Raises:
        DataError: see :func:`recipes.data.sources.read_rows`; or a field is missing, empty or of the wrong type, no
            prompt is left, or a token id is outside the vocabulary. Each names the file and line.
        ConfigError: ``overlong`` or ``duplicates`` is unknown.

    Attributes:
        counts: rows read, kept and dropped.
    """

    def __init__(
        self,
        cfg: DataSettings,
        tokenizer: Any,
        *,
        seed: int = 0,
        max_prompt_len: int | None = None,
        vocab_size: int | None = None,
        overlong: str = "drop",
        duplicates: str = "drop",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, known in (("overlong", overlong, OVERLONG), ("duplicates", duplicates, DUPLICATES)):
            if value not in known:
                raise ConfigError(f"{value!r} is not one of {', '.join(known)}", where=f"data.{name}")
        self.cfg, self.seed = cfg, seed
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._order: tuple[int, np.ndarray] | None = None
        self.counts = Counts()
        rows = read_rows(cfg.path, split=cfg.split, limit=cfg.limit)
        self.counts.rows = len(rows)
        texts, answers, places = self._unique(rows, duplicates)
        self.prompts = self._tokenize(texts, answers, places, max_prompt_len, vocab_size, overlong)
        self.counts.kept = len(self.prompts)
        if not self.prompts:
            raise DataError(
                f"all {len(rows)} prompts are longer than {max_prompt_len} tokens (the longest has "
                f"{self.counts.longest_prompt})",
                where=f"data.path={cfg.path}",
                fix="Raise rollout.max_prompt_len.",
            )
        if self.counts.dropped_overlong or self.counts.dropped_duplicate:
            log.warning(
                "data.path=%s: kept %d of %d prompts; dropped %d longer than %s tokens and %d duplicates",
                cfg.path,
                self.counts.kept,
                self.counts.rows,
                self.counts.dropped_overlong,
                max_prompt_len,
                self.counts.dropped_duplicate,
            )

    # ------------------------------------------------------------------ building

    def _unique(self, rows: Sequence[Row], duplicates: str) -> tuple[list[str], list[str], list[str]]:
        texts: list[str] = []
        answers: list[str] = []
        places: list[str] = []
        seen: dict[tuple[str, str], str] = {}
        for row in rows:
            answer = self._answer(row)
            text = self._render(row)
            if duplicates != "keep":
                first = seen.setdefault((text, answer), row.where)
                if first is not row.where:
                    if duplicates == "error":
                        raise DataError(
                            f"repeats {first}", where=row.where, fix="Remove the line or set duplicates=drop."
                        )
                    self.counts.dropped_duplicate += 1
                    continue
            texts.append(text)
            answers.append(answer)
            places.append(row.where)
        return texts, answers, places

    def _answer(self, row: Row) -> str:
        value = lookup(row, self.cfg.label_key, setting="data.label_key")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
            raise DataError(
                f"field {self.cfg.label_key!r} is {value!r}, a non-empty string or number is needed",
                where=row.where,
                fix="Repair or remove the line.",
            )
        return str(value)

    def _render(self, row: Row) -> str:
        key = self.cfg.prompt_key
        value = lookup(row, key, setting="data.prompt_key")
        if isinstance(value, str):
            if not value.strip():
                raise DataError(f"field {key!r} is empty", where=row.where, fix="Repair or remove the line.")
            if not self.cfg.chat_template:
                return value if self.cfg.system_prompt is None else f"{self.cfg.system_prompt}{value}"
            value = [{"role": "user", "content": value}]
        return self._apply_template(_messages(value, key, row.where), row.where)

    def _apply_template(self, messages: list[dict[str, str]], where: str) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                "the tokenizer has no chat template",
                where=where,
                fix="Use a tokenizer with one (model.tokenizer), or string prompts with data.chat_template=false.",
            )
        if self.cfg.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.cfg.system_prompt}, *messages]
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
        except Exception as error:  # noqa: BLE001 - jinja raises whatever the template raises
            raise DataError(
                f"the chat template refuses the messages: {error}", where=where, fix="Check roles and their order."
            ) from error

    def _tokenize(
        self,
        texts: Sequence[str],
        answers: Sequence[str],
        places: Sequence[str],
        max_prompt_len: int | None,
        vocab_size: int | None,
        overlong: str,
    ) -> list[Prompt]:
        prompts: list[Prompt] = []
        block = 4096
        for start in range(0, len(texts), block):
            part = list(texts[start : start + block])
            encoded = self._tokenizer(part, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            for offset, ids in enumerate(encoded):
                where = places[start + offset]
                if not ids:
                    raise DataError("the prompt has no token", where=where, fix="Repair or remove the line.")
                if vocab_size is not None and max(ids) >= vocab_size:
                    raise DataError(
                        f"token id {max(ids)} is outside the model's vocabulary of {vocab_size}",
                        where=where,
                        fix="Use the tokenizer that belongs to the model (model.tokenizer), or set model.vocab_size.",
                    )
                self.counts.longest_prompt = max(self.counts.longest_prompt, len(ids))
                if max_prompt_len is not None and len(ids) > max_prompt_len:
                    if overlong == "error":
                        raise DataError(
                            f"the prompt has {len(ids)} tokens, the limit is {max_prompt_len}",
                            where=where,
                            fix="Raise rollout.max_prompt_len, or set overlong=drop.",
                        )
                    self.counts.dropped_overlong += 1
                    continue
                prompts.append(Prompt(tuple(ids), answers[start + offset], len(prompts), part[offset]))
        return prompts

    # ------------------------------------------------------------------ drawing

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self), seed=self.seed, epoch=epoch, shuffle=self.cfg.shuffle))
        return self._order[1]

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts ``start`` to ``start + count`` of the endless stream of epochs.

        The stream depends on the data set and the seed only. Each epoch holds every prompt once.
        """
        out = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, len(self))
            out.append(self.prompts[self._epoch(epoch)[offset]])
        return out

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of step ``step`` (from 0): a function of data set, seed, ``step`` and ``size``, so a resumed run
        needs no state of the data set."""
        return self.take(step * size, size)

    def epoch_of(self, step: int, size: int) -> int:
        """The epoch of the first prompt of a step."""
        return step * size // len(self)

    @functools.cached_property
    def sha256(self) -> str:
        """Identity of what the run sees: SHA-256 over (prompt_ids, answer) of every prompt, in data set order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.prompt_ids, prompt.answer]).encode() + b"\n")
        return digest.hexdigest()

    def info(self) -> dict[str, Any]:
        """For the manifest; a resumed run must have the same ``sha256``."""
        return {"path": self.cfg.path, "split": self.cfg.split, "sha256": self.sha256, **asdict(self.counts)}


def _messages(value: Any, key: str, where: str) -> list[dict[str, str]]:
    fix = 'A prompt is a string or a list like [{"role": "user", "content": "..."}].'
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"field {key!r} is {type(value).__name__}, empty or of no use", where=where, fix=fix)
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            found = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
            raise DataError(f"message {number} of {key!r} lacks role or content ({found})", where=where, fix=fix)
        if not isinstance(message["content"], str) or not isinstance(message["role"], str):
            raise DataError(
                f"message {number} of {key!r} has a role or content that is no string", where=where, fix=fix
            )
        messages.append({"role": message["role"], "content": message["content"]})
    return messages
