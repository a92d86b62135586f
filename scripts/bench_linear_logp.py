#!/usr/bin/env python3
"""Time linear_logp forward and backward on one GPU beside its peers, in one run.

    python scripts/bench_linear_logp.py --out reports/linear_logp_h200 [--peers quack,liger] [--shapes T1,T3]

Writes OUT.json and OUT.md after every measurement. Peers (``scripts/peers.py``) are torch eager and compiled, QuACK,
Liger, cut-cross-entropy and verl; by default all of them, and one that is not installed is reported as blocked. The
status of a row is ``pass``, ``blocked``, ``oom`` or ``failure`` (an exception, NaN, another loss or other gradients
than torch eager's, or more time than ``--peer-seconds``); none of these ends the run.

Each implementation lives in a process of its own. All compile for all shapes before anything is measured, torch.compile
first (it times what it makes), the rest at the same time; then one at a time is measured, while the others wait. Every
other round goes in reverse order, so that a drift of the clock meets all. The upstream gradient is one value a token; a
peer that only takes the mean loss is marked. Inputs have the peaked softmax of a trained model; the policy loss is that
of the rollout's own weights, where no ratio is clipped (a row whose gradient is zero costs less).

A card that meets its power limit has two clocks: after a rest it runs such products faster for some tens of
milliseconds than from then on (an H200 for 26 to 45 ms: reports/linear_logp_sm90.md). A figure belongs to one of the
two, by the same rules for all and for the plain cuBLAS products of the shape (logits, dH, dW: what is needed without
any softmax):

``queued``: a stretch of calls after a rest, which follow each other without waiting for the GPU in between. How many is
chosen by a first estimate of their time; the first (the first three of many) and those that end later than 25 ms after
the first began do not count. Up to ``--stretches`` of them a turn, until there are six calls. Where not even two calls
fit into 25 ms there is no such figure: the second and third are timed and marked (``_cold`` is false), and
``sustained`` is the one to compare.

``sustained``: as in a step that keeps the card busy: 0.15 s of calls without a pause, then 0.1 s that are timed, with
events around groups of about 5 ms.

``latency``: waits after each of 6 calls (4 from 1.2e12 multiply-adds a product on), so that the time of the CPU before
the first kernel counts.

Caches are not cleared: the weight alone is larger than the L2. A figure is the median of all timed calls, its spread
the range of the medians of the turns. Ours, torch.compile and QuACK have one turn with all three methods and, as the
time allows, a second: ``queued`` at all shapes before ``sustained`` at any. The others have one turn of forward and
backward, ``queued``, and if there is time another that adds the forward part and ``latency``.

Rates for the roofline of 2, 6 or 8 THV operations: ``burst`` of an 8192^3 cuBLAS product measured first (queued and
latency), and ``library``, that of the plain cuBLAS products: their queued time for queued and latency, their sustained
time for sustained. Clock, power and limiting reasons are NVML's readings while the last calls run (null without the
package nvidia-ml-py); they are sampled slowly, power is the mean of a second on this card.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import bench_linear_logp_table
from bench_linear_logp_worker import OURS, STRETCH, serve
from peers import PEERS
from revision import revision

SHAPES = {
    "T1": (796, 2048, 75968),
    "T2": (1820, 2048, 75968),
    "T3": (6827, 2048, 75968),
    "Q8B_TP1": (8192, 4096, 151936),
    "Q8B_TP4": (8192, 4096, 37984),
}
NEAR = ("ours", "compile", "quack")  # measured in full
METHODS = ("queued", "latency", "sustained")  # the last warms the card
SUSTAINED = (0.15, 0.1)  # seconds before and while it is timed
LOSS, NORM = 0.01, 0.05  # how far a mean loss and the norm of a gradient may be from torch eager's, relatively


class Worker:
    """The process of an implementation; starts when it is asked, is ended when it takes too long."""

    def __init__(self, key: str, device: str, seconds: float, logs: Path) -> None:
        self.key, self.device, self.left, self.log = key, device, seconds, logs / f"{key}.log"
        self.process: subprocess.Popen[str] | None = None

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        """The answer, or a status and a reason if there is none within ``limit`` and the seconds left to it."""
        if self.left <= 0:
            return {"status": "failure", "reason": "its time for this run is used up"}
        began, limit = time.monotonic(), min(limit, self.left)
        try:
            return self._ask(limit, request)
        finally:
            self.left -= time.monotonic() - began

    def _ask(self, limit: float, request: dict[str, Any]) -> dict[str, Any]:
        if self.process is None:
            environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
            command = [sys.executable, __file__, "--worker", self.key, "--device", self.device]
            with self.log.open("a") as log:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
                    start_new_session=True,
                )  # fmt: skip
        process = self.process
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended: no answer below
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        ready = select.select([process.stdout], [], [], limit)[0]
        answer = process.stdout.readline() if ready else ""
        if answer:
            return json.loads(answer)
        self.end()
        if not ready:
            return {"status": "failure", "reason": f"no answer within {limit:.0f} s"}
        last = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return {"status": "failure", "reason": f"its process ended: {''.join(last)[:200]}"}

    def end(self, finally_: bool = False) -> None:
        if finally_:
            self.left = 0.0  # and is not started again
        process, self.process = self.process, None
        if process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Times:
    """What was timed of one implementation at a shape, a list for each turn."""

    def __init__(self) -> None:
        self.turns: dict[str, list[list[float]]] = {}
        self.readings: dict[str, list[dict[str, Any]]] = {}
        self.cold: dict[str, bool] = {}

    def add(self, answer: dict[str, Any]) -> None:
        for name in (f"{part}_{method}" for part in ("both", "forward") for method in METHODS):
            if times := answer.get(name):
                self.turns.setdefault(name, []).append(times)
                self.readings.setdefault(name, []).extend(answer.get(f"{name}_card", []))
                self.cold[name] = self.cold.get(name, True) and answer.get(f"{name}_cold", True)

    def ms(self) -> dict[str, float]:
        return {name: statistics.median(sum(turns, [])) for name, turns in self.turns.items()}

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, ms in self.ms().items():
            fields[f"{name}_ms"] = round(ms, 4)
            fields[f"{name}_turns_ms"] = [round(statistics.median(turn), 4) for turn in self.turns[name]]
            fields[f"{name}_calls_ms"] = self.turns[name]
            if name.endswith("queued"):
                fields[f"{name}_cold"] = self.cold[name]
            if not name.endswith("latency"):
                for what in ("mhz", "watts"):
                    found = [reading[what] for reading in self.readings[name] if what in reading]
                    fields[f"{name}_{what}"] = statistics.median(found) if found else None
                reasons = {reading["reasons"] for reading in self.readings[name] if "reasons" in reading}
                fields[f"{name}_reasons"] = sorted(reasons) or None
        return fields


class Row:
    """What is known of a variant at a shape."""

    def __init__(self, shape: str, key: str, variant: str) -> None:
        self.key, self.variant = key, variant
        self.times = Times()
        self.spent: dict[str, float] = {}  # seconds of a turn, by method
        self.row: dict[str, Any] = {"shape": shape, "variant": variant, "status": "blocked"}
        if key in PEERS:
            peer = PEERS[key]
            self.row |= {"peer": key, "gradient": "mean loss only" if peer.mean else "per token", "note": peer.note}
        else:
            self.row["gradient"] = "per token"
        self.measured = False

    def stop(self, status: str, reason: str) -> None:
        self.row |= {"status": status, "reason": reason}

    @property
    def over(self) -> bool:
        return "reason" in self.row

    def take(self, answer: dict[str, Any], reference: dict[str, Any] | None) -> None:
        """Add a turn."""
        if "status" in answer:
            if self.measured:  # what was measured before stands
                self.row["later"] = f"{answer['status']}: {answer['reason']}"
            else:
                self.stop(answer["status"], answer["reason"])
            return None
        for name in ("peak_mib", "operations"):
            if name in answer:
                self.row[name] = answer[name]
        if "finite" in answer:
            self.row["loss"] = answer["loss"]
            if not answer["finite"]:
                return self.stop("failure", f"not finite: loss {answer['loss']}, norms {answer['norms']}")
            if reference and (reason := self.differs(answer, reference)):
                return self.stop("failure", reason)
        self.times.add(answer)
        self.measured, self.row["status"] = True, "pass"
        return None

    def differs(self, answer: dict[str, Any], reference: dict[str, Any]) -> str | None:
        expected = reference["mean" if self.row["gradient"] == "mean loss only" else "token"]
        pairs = [("mean loss", answer["loss"], expected["loss"], LOSS)]
        if not self.variant.startswith("fused"):  # its gradients are those of another loss
            pairs += [(f"norm of {x}", a, b, NORM) for x, a, b in zip(("dH", "dW"), answer["norms"], expected["norms"])]
        for what, found, due, bound in pairs:
            if abs(found - due) > bound * abs(due):
                return f"{what} {found:.5g}, torch eager's {due:.5g}"
        return None

    def finish(self, work: float, burst: float, library: dict[str, float]) -> dict[str, Any]:
        """Times and their ratios to the roofline; ``work`` is THV / 1e9, rates are in TFLOP/s, ``library`` in ms."""
        row = self.row
        row |= self.times.fields()
        for method in ("queued", "sustained"):
            for part in ("both", "forward"):
                name = "library" + "_forward" * (part == "forward") + "_sustained" * (method == "sustained")
                row[f"{name}_ms"] = round(library.get(f"{part}_{method}", 0.0), 4)
        if turns := self.times.turns.get("both_queued"):
            row |= {"repeats": sum(map(len, turns)), "turns": len(turns)}
        for name, ms in self.times.ms().items():
            part, method = name.split("_")
            count, products = (row["operations"], 6) if part == "both" else (2, 2)
            rates = {} if method == "sustained" else {"burst": burst}
            if plain := library.get(f"{part}_{'sustained' if method == 'sustained' else 'queued'}"):
                rates["library"] = products * work / plain
            row |= {f"{name}_of_{of}": round(ms * rate / (count * work), 3) for of, rate in rates.items()}
        return row


class Run:
    def __init__(self, args: argparse.Namespace, report: dict[str, Any], logs: Path) -> None:
        self.args, self.report, self.began = args, report, time.monotonic()
        self.shapes = {name: SHAPES.get(name) or tuple(map(int, name.split("x"))) for name in args.shapes}
        self.workers = {
            key: Worker(key, args.device, args.peer_seconds if key in PEERS and key != "eager" else 1e9, logs)
            for key in ("ours", "eager", *args.peers)
        }  # torch eager's process also gives the reference and the plain products
        report["shapes"] = self.shapes
        self.rows: dict[str, list[Row]] = {}
        self.library: dict[str, Times] = {}
        self.before: dict[str, float] = {}  # seconds of a turn before its rows are measured
        self.reference: dict[str, dict[str, Any]] = {}
        for shape in self.shapes:
            # In the order of measurement: what is compared closest has its turns closest.
            order = [("ours", OURS[0]), *((key, PEERS[key].name) for key in args.peers)]
            order[2:2] = [("ours", name) for name in OURS[1:]]
            self.rows[shape] = [Row(shape, *item) for item in order]
            for row in self.rows[shape]:
                if row.key in PEERS and (reason := PEERS[row.key].missing()):
                    row.stop("blocked", reason)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def alive(self) -> list[str]:
        return [key for key in self.workers if key == "eager" or any(r.key == key and not r.over for r in self.all())]

    def all(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows]

    def compile(self) -> None:
        """Each shape after shape: torch.compile, which times what it makes, then the rest at the same time."""
        quiet = threading.Event()

        def warm(key: str) -> None:
            answer = self.workers[key].ask(max(self.args.compile_seconds - self.seconds(), 1), do="start")
            if key != "compile":
                quiet.wait(max(self.args.compile_seconds - self.seconds(), 1))
            for i, shape in enumerate(self.shapes.values()):
                if answer.get("status") == "blocked":  # it cannot be imported
                    self.stop(key, self.shapes, answer)
                    break
                answer = self.workers[key].ask(
                    max(self.args.compile_seconds - self.seconds(), 1), do="warm", shape=shape
                )
                if answer.get("reason", "").startswith("no answer"):
                    answer["reason"] = f"not compiled {self.args.compile_seconds:.0f} s after the start"
                    self.stop(key, list(self.shapes)[i:], answer)
                    break

        def one(key: str) -> float:
            try:
                warm(key)
            finally:
                if key == "compile":
                    quiet.set()
            return round(self.seconds(), 1)

        keys = self.alive()
        if "compile" not in keys:
            quiet.set()
        with ThreadPoolExecutor(len(keys)) as pool:
            self.report["compiled_s"] = dict(zip(keys, pool.map(one, keys)))
        print(f"compiled, seconds since the start: {self.report['compiled_s']}", flush=True)
        for reason in dict.fromkeys(f"{row.variant}: {row.row['reason']}" for row in self.all() if row.over):
            print(f"  {reason}", flush=True)

    def stop(self, key: str, shapes: Iterable[str], answer: Mapping[str, Any]) -> None:
        for row in self.all():
            if row.key == key and row.row["shape"] in shapes:
                row.stop(answer["status"], answer["reason"])

    def counts(self, shape: Sequence[int]) -> tuple[int, int]:
        """Warm-up and timed calls where each is waited for."""
        if self.args.device == "cpu":
            return 1, 2
        return (2, 4) if shape[0] * shape[1] * shape[2] > 1.2e12 else (3, 6)

    def plan(self, near: bool, sweep: int, sustained: bool = True) -> dict[str, Any]:
        """What is measured in a turn: of those that are far only what the time allows."""
        methods = {"queued": True, "latency": near == (sweep % 2 == 0), "sustained": near and sustained}
        return {
            "methods": [method for method in METHODS if methods[method]],
            "parts": ["both", "forward"] if near or sweep else ["both"],
            "rest": self.args.rest,
            "stretches": self.args.stretches,
            "sustained": SUSTAINED if self.args.device == "cuda" else (0.002, 0.002),
        }

    def turn(self, name: str, rows: Sequence[Row], sweep: int, sustained: bool) -> None:
        """One turn of these rows, and of the plain products, at a shape."""
        shape, limit = self.shapes[name], 30.0  # a measurement takes about 3 s
        began = self.seconds()
        keys = ["eager", *(key for key in dict.fromkeys(row.key for row in rows) if key != "eager")]
        with ThreadPoolExecutor(len(keys)) as pool:
            list(pool.map(lambda key: self.workers[key].ask(limit, do="inputs", shape=shape), keys))
        if name not in self.reference:
            self.reference[name] = self.workers["eager"].ask(limit, do="reference", shape=shape)
            if "status" in self.reference[name]:
                print(f"  no reference at {name}: {self.reference[name]['reason']}")
        plan = self.plan(any(row.key in NEAR for row in rows), sweep, sustained)
        answer = self.workers["eager"].ask(limit, do="library", shape=shape, **plan)
        if "status" in answer:
            raise SystemExit(f"the plain products at {name}: {answer['status']}, {answer['reason']}")
        self.library.setdefault(name, Times()).add(answer)
        reference = self.reference[name] if "token" in self.reference[name] else None
        self.before[name] = self.seconds() - began
        for row in rows:
            if row.over:
                continue
            began = self.seconds()
            plan = self.plan(row.key in NEAR, sweep, sustained) | {"counts": self.counts(shape)}
            answer = self.workers[row.key].ask(
                limit, do="measure", shape=shape, variant=row.variant, check=not row.measured, **plan
            )
            spent = answer.get("spent", {})
            row.spent |= spent | {"other": self.seconds() - began - sum(spent.values())}
            row.take(answer, reference)
            self.write()
            self.show(name, row)

    def expected(self, name: str, rows: Sequence[Row], plan: Mapping[str, Any]) -> float:
        """Seconds of another turn; what has not been measured yet is taken for longer than the queued part."""
        seconds = self.before[name]
        for row in rows:
            new = 3 * row.spent.get("queued", 0)
            seconds += sum(row.spent.get(what, new) for what in ("other", *plan["methods"]))
        return seconds

    def show(self, name: str, row: Row) -> None:
        values = row.row
        parts = [
            f"{part} {method} {values[f'{part}_{method}_turns_ms'][-1]:.3f}"
            for part in ("forward", "both")
            for method in METHODS
            if f"{part}_{method}_turns_ms" in values
        ]
        text = values.get("reason") or f"{'  '.join(parts)}  peak {values.get('peak_mib', 0):.0f} MiB"
        print(f"  {name:8s} {row.variant:27s} {values['status']:8s} {text}", flush=True)

    def write(self) -> None:
        rows = []
        for name, group in self.rows.items():
            t, h, v = self.shapes[name]
            library = self.library[name].ms() if name in self.library else {}
            rows += [row.finish(t * h * v / 1e9, self.report["cublas_tflops"], library) for row in group]
        self.report["library"] = {name: times.fields() for name, times in self.library.items()}
        report = self.report | {"seconds": round(self.seconds(), 1), "rows": rows}
        bench_linear_logp_table.write(self.args.out, report)

    def measure(self) -> None:
        for sweep in range(self.args.turns):
            # The second round goes backwards, the near ones first, and each turn only if it ends in time.
            for near in (None,) if sweep == 0 else (True, False) if sweep == 1 else (True,):
                chosen = {
                    name: [row for row in rows if not row.over and near in (None, row.key in NEAR)]
                    for name, rows in list(self.rows.items())[:: -1 if sweep % 2 else 1]
                }
                chosen = {name: rows for name, rows in chosen.items() if rows}
                for i, (name, rows) in enumerate(chosen.items()):
                    full, less = (self.plan(near is not False, sweep, sustained) for sustained in (True, False))
                    fits = True
                    if sweep:  # sustained times scatter least: left out where they leave no time for what follows
                        later = sum(self.expected(*item, less) for item in list(chosen.items())[i + 1 :])
                        fits = self.seconds() + self.expected(name, rows, full) + later < self.args.seconds
                        if self.seconds() + self.expected(name, rows, full if fits else less) > self.args.seconds:
                            continue
                    self.turn(name, rows[::-1] if sweep % 2 else rows, sweep, fits)
                    print(f"  {self.seconds():.0f} s since the start", flush=True)

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end(True)

    def go(self) -> None:
        n = 8192 if self.args.device == "cuda" else 256
        try:
            self.compile()
            backend = self.workers["ours"].ask(60, do="backend")
            burst = self.workers["eager"].ask(60, do="burst", n=n)
            if "ms" not in burst:
                raise SystemExit(f"the {n}^3 product: {burst['status']}, {burst['reason']}")
            self.report["cublas_tflops"] = round(2 * n**3 / statistics.median(burst["ms"]) / 1e9, 3)
            self.report["backend"] = backend.get("backend", backend.get("reason"))
            print(f"cuBLAS {self.report['cublas_tflops']:.0f} TFLOP/s, backend {self.report['backend']}", flush=True)
            self.measure()
            self.write()
        finally:
            self.end()
        print("\n".join(bench_linear_logp_table.comparison(json.loads(Path(self.args.out + ".json").read_text()))))


def said(command: list[str]) -> str:
    """What a program prints, nothing where it is missing or fails."""
    try:
        root = Path(__file__).resolve().parents[1]
        return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False).stdout.strip()
    except OSError:
        return ""


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """What a report names besides its figures."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    card = "CPU"
    if args.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("bench_linear_logp.py times a GPU, and torch sees none")
        lines = said(query).splitlines()
        card = lines[0] if lines else torch.cuda.get_device_name()
    versions = {}
    names = ["torch", "triton", "nvidia-cutlass-dsl", "nvidia-ml-py", *(PEERS[key].distribution for key in args.peers)]
    for name in dict.fromkeys(names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": revision(),
        "card": card,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "torch": torch.__version__,
        "versions": versions,
        "rest_s": args.rest,
        "stretch_ms": STRETCH,
        "sustained_s": list(SUSTAINED),
        "cublas_tflops": 0.0,
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="name of the report without its ending")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; none: only ours")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}, or TxHxV like 512x2048x8192"
    )
    parser.add_argument(
        "--turns", type=int, default=2, help="rounds of measurements; from the third on only the near ones"
    )
    parser.add_argument("--rest", type=float, default=0.3, help="seconds of idling before each stretch of calls")
    parser.add_argument(
        "--stretches", type=int, default=2, help="of queued calls in a turn, where one has fewer than six of them"
    )
    parser.add_argument("--seconds", type=float, default=190, help="no round after the first that would end later")
    parser.add_argument("--compile-seconds", type=float, default=90, help="for compiling, from the start")
    parser.add_argument("--peer-seconds", type=float, default=150, help="for one peer in all, compilation included")
    parser.add_argument("--table", metavar="JSON", help="write OUT.md from this report again; measures nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return args
    if not args.out:
        parser.error("--out is required")
    args.out = args.out.removesuffix(".json")
    args.peers = [] if args.peers == "none" else args.peers.split(",")
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"--peers names {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    args.peers = [key for key in PEERS if key in args.peers and not (args.no_compile and key == "compile")]
    args.shapes = args.shapes.split(",")
    for name in args.shapes:
        if name not in SHAPES and not (name.count("x") == 2 and all(x.isdigit() for x in name.split("x"))):
            parser.error(f"--shapes names {name}; known: {', '.join(SHAPES)}, or TxHxV")
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        serve(args.worker, args.device)
    elif args.table:
        bench_linear_logp_table.write(args.out, json.loads(Path(args.table).read_text(encoding="utf-8")))
    else:
        report = facts(args)
        print(f"{report['card']}, {report['versions']}", flush=True)
        with tempfile.TemporaryDirectory() as logs:
            run = Run(args, report, Path(logs))

            def stop(*_: object) -> None:
                run.end()
                raise SystemExit(128 + signal.SIGTERM)

            signal.signal(signal.SIGTERM, stop)
            run.go()


if __name__ == "__main__":
    main()
