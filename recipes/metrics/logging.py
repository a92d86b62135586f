"""Where metrics go: ``metrics.jsonl`` always, Weights & Biases when wanted. The same keys both ways.

``metrics.jsonl`` holds one strict JSON object a step. Two equal runs write equal bytes except for the keys that
:func:`is_time_key` names. Encoding rules:

* ``step`` comes first, the other keys follow in sorted order, no spaces, UTF-8, one ``\\n`` a line;
* integers and booleans stay what they are; floats are written with ``repr``, the shortest text that reads back exactly;
* JSON has no NaN or infinity: they become the strings ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, which
  :func:`read_metrics` turns back into floats;
* a line is flushed and fsynced before :meth:`JsonlWriter.write` returns, so a killed run loses at most the torn last
  line, which the next start removes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipes.errors import DataError, RecipeError
from recipes.metrics.wandb_logger import WandbLogger

METRICS_FILE = "metrics.jsonl"
# Keys that depend on the clock or the machine. Everything else is a function of code, config, data and seed.
TIME_PREFIXES = ("time/", "perf/")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsError(RecipeError, RuntimeError):
    """Metrics cannot be encoded or stored."""


def is_time_key(key: str) -> bool:
    """Whether ``key`` may differ between two runs of one seed (``time/*`` seconds, ``perf/*`` rates and memory)."""
    return key.startswith(TIME_PREFIXES)


def strip_time(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` without the keys that :func:`is_time_key` names: what must be equal between two runs of one seed."""
    return {key: value for key, value in row.items() if not is_time_key(key)}


def _plain(key: str, value: Any) -> bool | int | float | str | None:
    """``value`` as a JSON scalar (NumPy and torch scalars included)."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return float(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    shape = f" of shape {list(np.shape(value))}" if np.shape(value) else ""
    raise MetricsError(
        f"the value is a {type(value).__name__}{shape}",
        where=f"metric {key!r}",
        fix="Reduce it to one number or string.",
    )


def encode_row(metrics: Mapping[str, Any]) -> str:
    """One line of ``metrics.jsonl``, without the newline.

    Raises:
        MetricsError: ``step`` is missing or no integer, or a value is not a scalar.
    """
    row = {key: _plain(key, value) for key, value in metrics.items()}
    step = row.pop("step", None)
    if isinstance(step, bool) or not isinstance(step, int):
        raise MetricsError(f"step is {step!r}, an integer is needed", where="metrics row")
    return json.dumps(
        {"step": step, **dict(sorted(row.items()))}, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl`` (or of the run directory that holds one), non-finite numbers decoded.

    A torn last line, as a killed run leaves it, is ignored.

    Raises:
        DataError: there is no such file, or a line other than the last is not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / METRICS_FILE
    if not file.is_file():
        raise DataError("no such file", where=str(file), fix="Give the run directory (Hydra's hydra.run.dir).")
    rows = []
    text = file.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines):
            break  # after the last newline: empty, or torn
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("it is not an object with an integer 'step'")
        except ValueError as error:
            raise DataError(f"not a metrics row: {error}", where=f"{file}:{number}", fix="Remove the line.") from error
        rows.append({k: _NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


def _storage_error(path: Path, error: OSError) -> MetricsError:
    return MetricsError(
        f"cannot write: {error.strerror or error}",
        where=str(path),
        fix="Free disk space or choose another hydra.run.dir; trainer.resume=auto continues from the last checkpoint.",
    )


class JsonlWriter:
    """Appends rows to ``metrics.jsonl``.

    Args:
        path: the file; its directory is created.
        first_step: the first step this process will write. Rows at or after it, and a torn last line, are removed, so
            that a resumed run ends with the same bytes as one that was never interrupted. ``None`` continues after the
            last complete row whatever it is.

    Raises:
        MetricsError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, first_step: int | None = 0) -> None:
        self.path = Path(path)
        self.last_step: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - lives as long as the writer
            self._truncate(first_step)
        except OSError as error:
            raise _storage_error(self.path, error) from error

    def _truncate(self, first_step: int | None) -> None:
        self._file.seek(0)
        keep, size = 0, 0
        for line in self._file.readlines():
            size += len(line)
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                break
            if first_step is not None and step >= first_step:
                break
            keep, self.last_step = size, step
        self._file.truncate(keep)
        os.fsync(self._file.fileno())
        self._size = keep

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one row and fsync.

        Raises:
            MetricsError: a value cannot be encoded, the step does not increase, or the disk is full. The file then
                still ends with the last complete row.
        """
        line = encode_row(metrics)
        step = int(metrics["step"])
        if self.last_step is not None and step <= self.last_step:
            raise MetricsError(
                f"step {step} does not follow step {self.last_step}",
                where=str(self.path),
                fix="Open the writer with first_step set to the step the run resumes at.",
            )
        data = (line + "\n").encode()
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise _storage_error(self.path, error) from error
        self._size += len(data)
        self.last_step = step

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class MetricLogger:
    """Every logger of a run behind one call. A failure of W&B never raises; a failure of ``metrics.jsonl`` does.

    Args:
        run_dir: the run directory.
        first_step: the step this process starts at (0, or the one a checkpoint resumes at).
        wandb: ``off``, ``offline``, ``online``, or ``auto`` (online when a key is configured and the server answers).
        config: the run's configuration, stored with the W&B run.
        **wandb_options: ``project``, ``name``, ``group``, ``tags``, ``entity`` (see :class:`WandbLogger`).
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        first_step: int = 0,
        wandb: str = "off",
        config: Mapping[str, Any] | None = None,
        **wandb_options: Any,
    ) -> None:
        self.jsonl = JsonlWriter(Path(run_dir) / METRICS_FILE, first_step=first_step)
        self.wandb = WandbLogger(run_dir, mode=wandb, config=config, **wandb_options)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Store one step; ``metrics`` must hold ``step``."""
        self.jsonl.write(metrics)
        self.wandb.log(metrics)

    def close(self, *, exit_code: int = 0) -> None:
        """Flush and close all loggers. Idempotent."""
        self.jsonl.close()
        self.wandb.close(exit_code=exit_code)

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)


def differing_keys(left: Iterable[Mapping[str, Any]], right: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """``(row number, key)`` of every value that differs between two runs, times aside; [] when they are equal."""
    out: list[tuple[int, str]] = []
    a_rows, b_rows = [strip_time(r) for r in left], [strip_time(r) for r in right]
    for i in range(max(len(a_rows), len(b_rows))):
        if i >= min(len(a_rows), len(b_rows)):
            out.append((i, "step"))
            continue
        a, b = a_rows[i], b_rows[i]
        keys = dict.fromkeys([*a, *b])
        out += [(i, k) for k in keys if k not in a or k not in b or _plain(k, a[k]) != _plain(k, b[k])]
    return out
