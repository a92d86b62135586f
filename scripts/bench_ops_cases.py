"""The other parts of ``bench_ops.py``: memory-bound operators, attention and linear_logp."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import bench_ops_timer as timer
import torch
import torch.nn.functional as F  # noqa: N812
from bench_ops_timer import add, compare, eagerly, record, replays
from tune_launch import BF16

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
        for i in range(1 if timer.warming else 9):
            for name, call in calls.items():
                found = once(call)
                if i >= 2 or timer.warming:
                    times[name].append(found)
        middle = {name: [statistics.median(x) for x in zip(*group)] for name, group in times.items()}
        for part, kind in enumerate(("forward", "forward + backward")):
            for name in ("library", "triton"):
                row: dict[str, Any] = {"op": f"linear_logp {kind}", "shape": f"T {t}, H {h}, V {v}", "backend": name}
                # Stated for one shape, of what the registry takes where csrc/sm90 is not built: faster than eager, and
                # below 1 GiB above the inputs.
                judged = name == "library" and part == 1 and (t, h, v) == (6827, 2048, 75968)
                row.update(reference="torch eager cross-entropy", limit=1.0 if judged else None)
                record(row, middle[name][part], middle["eager"][part])
                if part == 1:
                    row.update(peak_mib=round(middle[name][2]), reference_peak_mib=round(middle["eager"][2]))
                    if judged and middle[name][2] >= 1024:
                        row.update(status="failure", reason="1 GiB or more above the inputs")
                add(row)
        torch.cuda.empty_cache()
