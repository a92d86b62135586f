"""The linear parts of ``bench_ops.py``: products, their gradients and row-parallel segments beside default cuBLAS."""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_ops_timer as timer
import torch
from bench_ops_timer import add, compare, record, replays
from tune_launch import BF16, SHAPES

shapes = list(SHAPES)
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@functools.lru_cache(maxsize=1)
def operands(key: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(weights, x) of a key, ([dy], x) for wgrad: in one place for all contenders, as time may depend on it."""
    kind, name, m = key.split()
    (n, k), t = SHAPES[name], int(m)
    torch.manual_seed(len(name) * 10007 + t)
    if kind == "wgrad":
        return [torch.randn(t, n, device="cuda").to(BF16)], torch.randn(t, k, device="cuda").to(BF16)
    copies = max(1, min(6, (256 << 20) // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda").mul_(0.02).to(BF16) for _ in range(copies)]
    return weights, torch.randn(t, k if kind == "matmul" else n, device="cuda").to(BF16)


def product_calls(key: str, backend: Any) -> list[Callable[[], object]]:
    """Calls of one product over rotating weights; ``key`` is ``<matmul, dgrad or wgrad> <shape> <rows>``."""
    (weights, x), kind, t = operands(key), key.split()[0], int(key.split()[2])
    if kind == "wgrad":
        return [lambda: backend.wgrad(weights[0], x)] * 2
    call = getattr(backend, kind)
    return [lambda w=w: call(x, w) for w in weights] * (1 if t > 512 or timer.warming else 8 if t <= 64 else 4)


class Torch:
    """The products as torch makes them."""

    matmul = staticmethod(lambda x, w: x @ w.t())
    dgrad = staticmethod(lambda dy, w: dy @ w)
    wgrad = staticmethod(lambda dy, x: dy.t() @ x)


def serve_baseline() -> None:
    """The other process: for each key that comes in, the microseconds of default cuBLAS go out."""
    current, measure = "", None
    for line in sys.stdin:
        key = line.strip()
        if key != current:
            measure = None
            measure, current = replays(product_calls(key, Torch)), key
        assert measure is not None
        print(measure(), flush=True)


class DefaultCublas:
    """Default cuBLAS in a process without our setting, which measures when it is asked."""

    process: subprocess.Popen[str] | None = None

    def of(self, key: str) -> Callable[[], float]:
        return (lambda: 1.0) if timer.warming else lambda: self.ask(key)

    def ask(self, key: str) -> float:
        if self.process is None:
            environment = {key: value for key, value in os.environ.items() if not key.startswith("CUBLAS")}
            command = [sys.executable, str(Path(__file__).with_name("bench_ops.py")), "--baseline"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(key + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of default cuBLAS ended at {key}")
        return float(answer)

    def close(self) -> None:
        if self.process and self.process.stdin:
            self.process.stdin.close()
            self.process.wait(60)


SUSTAINED = 0.05  # seconds of one turn of two contenders without a pause: the clock is that of a card under load


def linear_backends() -> dict[str, Any]:
    """What the registry takes, first and under its own name, then the library and Triton."""
    from rl_kernel import registry
    from rl_kernel.ops.linear import library, triton

    taken = registry.resolve("linear", torch.device("cuda"), BF16)
    others = {"library": library, "triton": triton}
    others.pop(taken.backend, None)
    return {f"auto: {taken.backend}": taken.module, **others}


def linear() -> None:
    backends, cublas = linear_backends(), DefaultCublas()
    auto = next(iter(backends))
    ratios: dict[str, list[float]] = {name: [] for name in backends}
    for name in shapes:
        for m in ROWS:
            key = f"matmul {name} {m}"
            found = compare(
                "linear",
                f"{name} M={m}",
                "default cuBLAS",
                cublas.of(key),
                {backend: product_calls(key, module) for backend, module in backends.items()},
                {auto: 1.05, **({"triton": 1.15} if m <= 64 else {})},
                14 if m <= 64 else 8,
            )
            for backend, row in found.items():
                if row.get("ratio"):
                    ratios[backend].append(row["ratio"])
            if m <= 64 and name in ("o", "down") and "us" in found[auto]:
                n, k = SHAPES[name]
                row = {"op": "linear, weight bytes", "shape": f"{name} M={m}", "backend": auto, "limit": 1.0}
                row.update(reference="weight bytes at 3 TB/s", tb_s=round(2e-6 * n * k / found[auto]["us"], 2))
                record(row, found[auto]["us"], 2 * n * k / 3e6)
                add(row)
    for backend, group in ratios.items():
        if not group:
            continue
        row = {"op": "linear", "shape": f"geometric mean of {len(group)}", "backend": backend}
        row.update(reference="default cuBLAS", limit=1.0 if backend == auto else None)
        record(row, statistics.geometric_mean(group), 1.0)
        add(row)
    for kind in ("dgrad", "wgrad"):
        for name in [name for name in ("qkv", "down") if name in shapes]:
            key = f"{kind} {name} 4096"
            compare(
                f"linear, {kind}",
                f"{name} T=4096",
                "default cuBLAS",
                cublas.of(key),
                {backend: product_calls(key, module) for backend, module in backends.items()},
                {auto: 1.05},
            )
    cublas.close()


def segments() -> None:
    """Row-parallel products in S segments on one rank, against the library's unsegmented one."""
    from rl_kernel import registry
    from rl_kernel.ops.linear import library, sm90

    backends, cublas = linear_backends(), DefaultCublas()
    auto = next(iter(backends))
    if auto != "auto: sm90" and not sm90.supports(registry.Request("linear", "sm90", BF16)):
        backends["sm90"] = sm90
    bound = {auto, "sm90"}  # stated for 1024 rows and more: what a user gets, and the kernel made for it
    for name in [name for name in ("o", "down") if name in shapes]:
        for m in (1, 16, 64, 128, 1024, 2048, 4096, 8192):
            key = f"matmul {name} {m}"
            whole = replays(product_calls(key, library))
            for s in (2, 4, 8):
                if s == 2 and m in (2048, 4096):
                    continue
                compare(
                    "linear, segments",
                    f"{name} M={m} S={s}",
                    "library, S=1",
                    whole,
                    {
                        backend: product_calls(key, Segmented(module, s))
                        for backend, module in backends.items()
                        if backend != "triton" or m <= 1024 or m == 8192
                    },
                    dict.fromkeys(bound, 1.10) if s > 2 and m >= 1024 else {},
                    6,
                    ("default cuBLAS, S=1", cublas.of(key)),
                )
            if m < 1024:
                continue
            long = replays(product_calls(key, library), SUSTAINED)
            for s in (2, 4, 8):
                compare(
                    "linear, segments, sustained",
                    f"{name} M={m} S={s}",
                    "library, S=1",
                    long,
                    {auto: replays(product_calls(key, Segmented(backends[auto], s)), SUSTAINED)},
                    {auto: 1.10} if s > 2 else {},
                )
    cublas.close()


class Segmented:
    def __init__(self, module: Any, segments: int) -> None:
        self.module, self.segments = module, segments

    def matmul(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.module.matmul(x, w, segments=self.segments)
