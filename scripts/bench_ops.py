"""The table of operator figures on one GPU, by one command.

    python scripts/bench_ops.py --out reports/ops_h200 [--only linear,attention,...]

Writes OUT.json and OUT.md. Every row names an operator, a shape, a backend, its time, what it is compared with, and
the limit; the status is ``pass``, ``failure`` (slower than the limit), ``oom`` or ``blocked`` (with the reason).
References are what a user would run: default cuBLAS in a process of its own, FlashAttention-3 if this machine has it,
torch elsewhere, and for memory-bound operators the time to move their bytes at the measured copy bandwidth. Times are
medians over CUDA graph replays with rotating weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F  # noqa: N812
from tune_launch import BF16, SHAPES, timed

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
rows: list[dict[str, Any]] = []


def add(op: str, shape: str, backend: str, run: Callable[[], float], reference: str, base: float, limit: float) -> None:
    """Time ``run`` (microseconds) and judge it against ``limit`` times ``base``."""
    row: dict[str, Any] = {"op": op, "shape": shape, "backend": backend, "reference": reference}
    row["limit"] = None if limit == math.inf else limit
    try:
        micros = run()
        row.update(us=round(micros, 2), reference_us=round(base, 2), ratio=round(micros / base, 3) if base else None)
        row["status"] = "blocked" if not base else "pass" if micros <= limit * base else "failure"
    except torch.cuda.OutOfMemoryError as error:
        row.update(status="oom", reason=str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001 - a row that cannot run is a finding, not the end of the table
        row.update(
            status="blocked", reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    rows.append(row)
    print(json.dumps(row), flush=True)


def weights_of(name: str) -> list[torch.Tensor]:
    n, k = SHAPES[name]
    return [
        torch.randn(n, k, device="cuda").mul_(0.02).to(BF16) for _ in range(max(1, min(6, (256 << 20) // (2 * n * k))))
    ]


def linear_times(multiply: Callable[[torch.Tensor, torch.Tensor], object]) -> dict[str, float]:
    """Microseconds of one product by shape and M."""
    found = {}
    for name in SHAPES:
        group = weights_of(name)
        for m in ROWS:
            x = torch.randn(m, SHAPES[name][1], device="cuda").to(BF16)

            def run(x: torch.Tensor = x, group: list[torch.Tensor] = group) -> None:
                for w in group:
                    multiply(x, w)

            found[f"{name} M={m}"] = timed(run) / len(group)
    return found


def default_cublas() -> dict[str, float]:
    """The same products by default cuBLAS, in a process without our setting."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CUBLAS")}
    done = subprocess.run(
        [sys.executable, __file__, "--baseline"], env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def linear() -> None:
    from rl_kernel.ops.linear import library, triton

    base = default_cublas()
    for backend, module in (("library", library), ("triton", triton)):
        found = linear_times(module.matmul)
        for key, micros in found.items():
            m = int(key.split("=")[1])
            limit = 1.05 if backend == "library" else 1.15 if m <= 64 else math.inf
            add("linear", key, backend, lambda value=micros: value, "default cuBLAS", base[key], limit)
        mean = math.exp(sum(math.log(found[key] / base[key]) for key in found) / len(found))
        add("linear", "geometric mean", backend, lambda value=mean: value, "default cuBLAS", 1.0, 1.0)
    for name in ("o", "down"):
        group = weights_of(name)
        for segments in (2, 4, 8):
            for m in (1, 16, 64, 1024, 8192):
                x = torch.randn(m, SHAPES[name][1], device="cuda").to(BF16)
                for backend, module in (("library", library), ("triton", triton)):

                    def run(x: torch.Tensor = x, module: Any = module, group: list = group, s: int = segments) -> float:
                        return timed(lambda: [module.matmul(x, w, segments=s) for w in group]) / len(group)

                    key = f"{name} M={m}"
                    add("linear, segments", f"{key} S={segments}", backend, run, "default cuBLAS, S=1", base[key], 1.10)
    for name in ("qkv", "down"):
        n, k = SHAPES[name]
        w, dy, x = weights_of(name)[0], torch.randn(4096, n, device="cuda").to(BF16), None
        x = torch.randn(4096, k, device="cuda").to(BF16)
        for backend, module in (("library", library), ("triton", triton)):
            limit = 1.05 if backend == "library" else math.inf
            plain = timed(lambda dy=dy, w=w: dy @ w)
            add("linear, dgrad", f"{name} T=4096", backend,
                lambda module=module, dy=dy, w=w: timed(lambda: module.dgrad(dy, w)),
                "torch.mm, this process", plain, limit)  # fmt: skip
            plain = timed(lambda dy=dy, x=x: dy.t() @ x)
            add("linear, wgrad", f"{name} T=4096", backend,
                lambda module=module, dy=dy, x=x: timed(lambda: module.wgrad(dy, x)),
                "torch.mm, this process", plain, limit)  # fmt: skip


def bandwidth() -> float:
    """Copy bandwidth in bytes a microsecond, read plus written."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    micros = min(timed(lambda: torch.add(source, 0.0, out=target)), timed(lambda: target.copy_(source)))
    return 2 * source.numel() * 4 / micros


def copied(count: int) -> float:
    """Microseconds of a copy that moves ``count`` bytes, half of them read and half written, under the same timer.

    :func:`bandwidth` is that of a gigabyte. A kernel that moves a hundred megabytes also has a launch, a first wave
    without stores and a last one that does not fill the chip; no kernel is without them, so they belong to the floor.
    """
    source = torch.randn(count // 8, device="cuda")
    target = torch.empty_like(source)
    return min(timed(lambda: torch.add(source, 0.0, out=target), 9), timed(lambda: target.copy_(source), 9))


def elementwise() -> None:
    from rl_kernel.ops.rms_norm import triton as norm
    from rl_kernel.ops.rope import triton as rope
    from rl_kernel.ops.swiglu import triton as swiglu

    speed = bandwidth()
    t = 8192
    x, r, w = (torch.randn(*s, device="cuda").to(BF16) for s in ((t, 4096), (t, 4096), (4096,)))
    rstd = norm.forward(x, w, 1e-6)[2]
    position, cache = torch.arange(t, device="cuda"), torch.randn(t, 128, device="cuda")
    head = torch.randn(128, device="cuda").to(BF16)
    qkv = torch.randn(t, 48, 128, device="cuda").to(BF16)
    q, k = qkv[:, :32], qkv[:, 32:40]
    g, dy = torch.randn(t, 24576, device="cuda").to(BF16), torch.randn(t, 12288, device="cuda").to(BF16)
    calls: tuple[tuple[str, str, Callable[[], object], int, float], ...] = (
        ("rms_norm + residual", f"{t}x4096", lambda: norm.forward(x, w, 1e-6, r), 4 * x.numel() * 2, 1.15),
        ("rms_norm", f"{t}x4096", lambda: norm.forward(x, w, 1e-6), 2 * x.numel() * 2, 1.15),
        ("rms_norm backward", f"{t}x4096", lambda: norm.backward(r, None, x, w, rstd), 3 * x.numel() * 2, math.inf),
        (
            "q/k norm + rope", f"{t}x(32+8)x128",
            lambda: rope.qk_norm_forward(q, k, head, head, 1e-6, position, cache),
            2 * 40 * 128 * t * 2 + t * 512, 1.15,
        ),
        ("swiglu", f"{t}x12288", lambda: swiglu.forward(g), 3 * dy.numel() * 2, 1.15),
        ("swiglu backward", f"{t}x12288", lambda: swiglu.backward(dy, g), 5 * dy.numel() * 2, 1.15),
    )  # fmt: skip
    for op, shape, call, count, limit in calls:
        micros = timed(call, 9)
        # Both floors: what the bytes cost at the speed of a large copy, and what a copy of just these bytes costs.
        add(op, shape, "triton", lambda u=micros: u, "bytes at copy bandwidth", count / speed, limit)
        add(op, shape, "triton", lambda u=micros: u, "copy of the same bytes", copied(count), limit)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attention() -> None:
    from rl_kernel.ops.attention import library, triton

    missing = library._load()
    speed = bandwidth()
    for batch, n in ((1, 8192), (8, 1024), (4, 4096)):
        q, k, v = (torch.randn(batch * n, heads, 128, device="cuda").to(BF16) for heads in (32, 8, 8))
        cu = torch.arange(0, batch * n + 1, n, device="cuda", dtype=torch.int32)
        base = 0.0 if missing else timed(lambda q=q, k=k, v=v, cu=cu: library.varlen_forward(q, k, v, cu))
        shape = f"{batch}x{n}, 32/8 heads of 128"
        for backend, module, limit in (("triton", triton, 1.8), ("library", library, 1.05)):
            add("attention prefill", shape, backend,
                lambda m=module, q=q, k=k, v=v, cu=cu: timed(lambda: m.varlen_forward(q, k, v, cu)),
                missing or "FlashAttention-3", base, limit)  # fmt: skip
        out, lse = triton.varlen_forward(q, k, v, cu)
        dout = torch.randn_like(q)
        dense = [x.view(batch, n, *x.shape[1:]).detach().requires_grad_() for x in (q, k, v)]
        result = sdpa(*dense)
        upstream = torch.randn_like(result)
        for _ in range(2):
            torch.autograd.grad(result, dense, upstream, retain_graph=True)
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.autograd.grad(result, dense, upstream, retain_graph=True)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        add("attention backward", shape, "triton",
            lambda a=(dout, q, k, v, out, lse, cu): timed(lambda: triton.varlen_backward(*a)),
            "SDPA backward (not deterministic)", sorted(times)[2], 1.3)  # fmt: skip
    page = 16
    for batch, context in ((64, 4096), (8, 4096), (4, 32768), (1, 8192), (256, 1024)):
        pages = batch * context // page
        table = torch.randperm(pages, device="cuda").view(batch, -1).to(torch.int32)
        caches = torch.randn(2, pages, page, 8, 128, device="cuda").to(BF16)
        cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        q = torch.randn(batch, 32, 128, device="cuda").to(BF16)
        limit = 1 / 0.75 if batch == 64 else math.inf
        for backend, module in (("triton", triton), *(() if missing else (("library", library),))):
            add("attention decode", f"batch {batch}, context {context}, page {page}", backend,
                lambda m=module, a=(q, caches[0], caches[1], table, cu, lens): timed(
                    lambda: m.paged_forward(*a, max_query_len=1)),
                "KV bytes at copy bandwidth", caches.numel() * 2 / speed, limit)  # fmt: skip


def logp() -> None:
    from rl_kernel.ops.logp import triton

    speed = bandwidth()
    t, v = 4096, 151936
    x = torch.randn(t, v, device="cuda")
    target = torch.randint(0, v, (t,), device="cuda")
    for temperature in (None, torch.full((t,), 0.7, device="cuda")):

        def run(temperature: torch.Tensor | None = temperature) -> float:
            def body() -> torch.Tensor:
                stats = triton.leaf_stats(x, temperature, v)
                m = stats[0].amax(1)
                nodes = triton.tree_nodes(stats, m, [(0, stats.shape[2])], 1)
                return triton.finish(nodes, [], 0, m, triton.target_logits(x, temperature, target))

            return timed(body)

        name = f"{t}x{v}, temperature {'1.0' if temperature is None else '0.7'}"
        add("logp, lse, entropy", name, "triton", run, "bytes at copy bandwidth", x.numel() * 4 / speed, 1.3)


def linear_logp() -> None:
    import rl_kernel

    for t, h, v in ((6827, 2048, 75968), (1820, 2048, 75968), (8192, 4096, 37984)):
        hidden, w = torch.randn(t, h, device="cuda").to(BF16), torch.randn(v, h, device="cuda").mul_(0.02).to(BF16)
        target, grad = torch.randint(0, v, (t,), device="cuda"), torch.randn(t, device="cuda")

        def measure(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], leaves=(hidden, w), grad=grad):  # type: ignore[no-untyped-def]
            a, b = (x.detach().requires_grad_() for x in leaves)
            times, forward = [], []
            for i in range(8):
                a.grad = b.grad = None
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                events[0].record()
                out = call(a, b)
                events[1].record()
                out.backward(grad)
                events[2].record()
                torch.cuda.synchronize()
                if i >= 3:
                    forward.append(events[0].elapsed_time(events[1]) * 1e3)
                    times.append(events[0].elapsed_time(events[2]) * 1e3)
                peak = torch.cuda.max_memory_allocated() - held
            return sorted(forward)[2], sorted(times)[2], peak / 2**20

        def eager(a: torch.Tensor, b: torch.Tensor, target: torch.Tensor = target) -> torch.Tensor:
            return -F.cross_entropy((a @ b.t()).float(), target, reduction="none")

        ef, eb, em = measure(eager)
        for backend in ("library", "triton"):
            f, b, m = measure(
                lambda a, c, target=target, backend=backend: rl_kernel.linear_logp(a, c, target, backend=backend).logp
            )
            shape = f"T {t}, H {h}, V {v}"
            add("linear_logp forward", shape, backend, lambda f=f: f, "torch eager cross-entropy", ef, math.inf)
            add("linear_logp forward + backward", shape, backend, lambda b=b: b, "torch eager cross-entropy", eb, 1.0)
            rows[-1]["peak_mib"], rows[-1]["reference_peak_mib"] = round(m), round(em)
            torch.cuda.empty_cache()


SECTIONS = {f.__name__: f for f in (linear, elementwise, attention, logp, linear_logp)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--baseline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.baseline:
        print(json.dumps(linear_times(lambda x, w: x @ w.t())))
        return
    from rl_kernel import cublaslt

    cublaslt.setup()
    for name in args.only.split(","):
        SECTIONS[name]()
        torch.cuda.empty_cache()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    head = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": commit or os.environ.get("RLK_COMMIT", "unknown"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": sys.modules["triton"].__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    report = {**head, "cublaslt": cublaslt.report(), "rows": rows}
    Path(args.out + ".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    lines = ["# Operators on one GPU", "", *(f"- {key}: `{value}`" for key, value in head.items()), ""]
    lines += ["| op | shape | backend | us | reference | reference us | ratio | limit | status |", "|---|" + "---|" * 8]
    for row in rows:
        limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
        peak = f", {row['peak_mib']} MiB (reference {row['reference_peak_mib']})" if "peak_mib" in row else ""
        lines.append(
            f"| {row['op']} | {row['shape']}{peak} | {row['backend']} | {row.get('us', '')} | {row['reference']} | "
            f"{row.get('reference_us', '')} | {row.get('ratio', '')} | {limit} | "
            f"{row['status']}{': ' + row['reason'] if 'reason' in row else ''} |"
        )
    Path(args.out + ".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
