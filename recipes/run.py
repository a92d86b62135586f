"""One run from start to end: processes up, resume, steps, checkpoints, progress, a clean end in every case."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.actors import Cluster
from recipes.checkpoint import Checkpointer, require_same_run, run_identity, set_aside
from recipes.config import RunConfig
from recipes.errors import RecipeError, WeightSyncError
from recipes.loop import Loop
from recipes.manifest import require_same_contract, write_manifest
from recipes.metrics.logging import MetricLogger
from recipes.task import Task, load_task

INTERRUPTED = 130


class Stop(BaseException):
    """The user wants out at once."""


class Signals(contextlib.AbstractContextManager):
    """Ctrl-C and SIGTERM. The first one lets a step finish; a second one, or one outside of a step, ends at once."""

    def __init__(self) -> None:
        self.requested = False
        self.in_step = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over. Ray installs its own handlers when it starts, so call it again after that."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous = signal.signal(number, self._handle)
                self._previous.setdefault(number, previous)

    def _handle(self, number: int, frame: object) -> None:
        if self.requested or not self.in_step:
            raise Stop
        self.requested = True
        print("\nstopping after this step, with a checkpoint (once more: at once)", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)


class Run:
    """A :class:`Loop` with persistence and reporting.

    Args:
        config: validated.
        cluster: not yet started.
        task: prompts and reward.
        resume_command: shown when the run ends early.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, task: Task, resume_command: str = "") -> None:
        self.config, self.cluster, self.task = config, cluster, task
        self.resume_command = resume_command
        self.loop = Loop(config, cluster, task)
        self.saved_at = -1
        # Weights, fp32 master weights and two moments of every trained model.
        trained = 16 * config.model.parameter_count() * (2 if config.algorithm.name == "ppo" else 1)
        self.checkpointer = Checkpointer(
            config.trainer.output_dir, keep=config.trainer.keep_checkpoints, expected_bytes=trained
        )

    def resume(self) -> None:
        """Continue the newest checkpoint of the run directory, if there is one; then sync the weights."""
        loop, found = self.loop, self.checkpointer.latest()
        if found:
            require_same_run(found.state["identity"], self.config.to_dict())
            self.cluster.restore(str(found.path))
            loop.step, loop.cursor, self.saved_at = found.step, found.state["cursor"], found.step
        loop.sync()
        if found and loop.weight_hash != found.state["weight_hash"]:
            raise WeightSyncError(
                f"restored weights have hash {loop.weight_hash[:16]}, {found.state['weight_hash'][:16]} was saved",
                where=str(found.path),
                fix="Remove this checkpoint to resume from the one before it.",
            )

    def save(self) -> None:
        """Checkpoint the finished steps, unless that was done."""
        loop = self.loop
        if self.saved_at == loop.step:
            return
        with loop.timed("checkpoint"):
            state = {
                "cursor": loop.cursor,
                "identity": run_identity(self.config.to_dict()),
                "weight_hash": loop.weight_hash,
            }
            self.checkpointer.save(loop.step, state, self.cluster.save)
        self.saved_at = loop.step

    def steps(self, logger: MetricLogger, signals: Signals) -> None:
        """Every remaining step."""
        loop, trainer = self.loop, self.config.trainer
        bar = tqdm(
            total=trainer.steps,
            initial=loop.step,
            disable=not self.config.logger.progress,
            file=sys.stderr,
            dynamic_ncols=True,
            desc=f"{self.config.algorithm.name} {self.config.consistency.mode}",
        )
        with bar:
            while loop.step < trainer.steps and not signals.requested:
                signals.in_step = True
                row = loop.one_step(logger.log)
                bar.set_postfix_str(
                    f"reward {row['reward/mean']:.3f}, mismatch_count {row['consistency/mismatch_count']}, "
                    f"{row['perf/tokens_per_s']:.0f} tok/s",
                    refresh=False,
                )
                bar.update()
                due = trainer.save_interval and loop.step % trainer.save_interval == 0
                if due or signals.requested or loop.step == trainer.steps:
                    self.save()
                signals.in_step = False

    def execute(self) -> int:
        """Run, whatever happens leave no process behind. Returns 0, or 130 after an interruption."""
        config, loop = self.config, self.loop
        folder = Path(config.trainer.output_dir)
        if config.trainer.resume == "never":
            set_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpointer.require_space()
        with Signals() as signals, contextlib.ExitStack() as stack:
            signals.install()
            stack.callback(self.task.close)
            stack.callback(self.cluster.shutdown)
            try:
                self.cluster.start(signals.install)
                require_same_contract(config, *self.cluster.infos)
                self.resume()
                write_manifest(folder, config, *self.cluster.infos, weight_hash=loop.weight_hash, first_step=loop.step)
                logger = MetricLogger(
                    folder,
                    first_step=loop.step,
                    wandb=config.logger.wandb,
                    config=config.to_dict(),
                    project=config.logger.project,
                    name=config.logger.run_name,
                )
                with logger:
                    self.steps(logger, signals)
                stopped = signals.requested
            except (Stop, SystemExit):  # SystemExit: Ray's own handler, while Ray starts
                stopped = True
            except RecipeError:
                self._explain_resume("stopped")
                raise
            finally:
                signals.in_step = False
        if stopped and loop.step < config.trainer.steps:
            self._explain_resume("interrupted")
            return INTERRUPTED
        return 0

    def _explain_resume(self, what: str) -> None:
        print(f"\n{what} after {self.loop.step} of {self.config.trainer.steps} steps", file=sys.stderr)
        if self.saved_at >= 0:
            print(f"checkpoint of step {self.saved_at}: {self.checkpointer.folder}", file=sys.stderr)
            if self.resume_command:
                print(f"to resume: {self.resume_command}", file=sys.stderr)


def run(config: RunConfig, *, resume_command: str = "") -> int:
    """Run ``config`` with real engines; returns the exit code."""
    return Run(config, Cluster(config), load_task(config), resume_command).execute()
