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
default cuBLAS takes its turn in its own process while this one waits. A graph of a linear or elementwise operator holds
several calls (16 of an elementwise one, and 4 copies of a gigabyte) on buffers that together exceed the cache, and the
time is that of one. "auto" is the backend that the registry takes; a second reference is for comparison and judges
nothing. A first pass (``--cold`` skips it) runs every part once, in parallel processes,
so that no kernel is compiled between measurements.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F  # noqa: N812
from tune_launch import BF16, SHAPES

Calls = Sequence[Callable[[], object]]
shapes = list(SHAPES)
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
rows: list[dict[str, Any]] = []
warming = False


def replays(calls: Calls) -> Callable[[], float]:
    """Captures the calls one after another; what is returned replays them and gives the microseconds of one."""
    calls[0]()
    torch.cuda.synchronize()
    if warming:
        return lambda: 1.0
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            results.append(call())  # held, so that no call writes where the one before it did
    results.clear()

    def measure() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(calls)

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


# linear


def product_calls(key: str, backend: Any) -> list[Callable[[], object]]:
    """Calls of one product over rotating weights; ``key`` is ``<matmul, dgrad or wgrad> <shape> <rows>``."""
    kind, name, m = key.split()
    (n, k), t = SHAPES[name], int(m)
    torch.manual_seed(len(name) * 10007 + t)
    copies = 1 if kind == "wgrad" else max(1, min(6, (256 << 20) // (2 * n * k)))
    if kind == "wgrad":
        dy, x = torch.randn(t, n, device="cuda").to(BF16), torch.randn(t, k, device="cuda").to(BF16)
        return [lambda: backend.wgrad(dy, x)] * 2
    weights = [torch.randn(n, k, device="cuda").mul_(0.02).to(BF16) for _ in range(copies)]
    x = torch.randn(t, k if kind == "matmul" else n, device="cuda").to(BF16)
    call = getattr(backend, kind)
    return [lambda w=w: call(x, w) for w in weights] * (1 if t > 512 or warming else 8 if t <= 64 else 4)


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
        return (lambda: 1.0) if warming else lambda: self.ask(key)

    def ask(self, key: str) -> float:
        if self.process is None:
            environment = {key: value for key, value in os.environ.items() if not key.startswith("CUBLAS")}
            command = [sys.executable, __file__, "--baseline"]
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
        for m in (1, 16, 64, 1024, 2048, 4096, 8192):
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
    cublas.close()


class Segmented:
    def __init__(self, module: Any, segments: int) -> None:
        self.module, self.segments = module, segments

    def matmul(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.module.matmul(x, w, segments=self.segments)


# memory-bound operators


def copy_calls(count: int, copies: int) -> list[list[Callable[[], object]]]:
    """Two ways to copy: ``count`` bytes, half of them read and half written, on ``copies`` pairs of buffers."""
    pairs = [(torch.randn(count // 8, device="cuda"), torch.empty(count // 8, device="cuda")) for _ in range(copies)]
    return [
        [lambda a=a, b=b: b.copy_(a) for a, b in pairs],
        [lambda a=a, b=b: torch.add(a, 0.0, out=b) for a, b in pairs],
    ]


def copied(count: int, copies: int = 4) -> float:
    """Microseconds of a copy that moves ``count`` bytes, the better of two ways."""
    return min(
        statistics.median([measure() for _ in range(7)])
        for measure in (replays(calls * (4 // copies)) for calls in copy_calls(count, copies))
    )


def bandwidth() -> float:
    """Copy bandwidth of a gigabyte in bytes a microsecond, read plus written."""
    count = 1 << 31
    return count / copied(count, 1)


def elementwise() -> None:
    from rl_kernel.ops.rms_norm import triton as norm
    from rl_kernel.ops.rope import triton as rope
    from rl_kernel.ops.swiglu import triton as swiglu

    speed = bandwidth()
    t, h, copies = 8192, 4096, 4

    def many(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(*shape, device="cuda").to(BF16) for _ in range(copies)]

    x, r, w, head = many(t, h), many(t, h), many(h)[0], many(128)[0]
    rstd = norm.forward(x[0], w, 1e-6)[2]
    one = torch.ones(t, 40, device="cuda")
    position, cache = torch.arange(t, device="cuda"), torch.randn(t, 128, device="cuda")
    qkv = many(t, 48, 128)
    dq, dk = many(t, 32, 128), many(t, 8, 128)

    def turned_back(i: int) -> None:
        for d, side, part in ((dq, slice(0, 32), one[:, :32]), (dk, slice(32, 40), one[:, 32:])):
            rope.qk_norm_backward(d[i], qkv[i][:, side], head, part, position, cache)

    g, dy = many(t, 24576), many(t, 12288)
    cases: tuple[tuple[str, str, Callable[[int], object], int, float | None], ...] = (
        ("rms_norm + residual", f"{t}x{h}", lambda i: norm.forward(x[i], w, 1e-6, r[i]), 4 * t * h * 2, 1.15),
        ("rms_norm", f"{t}x{h}", lambda i: norm.forward(x[i], w, 1e-6), 2 * t * h * 2, 1.15),
        ("rms_norm backward", f"{t}x{h}", lambda i: norm.backward(r[i], None, x[i], w, rstd), 3 * t * h * 2, None),
        (
            "q and k norm + RoPE, one launch", f"{t}x(32+8)x128",
            lambda i: rope.qk_norm_forward(
                qkv[i][:, :32], qkv[i][:, 32:40], head, head, 1e-6, position, cache
            ),
            2 * 40 * 128 * t * 2 + t * 512, 1.15,
        ),
        ("q and k norm + RoPE, backward", f"{t}x(32+8)x128", turned_back, 3 * 40 * 128 * t * 2 + t * 512, None),
        ("swiglu", f"{t}x12288", lambda i: swiglu.forward(g[i]), 3 * t * 12288 * 2, 1.15),
        ("swiglu backward", f"{t}x12288", lambda i: swiglu.backward(dy[i], g[i]), 5 * t * 12288 * 2, 1.15),
    )  # fmt: skip
    for op, shape, call, count, limit in cases:
        calls = [lambda i=i, call=call: call(i) for i in range(copies)] * 4
        # Judges nothing: torch's own copy of just these bytes, the better of two ways, under the same timer.
        ways = [replays(way * 4) for way in copy_calls(count, copies)]
        compare(
            op,
            shape,
            "bytes at the copy bandwidth of 1 GiB",
            count / speed,
            {"triton": calls},
            {} if limit is None else {"triton": limit},
            12,
            ("copy of these bytes", lambda ways=ways: min(way() for way in ways)),
        )
        del ways, calls
        torch.cuda.empty_cache()


def logp() -> None:
    from rl_kernel.ops.logp import triton

    speed = bandwidth()
    t, v = 4096, 151936
    x = torch.randn(t, v, device="cuda")
    target = torch.randint(0, v, (t,), device="cuda")
    for temperature in (None, torch.full((t,), 0.7, device="cuda")):

        def run(temperature: torch.Tensor | None = temperature) -> torch.Tensor:
            stats = triton.leaf_stats(x, temperature, v)
            m = stats[0].amax(1)
            nodes = triton.tree_nodes(stats, m, [(0, stats.shape[2])], 1)
            return triton.finish(nodes, [], 0, m, triton.target_logits(x, temperature, target))

        compare(
            "logp, lse, entropy",
            f"{t}x{v}, temperature {'1.0' if temperature is None else '0.7'}",
            "bytes at the copy bandwidth of 1 GiB",
            x.numel() * 4 / speed,
            {"triton": [run]},
            {"triton": 1.3},
        )


def sampling() -> None:
    from rl_kernel.ops.sampling import triton

    v = 151936
    for batch in (64, 256):
        x = torch.randn(batch, v, device="cuda")
        temperature = torch.full((batch,), 0.7, device="cuda")
        uniforms = torch.rand(batch, device="cuda", dtype=torch.float64)

        def plain(x: torch.Tensor = x, temperature: torch.Tensor = temperature) -> tuple[torch.Tensor, torch.Tensor]:
            p = torch.softmax(x / temperature[:, None], -1)
            token = (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
            return token, p.gather(1, token).log()

        compare(
            "sampling: a token and its log-probability",
            f"{batch}x{v}, temperature 0.7",
            "torch: softmax, exponential, argmax, log",
            replays([plain] * 4),
            {"triton": [lambda x=x, t=temperature, u=uniforms: triton.sample(x, t, u, v)] * 4},
            {},
        )


# attention


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attention() -> None:
    from rl_kernel.ops.attention import hopper, library, triton

    missing = library._load()
    speed = bandwidth()
    for batch, n, heads in ((1, 8192, 32), (8, 1024, 32), (4, 4096, 32), (4, 4096, 16), (4, 4096, 40)):
        q, k, v = (torch.randn(batch * n, some, 128, device="cuda").to(BF16) for some in (heads, 8, 8))
        cu = torch.arange(0, batch * n + 1, n, device="cuda", dtype=torch.int32)
        shape = f"{batch}x{n}, {heads}/8 heads of 128"
        flash = 0.0 if missing else replays([lambda q=q, k=k, v=v, cu=cu: library.varlen_forward(q, k, v, cu)])
        forwards = {"triton": triton.portable_forward}
        if not isinstance(hopper.module(q.device, "forward"), str):
            forwards["gluon"] = triton.varlen_forward
        own = "gluon" if "gluon" in forwards else "triton"  # what the backend takes
        if not missing:
            forwards["library"] = library.varlen_forward
        compare(
            "attention prefill",
            shape,
            missing or "FlashAttention-3",
            flash,
            {name: [lambda f=forward, q=q, k=k, v=v, cu=cu: f(q, k, v, cu, cu)] for name, forward in forwards.items()},
            {own: 1.8, "library": 1.05},
        )
        out, lse = triton.varlen_forward(q, k, v, cu)
        dout = torch.randn_like(q)
        dense = [x.view(batch, n, *x.shape[1:]).detach().requires_grad_() for x in (q, k, v)]
        result = sdpa(*dense)
        upstream = torch.randn_like(result)
        compare(
            "attention backward",
            shape,
            "SDPA backward (not deterministic)",
            eagerly(lambda r=result, d=dense, u=upstream: torch.autograd.grad(r, d, u, retain_graph=True)),
            {
                "triton" if isinstance(hopper.module(q.device, "backward"), str) else "gluon": [
                    lambda a=(dout, q, k, v, out, lse, cu): triton.varlen_backward(*a),
                ]
            },
            {"gluon": 1.3, "triton": 1.3},
        )
    page = 16
    for batch, context in ((64, 4096), (8, 4096), (4, 32768), (1, 8192), (256, 1024)):
        pages = batch * context // page
        table = torch.randperm(pages, device="cuda").view(batch, -1).to(torch.int32)
        caches = torch.randn(2, pages, page, 8, 128, device="cuda").to(BF16)
        cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        q = torch.randn(batch, 32, 128, device="cuda").to(BF16)
        arguments = (q, caches[0], caches[1], table, cu, lens)
        backends = {"triton": triton} if missing else {"triton": triton, "library": library}
        compare(
            "attention decode",
            f"batch {batch}, context {context}, page {page}",
            "KV bytes at the copy bandwidth of 1 GiB",
            caches.numel() * 2 / speed,
            {
                name: [lambda m=module, a=arguments: m.paged_forward(*a, max_query_len=1)]
                for name, module in backends.items()
            },
            dict.fromkeys(backends, 1 / 0.75) if (batch, context) == (64, 4096) else {},
        )


# linear_logp


def linear_logp() -> None:
    import rl_kernel

    for t, h, v in ((6827, 2048, 75968), (1820, 2048, 75968), (8192, 4096, 37984)):
        hidden, w = torch.randn(t, h, device="cuda").to(BF16), torch.randn(v, h, device="cuda").mul_(0.02).to(BF16)
        target, grad = torch.randint(0, v, (t,), device="cuda"), torch.randn(t, device="cuda")

        def once(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], leaves=(hidden, w), grad=grad):  # type: ignore[no-untyped-def]
            a, b = (x.detach().requires_grad_() for x in leaves)
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            out = call(a, b)
            events[1].record()
            out.backward(grad)
            events[2].record()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - held) / 2**20
            return events[0].elapsed_time(events[1]) * 1e3, events[0].elapsed_time(events[2]) * 1e3, peak

        def eager(a: torch.Tensor, b: torch.Tensor, target: torch.Tensor = target) -> torch.Tensor:
            return -F.cross_entropy((a @ b.t()).float(), target, reduction="none")

        calls = {"eager": eager}
        for name in ("library", "triton"):
            calls[name] = lambda a, c, target=target, name=name: rl_kernel.linear_logp(a, c, target, backend=name).logp
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
        for i in range(1 if warming else 9):
            for name, call in calls.items():
                found = once(call)
                if i >= 2 or warming:
                    times[name].append(found)
        middle = {name: [statistics.median(x) for x in zip(*group)] for name, group in times.items()}
        for part, kind in enumerate(("forward", "forward + backward")):
            for name in ("library", "triton"):
                row: dict[str, Any] = {"op": f"linear_logp {kind}", "shape": f"T {t}, H {h}, V {v}", "backend": name}
                # Stated for one shape: faster than eager, and below 1 GiB above the inputs.
                judged = part == 1 and (t, h, v) == (6827, 2048, 75968)
                row.update(reference="torch eager cross-entropy", limit=1.0 if judged else None)
                record(row, middle[name][part], middle["eager"][part])
                if part == 1:
                    row.update(peak_mib=round(middle[name][2]), reference_peak_mib=round(middle["eager"][2]))
                    if judged and middle[name][2] >= 1024:
                        row.update(status="failure", reason="1 GiB or more above the inputs")
                add(row)
        torch.cuda.empty_cache()


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


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    found, count = report["rows"], dict[str, int]()
    for row in found:
        count[row["status"]] = count.get(row["status"], 0) + 1
    yield "Rows: " + ", ".join(f"{n} {status}" for status, n in sorted(count.items())) + "."
    yield ""
    if report.get("unfinished"):
        yield "Parts that did not end: " + ", ".join(report["unfinished"]) + "."
        yield ""
    late = [row for row in found if row["status"] not in ("pass", "measured")]
    if late:
        yield "Not within a stated limit:"
        yield ""
        for row in late:
            why = row.get("reason") or f"{row.get('ratio')} of {row['reference']}, limit {row['limit'] or 0:.2f}"
            yield f"- {row['op']}, {row['shape']}, {row['backend']}: {why}"
        yield ""


def markdown(report: Mapping[str, Any]) -> str:
    keys = ("command", "commit", "gpu", "torch", "triton", "date", "seconds")
    lines = ["# Operators on one GPU", "", *(f"- {key}: `{report[key]}`" for key in keys if key in report), ""]
    lines += summary(report)
    lines += [(__doc__ or "").strip().split("\n\n")[-1].replace("\n", " ").replace("``", "`"), ""]
    lines += [
        "| op | shape | backend | us | reference | reference us | ratio | limit | status | second reference | ratio |",
        "|---|" + "---|" * 10,
    ]
    for row in report["rows"]:
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        if "tb_s" in row:
            limit += f" ({row['tb_s']} TB/s)"
        second = f"{row['second']}, {row['second_us']} us | {row['second_ratio']}" if "second" in row else " | "
        peak = f", peak {row['peak_mib']} MiB (reference {row['reference_peak_mib']})" if "peak_mib" in row else ""
        lines.append(
            f"| {row['op']} | {row['shape']}{peak} | {row['backend']} | {row.get('us', '')} | {row['reference']} | "
            f"{row.get('reference_us', '')} | {row.get('ratio', '')} | {limit} | "
            f"{row['status']}{': ' + row['reason'] if 'reason' in row else ''} | {second} |"
        )
    return "\n".join(lines) + "\n"


def write(out: str, report: Mapping[str, Any]) -> None:
    Path(out + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Path(out + ".md").write_text(markdown(report), encoding="utf-8")


def join(out: str, files: Sequence[str]) -> None:
    """One table out of the tables of parts, which must be of one commit."""
    parts = [json.loads(Path(name).read_text(encoding="utf-8")) for name in files]
    commits = {part["commit"] for part in parts}
    if len(commits) > 1:
        raise SystemExit(f"--join: the parts are of different commits: {', '.join(sorted(commits))}")
    whole = {**parts[0], "command": "; ".join(part["command"] for part in parts)}
    whole["seconds"] = {name: value for part in parts for name, value in part["seconds"].items()}
    whole["unfinished"] = [name for part in parts for name in part.get("unfinished", [])]
    whole["cublaslt"] = [part["cublaslt"] for part in parts]
    order = {name: i for i, name in enumerate(SECTIONS)}
    whole["rows"] = sorted((row for part in parts for row in part["rows"]), key=lambda row: order[row["section"]])
    write(out, whole)
    print("\n".join(summary(whole)))


def measure_all(args: argparse.Namespace) -> None:
    global warming
    seconds: dict[str, float] = {}
    names = args.only.split(",")
    if not (args.cold or args.warm):
        began = time.monotonic()
        warm(names)
        seconds["warm"] = round(time.monotonic() - began, 1)
        print(f"-- warm: {seconds['warm']} s", flush=True)
    from rl_kernel import cublaslt

    warming = args.warm
    torch.manual_seed(0)
    cublaslt.setup()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit or os.environ.get("RLK_COMMIT", "unknown"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": sys.modules["triton"].__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": seconds,
        "unfinished": list(names),
        "rows": rows,
    }
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
            if not warming:
                write(args.out, {**report, "cublaslt": cublaslt.report()})
        torch.cuda.empty_cache()
        if not warming:
            print(f"-- {name}: {seconds[name]} s", flush=True)
    if not warming:
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
        shapes[:] = args.shapes.split(",")
    if args.baseline:
        serve_baseline()
    elif args.join:
        join(args.out, args.join)
    else:
        signal.signal(signal.SIGTERM, stop)
        measure_all(args)


if __name__ == "__main__":
    main()
