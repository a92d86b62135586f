"""One run from start to end: processes up, resume, steps, checkpoints, progress, a clean end in every case."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.checkpoint import Checkpoint, Checkpointer, require_same_run, run_identity, run_lock, set_aside
from recipes.cluster import Cluster
from recipes.config import RunConfig
from recipes.engines.weights import HASH_KIND
from recipes.errors import CheckpointError, DataError, EngineError, RecipeError, WeightSyncError
from recipes.loop import Loop
from recipes.metrics import report
from recipes.metrics.logging import MetricLogger
from recipes.metrics.manifest import Manifest
from recipes.task import Task, make_task
from rl_kernel import require_equal

INTERRUPTED = 130
log = logging.getLogger(__name__)


class Stop(KeyboardInterrupt):
    """The user wants out at once."""


class Signals(contextlib.AbstractContextManager):
    """Ctrl-C and SIGTERM. The first one lets a step finish; a second one, or one outside of a step, ends at once."""

    def __init__(self) -> None:
        self.requested = False  # after this step
        self.at_once = False
        self.in_step = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over. Ray installs its own handlers when it starts, so call it again after that."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous = signal.signal(number, self._handle)
                self._previous.setdefault(number, previous)
        self.check()

    def check(self) -> None:
        """End now if a handler has said so in a place, such as a callback of Ray's start, that swallows exceptions."""
        if self.at_once:
            raise Stop

    def _handle(self, number: int, frame: object) -> None:
        if self.requested or not self.in_step:
            self.at_once = True
            raise Stop
        self.requested = True
        print("\nstopping after this step, with a checkpoint (once more: at once)", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)


def require_same_contract(mode: str, train: list[dict[str, Any]], rollout: list[dict[str, Any]]) -> None:
    """Compare the contract fingerprints that all processes report. ``fast`` and ``native`` promise no bits.

    Raises:
        ContractError: they differ.
        EngineError: a process reports none.
    """
    if mode in ("fast", "native"):
        return
    for side, infos in (("train", train), ("rollout", rollout)):
        for index, info in enumerate(infos):
            if not info.get("contract"):
                raise EngineError("reports no contract fingerprint", where=f"{side}-{index}")
            require_equal(info["contract"], train[0]["contract"])


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
        self.manifest: Manifest | None = None
        # Weights, fp32 master weights and Adam's two moments of every trained model.
        each = 8 + 8 * (config.train.optimizer == "adam")
        trained = each * config.model.parameter_count() * (2 if config.algorithm.name == "ppo" else 1)
        self.checkpointer = Checkpointer(
            config.trainer.output_dir, keep=config.trainer.keep_checkpoints, expected_bytes=trained
        )

    def find_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the run directory, of this very configuration; before any process starts."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.task.close)
            found = self.checkpointer.latest()
            if found:
                require_same_run(found.state["identity"], self.config.to_dict(), self._data())
            stack.pop_all()
        return found

    def resume(self, found: Checkpoint | None) -> None:
        """Continue ``found``, if there is one; then sync the weights."""
        loop = self.loop
        if found:
            saved, now = found.state.get("contract"), self._contract()
            if saved != now:
                raise CheckpointError(
                    f"was written under contract {saved}, this machine and version keep {now}: bits would change",
                    where=str(found.path),
                    fix="Resume where it was written, or start in a new hydra.run.dir.",
                )
            self.cluster.restore(str(found.path))
            loop.step, loop.cursor, self.saved_at = found.step, found.state["cursor"], found.step
        else:  # from step 0: rows of a run that got to no checkpoint, or of another one, are not this run's
            set_aside(self.config.trainer.output_dir)
        loop.sync()
        if found and found.state.get("weight_hash_kind") != HASH_KIND:  # its files were verified when it was read
            log.warning("%s holds a weight hash of another kind, which is not compared", found.path)
        elif found and loop.weight_hash != found.state["weight_hash"]:
            raise WeightSyncError(
                f"restored weights have hash {loop.weight_hash[:16]}, {found.state['weight_hash'][:16]} was saved",
                where=str(found.path),
                fix="Remove this checkpoint to resume from the one before it.",
            )

    def _contract(self) -> str | None:
        return self.cluster.infos[0][0].get("contract")

    def _data(self) -> str | None:
        return self.task.info().get("sha256")

    def save(self) -> None:
        """Checkpoint the finished steps, unless that was done or the run keeps none."""
        loop = self.loop
        if self.saved_at == loop.step or self.config.trainer.save_interval < 0:
            return
        with loop.timed("checkpoint"):
            state = {
                "cursor": loop.cursor,
                "identity": run_identity(self.config.to_dict(), self._data()),
                "weight_hash": loop.weight_hash,
                "weight_hash_kind": HASH_KIND,
                "contract": self._contract(),
            }
            self.checkpointer.save(loop.step, state, self.cluster.save)
        if self.manifest is not None:
            self.manifest.flush()
        self.saved_at = loop.step

    def steps(self, logger: MetricLogger, signals: Signals) -> None:
        """Every remaining step."""
        loop, trainer, first = self.loop, self.config.trainer, self.loop.step
        bar = tqdm(
            total=trainer.steps,
            initial=loop.step,
            disable=not self.config.logger.progress,
            file=sys.stderr,
            dynamic_ncols=True,
            desc=f"{self.config.algorithm.name} {self.config.consistency.mode}",
        )
        signals.check()
        signals.in_step = True  # for the whole loop: a signal between two steps must end with a checkpoint as well
        with bar:
            while loop.step < trainer.steps and not signals.requested:
                row = loop.one_step(logger.log)
                if self.manifest is not None:
                    self.manifest.weights(loop.step, loop.weight_hash)
                    if loop.step == first + 1:  # backends are resolved by the first calls; a killed run must know them
                        self.manifest.engines(*self.cluster.describe())
                if loop.step == first + 1 and row["kernel/fallback_count"]:
                    log.warning(
                        "%s choices passed over a preferred backend (in use: %s); rl_kernel.explain says why",
                        row["kernel/fallback_count"],
                        row["kernel/backend"],
                    )
                bar.set_postfix_str(
                    f"reward {row['reward/mean']:.3f}, mismatch_count {row['consistency/mismatch_count']}, "
                    f"{row['perf/tokens_per_s']:.0f} tok/s",
                    refresh=False,
                )
                bar.update()
                due = trainer.save_interval > 0 and loop.step % trainer.save_interval == 0
                if due or signals.requested or loop.step == trainer.steps:
                    self.save()
            if signals.requested:  # it may have come after the last look at it
                self.save()
        signals.in_step = False

    def execute(self) -> int:
        """Run; whatever happens, leave no process behind. Returns 0, or 130 after an interruption.

        Raises:
            CheckpointError: another run holds the run directory, which is untouched then.
        """
        with run_lock(self.config.trainer.output_dir):
            return self._execute()

    def _execute(self) -> int:
        config, loop = self.config, self.loop
        folder = Path(config.trainer.output_dir)
        self.checkpointer.remove_left_overs()
        if config.trainer.resume == "never":
            set_aside(folder)
        if config.trainer.save_interval >= 0:
            self.checkpointer.require_space()
        found = self.find_checkpoint()
        signals = Signals()
        try:
            with signals, contextlib.ExitStack() as stack:
                signals.install()
                stack.callback(self.task.close)
                stack.callback(self.cluster.shutdown)
                self.cluster.start(signals.install)
                require_same_contract(config.consistency.mode, *self.cluster.infos)
                self.resume(found)
                facts: dict[str, Any] = {"data": self.task.info(), "weight_sync": self.cluster.sync_facts()}
                self.manifest = Manifest(folder, config.to_dict(), first_step=loop.step, **facts)
                self.manifest.engines(*self.cluster.infos)
                self.manifest.weights(loop.step, loop.weight_hash)
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
                self.manifest.engines(*self.cluster.describe())
        except BaseException as error:
            # Ray's own handler exits while Ray starts, and compiled code may wrap what a handler of ours raised.
            if signals.at_once or isinstance(error, SystemExit):
                return self._end("interrupted")
            self._end("failed", error)
            raise
        return self._end("completed" if loop.step >= config.trainer.steps else "interrupted")

    def _end(self, state: str, error: BaseException | None = None) -> int:
        """Close the manifest, say how to go on, return the exit code."""
        if self.manifest is not None:
            # A full disk may be what ended the run: the first error is the one to show.
            with contextlib.suppress(RecipeError):
                self.manifest.finish(state, last_step=self.loop.step, error=error)
        self._show()
        if state == "completed":
            return 0
        print(f"\n{state} after {self.loop.step} of {self.config.trainer.steps} steps", file=sys.stderr)
        if self.saved_at >= 0:
            print(f"checkpoint of step {self.saved_at}: {self.checkpointer.folder}", file=sys.stderr)
            if self.resume_command:
                print(f"to resume: {self.resume_command}", file=sys.stderr)
        return INTERRUPTED if state == "interrupted" else 1

    def _show(self) -> None:
        """Two lines about the run, and ``report.html``."""
        folder = Path(self.config.trainer.output_dir)
        try:
            figures = report.totals(report.load_run(folder))
        except DataError:  # not one step was finished
            return
        first, last = figures["reward_first"], figures["reward_last"]
        print(
            f"\nreward {first:.3f} -> {last:.3f} (mean of the first and last {report.WINDOW} steps), mismatch_count "
            f"{figures['mismatch_count']} of {figures['active_tokens']:,} tokens",
            file=sys.stderr,
        )
        if self.config.logger.report:
            try:
                print(f"report: {report.write_report(folder)}", file=sys.stderr)
            except (RecipeError, ImportError) as error:
                log.warning("no report.html: %s", error)


def run(config: RunConfig, *, resume_command: str = "") -> int:
    """Run ``config`` with real engines; returns the exit code."""
    return Run(config, Cluster(config), make_task(config), resume_command).execute()
