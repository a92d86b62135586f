"""Run the embedded matrix on this machine and write the evidence: reports/embedded.md and reports/embedded.json.

    python scripts/verify_embedded.py [--only NAME ...] [--steps 200] [--out DIR]

Every run is the product's own entry point with Hydra overrides. A strict run must count no mismatch; the stock run
beside it, with the same seed, must count some. A row that fails is written as FAIL, never left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


SECONDS_PER_STEP = 3.0  # 100 steps in five minutes
START_SECONDS = 60.0  # processes, engines, report


@dataclass(frozen=True)
class Run:
    """One row of the report."""

    name: str
    overrides: tuple[str, ...]
    steps: int
    strict: bool = True
    learns: bool = False  # the reward of the last 20 steps must exceed that of the first 20
    falls: str | None = None  # a loss whose last 20 steps must lie below its first 20


def matrix(steps: int) -> list[Run]:
    """Training TP / rollout TP 1/1, 2/1, 1/2 in fp32 and bf16, stock controls, seeds, temperatures, PPO."""
    runs = []
    for dtype in ("bfloat16", "float32"):
        for train_tp, rollout_tp in ((1, 1), (2, 1), (1, 2)):
            overrides = (
                f"model.dtype={dtype}",
                f"train.tensor_parallel_size={train_tp}",
                f"rollout.tensor_parallel_size={rollout_tp}",
            )
            tag = f"{dtype}-tp{train_tp}-{rollout_tp}"
            runs.append(Run(f"grpo-strict-{tag}", overrides, steps, learns=True))
            runs.append(Run(f"grpo-native-{tag}", (*overrides, "consistency=native"), 10, strict=False))
    for seed in (1, 2):
        runs.append(Run(f"grpo-strict-seed{seed}", (f"trainer.seed={seed}",), steps // 2, learns=True))
    for temperature in (0.7, 1.3):
        runs.append(Run(f"grpo-strict-temperature{temperature}", (f"rollout.temperature={temperature}",), 20))
    # Prefills in pieces, and a cache too small for all requests at once, so that some are preempted.
    pressure = ("rollout.max_num_batched_tokens=40", "rollout.kv_cache_bytes=200000", "rollout.max_num_seqs=8")
    runs.append(Run("grpo-strict-chunked-preempted", pressure, 20))
    runs.append(Run("grpo-strict-dp2", ("train.data_parallel_size=2",), 20))
    runs.append(Run("ppo-strict", ("algorithm=ppo",), steps // 2, falls="loss/value"))
    return runs


class Memory(threading.Thread):
    """Peak proportional set size of a process and everything below it, sampled every half second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.stop = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.5):
            total = 0
            try:
                family = [self.process, *self.process.children(recursive=True)]
            except psutil.Error:
                continue
            for process in family:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)


def mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The step rows of a run; none where it did not come so far."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def shown(command: list[str]) -> str:
    """``command`` for a report: without the interpreter's path and the folder, which differ from machine to machine."""
    return shlex.join(["python", *(item for item in command[1:] if not item.startswith("hydra.run.dir="))])


def counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was compared in all steps of a run."""
    return {
        "steps": len(rows),
        "active_tokens": sum(row["consistency/active_tokens"] for row in rows),
        "mismatches": sum(row["consistency/mismatch_count"] for row in rows),
        "max_abs_diff": max((row["consistency/max_abs_diff"] for row in rows), default=None),
    }


def execute(run: Run, folder: Path) -> dict[str, Any]:
    """Run one configuration in a fresh folder and read its metrics back."""
    overrides = [*run.overrides, f"trainer.steps={run.steps}", f"hydra.run.dir={folder}", "logger=jsonl"]
    command = [sys.executable, "-m", "recipes.main", *overrides, "trainer.resume=never"]
    started = time.time()
    with (folder.parent / f"{run.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        memory = Memory(process.pid)
        memory.start()
        code = process.wait()
        memory.stop.set()
    rows = read_metrics(folder)
    edge = min(20, max(1, len(rows) // 2))
    return {
        "name": run.name,
        "command": shown(command),
        "exit_code": code,
        "seconds": round(time.time() - started, 1),
        **counts(rows),
        "reward_first": mean(rows[:edge], "reward/mean"),
        "reward_last": mean(rows[-edge:], "reward/mean"),
        "falls_first": mean(rows[:edge], run.falls) if run.falls else None,
        "falls_last": mean(rows[-edge:], run.falls) if run.falls else None,
        "peak_gib": round(memory.peak / 2**30, 2),
    }


def verdict(run: Run, result: dict[str, Any]) -> str:
    """``pass``, or what is wrong."""
    if result["exit_code"] != 0 or result["steps"] != run.steps:
        return f"FAIL: exit code {result['exit_code']} after {result['steps']} steps"
    if run.strict and result["mismatches"]:
        return f"FAIL: {result['mismatches']} mismatches"
    if not run.strict and not result["mismatches"]:
        return "FAIL: the stock control shows no mismatch"
    if run.strict and run.steps >= 200 and result["active_tokens"] < 200_000:
        return f"FAIL: {result['active_tokens']} compared tokens are fewer than 200,000"
    if result["peak_gib"] > 6:
        return f"FAIL: {result['peak_gib']} GiB are more than 6"
    if result["seconds"] > SECONDS_PER_STEP * run.steps + START_SECONDS:
        return f"FAIL: {result['seconds']} s are more than {SECONDS_PER_STEP:g} a step"
    # Rewards lie in [0, 1] and their means over 20 steps of 256 responses scatter by about 0.03 between seeds.
    if run.learns and not result["reward_last"] > result["reward_first"] + 0.1:
        return "FAIL: the reward does not rise by 0.1"
    if run.falls and not result["falls_last"] < result["falls_first"]:
        return f"FAIL: {run.falls} does not fall"
    return "pass"


def report(results: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The Markdown report."""

    def number(value: float | None, spec: str) -> str:
        return "" if value is None else format(value, spec)

    lines = ["# Embedded runs: real vLLM and real Megatron-Core on a CPU", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    others = sorted({f"{row['name']} at {row['commit']}" for row in results if row["commit"] != about["commit"]})
    lines += [f"- rows of another commit: {', '.join(others)}"] if others else []
    lines += [
        "",
        "Reward: mean of the first and of the last 20 steps. Memory: peak proportional set size of all processes.",
        "",
        "| run | steps | active tokens | mismatches | max abs diff | reward | value loss | s | GiB | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        reward = f"{number(row['reward_first'], '.3f')} → {number(row['reward_last'], '.3f')}"
        value = f"{row['falls_first']:.4f} → {row['falls_last']:.4f}" if row["falls_first"] is not None else ""
        cells = [row["name"], row["steps"], f"{row['active_tokens']:,}", f"{row['mismatches']:,}"]
        cells += [number(row["max_abs_diff"], ".3g"), reward, value, row["seconds"], row["peak_gib"], row["verdict"]]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    lines += ["", "## Commands", "", "```", *(row["command"] for row in results), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=None, help="substrings of run names")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "verify")
    parser.add_argument("--report", type=Path, default=ROOT / "reports" / "embedded")
    arguments = parser.parse_args()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = arguments.out / stamp
    folder.mkdir(parents=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].split(":")[1].strip() if names else platform.machine()
    about = {
        "command": shlex.join(["python", "scripts/verify_embedded.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "machine": f"{model}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU",
        "date": datetime.date.today().isoformat(),
    }
    runs = matrix(arguments.steps)
    path = arguments.report.with_suffix(".json")
    rows: dict[str, dict[str, Any]] = {}
    if arguments.only is not None and path.exists():  # keep the other rows, each with the commit it was measured at
        kept = json.loads(path.read_text())
        about = {key: kept[key] for key in about}
        rows = {row["name"]: row for row in kept["runs"]}
    for run in runs:
        if arguments.only is not None and not any(part in run.name for part in arguments.only):
            continue
        result = execute(run, folder / run.name)
        rows[run.name] = result | {"verdict": verdict(run, result), "commit": commit.stdout.strip()}
        print(json.dumps({k: v for k, v in rows[run.name].items() if k != "command"}), flush=True)
        ordered = [rows[known.name] for known in runs if known.name in rows]
        path.write_text(json.dumps({**about, "runs": ordered}, indent=1) + "\n")
        arguments.report.with_suffix(".md").write_text(report(ordered, about), encoding="utf-8")
    sys.exit(any(row["verdict"] != "pass" for row in rows.values()))


if __name__ == "__main__":
    main()
