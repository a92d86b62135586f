"""Checkpoints that are either complete or absent.

Layout of ``<run_dir>/checkpoints``::

    step_000050/             weights and optimizer of every rank, written by the training group
    step_000050/state.json   written last: loop state, and size and SHA-256 of every file
    latest                   name of the newest checkpoint, for people and scripts

A checkpoint is written to ``.tmp-step_000050``, every file fsynced, then renamed; ``latest`` is replaced in the same
way. A process killed at any point therefore leaves the previous checkpoint in place, and a temporary folder that the
next start removes. ``step`` counts finished steps: a run resumed from ``step_000050`` continues with step 50. One run
at a time writes to a run directory, see :func:`run_lock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)
FOLDER, LATEST, STATE, LOCK = "checkpoints", "latest", "state.json", ".lock"
RESERVE = 64 << 20  # bytes left free for metrics and logs
# Keys that may change between the parts of a run without changing its bits.
_FREE_KEYS = ("trainer.steps", "trainer.resume", "trainer.save_interval", "trainer.keep_checkpoints")
_FREE_GROUPS = ("logger.", "orchestrator.", "trainer.output_dir", "experiment")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, the steps finished, and the loop's own state."""

    path: Path
    step: int
    state: dict[str, Any]


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Free bytes of the file system that holds ``folder``, or will once it is created."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


@contextlib.contextmanager
def run_lock(run_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Hold ``<run_dir>/.lock`` for the block. It ends with the process, however that ends; the file itself stays.

    Raises:
        CheckpointError: another process holds it.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+") as file:  # not inherited by the processes that the run starts
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CheckpointError(
                f"another run (process {file.read().strip() or 'unknown'}) is writing to this folder",
                where=str(folder),
                fix="Wait for it, stop it, or start in a new hydra.run.dir.",
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): start no second run in it", folder, error.strerror or error)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def run_identity(config: Mapping[str, Any], data: str | None = None) -> dict[str, Any]:
    """The flattened configuration without the keys that do not change a run's bits, and the data's content hash."""
    flat = {**_flatten(config), "data.sha256": data}
    return {k: v for k, v in flat.items() if k not in _FREE_KEYS and not k.startswith(_FREE_GROUPS)}


class Checkpointer:
    """Writes and finds the checkpoints of one run directory.

    Args:
        run_dir: the run directory.
        keep: newest checkpoints that stay.
        expected_bytes: estimated size of the first checkpoint; later ones are judged by the last one's size.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, keep: int = 2, expected_bytes: int = 0) -> None:
        self.folder = Path(run_dir) / FOLDER
        self.keep = keep
        self._expected = expected_bytes

    def remove_left_overs(self) -> None:
        """Remove what a killed run left half written. Only the holder of :func:`run_lock` may call it."""
        for left_over in self.folder.glob(".tmp-*"):
            shutil.rmtree(left_over, ignore_errors=True)

    def require_space(self) -> None:
        """Raise before any work is lost to a full disk.

        Raises:
            CheckpointError: names the folder, the bytes needed and the bytes free.
        """
        free = free_bytes(self.folder)
        need = self._expected + RESERVE
        if free < need:
            raise CheckpointError(
                f"a checkpoint needs about {need >> 20} MiB, {free >> 20} MiB are free",
                where=str(self.folder),
                fix="Free disk space or move hydra.run.dir; older checkpoints are intact.",
            )

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[str], object]) -> Path:
        """Write the checkpoint of ``step`` finished steps.

        Args:
            step: finished steps.
            state: JSON-serialisable loop state.
            write: called with a folder; every training rank puts its files there.

        Raises:
            CheckpointError: no space, or a file cannot be written; nothing of the new checkpoint is left.
        """
        self.require_space()
        name = f"step_{step:06d}"
        final, temporary = self.folder / name, self.folder / f".tmp-{name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write(str(temporary))
            files = sorted(p for p in temporary.rglob("*") if p.is_file())
            listed: dict[str, dict[str, Any]] = {}
            for path in files:
                _sync(path)
                listed[str(path.relative_to(temporary))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
            record = {"step": step, "state": dict(state), "files": listed}
            (temporary / STATE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
            _sync(temporary / STATE)
            for folder in {p.parent for p in files} | {temporary}:
                _sync(folder)
            if final.exists():  # a resumed run repeats a step that a later part of the old run had saved
                shutil.rmtree(final)
            os.rename(temporary, final)
            self._point_to(name)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"cannot be written: {error.strerror or error}",
                where=str(final),
                fix="Free disk space or check permissions; the previous checkpoint is intact.",
            ) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._expected = sum(entry["bytes"] for entry in listed.values())
        self._prune(name)
        return final

    def _point_to(self, name: str) -> None:
        temporary = self.folder / f".{LATEST}"
        temporary.write_text(name + "\n")
        _sync(temporary)
        os.replace(temporary, self.folder / LATEST)
        _sync(self.folder)

    def _prune(self, newest: str) -> None:
        # Steps after the newest belong to an abandoned part of the run (resumed from an earlier checkpoint).
        names = sorted(p.name for p in self.folder.glob("step_*") if p.is_dir())
        stale = [n for n in names if n > newest] + [n for n in names if n <= newest][: -self.keep]
        for name in stale:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified file by file; None when there is none.

        A rename is atomic, so every ``step_*`` folder is complete unless something else changed it.

        Raises:
            CheckpointError: the checkpoint is damaged; names the file.
        """
        # Not by the pointer: it may lag a kill after the rename, or name a folder that the user removed.
        names = sorted(p.name for p in self.folder.glob("step_*") if p.is_dir())
        if not names:
            return None
        path = self.folder / names[-1]
        fix = f"Remove {path} to resume from the one before it, or use trainer.resume=never in a new run directory."
        try:
            record = json.loads((path / STATE).read_text())
            files, step, state = record["files"], int(record["step"]), dict(record["state"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot be read: {error}", where=str(path / STATE), fix=fix) from error
        for name, entry in files.items():
            file = path / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise CheckpointError("is missing or has the wrong size", where=str(file), fix=fix)
            if _digest(file) != entry["sha256"]:
                raise CheckpointError("does not have the bytes that were written", where=str(file), fix=fix)
        return Checkpoint(path, step, state)


def set_aside(run_dir: str | os.PathLike[str]) -> None:
    """Rename what an earlier run left in ``run_dir`` (checkpoints, metrics, its W&B id), so that a run from step 0
    loses nothing. Empty files and folders stay."""
    for name in (FOLDER, "metrics.jsonl", "wandb-run-id"):
        path = Path(run_dir) / name
        if path.exists() and (any(path.iterdir()) if path.is_dir() else path.stat().st_size):
            number = next(n for n in range(1, 1 << 20) if not path.with_name(f"{name}.{n}").exists())
            path.rename(path.with_name(f"{name}.{number}"))
            log.warning("%s of an earlier run is kept as %s.%s", path, name, number)


def require_same_run(saved: Mapping[str, Any], config: Mapping[str, Any], data: str | None = None) -> None:
    """Refuse to continue a checkpoint under a configuration, or on data, that would change its bits.

    Args:
        saved: :func:`run_identity` of the run that wrote the checkpoint.
        config: the present configuration, nested.
        data: content hash of the present data set.

    Raises:
        ConfigError: names the keys with both values (``data.sha256`` where the content of the same files changed).
    """
    now = run_identity(config, data)
    keys = [k for k in sorted({*saved, *now}) if saved.get(k) != now.get(k)]
    if keys:
        shown = "; ".join(f"{k}: {saved.get(k)!r} in the checkpoint, {now.get(k)!r} now" for k in keys[:5])
        raise ConfigError(
            f"the checkpoint belongs to another configuration ({shown})",
            where=keys[0],
            fix="Restore these values, or start in a new hydra.run.dir.",
        )
