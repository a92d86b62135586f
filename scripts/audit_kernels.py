"""Cross-compile kernel variants for sm_90 and gfx942 without a GPU and check what they became.

    python scripts/audit_kernels.py [--family sm90 gfx942] [--sample] [--out OUT]

Every launch that the operators make for the shapes below is captured and compiled for the target, with the launch
tables of its family. All variants of one operator must use one family of matrix instructions, accumulate in one chain,
and have no float atomics, no layout-ordered sums, no contraction and no spills beyond what :mod:`rl_kernel.audit`
allows. The exit status is 1 when a variant fails. ``--sample`` takes the variants that CI compiles; ``--out`` writes
OUT.json and, a row an operator, OUT.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton

from rl_kernel import audit

BF16, F32 = torch.bfloat16, torch.float32


def backend(op: str) -> ModuleType:
    return importlib.import_module(f"rl_kernel.ops.{op}.triton")


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def calls(family: str, sample: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Operator calls whose launches are audited, under the name of the operator."""
    h = 4096
    linear = backend("linear")
    rows = (16, 128, 8192) if sample else (1, 7, 16, 32, 64, 128, 256, 512, 1024, 8192)
    for m in rows:
        yield "linear", partial(linear.matmul, empty(m, h), empty(h, h))
    for segments in (4,) if sample else (2, 4, 8):
        for m in (16, 8192) if not sample else (16,):
            yield "linear", partial(linear.matmul, empty(m, h), empty(h, h), segments=segments)
    yield "linear", lambda: linear.matmul(empty(8192, h), empty(h, h), segments=2)
    yield "linear", lambda: linear.dgrad(empty(8192, h), empty(h, h))
    yield "linear", lambda: linear.wgrad(empty(8192, h), empty(8192, h))
    if not sample:
        yield "linear", lambda: linear.matmul(empty(64, h), empty(151936, h), out_dtype=F32)
        yield "linear", lambda: linear.dgrad(empty(8192, h), empty(h, h), segments=2, parts=2)
        yield "linear", lambda: linear.wgrad(empty(777, h), empty(777, h))
    attention = backend("attention")
    cu, lens = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    q, kv, t = empty(512, 32, 128), empty(512, 8, 128), empty(512, 32, dtype=F32)
    yield "attention", lambda: attention.varlen_forward(q, kv, kv, cu)
    cache, table = empty(100, 16, 8, 128), torch.zeros(8, 64, dtype=torch.int32)
    for split in (True, False):
        yield (
            "attention",
            partial(
                attention.paged_forward,
                q[:8],
                cache,
                cache,
                table,
                cu,
                lens,
                split=split,
                max_query_len=1 if sample else None,
            ),  # fmt: skip
        )
    yield "attention backward", lambda: attention.varlen_backward(q, q, kv, kv, q, t, cu)
    if family == "sm90":
        forward = importlib.import_module("rl_kernel.ops.attention.sm90_forward")
        yield "attention", lambda: forward.forward(q, kv, kv, cu, cu, 0.1, 4)
        sm90 = importlib.import_module("rl_kernel.ops.attention.sm90_backward")
        yield "attention backward", lambda: sm90.backward(q, q, kv, kv, q, t, cu, cu, 0.1, 4)
    if not sample:
        q64, kv64 = empty(512, 16, 64), empty(512, 8, 64)
        yield "attention", lambda: attention.varlen_forward(q64, kv64, kv64, cu)
        if family == "sm90":
            q40, t40 = empty(512, 40, 128), empty(512, 40, dtype=F32)
            yield "attention", lambda: forward.forward(q64, kv64, kv64, cu, cu, 0.1, 2)
            yield "attention", lambda: forward.forward(q40, kv, kv, cu, cu, 0.1, 5)
            yield "attention backward", lambda: sm90.backward(q40, q40, kv, kv, q40, t40, cu, cu, 0.1, 5)
    norm, rope, swiglu, embedding = (backend(name) for name in ("rms_norm", "rope", "swiglu", "embedding"))
    yield "rms_norm", lambda: norm.forward(empty(64, h), empty(h), 1e-6, empty(64, h))
    for dres in (None, empty(64, h)):
        yield "rms_norm", partial(norm.backward, empty(64, h), dres, empty(64, h), empty(h), empty(64, dtype=F32))
    position, angles = torch.zeros(64, dtype=torch.int64), empty(64, 128, dtype=F32)
    yield (
        "rope",
        lambda: rope.qk_norm_forward(
            empty(64, 32, 128), empty(64, 8, 128), empty(128), empty(128), 1e-6, position, angles
        ),
    )
    many, far = empty(8192, 40, 128), torch.zeros(8192, dtype=torch.int64)
    yield (
        "rope",
        lambda: rope.qk_norm_forward(many[:, :32], many[:, 32:], empty(128), empty(128), 1e-6, far, angles),
    )
    yield (
        "rope",
        lambda: rope.qk_norm_backward(
            empty(64, 32, 128), empty(64, 32, 128), empty(128), empty(64, 32, dtype=F32), position, angles
        ),
    )
    yield "swiglu", lambda: swiglu.forward(empty(64, 24576))
    yield "swiglu", lambda: swiglu.backward(empty(64, 12288), empty(64, 24576))
    ids = torch.zeros(64, dtype=torch.int64)
    yield "embedding", lambda: embedding.forward(ids, empty(1000, h))
    yield "collectives", lambda: backend("collectives").reduce_parts(empty(4, 4096, dtype=F32), BF16)
    logp = backend("logp")
    x, row = empty(64, 151936, dtype=F32), empty(64, dtype=F32)
    three, stats = empty(3, 64, dtype=F32), empty(3, 64, 1187, dtype=F32)
    yield "logp", lambda: logp.leaf_stats(x, row, 151936)
    yield "logp", lambda: logp.whole_rows(stats, row)
    yield "logp", lambda: logp.dlogits(x, row, ids, three, three, 151936)
    kept, kept_stats = empty(64, 16384), empty(3, 64, 128, dtype=F32)
    fused = importlib.import_module("rl_kernel.ops.linear_logp.kept")
    for t in (row, None):
        yield "linear_logp", partial(logp.write_leaf_stats, x, t, 16384, kept_stats, 0, ids, 0, row, kept)
        yield "linear_logp", partial(fused.make_dlogits, kept, kept_stats[0], t, ids, three, three)
        yield "linear_logp", partial(fused.write_dlogits, x, t, ids, three, three, 16384, kept)
    sampling, numbers = backend("sampling"), empty(64, dtype=torch.float64)
    yield "sampling", lambda: sampling.sample(x, row, numbers, 151936)
    yield "sampling", lambda: sampling.fill_uniforms(ids, ids, numbers)
    if not sample:
        yield "rms_norm", lambda: norm.forward(empty(64, 32, 128), empty(128), 1e-6)
        yield "rope", lambda: rope.backward(empty(64, 8, 128), position, angles)
        yield "embedding", lambda: embedding.backward(empty(64, h), ids, 1000)
        yield "logp", lambda: logp.tree_nodes(stats, row, [(0, 1024), (1024, 1187)], 2)
        yield "logp", lambda: logp.finish(empty(1, 2, 64, dtype=F32), [], 0, row, row)
        yield "logp", lambda: logp.log_softmax(x, None, three[:2], 151936)
        yield "sampling", lambda: sampling.draw(x, numbers)


def run(family: str, sample: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """All variants of one family: their reports, and the problems."""
    by_op: dict[str, list[audit.Report]] = defaultdict(list)
    seen: set[str] = set()
    records, problems = [], []
    for op, call in calls(family, sample):
        with audit.record(family) as launches:
            call()
        for launch in launches:
            key = launch.identity(family)
            if key in seen:
                continue
            seen.add(key)
            started = time.monotonic()
            report = audit.findings(launch, family)
            by_op[op].append(report)
            record = {
                "op": op, "kernel": report.name, "family": family, "constants": report.constants,
                "mma": dict(report.mma), "spills": report.spills, "problems": report.problems,
                "seconds": round(time.monotonic() - started, 1),
            }  # fmt: skip
            records.append(record)
            problems += [f"{family} {report.name} {report.constants}: {problem}" for problem in report.problems]
            print(family, op, report.name, dict(report.mma), "; ".join(report.problems) or "ok", flush=True)
    for op, reports in by_op.items():
        problems += [f"{family} {op}: {problem}" for problem in audit.same_family(reports)]
    return records, problems


def table(records: list[dict[str, Any]], problems: list[str]) -> str:
    """The Markdown report."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    lines = [
        "# Instruction audit",
        "",
        f"`{' '.join(['python', *sys.argv])}` at {commit.stdout.strip() or 'unknown'}, Triton {triton.__version__}, "
        f"cross-compiled without a GPU, {datetime.date.today()}: {len(records)} variants, {len(problems)} problems. "
        "Checked: matrix instructions, one accumulator chain, float atomics, layout-ordered sums, contraction, spills.",
        "",
        "| family | operator | variants | matrix instructions | largest spill |",
        "|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["family"], record["op"]].append(record)
    for (family, op), group in groups.items():
        names = sorted(
            {name.replace(".sync.aligned", "").replace(".mma_async", "") for r in group for name in r["mma"]}
        )
        spill = max(record["spills"] for record in group)
        lines.append(f"| {family} | {op} | {len(group)} | {', '.join(names) or 'none'} | {spill} |")
    return "\n".join([*lines, "", *problems]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["sm90", "gfx942"], choices=sorted(audit.TARGETS))
    parser.add_argument("--sample", action="store_true", help="the variants that CI compiles")
    parser.add_argument("--out")
    args = parser.parse_args()
    records, problems = [], []
    for family in args.family:
        found, wrong = run(family, args.sample)
        records += found
        problems += wrong
    if args.out:
        text = json.dumps({"variants": records, "problems": problems}, indent=1)
        Path(args.out + ".json").write_text(text + "\n", encoding="utf-8")
        Path(args.out + ".md").write_text(table(records, problems), encoding="utf-8")
    print(f"{len(records)} variants, {len(problems)} problems")
    for problem in problems:
        print(" ", problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
