"""Weights & Biases, kept at arm's length: it can be missing, unreachable or slow, and the run goes on.

W&B lives in a process of its own (:mod:`recipes.metrics.wandb_process`) that this module feeds through a queue, so no
call of the training loop waits for it. The network can hold the run up before and after the loop only:
``PROBE_SECONDS`` to see whether the server answers, ``START_SECONDS`` to start online, ``UPLOAD_SECONDS`` to upload the
rest at the end (Ctrl-C ends that wait). Offline, nothing waits for the network: the local process starts in two seconds
on an idle machine and at most ``OFFLINE_SECONDS`` on a busy one, and ends within ``CLOSE_SECONDS``. What was not
uploaded stays in ``<run_dir>/wandb`` and ``wandb sync`` sends it later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError
from recipes.metrics.wandb_process import RUN_ID_FILE

log = logging.getLogger(__name__)

MODES = ("off", "offline", "online", "auto")
PROBE_SECONDS = 2.0
START_SECONDS = 20.0
OFFLINE_SECONDS = 60.0
CLOSE_SECONDS = 5.0
UPLOAD_SECONDS = 30.0


class _TimeoutError(Exception):
    pass


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """``call()`` in a daemon thread; raises ``_TimeoutError`` after ``seconds`` and leaves the thread behind."""
    box: dict[str, Any] = {}

    def target() -> None:
        try:
            box["value"] = call()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            box["error"] = error

    thread = threading.Thread(target=target, daemon=True, name="wandb-wait")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise _TimeoutError(f"no answer within {seconds:g} s")
    if "error" in box:
        raise box["error"]
    return box.get("value")


def _kill_with_children(process: subprocess.Popen[str]) -> None:
    """End ``process`` and the processes it started. What they wrote to disk stays."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError):  # a process may end while it is looked at
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if fields.get("PPid") == str(process.pid):
                os.kill(int(fields["Pid"]), signal.SIGKILL)
    process.kill()
    process.wait()


def base_url() -> str:
    """The W&B server in use."""
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")


def has_credentials() -> bool:
    """Whether a key is configured (environment or ``wandb login``). The key itself is left to wandb."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    host = base_url().split("://")[-1].split("/")[0].split(":")[0]
    try:
        return any(line.split()[:2] == ["machine", host] for line in netrc.read_text().splitlines())
    except OSError:
        return False


def unreachable_because(seconds: float = PROBE_SECONDS) -> str | None:
    """None when the server answers an HTTP request (through the proxy the environment names), else the reason."""

    def probe() -> None:
        with contextlib.suppress(urllib.error.HTTPError):  # an error page is an answer
            urllib.request.urlopen(base_url() + "/healthz", timeout=seconds).close()

    try:
        _within(seconds, probe)
    except Exception as error:  # noqa: BLE001 - any failure means unreachable
        return str(getattr(error, "reason", error))
    return None


def resolve_mode(mode: str) -> tuple[str, str]:
    """The mode to use for a requested one, and why.

    Args:
        mode: ``off``, ``offline``, ``online`` or ``auto``. ``auto`` is offline without a key. So is ``online``
            without a key or a server, with a warning: a run must not die for its dashboard.

    Raises:
        ConfigError: ``mode`` is unknown.
    """
    if mode not in MODES:
        raise ConfigError(f"{mode!r} is not one of {', '.join(MODES)}", where="logger.wandb")
    if mode in ("off", "offline"):
        return mode, "as configured"
    if not has_credentials():
        return "offline", "no WANDB_API_KEY and no `wandb login`"
    reason = unreachable_because()
    if reason is not None:
        return "offline", f"{base_url()} is unreachable ({reason})"
    return "online", "a key is configured and the server answers"


class WandbLogger:
    """One W&B run. Every method returns without raising, whatever W&B does.

    Args:
        run_dir: files go to ``<run_dir>/wandb``; the run id is kept in ``<run_dir>/wandb-run-id`` so that a resumed run
            continues the same W&B run.
        mode: see :func:`resolve_mode`.
        config: the run's configuration.
        project, name, group, tags, entity: as in ``wandb.init``.

    Attributes:
        mode: ``off``, ``offline`` or ``online``: what is in use.
        reason: why.

    Raises:
        ConfigError: ``mode`` is unknown. Nothing else.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        mode: str = "auto",
        config: Mapping[str, Any] | None = None,
        project: str = "rl-kernel",
        name: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
        entity: str | None = None,
    ) -> None:
        self.run_dir = Path(run_dir).absolute()
        self._process: subprocess.Popen[str] | None = None
        self._rows: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._warned = False
        self.mode, self.reason = resolve_mode(mode)
        if self.mode == "off":
            return
        if self.mode == "offline" and (mode == "online" or "unreachable" in self.reason):
            self._warn(self.reason)
        init: dict[str, Any] = {"project": project, "name": name, "group": group, "tags": list(tags), "entity": entity}
        init["config"] = dict(config or {})
        attempts = ("online", "offline") if self.mode == "online" else ("offline",)
        for attempt in attempts:
            try:
                self._process = self._start(attempt, init, START_SECONDS if attempt == "online" else OFFLINE_SECONDS)
            except Exception as error:  # noqa: BLE001 - W&B must not stop the run
                self.mode, self.reason = "off", f"{attempt} start failed: {error}"
                self._warn(self.reason)
                continue
            self.mode = attempt
            threading.Thread(target=self._feed, daemon=True, name="wandb-feed").start()
            break

    def _start(self, mode: str, init: dict[str, Any], seconds: float) -> subprocess.Popen[str]:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            # -P: the script's folder holds a logging.py that must not shadow the standard one.
            [sys.executable, "-P", str(Path(__file__).with_name("wandb_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run; this process ends when its input does
        )
        assert process.stdin is not None and process.stdout is not None
        options = {"run_dir": str(self.run_dir), "mode": mode, "init": init, "init_seconds": seconds}
        try:
            process.stdin.write(json.dumps(options, default=str) + "\n")
            process.stdin.flush()
            line = _within(seconds, process.stdout.readline)
            answer = json.loads(line) if line else {"error": "its process ended"}
            if "error" in answer:
                raise RuntimeError(answer["error"])
        except Exception:
            _kill_with_children(process)
            raise
        return process

    def _feed(self) -> None:
        """Pass rows on until the end marker; the pipe may block this thread, never the loop."""
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            while (row := self._rows.get()) is not None:
                process.stdin.write(row + "\n")
                process.stdin.flush()
            process.stdin.close()
        except OSError as error:
            self._warn(f"its process ended ({error})")

    def _warn(self, reason: str) -> None:
        """Say it once; later failures are the same story."""
        if not self._warned:
            self._warned = True
            log.warning(
                "W&B: %s. The run continues and metrics.jsonl has every metric. "
                "What W&B kept on disk can be sent later: wandb sync --include-offline %s/wandb/*run-*",
                reason,
                self.run_dir,
            )

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Hand one step over; returns at once."""
        if self._process is not None:
            row = {k: v.item() if hasattr(v, "item") else v for k, v in metrics.items()}
            self._rows.put(json.dumps({k: v for k, v in row.items() if v is not None}, default=str))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set summary values of the run."""
        if self._process is not None:
            self._rows.put(json.dumps({"summary": dict(values)}, default=str))

    def close(self, *, exit_code: int = 0) -> None:
        """Finish the run: online at most ``UPLOAD_SECONDS`` for the upload, else ``CLOSE_SECONDS``. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        self._rows.put(json.dumps({"exit_code": exit_code}))
        self._rows.put(None)
        seconds = CLOSE_SECONDS
        if self.mode == "online":
            seconds = UPLOAD_SECONDS
            log.info("W&B: uploading the rest, at most %g s", seconds)
        try:
            code = process.wait(seconds)
            if code != 0:
                self._warn(f"its process ended with code {code}")
        except subprocess.TimeoutExpired:
            self._warn(f"it did not finish within {seconds:g} s")
            _kill_with_children(process)
        except BaseException:  # Ctrl-C while it uploads
            _kill_with_children(process)
            raise


__all__ = ["MODES", "RUN_ID_FILE", "WandbLogger", "base_url", "has_credentials", "resolve_mode", "unreachable_because"]
