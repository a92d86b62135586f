"""Bytes of the elementwise and normalising operators on a GPU: rows never notice their batch or their launch."""

from __future__ import annotations

import contextlib

import pytest
import torch

from rl_kernel import triton_utils
from tests.ops.gpu_harness import BF16, CASES, Tally, data, differing, rng, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU"),
]


@pytest.mark.parametrize("part", range(4))
def test_rms_norm_rows_do_not_notice_batch_or_launch(part):
    from rl_kernel.ops.rms_norm import triton as op

    tally, source = Tally(f"rms_norm_{part}"), rng(1 + 100 * part)
    while tally.cases < CASES // 4:
        h = source.choice([64, 128, 896, 1024, 2048, 4096, 5120])
        t = rows(source, 8192 if h <= 2048 else 4096)
        seed = source.randrange(1 << 30)
        x, w = data(t, h, seed=seed), data(h, seed=seed + 1, heavy=False)
        residual = data(t, h, seed=seed + 2) if source.random() < 0.5 else None
        y, out, rstd = op.forward(x, w, 1e-6, residual)
        for _ in range(4):
            a = source.randrange(t)
            b = min(t, a + source.choice([1, 2, 3, 17, 64]))
            launch = {"block": source.choice([128, 1024, 4096, 8192]), "warps": source.choice([1, 2, 4, 8])}
            launch["pdl"] = launch["warps"] // 2 % 3
            if h * 16 < launch["block"]:
                launch["block"] = h * 16
            with triton_utils.override_launch("rms_norm" if residual is None else "add_rms_norm", launch):
                z, zout, zstd = op.forward(x[a:b], w, 1e-6, None if residual is None else residual[a:b])
            tally.equal(y[a:b], z, "slice and launch", (h, t, a, b, launch))
            assert differing(rstd[a:b], zstd) == 0
            if out is not None and zout is not None:
                assert differing(out[a:b], zout) == 0
        dy, s = data(t, h, seed=seed + 3), x if out is None else out
        dx, dw = op.backward(dy, residual, s, w, rstd)
        a = source.randrange(t)
        dres = None if residual is None else residual[a:]
        tally.equal(dx[a:], op.backward(dy[a:], dres, s[a:], w, rstd[a:])[0], "dx")
        launch = {"rows": source.choice([1, 2, 4]), "warps": source.choice([4, 16])}
        with triton_utils.override_launch("rms_norm_backward" if residual is None else "add_rms_norm_backward", launch):
            other = op.backward(dy, residual, s, w, rstd)
        tally.equal(dx, other[0], "dx, another launch", (h, t, launch))
        tally.equal(dw, other[1], "dw, another launch", (h, t, launch))
    tally.done()


@pytest.mark.parametrize("part", range(3))
def test_rope_fused_with_norm_equals_both_after_each_other(part):
    from rl_kernel.ops.rms_norm import triton as norm
    from rl_kernel.ops.rope import triton as op

    tally, source = Tally(f"rope_{part}"), rng(2 + 100 * part)
    cache = torch.randn(4096, 128, device="cuda")
    while tally.cases < CASES // 3 + 1:
        heads, k_heads, dim = source.choice(
            [(1, 1, 64), (2, 1, 128), (8, 2, 64), (14, 2, 64), (32, 1, 128), (32, 8, 128), (40, 8, 128)]
        )
        t = rows(source, 4096)
        seed = source.randrange(1 << 30)
        qkv = data(t, (heads + 1 + k_heads) * dim, seed=seed)
        x = qkv[:, dim : dim + heads * dim].view(t, heads, dim)
        table = cache[:, :dim].contiguous()
        position = torch.randint(0, 4096, (t,), device="cuda")
        w, kw = data(dim, seed=seed + 1, heavy=False), data(dim, seed=seed + 2, heavy=False)
        k = qkv.view(t, heads + 1 + k_heads, dim)[:, heads + 1 :]
        plain = op.forward(x, position, table)
        both, k_both, rstd = op.qk_norm_forward(x, k, w, kw, 1e-6, position, table)
        normed, _, q_rstd = norm.forward(x, w, 1e-6)
        tally.equal(both, op.forward(normed, position, table), "fused", (heads, t, dim))
        tally.equal(k_both, op.forward(norm.forward(k, kw, 1e-6)[0], position, table), "fused k", (heads, t, dim))
        assert differing(rstd[:, :heads], q_rstd) == 0
        dy = data(t, heads, dim, seed=seed + 3)
        turned = op.backward(dy, position, table).reshape(-1, dim)
        composed = norm.backward(turned, None, x.reshape(-1, dim), w, rstd[:, :heads].reshape(-1))
        for own, other, kind in zip(
            op.qk_norm_backward(dy, x, w, rstd[:, :heads], position, table), composed, ("fused dx", "fused dw")
        ):
            tally.equal(own.reshape(-1), other.reshape(-1), kind, (heads, t, dim))
        with triton_utils.override_launch("rms_norm_backward", {"rows": source.choice([1, 2]), "warps": 2}):
            again = op.qk_norm_backward(dy, x, w, rstd[:, :heads], position, table)
        for own, other, kind in zip(again, composed, ("dx, another launch", "dw, another launch")):
            tally.equal(own.reshape(-1), other.reshape(-1), kind, (heads, t, dim))
        c, s = table[position, None, : dim // 2], table[position, None, dim // 2 :]
        x1, x2 = x[..., : dim // 2].float(), x[..., dim // 2 :].float()
        tally.equal(plain, torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1).to(BF16), "torch formula")
        a = source.randrange(t)
        launch = {
            "tokens": source.choice([1, 2, 4]),
            "block": source.choice([128, 512, 8192]),
            "warps": source.choice([1, 2, 8]),
        }
        whole = {
            **source.choice(
                [{"tokens": 1, "rows": 8, "warps": 1, "pdl": 1}, {"tokens": 2, "rows": 4, "warps": 2, "pdl": 2}]
            ),
            "least": source.choice([1, 1 << 30]),
            "most": 1 << 13,
        }
        with triton_utils.override_launch("rope", launch), triton_utils.override_launch("qk_norm_rope", whole):
            sliced = op.qk_norm_forward(x[a:], k[a:], w, kw, 1e-6, position[a:], table)
            tally.equal(both[a:], sliced[0], "slice and launch")
            tally.equal(k_both[a:], sliced[1], "slice and launch of k")
    tally.done()


@pytest.mark.skipif(torch.version.hip is not None, reason="AMD GPUs have no programmatic launches")
@pytest.mark.parametrize("pdl", [1, 2])
@pytest.mark.parametrize("graphed", [False, True])
def test_kernels_that_start_early_see_what_is_in_front_of_them(pdl, graphed):
    """Outputs feed the next norm, and inputs, weights and outputs' memory are written right before they are met."""
    from rl_kernel.ops.rms_norm import triton as norm
    from rl_kernel.ops.rope import triton as rope

    t, steps = 2048, 6
    fresh = [data(t, 48, 128, seed=seed) for seed in range(3)]
    weights = [data(128, seed=10 + seed, heavy=False) for seed in range(3)]
    wide = [data(6144, seed=20 + seed, heavy=False) for seed in range(3)]
    table = [torch.randn(t, 128, device="cuda") for _ in range(3)]
    qkv, w, wh, cache = (torch.empty_like(x[0]) for x in (fresh, weights, wide, table))
    position = torch.arange(t, device="cuda")

    def work():
        results = []
        for i in range(steps):
            qkv.copy_(fresh[i % 3])
            wh.copy_(wide[i % 3])
            for residual in (None, fresh[(i + 1) % 3].view(t, -1)):
                # Three that start early, the first behind a copy; each reads what the one in front of it wrote.
                y, total, _ = norm.forward(qkv.view(t, -1), wh, 1e-6, residual)
                y, total, rstd = norm.forward(y, wh, 1e-6, total)
                qk = y.view(t, 48, 128)
                q, k, qk_rstd = rope.qk_norm_forward(qk[:, :32], qk[:, 32:40], w, w, 1e-6, position, cache)
                again = norm.forward(q, w, 1e-6)[0]
                results += [y, rstd, q, k, qk_rstd, again]
                w.copy_(weights[i % 3])
                cache.copy_(table[i % 3])
                qkv.view(t, -1).copy_(y)
        return results

    def launches(pdl):
        stack = contextlib.ExitStack()
        whole = {"tokens": 1, "rows": 8, "warps": 1, "least": 1, "most": 1 << 13, "pdl": pdl}
        stack.enter_context(triton_utils.override_launch("qk_norm_rope", whole))
        for op in ("rms_norm", "add_rms_norm"):
            stack.enter_context(triton_utils.override_launch(op, {"block": 8192, "warps": 8, "pdl": pdl}))
        return stack

    def first():
        w.copy_(weights[2])
        cache.copy_(table[2])

    with launches(0):
        first()
        expected = [y.clone() for y in work()]
    with launches(pdl):
        first()
        found = work()
        torch.cuda.synchronize()
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = work()
        for _ in range(10):
            for y in found:
                y.zero_()
            first()
            if graphed:
                graph.replay()
            else:
                found = work()
            assert [differing(y, z) for y, z in zip(found, expected, strict=True)] == [0] * len(expected)
    assert all(differing(expected[i], expected[i + 12]) > 0 for i in range(12))


def test_swiglu_rows_do_not_notice_batch_or_launch():
    from rl_kernel.ops.swiglu import triton as op

    tally, source = Tally("swiglu"), rng(3)
    while tally.cases < CASES:
        f, t = source.choice([48, 1536, 3072, 12288]), rows(source, 2048)
        x, dy = data(t, 2 * f, seed=tally.cases), data(t, f, seed=tally.cases + 1)
        y, g = op.forward(x), op.backward(dy, x)
        for _ in range(4):
            a = source.randrange(t)
            launch = {"block": source.choice([256, 2048]), "warps": source.choice([1, 8])}
            with (
                triton_utils.override_launch("swiglu", launch),
                triton_utils.override_launch("swiglu_backward", launch),
            ):
                tally.equal(y[a:], op.forward(x[a:]), "forward", (f, t, a))
                tally.equal(g[a:], op.backward(dy[a:], x[a:]), "backward", (f, t, a))
        # A column shard of both halves is what a tensor-parallel rank holds.
        half = f // 2
        shard = torch.cat([x[:, half:f], x[:, f + half :]], 1)
        tally.equal(y[:, half:], op.forward(shard), "column shard")
    tally.done()


def test_embedding_shards_add_up_and_backward_is_ordered():
    from rl_kernel.ops.embedding import triton as op

    tally, source = Tally("embedding"), rng(4)
    while tally.cases < CASES:
        h, v, t = source.choice([64, 1024, 4096]), source.choice([512, 4096]), rows(source, 2048)
        w, ids = data(v, h, seed=tally.cases), torch.randint(0, v, (t,), device="cuda")
        dy = data(t, h, seed=tally.cases + 1)
        whole = op.forward(ids, w)
        tally.equal(whole, w[ids] + 0.0, "gather", (h, v, t))
        tp = source.choice([2, 4, 8])
        parts = [op.forward(ids, w[r * v // tp : (r + 1) * v // tp], r * v // tp) for r in range(tp)]
        tally.equal(whole, torch.stack(parts).sum(0), "sum over ranks")
        grad = op.backward(dy, ids, v)
        tally.equal(grad, op.backward(dy, ids, v), "backward run to run")
        shards = [op.backward(dy, ids, v // tp, r * v // tp) for r in range(tp)]
        tally.equal(grad, torch.cat(shards), "backward shards")
    tally.done()


def test_reduce_parts_is_the_tree():
    from rl_kernel.ops.collectives import reference, triton

    tally, source = Tally("collectives"), rng(5)
    while tally.cases < CASES:
        ranks, n = source.choice([1, 2, 3, 4, 8]), rows(source, 1 << 18)
        parts = torch.randn(ranks, n, device="cuda") * torch.randn(ranks, n, device="cuda").exp()
        for dtype in (torch.float32, BF16):
            tally.equal(triton.reduce_parts(parts, dtype), reference.reduce_parts(parts, dtype), "tree", (ranks, n))
    tally.done()


def test_accuracy_is_that_of_eager():
    import torch.nn.functional as F  # noqa: N812

    from rl_kernel.ops.rms_norm import triton as norm
    from rl_kernel.ops.swiglu import triton as swiglu

    x, w = data(512, 4096, seed=1), data(4096, seed=2, heavy=False)
    exact = F.rms_norm(x.double(), (4096,), w.double(), 1e-6)
    own, eager = norm.forward(x, w, 1e-6)[0], F.rms_norm(x, (4096,), w, 1e-6)
    assert (own - exact).abs().sum() <= 2 * (eager - exact).abs().sum()
    g = data(512, 8192, seed=3)
    exact = F.silu(g[:, :4096].double()) * g[:, 4096:].double()
    own, eager = swiglu.forward(g), F.silu(g[:, :4096]) * g[:, 4096:]
    assert (own - exact).abs().sum() <= 2 * (eager - exact).abs().sum()
