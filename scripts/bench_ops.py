"""The table of operator figures on one GPU, by one command.

    python scripts/bench_ops.py --out reports/gpu_operators_h200 [--only linear,attention,...]
    python scripts/bench_ops.py --out reports/gpu_operators_h200 --join A.json B.json   # tables of parts, into one

Writes OUT.json and OUT.md after every part; ended by SIGTERM (``timeout``), it writes what it has. Every row names an
operator, a shape, a backend, its time, what it is compared with, and the limit; the status is ``pass``, ``failure``
(slower than the limit), ``measured`` (no limit stated), ``oom`` or ``blocked`` (with the reason). References are what a
user would run: default cuBLAS in a process of its own, FlashAttention-3 if this machine has it, torch elsewhere, and
for memory-bound operators the time to move their bytes at the copy bandwidth of a gigabyte.

Times are the smaller of the medians of two passes of CUDA graph replays (linear_logp: one median of eager calls with
gradients). The contenders of a row and their references take turns, so that a drift of the clock meets all of them;
default cuBLAS takes its turn in its own process while this one waits. A graph of a linear or elementwise operator
holds several calls (16 of an elementwise one, and 4 copies of a gigabyte) on buffers that together exceed the cache,
and the time is that of one. "sustained": turns of 50 ms without a pause, at the clock that the card holds in
training. "auto" is the backend that the registry takes; a second reference is for comparison and judges nothing. A
first pass (``--cold`` skips it) runs every part once, in parallel processes, so that no kernel is compiled between
measurements.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import bench_ops_linear
import bench_ops_timer as timer
import torch
from bench_ops_cases import attention, elementwise, linear_logp, logp, sampling
from bench_ops_linear import linear, segments, serve_baseline
from bench_ops_table import join, summary, write
from bench_ops_timer import add, rows
from revision import revision
from tune_launch import SHAPES

METHOD = (__doc__ or "").strip().split("\n\n")[-1]
SECTIONS = {f.__name__: f for f in (linear, segments, elementwise, attention, logp, sampling, linear_logp)}


def warm(names: Sequence[str]) -> None:
    """Every part once, in processes of their own at the same time: compiles what the parts will launch."""
    tasks = []
    for name in names:
        by_shape = {"linear": list(SHAPES), "segments": ["o", "down"]}.get(name, [""])
        tasks += [["--only", name, *(["--shapes", shape] if shape else [])] for shape in by_shape]
    command = [sys.executable, __file__, "--warm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([*command, *task], env=environment, stdout=subprocess.DEVNULL) for task in tasks]
    try:
        for task, process in zip(tasks, running):
            if process.wait():
                print(f"warming {' '.join(task)} ended with {process.returncode}", flush=True)
    finally:
        for process in running:
            process.kill()


def wake() -> None:
    """A second of work, so that the first row does not meet the clock of an idle card."""
    x = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")
    began = time.monotonic()
    while time.monotonic() - began < 1:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


def measure_all(args: argparse.Namespace) -> None:
    seconds: dict[str, float] = {}
    names = args.only.split(",")
    if not (args.cold or args.warm):
        began = time.monotonic()
        warm(names)
        seconds["warm"] = round(time.monotonic() - began, 1)
        print(f"-- warm: {seconds['warm']} s", flush=True)
    from rl_kernel import cublaslt

    timer.warming = args.warm
    torch.manual_seed(0)
    cublaslt.setup()
    if not torch.cuda.is_available():
        raise SystemExit("bench_ops.py times a GPU, and torch sees none")
    report = {
        "command": " ".join(["python", *sys.argv]),
        "commit": revision(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": sys.modules["triton"].__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": seconds,
        "unfinished": list(names),
        "rows": rows,
    }
    if not timer.warming:
        wake()
    for name in names:
        began, first = time.monotonic(), len(rows)
        try:
            SECTIONS[name]()
        except Exception as error:  # noqa: BLE001 - the other parts of the table are worth having
            row = {"op": name, "shape": "", "backend": "", "reference": "", "limit": None, "status": "blocked"}
            add({**row, "reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})
        else:
            report["unfinished"].remove(name)
        finally:
            for row in rows[first:]:
                row["section"] = name
            seconds[name] = round(time.monotonic() - began, 1)
            if not timer.warming:
                write(args.out, {**report, "cublaslt": cublaslt.report()}, METHOD)
        torch.cuda.empty_cache()
        if not timer.warming:
            print(f"-- {name}: {seconds[name]} s", flush=True)
    if not timer.warming:
        print("\n".join(summary(report)))


def stop(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="name of the report without its ending")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"parts, of {', '.join(SECTIONS)}")
    parser.add_argument("--join", nargs="+", metavar="JSON", help="write one report out of those of parts")
    parser.add_argument("--cold", action="store_true", help="compile kernels when they are first met")
    for hidden in ("--warm", "--baseline"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shapes", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(SECTIONS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    if not (args.out or args.warm or args.baseline):
        parser.error("--out is required")
    if args.shapes:
        bench_ops_linear.shapes[:] = args.shapes.split(",")
    if args.baseline:
        serve_baseline()
    elif args.join:
        join(args.out, args.join, list(SECTIONS), METHOD)
    else:
        signal.signal(signal.SIGTERM, stop)
        measure_all(args)


if __name__ == "__main__":
    main()
