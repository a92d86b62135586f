"""What travels between the rollout engine, the loop and the training engine. No backend is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from recipes.errors import ConfigError, DataError

IGNORE_INDEX = -100


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn.

    Attributes:
        temperature: logits are divided by it once, in fp32, before sampling and before the log-probability. > 0.
        top_p: 1.0 keeps the whole distribution. The strict and audit modes accept nothing else: a truncated
            distribution is renormalised, and the trainer's log-probability is not.
        top_k: 0 keeps the whole distribution; the same rule as for ``top_p``.
        max_tokens: most tokens of one response.
        n: responses per prompt.
        stop_token_ids: tokens that end a response; the token itself is part of it.
        ignore_eos: do not stop at the model's end-of-sequence token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature > 0.0, "must be above 0 (a greedy choice has no log-probability)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or a positive number"),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("n", self.n >= 1, "must be at least 1"),
        )
        for name, good, rule in checks:
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)!r} {rule}", where=f"rollout.{name}")


@dataclass(frozen=True, eq=False)
class Sample:
    """One response.

    Attributes:
        prompt_ids: token ids of the prompt.
        response_ids: sampled token ids, at least one.
        rollout_logp: float32 [len(response_ids)], the engine's log-probability of each sampled token, bit for bit.
        prompt_index: position of the prompt in the ``generate`` call.
        sample_index: 0 .. n-1 within the prompt.
        weight_version: version given to the last ``update_weights``.
        finish_reason: ``stop`` (end-of-sequence or stop token) or ``length``.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logp: np.ndarray
    prompt_index: int
    sample_index: int
    weight_version: int
    finish_reason: str

    def __post_init__(self) -> None:
        where = f"sample {self.sample_index} of prompt {self.prompt_index}"
        if not self.prompt_ids:
            raise DataError("the prompt is empty", where=where, fix="Drop the data line or add a first token.")
        if not self.response_ids:
            raise DataError("the response is empty", where=where, fix="Check max_tokens and the stop tokens.")
        if self.rollout_logp.dtype != np.float32 or self.rollout_logp.shape != (len(self.response_ids),):
            raise DataError(
                f"rollout_logp is {self.rollout_logp.dtype}{list(self.rollout_logp.shape)}, "
                f"float32[{len(self.response_ids)}] is needed, one for each sampled token",
                where=where,
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(eq=False)
class PackedBatch:
    """Sequences laid end to end for one forward pass of the trainer, padded only where a parallel layout needs it.

    Shapes: T = all tokens, B = sequences. Position t predicts ``target_ids[t]``, the token after it in the same
    sequence; it is ``IGNORE_INDEX`` wherever that token was not sampled by the policy (prompt, last position, padding).

    Attributes:
        tokens: int64 [T].
        position_ids: int64 [T], starting at 0 in each sequence.
        cu_seqlens: int32 [B + 1].
        target_ids: int64 [T].
        sample_index: int64 [B], index into the list of samples; -1 for a padding sequence.
        prompt_lens: int64 [B].
        rollout_logp: float32 [T], aligned with ``target_ids``; 0 where ignored.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    target_ids: torch.Tensor
    sample_index: torch.Tensor
    prompt_lens: torch.Tensor
    rollout_logp: torch.Tensor

    @property
    def active(self) -> torch.Tensor:
        """Bool [T]: positions whose target the policy sampled."""
        return self.target_ids != IGNORE_INDEX

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.numel()

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with every tensor on ``device``."""
        return PackedBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @staticmethod
    def from_samples(
        samples: Sequence[Sample],
        *,
        indices: Sequence[int] | None = None,
        pad_to_multiple: int = 1,
        sequence_multiple: int = 1,
        pad_id: int = 0,
    ) -> PackedBatch:
        """Pack ``samples`` in the given order.

        Args:
            samples: at least one.
            indices: what ``sample_index`` holds for each of them; 0, 1, ... when absent.
            pad_to_multiple: append one padding sequence so that T becomes a multiple (sequence parallelism needs it).
            sequence_multiple: pad every sequence at its end to a multiple (context parallelism cuts each into equal
                chunks). Padding follows the response, so causal attention keeps it away from every real token.
            pad_id: token of the padding.

        Raises:
            DataError: there is no sample.
        """
        if not samples:
            raise DataError("no sample to pack", where="PackedBatch.from_samples", fix="Skip empty micro-batches.")
        tokens: list[int] = []
        positions: list[int] = []
        targets: list[int] = []
        logp: list[np.ndarray] = []
        lengths: list[int] = []
        for sample in samples:
            p, r = len(sample.prompt_ids), len(sample.response_ids)
            tail = -(p + r) % sequence_multiple
            tokens += [*sample.prompt_ids, *sample.response_ids, *[pad_id] * tail]
            positions += range(p + r + tail)
            targets += [IGNORE_INDEX] * (p - 1) + list(sample.response_ids) + [IGNORE_INDEX] * (1 + tail)
            logp += [np.zeros(p - 1, np.float32), sample.rollout_logp, np.zeros(1 + tail, np.float32)]
            lengths.append(p + r + tail)
        sample_index = list(range(len(samples)) if indices is None else indices)
        prompt_lens = [len(sample.prompt_ids) for sample in samples]
        pad = -len(tokens) % pad_to_multiple
        if pad:
            tokens += [pad_id] * pad
            positions += range(pad)
            targets += [IGNORE_INDEX] * pad
            logp.append(np.zeros(pad, np.float32))
            lengths.append(pad)
            sample_index.append(-1)
            prompt_lens.append(pad)
        return PackedBatch(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            position_ids=torch.tensor(positions, dtype=torch.int64),
            cu_seqlens=torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32),
            target_ids=torch.tensor(targets, dtype=torch.int64),
            sample_index=torch.tensor(sample_index, dtype=torch.int64),
            prompt_lens=torch.tensor(prompt_lens, dtype=torch.int64),
            rollout_logp=torch.from_numpy(np.concatenate(logp)),
        )
