"""Actors in plain processes: one ``python -m recipes.transport.child`` each, and a socket to it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from recipes.transport import ActorDiedError, ActorFailedError


@dataclass(frozen=True)
class Put:
    """A value that is serialised already."""

    data: bytes


@dataclass(eq=False)
class Process:
    """One actor: its process, the socket, answers that nobody asked for yet."""

    popen: subprocess.Popen
    pipe: Connection
    calls: int = 0
    answers: dict[int, tuple[bool, Any]] = field(default_factory=dict)
    ended: str = ""  # how, once it has

    def read(self) -> None:
        """Take one answer, or notice the end."""
        try:
            number, good, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.ended = self._how()
        else:
            self.answers[number] = (good, value)

    def _how(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.popen.wait(timeout=10)
            if code < 0:
                with contextlib.suppress(ValueError):
                    return f"killed by {signal.Signals(-code).name}"
            return f"exit code {code}"
        return "it closed its connection"

    def kill(self) -> None:
        """End the process and everything it started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=10)


@dataclass(frozen=True)
class Reference:
    """The answer to one call."""

    process: Process
    number: int


class ProcessTransport:
    """See :class:`recipes.transport.Transport`.

    A child leads a session of its own, so Ctrl-C in a terminal reaches the driver alone, and killing the session takes
    along what the child started (vLLM's workers). When the driver goes, the socket closes and the child kills its
    session. Values travel as pickles; the messages of both directions are read as soon as they come.
    """

    name = "process"

    def __init__(self) -> None:
        self._all: list[Process] = []

    def require_space(self) -> None:
        """Nothing is written but the logs."""

    def start(self) -> None:
        """Nothing to start."""

    def spawn(self, cls: type, args: Sequence[Any], *, env: Mapping[str, str], log: Path) -> Process:
        """Start a child; its output goes to ``log`` from its first line."""
        ours, theirs = Pipe(duplex=True)
        command = [sys.executable, "-m", "recipes.transport.child", str(theirs.fileno())]
        with theirs, open(log, "ab") as output:
            process = Process(
                subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                ),
                ours,
            )
        self._all.append(process)
        self._send(process, (f"{cls.__module__}:{cls.__qualname__}", pickle.dumps(tuple(args))))
        return process

    def call(self, actor: Process, method: str, args: Sequence[Any]) -> Reference:
        """Send the call; a child that is gone is noticed by :meth:`wait`."""
        actor.calls += 1
        parts = [arg.data if isinstance(arg, Put) else pickle.dumps(arg) for arg in args]
        self._send(actor, (actor.calls, method, parts))
        return Reference(actor, actor.calls)

    @staticmethod
    def _send(process: Process, message: Any) -> None:
        with contextlib.suppress(OSError):  # gone: what it answered before, and how it ended, is read by wait
            process.pipe.send_bytes(pickle.dumps(message))

    def put(self, value: Any) -> Put:
        """Pickled once."""
        return Put(pickle.dumps(value))

    def wait(self, references: Sequence[Reference], timeout: float) -> list[Reference]:
        """Read the sockets until one of ``references`` is answered."""
        deadline = time.monotonic() + timeout
        while True:
            done = [r for r in references if r.number in r.process.answers or r.process.ended]
            if done:
                return done
            pipes = {r.process.pipe: r.process for r in references}
            ready = wait(list(pipes), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                return []
            for pipe in ready:
                pipes[pipe].read()  # type: ignore[index]

    def result(self, reference: Reference) -> Any:
        """The answer, once."""
        process = reference.process
        if reference.number not in process.answers:
            raise ActorDiedError(process.ended or "no answer yet")
        good, value = process.answers.pop(reference.number)
        if not good:
            raise ActorFailedError(value)
        return value

    def shutdown(self, actors: Sequence[Process], grace_s: float = 5.0) -> None:
        """Ask, wait, kill. Answers are not read any more: a signal may have cut one in half."""
        for process in self._all:
            self.call(process, "shutdown", ())
            with contextlib.suppress(OSError):
                process.pipe.send_bytes(b"")  # the last message
        deadline = time.monotonic() + grace_s
        for process in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=max(deadline - time.monotonic(), 0.0))
        for process in self._all:
            process.kill()
            with contextlib.suppress(OSError):
                process.pipe.close()
        self._all.clear()
