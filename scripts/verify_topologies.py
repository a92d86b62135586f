"""Training and rollout topologies against each other on this machine's CPU: reports/topologies.md and .json.

    python scripts/verify_topologies.py [--only NAME ...] [--out DIR]

Two parts, on a tiny Qwen3 with 8 key/value heads and 8 segments (virtual TP 8):

``logprobs``: the same weights (as initialised, and after each of three updates) and the same tokens in every topology.
Every rollout engine draws the tokens again from the same seeds; every training group computes their log-probabilities.
All must have the bits of all others. Controls that must not: stock operators, and another virtual TP on one side.

``loop-*``: the product's own entry point, training layout by rollout TP, three updates each. mismatch_count must be 0,
and step 0, which has the same weights and seeds in every row, must draw the same responses.

Names choose parts or single rows; what was measured before stays, with its commit. A row that fails is written as FAIL,
never left out.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import pickle
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from verify_embedded import Run, execute  # noqa: E402

from recipes.batching import Part, gather, join, pack_by_tokens, padding_of  # noqa: E402
from recipes.config import ConsistencyConfig, ModelConfig, RolloutConfig, TrainConfig  # noqa: E402
from recipes.engines.types import PackedBatch, Sample, SamplingParams  # noqa: E402
from tests.engines import megatron_ranks  # noqa: E402 - the pool of training processes

SEGMENTS = 8
UPDATES = 3
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
MODEL = ModelConfig(**SIZES)
ROLLOUT_TP = (1, 2, 4, 8)
TEMPERATURE = 0.7
LIMIT_S = 900.0


@dataclass(frozen=True)
class Layout:
    """A training group."""

    tp: int = 1
    cp: int = 1
    virtual_tp: int = SEGMENTS
    mode: str = "strict"

    @property
    def name(self) -> str:
        return f"tp{self.tp}cp{self.cp}"

    @property
    def train(self) -> TrainConfig:
        return TrainConfig(
            tensor_parallel_size=self.tp,
            context_parallel_size=self.cp,
            sequence_parallel=self.tp > 1 and self.mode == "strict",
            distributed_optimizer=True,
            lr=1e-2,
        )


LAYOUTS = (Layout(4, 2), Layout(8, 1), Layout(2, 4), Layout(1, 8))
LOGPROBS = (
    *(f"logprobs rollout TP{tp}" for tp in ROLLOUT_TP),
    *(f"logprobs training TP{layout.tp}/CP{layout.cp}" for layout in (Layout(), *LAYOUTS)),
    "logprobs control: training TP1, virtual TP 1",
    "logprobs control: training TP1, stock",
    "logprobs control: rollout TP1, virtual TP 1",
    "logprobs control: rollout TP1, stock",
)


# ---------------------------------------------------------------------- the same weights and tokens everywhere


def prompts() -> list[list[int]]:
    """Prompts of 1 to 200 tokens, over several key blocks, most of them no multiple of anything."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, MODEL.vocab_size, n).tolist() for n in (1, 2, 3, 7, 16, 31, 33, 48, 64, 65, 100, 129, 200)]


def _engine(layout: Layout, rank: int, port: int) -> Any:
    from recipes.engines.megatron import MegatronEngine

    return MegatronEngine(
        MODEL,
        layout.train,
        ConsistencyConfig(mode=layout.mode, virtual_tp=layout.virtual_tp),
        rank=rank,
        world_size=layout.train.world_size,
        master_port=port,
        seed=7,
        timeout_s=LIMIT_S,
    )


def write_weights(rank: int, port: int, folder: Path) -> None:
    """Weights as initialised and after each update, from one rank."""
    engine = _engine(Layout(), rank, port)
    for version in range(UPDATES + 1):
        torch.save(engine.export_hf_weights(), folder / f"weights{version}.pt")
        batch = PackedBatch.from_samples(
            [
                Sample(tuple(p[:1]), tuple(p[1:]), np.zeros(len(p) - 1, np.float32), 0, 0, 0, "stop")
                for p in prompts()[3:]
            ]
        )
        engine.forward_backward([batch], megatron_ranks.nll(1.0 / batch.num_tokens), TEMPERATURE)
        engine.optimizer_step()
    engine.shutdown()


def train_logp(rank: int, port: int, layout: Layout, folder: Path) -> list[dict[int, Part]]:
    """Log-probabilities that this rank holds of the drawn tokens, a list by version; {} on silent ranks."""
    engine = _engine(layout, rank, port)
    sequence, total = padding_of(layout.train)
    found = []
    for version in range(UPDATES + 1):
        samples = pickle.loads((folder / f"samples{version}.pkl").read_bytes())
        engine.load_hf_weights(torch.load(folder / f"weights{version}.pt"), version)
        parts: dict[int, Part] = {}
        for pack in pack_by_tokens([s.num_tokens for s in samples], 1024):
            members = [samples[i] for i in pack]
            batch = PackedBatch.from_samples(members, indices=pack, sequence_multiple=sequence, pad_to_multiple=total)
            parts |= gather(batch, engine.forward_logp(batch, TEMPERATURE).logp, engine.local_rows(batch))
        found.append(parts if rank % layout.tp == 0 else {})
    engine.shutdown()
    return found


def rollout(tp: int, mode: str, virtual_tp: int, folder: Path, out: Path) -> None:
    """Draw responses with every version of the weights; runs in a process of its own."""
    from recipes.engines.vllm import VllmEngine

    config = RolloutConfig(
        tensor_parallel_size=tp,
        max_prompt_len=200,
        max_response_len=24,
        max_num_seqs=16,
        max_num_batched_tokens=256,  # the long prompts are prefilled in pieces
        kv_cache_bytes=32 << 20,
        temperature=TEMPERATURE,
    )
    engine = VllmEngine(MODEL, config, ConsistencyConfig(mode=mode, virtual_tp=virtual_tp), seed=0)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=24, n=2, ignore_eos=True)
    drawn = []
    for version in range(UPDATES + 1):
        engine.update_weights(torch.load(folder / f"weights{version}.pt"), version)
        drawn.append(engine.generate(prompts(), params, list(range(2 * len(prompts()))), weight_version=version))
    engine.shutdown()
    out.write_bytes(pickle.dumps(drawn))


def _draw(tp: int, folder: Path, mode: str = "strict", virtual_tp: int = SEGMENTS) -> list[list[Sample]]:
    out = folder / f"rollout-tp{tp}-{mode}-{virtual_tp}.pkl"
    process = multiprocessing.get_context("spawn").Process(target=rollout, args=(tp, mode, virtual_tp, folder, out))
    process.start()
    process.join(LIMIT_S)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"the rollout engine of TP {tp} ended with {process.exitcode}")
    return pickle.loads(out.read_bytes())


def _digest(version: list[np.ndarray], samples: list[Sample]) -> str:
    """Of tokens and the bits of their log-probabilities."""
    digest = hashlib.sha256()
    for sample, logp in zip(samples, version, strict=True):
        digest.update(np.asarray(sample.response_ids, np.int64).tobytes() + logp.tobytes())
    return digest.hexdigest()[:16]


def _differ(version: list[np.ndarray], samples: list[Sample]) -> int:
    """Log-probabilities whose bits are not those of ``samples``."""
    pairs = zip(version, (s.rollout_logp for s in samples), strict=True)
    return sum(int((a.view(np.int32) != b.view(np.int32)).sum()) for a, b in pairs)


def compare_logprobs(folder: Path, wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """A row for each wanted topology, as soon as it is there; rollout TP1, the reference, is always one."""
    megatron_ranks.TIMEOUT_S = LIMIT_S
    megatron_ranks.run(1, write_weights, folder)
    first = _draw(1, folder)
    tokens = sum(len(s.response_ids) for samples in first for s in samples)
    for version, samples in enumerate(first):
        (folder / f"samples{version}.pkl").write_bytes(pickle.dumps(samples))

    def row(
        name: str, logp: list[list[np.ndarray]], drawn: list[list[Sample]], control: bool = False
    ) -> dict[str, Any]:
        digests = [_digest(a, b) for a, b in zip(logp, drawn)]
        same = [s.response_ids for v in drawn for s in v] == [s.response_ids for v in first for s in v]
        differing = sum(_differ(a, b) for a, b in zip(logp, first)) if same else None
        good = (differing != 0) if control else (differing == 0 and digests == reference)
        return {
            "name": name,
            "control": control,
            "tokens": tokens,
            "differing": differing,  # None: other tokens were drawn
            "hashes": digests,
            "verdict": "pass" if good else "FAIL",
        }

    def trained(layout: Layout) -> list[list[np.ndarray]]:
        ranks = megatron_ranks.run(layout.train.world_size, train_logp, layout, folder)
        return [join([rank[v] for rank in ranks], len(first[v]), layout.name) for v in range(UPDATES + 1)]

    def logp_of(drawn: list[list[Sample]]) -> list[list[np.ndarray]]:
        return [[s.rollout_logp for s in samples] for samples in drawn]

    reference = [_digest(a, b) for a, b in zip(logp_of(first), first)]
    yield row(LOGPROBS[0], logp_of(first), first)
    for tp in ROLLOUT_TP[1:]:
        if wanted(name := f"logprobs rollout TP{tp}"):
            drawn = _draw(tp, folder)
            yield row(name, logp_of(drawn), drawn)
    for layout in (Layout(), *LAYOUTS):
        if wanted(name := f"logprobs training TP{layout.tp}/CP{layout.cp}"):
            yield row(name, trained(layout), first)
    for name, layout in zip(LOGPROBS[-4:-2], (Layout(virtual_tp=1), Layout(mode="native"))):
        if wanted(name):
            yield row(name, trained(layout), first, True)
    for name, (mode, virtual_tp) in zip(LOGPROBS[-2:], (("strict", 1), ("native", SEGMENTS))):
        if wanted(name):
            drawn = _draw(1, folder, mode, virtual_tp)
            yield row(name, logp_of(drawn), drawn, True)


# ---------------------------------------------------------------------- the loop


def loop_rows() -> list[Run]:
    """Training layout by rollout TP; the published one longer and with two engines; a stock control."""
    common = tuple(f"model.{key}={value}" for key, value in SIZES.items())
    common += (f"consistency.virtual_tp={SEGMENTS}", "rollout.batch_size=8", "rollout.n_samples_per_prompt=8")
    common += ("trainer.save_interval=0", "orchestrator.start_timeout_s=900", "rollout.kv_cache_bytes=16777216")

    def overrides(layout: Layout, tp: int, engines: int = 1, shards: bool = True) -> tuple[str, ...]:
        return (
            *common,
            f"train.tensor_parallel_size={layout.tp}",
            f"train.context_parallel_size={layout.cp}",
            f"train.sequence_parallel={str(shards and layout.tp > 1).lower()}",
            f"train.distributed_optimizer={str(shards).lower()}",
            f"rollout.tensor_parallel_size={tp}",
            f"rollout.num_engines={engines}",
        )

    rows = [Run("loop-tp4cp2-2xtp4", overrides(LAYOUTS[0], 4, 2), 20)]
    rows += [
        Run(f"loop-{layout.name}-tp{tp}", overrides(layout, tp), UPDATES) for layout in LAYOUTS for tp in ROLLOUT_TP
    ]
    # Megatron's local modules have neither sequence nor context parallelism, so the stock arm is TP8.
    native = (*overrides(LAYOUTS[1], 1, shards=False), "consistency=native")
    return [*rows, Run("loop-native-tp8cp1-tp1", native, UPDATES, strict=False)]


def verdict(run: Run, result: dict[str, Any]) -> str:
    """``pass``, or what is wrong."""
    if result["exit_code"] != 0 or result["steps"] != run.steps:
        return f"FAIL: exit code {result['exit_code']} after {result['steps']} steps"
    if run.strict == bool(result["mismatches"]) or not result["active_tokens"]:
        return f"FAIL: {result['mismatches']} mismatches of {result['active_tokens']}"
    return "pass"


def step_zero(folder: Path) -> dict[str, Any]:
    """What step 0 drew: the same in every strict row."""
    path = folder / "metrics.jsonl"
    line = path.read_text(encoding="utf-8").splitlines()[:1] if path.exists() else []
    names = ("train/weight_hash", "consistency/active_tokens", "consistency/digest")
    return {name: json.loads(line[0])[name] for name in names} if line else {}


# ---------------------------------------------------------------------- the report


def report(found: dict[str, Any], about: dict[str, str]) -> str:
    """The Markdown report."""
    lines = ["# Topologies: training layout by rollout TP, gloo processes on a CPU", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [
        f"- model: Qwen3, {MODEL.num_hidden_layers} layers, hidden {MODEL.hidden_size}, {MODEL.num_attention_heads} "
        f"heads, {MODEL.num_key_value_heads} key/value heads, {MODEL.dtype}, virtual TP {SEGMENTS}; sequence "
        "parallelism wherever TP > 1, distributed optimizer",
        "- measured beside other work on the same cores: seconds say little",
    ]
    if found.get("logprobs"):
        rows = found["logprobs"]
        lines += ["", "## The same weights and tokens in every topology", ""]
        lines += [
            f"Log-probabilities of {rows[0]['tokens']:,} sampled tokens under four versions of the weights (as "
            f"initialised, after 1, 2 and 3 updates), temperature {TEMPERATURE:g}. Rollout engines draw the tokens "
            "themselves, from the same seeds; training groups compute the log-probabilities of the tokens of rollout "
            "TP1. Hash: of tokens and bits.",
            "",
            "| topology | differ | hashes by version | s | commit | verdict |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            differing = "other tokens" if row["differing"] is None else f"{row['differing']:,}"
            cells = [row["name"].removeprefix("logprobs "), differing, " ".join(row["hashes"])]
            lines.append(f"| {' | '.join(cells)} | {row['seconds']} | {row['commit']} | {row['verdict']} |")
    rows = found.get("loop", [])
    if rows:
        lines += ["", "## The loop", ""]
        lines += [
            "| run | updates | active tokens | mismatches | max abs diff | step 0 | s | GiB | commit | verdict |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            zero = row["step_zero"].get("consistency/digest", "")
            cells = [row["name"], row["steps"], f"{row['active_tokens']:,}", f"{row['mismatches']:,}"]
            cells += ["" if row["max_abs_diff"] is None else f"{row['max_abs_diff']:.3g}", zero, row["seconds"]]
            cells += [row["peak_gib"], row["commit"], row["verdict"]]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        lines += ["", "Step 0: digest of its tokens and log-probabilities."]
        lines += ["", "## Commands", "", "```", *(row["command"] for row in rows), "```"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure what ``--only`` names and write the report after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=None, help="substrings of row names")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "topologies")
    parser.add_argument("--report", type=Path, default=ROOT / "reports" / "topologies")
    arguments = parser.parse_args()
    folder = arguments.out / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    about = {
        "command": shlex.join(["python", "scripts/verify_topologies.py"]),
        "machine": f"{names[0].split(':')[1].strip() if names else 'CPU'}, {psutil.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU",
        "date": datetime.date.today().isoformat(),
    }
    path = arguments.report.with_suffix(".json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def wanted(name: str) -> bool:
        return arguments.only is None or any(part in name for part in arguments.only)

    def write() -> None:
        path.write_text(json.dumps({**found, **about}, indent=1) + "\n")
        arguments.report.with_suffix(".md").write_text(report(found, about), encoding="utf-8")

    rows = {row["name"]: row for row in found.get("logprobs", [])}
    started = time.time()
    for row in compare_logprobs(folder, wanted) if any(map(wanted, LOGPROBS)) else ():
        rows[row["name"]] = row | {"seconds": round(time.time() - started, 1), "commit": commit}
        started = time.time()
        for other in rows.values():  # rows measured before, too
            if not other["control"] and other["hashes"] != row["hashes"] and not row["control"]:
                rows[row["name"]]["verdict"] = f"FAIL: not the bits of {other['name']}"
        print(json.dumps(rows[row["name"]]), flush=True)
        found["logprobs"] = [rows[name] for name in LOGPROBS if name in rows]
        write()
    runs = loop_rows()
    rows = {row["name"]: row for row in found.get("loop", [])}
    for run in runs:
        if not wanted(run.name):
            continue
        result = execute(run, folder / run.name)
        zero = step_zero(folder / run.name)
        rows[run.name] = result | {"step_zero": zero, "verdict": verdict(run, result), "commit": commit}
        strict = [rows[r.name] for r in runs if r.strict and r.name in rows and rows[r.name]["step_zero"]]
        if any(row["step_zero"] != strict[0]["step_zero"] for row in strict):
            rows[run.name]["verdict"] = "FAIL: step 0 differs from the other rows'"
        print(json.dumps({k: v for k, v in rows[run.name].items() if k != "command"}), flush=True)
        found["loop"] = [rows[r.name] for r in runs if r.name in rows]
        write()
    everything = [*found.get("logprobs", []), *found.get("loop", [])]
    sys.exit(any(row["verdict"] != "pass" for row in everything))


if __name__ == "__main__":
    main()
