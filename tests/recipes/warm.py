"""Runs of ``recipes.main`` whose processes are forked from one that has imported vLLM and Megatron-Core.

Importing them takes longer than a short run, in every process of every run. Here a server imports them once; a driver
is a fork of the server, and what the driver's ``ProcessTransport`` would start as an interpreter is a fork of the
driver. What runs in those processes, and in which of them, is what a plain start runs; the tests that start plain
processes and Ray's are the ones that know whether imports and environments come in the right order.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODULES = (
    "recipes.main",
    "recipes.run",
    "recipes.engines.megatron_layers",
    "recipes.engines.megatron_optim",
    "recipes.engines.vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
)
SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # no thread to lose


def _keep_only(keep: set[int]) -> None:
    """Point every other descriptor at /dev/null. Not closed: objects of the parent would close another file's later."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number > 2 and number not in keep and number != null:
            with contextlib.suppress(OSError):
                os.dup2(null, number)


class Forked:
    """The part of ``subprocess.Popen`` that ``ProcessTransport`` uses, for a child that is a fork of this process."""

    def __init__(
        self, command: list[str], *, env: dict, pass_fds: list[int], stdin: Any, stdout: Any, **_: Any
    ) -> None:
        assert command[1:3] == ["-m", "recipes.transport.child"] and stdin == subprocess.DEVNULL
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        with _ends_here():
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(1, 2)
            _keep_only(set(pass_fds))
            os.environ.clear()
            os.environ.update(env)
            sys.argv = command[2:]
            importlib.import_module("recipes.transport.child").main()

    def wait(self, timeout: float | None = None) -> int:
        """As ``Popen.wait``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            else:
                time.sleep(0.01)
        return self.returncode


@contextlib.contextmanager
def _ends_here() -> Any:
    """The process ends with the block, without the exit handlers of its parent."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter would end
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _drive(arguments: list[str], stderr: str) -> None:
    from recipes.transport import on_processes

    os.setsid()
    output = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _keep_only(set())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork = type("subprocess", (), {**vars(subprocess), "Popen": Forked})
    on_processes.subprocess = fork  # type: ignore[assignment]
    sys.argv = ["recipes.main", *arguments]
    importlib.import_module("recipes.main").main()


def _serve(pipe: Connection) -> None:
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would walk, and so copy, all of this
    gc.unfreeze = lambda: None  # vLLM calls it when an engine ends
    threads = len(os.listdir("/proc/self/task"))
    pipe.send(threads)  # a fork would lose the others
    children: dict[int, int | None] = {}
    while True:
        try:
            what, *parts = pipe.recv()
        except (EOFError, KeyboardInterrupt):  # the tests are over; runs that are not have a terminal of their own
            for pid in [pid for pid, code in children.items() if code is None]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        if what == "start":
            pid = os.fork()
            if pid == 0:
                with _ends_here():
                    _drive(*parts)
            children[pid] = None
            pipe.send(pid)
        elif children[parts[0]] is None:
            pid, status = os.waitpid(parts[0], os.WNOHANG)
            children[parts[0]] = os.waitstatus_to_exitcode(status) if pid else None
            pipe.send(children[parts[0]])
        else:
            pipe.send(children[parts[0]])


class Server:
    """Starts drivers. One thread of the test uses it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        saved = {name: os.environ.get(name) for name in SINGLE}
        os.environ.update(SINGLE)
        try:
            self._process = context.Process(target=_serve, args=(theirs,))  # daemons may not have children
            self._process.start()
        finally:
            for name, value in saved.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()

    def _ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()

    def start(self, arguments: list[str], stderr: Path) -> Driver:
        """``python -m recipes.main *arguments`` in a session of its own; its standard error goes to a file."""
        if not hasattr(self, "threads"):
            self.threads = self._pipe.recv()
            assert self.threads == 1, f"{self.threads} threads after the imports: forks are not safe"
        return Driver(self, self._ask("start", arguments, str(stderr)), stderr)

    def poll(self, pid: int) -> int | None:
        """Exit code of a driver, once it has one."""
        return self._ask("poll", pid)

    def close(self) -> None:
        """End the server."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


class Driver:
    """A forked run: the part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, server: Server, pid: int, stderr: Path) -> None:
        self._server, self.pid, self._stderr = server, pid, stderr

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._server.poll(self.pid)

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Wait for the end; returns standard error. A run that takes too long is killed."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired("recipes.main", timeout)
            time.sleep(0.05)
        return None, self._stderr.read_text()

    @property
    def returncode(self) -> int | None:
        """As :meth:`poll`."""
        return self.poll()
