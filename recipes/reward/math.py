"""Mathematical answers, compared by math-verify in worker processes under a hard time limit.

Reward 1.0 for an answer equal to the reference, else 0.0. The comparison of two expressions may take forever, or all
memory, inside C code where no signal reaches; so it runs in processes that are killed and replaced when they exceed the
limit. A comparison that times out counts as wrong and is reported as ``reward/timeout_count``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from recipes.errors import ConfigError, EngineError
from recipes.reward.extract import extract_answer, normalize
from recipes.reward.types import RewardItem, RewardResult, summarize

START_SECONDS = 120.0


class _Worker:
    """One comparison process, started on first use and after every kill."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _read(self, seconds: float) -> dict[str, object] | None:
        """The next message; None when there is none in time. Raises EOFError when the process ended."""
        assert self._process is not None and self._process.stdout is not None
        stream: IO[bytes] = self._process.stdout
        if not select.select([stream], [], [], seconds)[0]:
            return None
        line = stream.readline()  # messages are short and written at once
        if not line:
            raise EOFError
        return json.loads(line)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        # -P: the script's folder holds a math.py that must not shadow the standard one.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        try:
            ready = self._read(START_SECONDS)
        except EOFError:
            ready = None
        if ready is None:
            self.kill()
            raise EngineError(
                "a math-verify worker does not start",
                where="reward",
                fix=f"Run: {sys.executable} -c 'import math_verify'",
            )

    def equal(self, answer: str, candidate: str, seconds: float) -> str:
        """``equal``, ``different``, ``timeout`` or ``error``."""
        self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps([answer, candidate]) + "\n").encode())
            message = self._read(seconds)
        except (EOFError, OSError):  # the process died: out of memory
            self.kill()
            return "error"
        if message is None:
            self.kill()
            return "timeout"
        if "error" in message:
            return "error"
        return "equal" if message["equal"] else "different"

    def kill(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class MathReward:
    """The math reward as a :class:`recipes.reward.types.RewardFunction`.

    Args:
        timeout_s: most seconds one comparison may take.
        num_workers: comparison processes.

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(self, *, timeout_s: float = 5.0, num_workers: int = 1) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "math-verify is not installed",
                where="reward=math",
                fix="pip install math-verify, or reward=arithmetic.",
            )
        if timeout_s <= 0 or num_workers < 1:
            raise ConfigError(
                f"timeout_s={timeout_s} and num_workers={num_workers} must be positive",
                where="reward",
                fix="Use reward.timeout_s=5 reward.num_workers=1.",
            )
        self.timeout_s = timeout_s
        self._workers = [_Worker() for _ in range(num_workers)]

    def __call__(self, items: Sequence[RewardItem]) -> RewardResult:
        """Score ``items``. The same pair of expressions is compared once a batch.

        Metrics besides the common ones: ``reward/no_answer_count`` (neither a box nor an answer line),
        ``reward/timeout_count``, ``reward/error_count`` (not parseable, or the worker ran out of memory).
        """
        candidates = [extract_answer(item.response) for item in items]
        verdicts: dict[tuple[str, str], str] = {}
        pending: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for item, candidate in zip(items, candidates):
            if candidate is None or (item.answer, candidate) in verdicts:
                continue
            key = (item.answer, candidate)
            if normalize(item.answer) == normalize(candidate):
                verdicts[key] = "equal"
            else:
                verdicts[key] = "pending"
                pending.put(key)
        self._compare(pending, verdicts)
        states = ["none" if c is None else verdicts[(i.answer, c)] for i, c in zip(items, candidates)]
        rewards = [1.0 if state == "equal" else 0.0 for state in states]
        extra = {
            "reward/no_answer_count": states.count("none"),
            "reward/timeout_count": states.count("timeout"),
            "reward/error_count": states.count("error"),
        }
        return summarize(rewards, states.count("equal"), extra)

    def _compare(self, pending: queue.SimpleQueue[tuple[str, str]], verdicts: dict[tuple[str, str], str]) -> None:
        failures: list[BaseException] = []

        def serve(worker: _Worker) -> None:
            try:
                while not failures:
                    key = pending.get_nowait()
                    verdicts[key] = worker.equal(*key, self.timeout_s)
            except queue.Empty:
                pass
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                failures.append(error)

        active = self._workers[: pending.qsize()]
        threads = [threading.Thread(target=serve, args=(w,), daemon=True, name="math-reward") for w in active]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the workers. Idempotent."""
        for worker in self._workers:
            worker.kill()
