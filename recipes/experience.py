"""What one step knows about each response: reward, log-probabilities, advantages. Pure bookkeeping, no engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from recipes.algorithms import grpo, ppo
from recipes.algorithms.common import token_weights
from recipes.batching import MicroBatch, chunk, micro_batches, padding_of
from recipes.config import RunConfig
from recipes.engines.types import Sample
from recipes.errors import DataError, EngineError
from recipes.metrics.mismatch import MismatchStats


@dataclass(eq=False)
class Experience:
    """The responses of one step, groups of one prompt next to each other; every list has one entry per response."""

    samples: list[Sample]
    rewards: list[float]
    reward_metrics: dict[str, float | int] = field(default_factory=dict)
    old_logp: list[np.ndarray] = field(default_factory=list)
    ref_logp: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    returns: list[np.ndarray] = field(default_factory=list)
    advantages: list[np.ndarray | float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each sample."""
        return [len(s.response_ids) for s in self.samples]

    def compare(self) -> MismatchStats:
        """Bits of ``old_logp`` against the rollout engine's.

        Raises:
            EngineError: the training group did not return one log-probability for each sampled token.
        """
        if [a.shape[0] for a in self.old_logp] != self.lengths:
            raise EngineError("the number of training log-probabilities is not that of the sampled tokens")
        rollout = np.concatenate([s.rollout_logp for s in self.samples])
        train = np.concatenate(self.old_logp)
        stats = MismatchStats.from_batch(train, rollout, np.ones(train.size, bool), self.lengths)
        stats.require_tokens(sum(self.lengths))
        return stats

    def digest(self) -> str:
        """64 hex digits over the tokens of every response and the bits of its training log-probabilities: two runs of
        equal weights, prompts and seeds agree in it if and only if they agree in every token and bit."""
        found = hashlib.sha256()
        for sample, logp in zip(self.samples, self.old_logp, strict=True):
            found.update(np.asarray([len(sample.response_ids), *sample.response_ids], np.int64).tobytes())
            found.update(np.ascontiguousarray(logp, np.float32).tobytes())
        return found.hexdigest()

    def evidence(self, limit: int) -> list[dict[str, object]]:
        """The first ``limit`` tokens whose bits differ: enough to replay one of them."""
        found: list[dict[str, object]] = []
        for index, (sample, train) in enumerate(zip(self.samples, self.old_logp)):
            differ = train.view(np.int32) != sample.rollout_logp.view(np.int32)
            for position in np.flatnonzero(differ | ~np.isfinite(train)).tolist():
                if len(found) == limit:
                    return found
                found.append(
                    {
                        "sample": index,
                        "position": position,
                        "token": sample.response_ids[position],
                        "rollout_logp": float(sample.rollout_logp[position]).hex(),
                        "train_logp": float(train[position]).hex(),
                        "weight_version": sample.weight_version,
                        "prompt_ids": list(sample.prompt_ids),
                        "response_ids": list(sample.response_ids[: position + 1]),
                    }
                )
        return found

    def compute_advantages(self, config: RunConfig) -> None:
        """Fill ``advantages`` (and ``returns`` for PPO) and decide which responses take part in the loss.

        Raises:
            DataError: a reward or value is not finite.
        """
        algorithm = config.algorithm
        self.kept = [not (algorithm.mask_truncated and s.finish_reason == "length") for s in self.samples]
        if algorithm.name == "grpo":
            values = grpo.group_advantages(
                self.rewards,
                config.rollout.n_samples_per_prompt,
                normalize_std=algorithm.normalize_std,
                eps=algorithm.advantage_eps,
            )
            self.advantages = [float(a) for a in values]
            return
        pairs = [
            ppo.gae(reward, value, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
            for reward, value in zip(self.rewards, self.values, strict=True)
        ]
        self.returns = [r for _, r in pairs]
        self.advantages = [a for a, _ in pairs]
        if algorithm.whiten_advantages:  # over the tokens of the loss alone
            kept = [i for i, keep in enumerate(self.kept) if keep]
            for i, white in zip(kept, ppo.whiten([pairs[i][0] for i in kept]), strict=True):
                self.advantages[i] = white

    def columns(self, indices: list[int], config: RunConfig) -> dict[str, list[np.ndarray | float]]:
        """Per-token columns of a minibatch; weights sum to 1 over ``indices``."""
        lengths, kept = self.lengths, self.kept
        weights = token_weights(
            [lengths[i] for i in indices], [kept[i] for i in indices], config.algorithm.loss_aggregation
        )
        weight: list[np.ndarray | float] = [0.0] * len(self.samples)
        for i, w in zip(indices, weights, strict=True):
            weight[i] = w
        columns: dict[str, list[np.ndarray | float]] = {
            "weight": weight,
            "old_logp": list(self.old_logp),
            "advantages": self.advantages,
        }
        for name in ("ref_logp", "values", "returns"):
            if getattr(self, name):
                columns[name] = list(getattr(self, name))
        return columns

    def minibatches(self, config: RunConfig) -> Iterator[list[list[MicroBatch]]]:
        """Micro-batches of each data-parallel rank, one item an optimizer step; fully masked minibatches are left out.

        Minibatches are contiguous, so a group of one prompt is spread over as few of them as possible.
        """
        for _ in range(config.algorithm.ppo_epochs):
            for part in chunk(len(self.samples), config.algorithm.num_minibatches):
                indices = list(part)
                if any(self.kept[i] for i in indices):
                    yield self.packs(config, indices=indices, columns=self.columns(indices, config))

    def packs(
        self,
        config: RunConfig,
        *,
        indices: list[int] | None = None,
        columns: dict[str, list[np.ndarray | float]] | None = None,
    ) -> list[list[MicroBatch]]:
        """Micro-batches of each data-parallel rank over ``indices`` (all when absent)."""
        if not self.samples:
            raise DataError("there is no response to train on", where="rollout")
        sequence_multiple, pad_to_multiple = padding_of(config.train)
        return micro_batches(
            self.samples,
            columns or {},
            data_parallel_size=config.train.data_parallel_size,
            budget=config.train.micro_batch_tokens,
            indices=indices,
            pad_to_multiple=pad_to_multiple,
            sequence_multiple=sequence_multiple,
        )

    def metrics(self, config: RunConfig) -> dict[str, float | int]:
        """``reward/*`` and ``rollout/*`` of the step."""
        lengths, n = np.asarray(self.lengths), config.rollout.n_samples_per_prompt
        mixed = grpo.informative_groups(self.rewards, n)
        return {
            **self.reward_metrics,
            "reward/mixed_groups": sum(mixed) / len(mixed),
            "rollout/responses": len(self.samples),
            "rollout/response_tokens": int(lengths.sum()),
            "rollout/response_len_mean": float(lengths.mean()),
            "rollout/response_len_max": int(lengths.max()),
            "rollout/truncated_fraction": sum(s.finish_reason == "length" for s in self.samples) / len(self.samples),
        }
