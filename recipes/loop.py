"""The embedded loop: roll out, score, compare bits, train, sync. No backend is imported here."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.algorithms.grpo import informative_groups
from recipes.batching import derive_seed
from recipes.cluster import Cluster
from recipes.config import RunConfig
from recipes.engines.types import SamplingParams
from recipes.errors import EngineError, WeightSyncError
from recipes.experience import Experience
from recipes.task import Task

log = logging.getLogger(__name__)


class Loop:
    """One run: its processes, its data, and the few numbers that are its state (``step``, ``cursor``)."""

    def __init__(self, config: RunConfig, cluster: Cluster, task: Task) -> None:
        self.config, self.cluster, self.task = config, cluster, task
        self.step, self.cursor = 0, 0  # finished steps, prompts drawn
        self.weight_hash = ""
        self.times: dict[str, float] = {}
        self.sampling = SamplingParams(
            temperature=config.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_tokens=config.rollout.max_response_len,
            n=config.rollout.n_samples_per_prompt,
            stop_token_ids=task.eos_token_ids,
            ignore_eos=config.rollout.ignore_eos,
        )

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to ``time/<name>``."""
        start = time.monotonic()
        yield
        self.times[f"time/{name}"] = self.times.get(f"time/{name}", 0.0) + time.monotonic() - start

    # ------------------------------------------------------------------ the parts of a step

    def draw(self, count: int) -> Experience:
        """Responses to the next ``count`` prompts, with rewards. Seeds depend on step, prompt and sample only."""
        n, seed, start = self.sampling.n, self.config.trainer.seed, self.cursor
        prompts = self.task.take(start, count)
        seeds = [derive_seed(seed, self.step, start + i, j) for i in range(count) for j in range(n)]
        with self.timed("rollout"):
            ids = [list(prompt.prompt_ids) for prompt in prompts]
            samples = self.cluster.generate(ids, self.sampling, seeds, self.step)
        self.cursor += count
        if len(samples) != count * n:
            raise EngineError(f"{len(samples)} responses came back for {count} prompts x {n}", where="rollout")
        stale = [s.weight_version for s in samples if s.weight_version != self.step]
        if stale:
            raise WeightSyncError(
                f"a response was drawn with weights of version {stale[0]}, the trainer is at {self.step}",
                where="rollout",
                fix="An engine missed an update; restart the run, it resumes from the last checkpoint.",
            )
        with self.timed("reward"):
            scored = self.task.score([prompts[s.prompt_index] for s in samples], samples)
        return Experience(samples, scored.rewards, scored.metrics)

    def collect(self) -> tuple[Experience, dict[str, Any]]:
        """The responses of a step; with dynamic sampling, groups of equal rewards are replaced by further prompts."""
        batch, n = self.config.rollout.batch_size, self.config.rollout.n_samples_per_prompt
        first = self.draw(batch)
        metrics = first.metrics(self.config)  # of what the policy drew: a filter must not flatter reward/mean
        if not self.config.algorithm.dynamic_sampling:
            return first, metrics
        kept, dropped, rounds, part = Experience([], []), 0, 1, first
        while True:
            for group, good in enumerate(informative_groups(part.rewards, n)):
                if good and len(kept.samples) < batch * n:
                    kept.samples += part.samples[group * n : group * n + n]
                    kept.rewards += part.rewards[group * n : group * n + n]
                dropped += not good
            if len(kept.samples) == batch * n or rounds == self.config.algorithm.dynamic_sampling_max_rounds:
                metrics |= {"rollout/groups_dropped": dropped, "rollout/rounds": rounds}
                return (kept if kept.samples else first), metrics
            part, rounds = self.draw(batch), rounds + 1

    def evaluate(self, batch: Experience) -> None:
        """Old and reference log-probabilities and values, from the training engine and before any update."""
        count, shares = len(batch.samples), batch.packs(self.config)
        with self.timed("logp"):
            batch.old_logp = self.cluster.per_sample("logp", shares, count, "policy")
        if self.config.algorithm.kl_coef > 0:
            with self.timed("ref_logp"):
                batch.ref_logp = self.cluster.per_sample("logp", shares, count, "reference")
        if self.config.algorithm.name == "ppo":
            with self.timed("values"):
                batch.values = self.cluster.per_sample("values", shares, count)

    def train(self, batch: Experience) -> dict[str, float]:
        """All optimizer steps of one rollout; metrics are means over them."""
        roles = ["critic"] if self.config.algorithm.name == "ppo" else []
        roles += ["policy"] if self.step >= self.config.algorithm.critic_warmup_steps or not roles else []
        history: dict[str, list[float]] = {}
        with self.timed("update"):
            for minibatch in batch.minibatches(self.config):
                for role in roles:
                    for key, value in self.cluster.update(minibatch, role).items():
                        name = f"train/{key.replace('/', '_')}" if key.startswith(role) else key
                        history.setdefault(name, []).append(value)
        if not history:
            log.warning("step %d: every response is masked (algorithm.mask_truncated), nothing is trained", self.step)
        for key, values in history.items():
            if not all(map(math.isfinite, values)):
                raise EngineError(
                    f"{key} is {values} at step {self.step}",
                    where="train",
                    fix="Weights or rewards are not finite: lower train.lr or resume from the last checkpoint.",
                )
        steps = len(history.get(f"train/{roles[0]}_grad_norm", ()))
        return {"train/optimizer_steps": steps, **{key: sum(values) / len(values) for key, values in history.items()}}

    def sync(self) -> None:
        """Give the rollout engines the policy; the version is the number of finished steps."""
        with self.timed("sync"):
            self.weight_hash = self.cluster.sync(self.step)

    def one_step(self, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """One step. The row is logged also when the comparison stops the run."""
        start = time.monotonic()
        batch, row = self.collect()
        self.evaluate(batch)
        stats = batch.compare()
        row = {"step": self.step, "train/weight_version": self.step, **row, **stats.metrics()}
        row["train/weight_hash"], row["consistency/digest"] = self.weight_hash[:16], batch.digest()[:16]
        strict = self.config.consistency.mode == "strict"
        if (stats.mismatch_count and strict) or row["consistency/nonfinite_count"]:
            write({**row, **self.cluster.kernel(), **self.times})
            self.stop_for_mismatch(batch, row)
        batch.compute_advantages(self.config)
        row |= self.train(batch)
        row |= self.cluster.kernel()  # after backward, which has met shapes of its own
        self.step += 1
        self.sync()
        seconds = time.monotonic() - start
        row |= {**self.times, "time/step": seconds, "perf/tokens_per_s": row["rollout/response_tokens"] / seconds}
        write(row)
        self.times = {}  # what follows (a checkpoint) counts for the next step
        return row

    def stop_for_mismatch(self, batch: Experience, row: dict[str, Any]) -> None:
        """Write the evidence and raise."""
        path = Path(self.config.trainer.output_dir) / "mismatch.jsonl"
        lines = [json.dumps(item) for item in batch.evidence(self.config.consistency.evidence_tokens)]
        path.write_text("\n".join(lines) + "\n")
        bad = row["consistency/nonfinite_count"]
        raise EngineError(
            f"{row['consistency/mismatch_count']} of {row['consistency/active_tokens']} log-probabilities differ "
            f"between rollout and training at step {self.step}" + (f", {bad} are not finite" if bad else ""),
            where=f"consistency={self.config.consistency.mode}",
            fix=f"Tokens and bits are in {path}; consistency=audit reports and goes on. No weight was updated.",
        )
