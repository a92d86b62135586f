#!/usr/bin/env python3
"""Time linear_logp forward and backward on one GPU beside torch, and write a JSON report.

    python scripts/bench_linear_logp.py --out reports/linear_logp_sm90.json [--shapes T1,T3] [--no-compile]

Each variant: 3 warm-up and 10 timed calls (2 and 6 from 10 ms a call on), CUDA events around each, median; the
upstream gradient is one value a token. torch.compile comes last, after the other variants of all shapes: most of the
time goes into its compilation. The report is written after every variant.

Two methods: ``queued`` lets calls follow each other without waiting for the GPU in between, as a training step does
(caches are not cleared: the weight alone is larger than the L2); ``latency`` waits after each call, so that the time of
the CPU before the first kernel counts.

Two rates for the roofline of 2, 6 or 8 THV operations: ``burst`` of an 8192^3 cuBLAS product measured first, and
``library``, that of the three plain cuBLAS products of the same shape (logits, dH, dW: what is needed without any
softmax), queued, after the same rest and as often, so equally hot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

import torch
import torch._dynamo

from rl_kernel import registry
from rl_kernel.ops.linear_logp import linear_logp, sm90
from rl_kernel.ops.linear_logp.policy import linear_policy_loss

SHAPES = {
    "T1": (796, 2048, 75968),
    "T2": (1820, 2048, 75968),
    "T3": (6827, 2048, 75968),
    "Q8B_TP1": (8192, 4096, 151936),
    "Q8B_TP4": (8192, 4096, 37984),
}


def timed(call, warm: int = 3, repeats: int = 10, wait: bool = True) -> float:
    """Median milliseconds. ``wait``: for the GPU after each call."""
    for _ in range(warm):
        call()
    events = []
    if wait:
        torch.cuda.synchronize()
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        if wait:
            torch.cuda.synchronize()
        events.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return (times[(repeats - 1) // 2] + times[repeats // 2]) / 2


def peak_mib(call) -> float:
    """Memory above what was allocated before, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del result
    return round(peak, 1)


def inputs(tokens: int, hidden: int, vocabulary: int):
    """Peaked softmax like a trained model's: one token a row is lifted by 10 to 20, mostly the target."""
    g = torch.Generator(device="cuda").manual_seed(0)
    w = torch.empty(vocabulary, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02, generator=g)
    top = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=g)
    other = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=g)
    t = torch.where(torch.rand(tokens, device="cuda", generator=g) < 0.95, top, other)
    row = w[top].float()
    lift = torch.empty(tokens, 1, device="cuda").uniform_(10, 20, generator=g)
    h = torch.randn(tokens, hidden, device="cuda", generator=g) + lift * row / row.pow(2).sum(-1, keepdim=True)
    return h.bfloat16(), w, t, torch.randn(tokens, device="cuda", generator=g)


def eager(h, w, t):
    return torch.nn.functional.cross_entropy((h @ w.T).float(), t, reduction="none")


def gradients(function, h, w, g):
    return torch.autograd.grad(function(h, w), (h, w), g)


def variants(h, w, t, g, compiled):
    """name -> (forward, forward and backward, operations in THV of forward and backward)

    ``compiled``: only this one.
    """

    def ours(mib: int):
        def logp(h, w):
            sm90.WORKSPACE_BYTES = mib << 20
            return linear_logp(h, w, t).logp

        return logp

    old, advantages = torch.zeros(t.shape[0], device="cuda") - 1.0, g
    bound = 512

    def fused():
        sm90.WORKSPACE_BYTES = bound << 20
        loss, _, _ = linear_policy_loss(h, w, t, old, advantages)
        return torch.autograd.grad(loss, (h, w))

    def forward(function):
        def call():
            with torch.no_grad():
                return function(h, w)

        return call

    if compiled is not None:
        return {
            "torch.compile": (
                forward(lambda h, w: compiled(h, w, t)),
                lambda: gradients(lambda h, w: compiled(h, w, t), h, w, g),
                6,
            )
        }
    return {
        "kept": (forward(ours(8192)), lambda: gradients(ours(8192), h, w, g), 6),
        "recompute, 512 MiB": (None, lambda: gradients(ours(512 if h.shape[0] > 4000 else 64), h, w, g), 8),
        "fused policy loss, 512 MiB": (None, fused, 6),
        "torch eager": (
            forward(lambda h, w: eager(h, w, t)),
            lambda: gradients(lambda h, w: eager(h, w, t), h, w, g),
            6,
        ),
    }


def cublas_rate() -> float:
    """TFLOP/s of an 8192^3 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: torch.mm(a, b), 3, 12) / 1e9


def library_products(h: torch.Tensor, w: torch.Tensor, rest: float, counts: tuple[int, int]) -> tuple[float, float]:
    """Milliseconds of the product that gives logits, and of the three of forward and backward."""
    with torch.no_grad():
        x = torch.empty(h.shape[0], w.shape[0], device="cuda", dtype=torch.bfloat16)
        dh, dw = torch.empty_like(h), torch.empty_like(w)

        def forward():
            torch.mm(h, w.t(), out=x)

        def both():
            torch.mm(h, w.t(), out=x)
            torch.mm(x, w, out=dh)
            torch.mm(x.t(), h, out=dw)

        both()
        time.sleep(rest)
        one = timed(forward, *counts, wait=False)
        time.sleep(rest)
        return one, timed(both, *counts, wait=False)


class Shape:
    """Operands of one shape and what the roofline is there."""

    def __init__(self, name: str, burst: float, rest: float) -> None:
        self.name, self.rest = name, rest
        tokens, hidden, vocabulary = SHAPES[name]
        self.work = tokens * hidden * vocabulary / 1e9
        self.counts = (2, 6) if self.work > 1200 else (3, 10)  # warm-up and timed calls
        self.h, self.w, self.t, self.g = inputs(tokens, hidden, vocabulary)
        self.h.requires_grad_(), self.w.requires_grad_()
        self.library = one, three = library_products(self.h, self.w, rest, self.counts)
        self.rates = {"burst": burst, "library": 6 * self.work / three}
        self.rates_forward = {"burst": burst, "library": 2 * self.work / one}
        print(f"\n{name} {tokens} x {hidden} x {vocabulary}: 2/6/8 THV at {burst:.0f} TFLOP/s "
              f"{2 * self.work / burst:.2f} / {6 * self.work / burst:.2f} / {8 * self.work / burst:.2f} ms; library "
              f"products {one:.2f}, three {three:.2f} ms = {self.rates_forward['library']:.0f}, "
              f"{self.rates['library']:.0f} TFLOP/s")  # fmt: skip

    def measure(self, variant: str, forward, both, operations: int) -> dict:
        torch.cuda.empty_cache()
        row = {"shape": self.name, "variant": variant, "operations": operations, "repeats": self.counts[1],
               "library_ms": round(self.library[1], 3), "library_forward_ms": round(self.library[0], 3)}  # fmt: skip
        both()  # compiles
        row["peak_mib"] = peak_mib(both)
        for part, call, at, count in (
            ("both", both, self.rates, operations),
            ("forward", forward, self.rates_forward, 2),
        ):
            if call is None:
                continue
            call()
            for method in ("queued", "latency"):
                torch.cuda.synchronize()
                time.sleep(self.rest)  # the same rest for all: a hot card runs slower
                ms = timed(call, *self.counts, wait=method == "latency")
                row[f"{part}_{method}_ms"] = round(ms, 3)
                row |= {f"{part}_{method}_of_{of}": round(ms * r / (count * self.work), 3) for of, r in at.items()}
        line = "  ".join(
            f"{part} {method} {row[f'{part}_{method}_ms']:.3f} ({row[f'{part}_{method}_of_burst']:.3f}, "
            f"{row[f'{part}_{method}_of_library']:.3f})"
            for part in ("forward", "both") for method in ("queued", "latency") if f"{part}_{method}_ms" in row
        )  # fmt: skip
        print(f"  {variant:28s} {line}  peak {row['peak_mib']:.0f} MiB", flush=True)
        return row


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds of idling before each measurement")
    args = parser.parse_args()
    rate = cublas_rate()
    card = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout.strip().splitlines()  # fmt: skip
    gpu = card[0] if card else torch.cuda.get_device_name()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    report = {
        "card": gpu,
        "torch": torch.__version__,
        "commit": commit.strip() or os.environ.get("RLK_COMMIT", "unknown"),
        "rest_s": args.rest,
        "cublas_tflops": round(rate, 1),
        "seconds": 0.0,
        "rows": [],
    }
    chosen = registry.resolve("linear_logp", torch.device("cuda"), torch.bfloat16).backend
    print(f"{gpu}, torch {torch.__version__}, cuBLAS {rate:.0f} TFLOP/s, backend {chosen}")
    print("ms (ratio to the roofline at the burst rate, at the rate of the library products)")
    torch._dynamo.config.recompile_limit = 64
    for compiled in (None,) if args.no_compile else (None, torch.compile(eager, dynamic=False)):
        for name in args.shapes.split(","):
            shape = Shape(name, rate, args.rest)
            for variant, calls in variants(shape.h, shape.w, shape.t, shape.g, compiled).items():
                report["rows"].append(shape.measure(variant, *calls))
                report["seconds"] = round(time.monotonic() - began, 1)
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(f"  {report['seconds']:.0f} s since the start", flush=True)
            del shape


if __name__ == "__main__":
    main()
