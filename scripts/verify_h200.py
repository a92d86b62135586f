"""Run the loop at Qwen3-8B shape on one or two H200s and write the evidence: reports/loop_<name>.{md,json}.

    python scripts/verify_h200.py one [--only NAME]... [key=value ...]     one GPU: strict, cost against stock
    python scripts/verify_h200.py two [--only NAME]... [key=value ...]     two GPUs, several topologies
    python scripts/verify_h200.py one|two --merge FILE.json...             rows of other starts join the report

Every row is the product's own entry point with Hydra overrides; metrics.jsonl, manifest.json and report.html of each
stay in the output folder. A strict row must count no mismatch, the stock row some. Rows of one comparison draw the
same prompts with the same seeds, so their first steps (equal weights) must agree in every token and bit, which the
digest of tokens and log-probabilities shows. Further key=value arguments go to every row; a number of layers becomes
part of a row's name. A row that fails is written as FAIL, never left out. ``--only`` makes the chosen rows again and
keeps the others of the report, as it keeps the notes at its end, which are written by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from revision import revision
from verify_embedded import counts, mean, read_metrics, shown

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("--report", "--out", "--timeout")
STAGES = ("rollout", "logp", "update", "sync", "step")


@dataclass(frozen=True)
class Run:
    """One row. Rows of one ``same`` start from equal weights and prompts: their first steps must have one digest."""

    name: str
    overrides: tuple[str, ...]
    steps: int
    strict: bool = True
    same: str = ""
    cost: str = ""  # rows of one name are compared in time: strict against stock


def one() -> list[Run]:
    experiment = "experiment=qwen3_8b_grpo_h200_1gpu"
    # Equal lengths, so that both do the same work.
    fixed = (experiment, "rollout.ignore_eos=true", "rollout.max_response_len=512", "rollout.batch_size=16")
    return [
        Run("10 updates", (experiment, "rollout.batch_size=20"), 10),
        Run("cost-strict", fixed, 3, cost="one GPU"),
        Run("cost-stock", (*fixed, "consistency=native"), 3, strict=False, cost="one GPU"),
    ]


def two() -> list[Run]:
    def row(name: str, *overrides: str, steps: int = 3, strict: bool = True) -> Run:
        base = ("experiment=qwen3_8b_grpo_h200_2gpu", "consistency.virtual_tp=2", *overrides)
        return Run(name, base, steps, strict, same="two GPUs" if strict else "")

    tp2, tp1x2 = (
        ("rollout.tensor_parallel_size=2", "rollout.num_engines=1"),
        ("rollout.tensor_parallel_size=1", "rollout.num_engines=2"),
    )
    train_tp2 = ("train.tensor_parallel_size=2", "train.context_parallel_size=1", "train.data_parallel_size=1")
    train_tp1 = ("train.tensor_parallel_size=1", "train.context_parallel_size=1", "train.data_parallel_size=1")
    train_cp2 = ("train.tensor_parallel_size=1", "train.context_parallel_size=2", "train.data_parallel_size=1")
    train_dp2 = ("train.tensor_parallel_size=1", "train.context_parallel_size=1", "train.data_parallel_size=2")
    separate = ("hardware.colocate=false", "rollout.tensor_parallel_size=1", "rollout.num_engines=1")
    return [
        row("train TP2, rollout TP1 x 2", *train_tp2, *tp1x2),
        row("train TP2, rollout TP2", *train_tp2, *tp2),
        row("train CP2, rollout TP1 x 2", *train_cp2, *tp1x2),
        row("train DP2, rollout TP2", *train_dp2, *tp2),
        row("train TP1 on one GPU, rollout TP1 on the other", *train_tp1, *separate),
        row("Ray, TP2 on both sides", *train_tp2, *tp2, "orchestrator.backend=ray"),
        row("Ray, train TP1 on one GPU, rollout TP1 on the other", *train_tp1, *separate, "orchestrator.backend=ray"),
        row("stock control, TP2 on both sides", *train_tp2, *tp2, "consistency=native", steps=2, strict=False),
    ]


def execute(run: Run, folder: Path, extra: list[str], timeout: float) -> dict[str, Any]:
    """Run one configuration in a fresh folder and read its metrics back."""
    overrides = [*run.overrides, *extra, f"trainer.steps={run.steps}", "logger=jsonl"]
    command = [sys.executable, "-m", "recipes.main", *overrides, "trainer.resume=never", f"hydra.run.dir={folder}"]
    if folder.exists():
        shutil.rmtree(folder)
    started = time.time()
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            code = 124
    rows = read_metrics(folder)
    timed = rows[1:] or rows  # the first step compiles, probes and warms up
    return {
        "name": run.name,
        "command": shown(command),
        "exit_code": code,
        "seconds": round(time.time() - started, 1),
        **counts(rows),
        "digest": rows[0].get("consistency/digest") if rows else None,
        "reward": [row["reward/mean"] for row in rows],
        "grad_norm": [row.get("train/policy_grad_norm") for row in rows],
        "weight_hash": [row.get("train/weight_hash") for row in rows],
        "sync": [row.get("time/sync") for row in rows],
        "backend": rows[-1].get("kernel/backend") if rows else None,
        "fallback_count": rows[-1].get("kernel/fallback_count") if rows else None,
        "contract": rows[-1].get("kernel/contract") if rows else None,
        "response_tokens": mean(timed, "rollout/response_tokens"),
        "times": {stage: mean(timed, f"time/{stage}") for stage in STAGES},
        **engines(folder / "manifest.json"),
    }


def engines(path: Path) -> dict[str, Any]:
    """What the manifest says about the processes: memory of the trainer, way of the weights, versions."""
    if not path.exists():
        return {}
    manifest = json.loads(path.read_text(encoding="utf-8"))
    train, rollout = (manifest["processes"].get(side) or [{}] for side in ("train", "rollout"))
    return {
        "start": start_of(manifest["config"]),
        "train_peak_gib": max((rank.get("peak_memory_gib") or 0.0 for rank in train), default=None),
        "weight_sync": manifest.get("weight_sync"),
        "versions": {"vllm": rollout[0].get("vllm"), "megatron-core": train[0].get("version")},
        "preemptions": sum(engine.get("preemptions") or 0 for engine in rollout),
        "prefix_cache_hit_tokens": sum(engine.get("prefix_cache_hit_tokens") or 0 for engine in rollout),
    }


def start_of(config: dict[str, Any]) -> str:
    """What the first step of a strict run depends on, in words: rows of one text must have one digest."""
    model, rollout, trainer = config["model"], config["rollout"], config["trainer"]
    lengths = "exactly" if rollout["ignore_eos"] else "up to"
    return (
        f"{model['num_hidden_layers']} layers, {rollout['batch_size']} x {rollout['n_samples_per_prompt']} responses "
        f"of {lengths} {rollout['max_response_len']} tokens, virtual TP {config['consistency']['virtual_tp']}, "
        f"seed {trainer['seed']}"
    )


def named(run: Run, extra: list[str]) -> Run:
    """``run`` with the number of layers in its name, where the command line gives one."""
    layers = [item.split("=", 1)[1] for item in extra if item.startswith("model.num_hidden_layers=")]
    return replace(run, name=f"{run.name}, {layers[-1]} layers") if layers else run


def verdict(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """``pass``, or what is wrong."""
    if row["exit_code"] != 0 or row["steps"] != row["wanted_steps"]:
        return f"FAIL: exit code {row['exit_code']} after {row['steps']} of {row['wanted_steps']} steps"
    if not row["active_tokens"]:
        return "FAIL: nothing was compared"
    if row["strict"] and row["mismatches"]:
        return f"FAIL: {row['mismatches']} mismatches"
    if not row["strict"] and not row["mismatches"]:
        return "FAIL: the stock control shows no mismatch"
    if row["strict"] and len(set(row["weight_hash"])) != len(row["weight_hash"]):
        return "FAIL: an update changed no weight"
    if row["strict"] and row.get("fallback_count"):
        return f"FAIL: {row['fallback_count']} kernels were replaced by slower ones, which manifest.json names"
    kin = [other for other in rows if row["same"] and other["same"] == row["same"] and other["start"] == row["start"]]
    digests = {other["digest"] for other in kin if other["steps"]}
    if len(digests) > 1:
        return f"FAIL: first steps of {len(digests)} kinds"
    return "pass"


def own_command(arguments: list[str]) -> str:
    """The command line for a report, without the folders and limits that say nothing about a figure."""
    kept = [
        item
        for before, item in zip(["", *arguments], arguments)
        if item not in PLACES and before not in PLACES and not item.startswith(tuple(f"{place}=" for place in PLACES))
    ]
    return shlex.join(["python", "scripts/verify_h200.py", *kept])


def notes_of(path: Path) -> str:
    """The part of a report that is written by hand."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return "## Notes" + text.split("\n## Notes", 1)[1] if "\n## Notes" in text else ""


def report(rows: list[dict[str, Any]], about: dict[str, str], notes: str = "") -> str:
    """The Markdown report."""
    lines = ["# The loop at Qwen3-8B shape", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += [
        "| run | steps | active tokens | mismatches | max abs diff | first step | s | verdict |",
        "|---|" + "---|" * 7,
    ]
    for row in rows:
        worst = "" if row["max_abs_diff"] is None else f"{row['max_abs_diff']:.3g}"
        cells = [row["name"], row["steps"], f"{row['active_tokens']:,}", f"{row['mismatches']:,}", worst]
        cells += [(row["digest"] or "")[:12], row["seconds"], row["verdict"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Seconds a step by stage (mean without the first step), response tokens a step:", ""]
    lines += ["| run | tokens | " + " | ".join(STAGES) + " | rollout tok/s |", "|---|" + "---|" * (len(STAGES) + 2)]
    for row in rows:
        if row["response_tokens"] is None:
            continue
        times = [row["times"][stage] for stage in STAGES]
        speed = row["response_tokens"] / times[0] if times[0] else 0.0
        shown = ["" if t is None else f"{t:.2f}" for t in times]
        lines.append("| " + " | ".join([row["name"], f"{row['response_tokens']:.0f}", *shown, f"{speed:.0f}"]) + " |")
    for name in sorted({row["cost"] for row in rows if row["cost"]}):
        strict, stock = (
            next((r for r in rows if r["cost"] == name and r["strict"] is kind and r["steps"]), None)
            for kind in (True, False)
        )
        if strict and stock:
            ratios = [
                f"{stage} {strict['times'][stage] / stock['times'][stage]:.3f}"
                for stage in STAGES
                if strict["times"][stage] and stock["times"][stage]
            ]
            lines += ["", f"Strict time over stock time, {name}: {', '.join(ratios)}."]
    facts = [
        "commit",
        "backend",
        "contract",
        "fallback_count",
        "train_peak_gib",
        "weight_sync",
        "sync",
        "start",
        "versions",
        "preemptions",
    ]
    facts += ["prefix_cache_hit_tokens", "reward", "grad_norm", "weight_hash"]
    lines += ["", "## Facts", "", *(f"- {r['name']}: " + json.dumps({k: r[k] for k in facts if k in r}) for r in rows)]
    lines += ["", "## Commands", "", "```", *(row["command"] for row in rows), "```", ""]
    return "\n".join(lines) + (f"\n{notes}" if notes else "")


def write(target: Path, about: dict[str, str], kept: dict[str, dict[str, Any]]) -> None:
    """Both forms of the report, every verdict anew: one row can put another in doubt."""
    rows = list(kept.values())
    for row in rows:
        row["verdict"] = verdict(row, rows)
    markdown = report(rows, about, notes_of(target.with_suffix(".md")))
    target.with_suffix(".json").write_text(json.dumps({**about, "runs": rows}, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(markdown, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("matrix", choices=("one", "two"))
    parser.add_argument("--only", action="append", default=None, help="substring of row names; may be repeated")
    parser.add_argument("--exclude", action="append", default=[], help="as --only, of rows to leave out")
    parser.add_argument("--steps", type=int, default=None, help="instead of each row's own number")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a row may take")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "verify_h200")
    parser.add_argument("--report", type=Path, default=None)
    parser.add_argument("--merge", type=Path, nargs="+", default=None, help="reports whose rows to take over")
    arguments, extra = parser.parse_known_args()
    target = arguments.report or ROOT / "reports" / f"loop_h200_{arguments.matrix}"
    before = json.loads(target.with_suffix(".json").read_text()) if target.with_suffix(".json").exists() else {}
    kept: dict[str, dict[str, Any]] = {}
    if arguments.only is not None or arguments.merge is not None:  # each with the commit it was measured at
        kept = {row["name"]: row for row in before.get("runs", [])}
    if arguments.merge is not None:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.merge]
        kept |= {row["name"]: row for other in found for row in other["runs"]}
        about = {key: value for key, value in (found[0] | before).items() if key != "runs"}
        for key, values in (
            ("command", [part["command"] for part in (before, *found) if part]),
            ("commit", [row["commit"] for row in kept.values()]),
        ):
            about[key] = " and ".join(dict.fromkeys(values))
        write(target, about, kept)
        return
    import torch

    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {
        "command": own_command(sys.argv[1:]),
        "commit": revision(),
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        if torch.cuda.is_available()
        else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    failed = False
    for run in {"one": one, "two": two}[arguments.matrix]():
        if arguments.only is not None and not any(part in run.name for part in arguments.only):
            continue
        if any(part in run.name for part in arguments.exclude):
            continue
        run = named(replace(run, steps=arguments.steps or run.steps), extra)
        name = "".join(c if c.isalnum() else "-" for c in run.name)
        row = execute(run, arguments.out / name, extra, arguments.timeout)
        facts = {"same": run.same, "cost": run.cost, "strict": run.strict, "wanted_steps": run.steps}
        kept[run.name] = row = {"start": None, **row, **facts, "commit": about["commit"]}
        write(target, about, kept)
        failed |= row["verdict"] != "pass"
        print(json.dumps({k: v for k, v in row.items() if k not in ("command", "reward", "grad_norm")}), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
