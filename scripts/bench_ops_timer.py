"""Clock, rows and limits of ``bench_ops.py``: what its parts share."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Calls = Sequence[Callable[[], object]]
rows: list[dict[str, Any]] = []
warming = False  # everything runs once and nothing is timed


def replays(calls: Calls, seconds: float = 0.0) -> Callable[[], float]:
    """Captures the calls one after another; what is returned replays them and gives the microseconds of one.

    ``seconds``: again and again for so long, without a wait between, as the card works in training.
    """
    calls[0]()
    torch.cuda.synchronize()
    if warming:
        return lambda: 1.0
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            results.append(call())  # held, so that no call writes where the one before it did
    results.clear()

    def measure(count: int = 1) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (count * len(calls))

    if seconds:
        return functools.partial(measure, max(1, round(seconds * 1e6 / (measure() * len(calls)))))
    return measure


def eagerly(call: Callable[[], object]) -> Callable[[], float]:
    """The same for a call that no graph can hold."""

    def measure() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    measure()
    return measure


def middle(times: Sequence[float]) -> float:
    """The smaller of the medians of the first and the second half."""
    half = (len(times) + 1) // 2
    return min(statistics.median(times[:half]), statistics.median(times[half:] or times))


def record(row: dict[str, Any], micros: float, base: float) -> None:
    """Judge a row by its limit (a multiple of ``base``; ``None``: none is stated)."""
    limit = row["limit"]
    row.update(us=round(micros, 2), reference_us=round(base, 2), ratio=round(micros / base, 3) if base else None)
    if not base:
        row["status"] = "blocked"
    else:
        row["status"] = "measured" if limit is None else "pass" if micros <= limit * base else "failure"


def add(row: dict[str, Any]) -> None:
    rows.append(row)
    if not warming:
        print(json.dumps(row), flush=True)


def compare(
    op: str,
    shape: str,
    reference: str,
    base: float | Callable[[], float],
    contenders: Mapping[str, Calls | Callable[[], float]],
    limits: Mapping[str, float],
    rounds: int = 8,
    second: tuple[str, Callable[[], float]] | None = None,
) -> dict[str, dict[str, Any]]:
    """A row for each contender, measured in turns with the reference and a second one; returns them by backend."""
    found: dict[str, dict[str, Any]] = {}
    measures: dict[str, Callable[[], float]] = {}
    for backend, calls in contenders.items():
        row: dict[str, Any] = {"op": op, "shape": shape, "backend": backend, "reference": reference}
        row["limit"] = limits.get(backend)
        found[backend] = row
        try:
            measures[backend] = calls if callable(calls) else replays(calls)
        except torch.cuda.OutOfMemoryError as error:
            row.update(status="oom", reason=str(error).splitlines()[0])
        except Exception as error:  # noqa: BLE001 - a row that cannot run is a finding, not the end of the table
            row.update(status="blocked", reason=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    times: dict[str, list[float]] = {backend: [] for backend in measures}
    bases: list[float] = []
    seconds: list[float] = []
    for _ in range(2 if warming else rounds):
        bases.append(base() if callable(base) else base)
        if second:
            seconds.append(second[1]())
        for backend, measure in measures.items():
            times[backend].append(measure())
    for backend, row in found.items():
        if backend in times:
            record(row, middle(times[backend]), middle(bases))
            if second:
                also = middle(seconds)
                row.update(second=second[0], second_us=round(also, 2), second_ratio=round(row["us"] / also, 3))
        add(row)
    return found
