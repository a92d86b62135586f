"""Bytes of logp and linear_logp on a GPU: rows, shards, tiles and backends agree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from rl_kernel import cublaslt, triton_utils
from rl_kernel.ops.logp.vocab_tree import VocabLayout
from tests.ops.gpu_harness import BF16, CASES, Tally, data, differing, rng, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU"),
]
VOCABULARY = [151936, 151669, 32000, 5000, 1000, 128, 77]


def finish(op, layout, stats, z):
    """What the ranks of ``layout`` compute together, in one process."""
    m = torch.stack([s[0].amax(1) if s.shape[2] else torch.full_like(z, -torch.inf) for s in stats]).amax(0)
    nodes = torch.cat([op.tree_nodes(s, m, layout.local_ranges(r), layout.max_nodes()) for r, s in enumerate(stats)])
    return m, op.finish(nodes, layout.merges(), layout.first_slot(), m, z)


def borders(source, vocabulary):
    leaves = -(-vocabulary // 128)
    tp = source.choice([1, 2, 4, 8])
    if source.random() < 0.5:
        step = -(-leaves // tp)
        inner = [min(leaves, step * r) for r in range(1, tp)]
    else:
        inner = sorted(source.randint(0, leaves) for _ in range(tp - 1))
    return tuple(128 * x for x in [0, *inner, leaves])


@pytest.mark.parametrize("share", range(4))
def test_logp_rows_do_not_notice_batch_launch_or_shards(share):
    from rl_kernel.ops.logp import triton as op

    tally, source = Tally(f"logp_{share}"), rng(31 + 100 * share)
    while tally.cases < CASES // 4:
        v = source.choice(VOCABULARY)
        t = rows(source, 64 if v > 50000 else 512)
        generator = torch.Generator(device="cuda").manual_seed(source.randrange(1 << 30))
        x = torch.randn(t, -(-v // 128) * 128, device="cuda", generator=generator) * source.choice([0.1, 3.0, 30.0])
        x += source.choice([0.0, 0.0, 1e4])
        target = torch.randint(0, v, (t,), device="cuda", generator=generator)
        temperature = torch.full((t,), source.choice([0.7, 1.0, 1.3]), device="cuda")
        one = VocabLayout((0, x.shape[1]), v)
        stats = op.leaf_stats(x, temperature, v)
        z = op.target_logits(x, temperature, target)
        m, out = finish(op, one, [stats], z)
        a = source.randrange(t)
        launch = {"leaves": source.choice([1, 4, 16, 64]), "warps": source.choice([1, 4, 8])}
        with triton_utils.override_launch("logp", launch):
            part = op.leaf_stats(x[a:].contiguous(), temperature[a:], v)
        tally.equal(stats[:, a:], part, "leaves, slice and launch", (v, t, a))
        tally.equal(out, op.whole_rows(stats, z)[1], "whole rows", (v, t))
        layout = VocabLayout(borders(source, v), v)
        shards = [
            op.leaf_stats(x[:, layout.borders[r] : layout.borders[r + 1]].contiguous(), temperature, layout.columns(r))
            for r in range(layout.ranks)
        ]
        tally.equal(out, finish(op, layout, shards, z)[1], "shards", (v, t, layout.borders))
        if float(temperature[0]) == 1.0:
            tally.equal(stats, op.leaf_stats(x, None, v), "temperature 1 is no temperature")
        full = op.log_softmax(x, temperature, torch.stack([m, out[3]]), v)
        tally.equal(out[0], full.gather(1, target[:, None])[:, 0], "log_softmax column")
    tally.done()


def test_linear_logp_equals_logp_of_lm_head():
    from rl_kernel.ops.linear import library as lib_linear
    from rl_kernel.ops.linear import triton as own_linear
    from rl_kernel.ops.linear_logp import library, tiles, triton
    from rl_kernel.ops.logp import triton as op

    reason = cublaslt.unavailable("gfx942" if torch.version.hip else "sm90")
    tally, source = Tally("linear_logp"), rng(32)
    weights = {(v, h): data(-(-v // 1024) * 1024, h, seed=v, scale=0.02) for v, h in
               [(151936, 1024), (37984, 2048), (151669, 256), (5000, 512), (777, 128)]}  # fmt: skip
    tile = tiles.TILE_BYTES
    try:
        while tally.cases < CASES:
            (v, h), w = source.choice(list(weights.items()))
            t = rows(source, 256 if v > 100000 else 1024)
            hidden = data(t, h, seed=tally.cases, heavy=False)
            target = torch.randint(0, v, (t,), device="cuda")
            temperature = torch.full((t,), source.choice([0.7, 1.0, 1.3]), device="cuda")
            logits = source.choice([lib_linear, own_linear]).matmul(hidden, w, out_dtype=torch.float32)
            stats, z = op.leaf_stats(logits, temperature, v), op.target_logits(logits, temperature, target)
            modules = [triton] if reason else [triton, library]
            for module in modules:
                tiles.TILE_BYTES = source.choice([1 << 20, 32 << 20, tile])
                got = module.leaf_stats(hidden, w, temperature, target, v)
                tally.equal(stats, got[0], f"{module.__name__.rsplit('.', 1)[1]}, leaves", (v, h, t))
                tally.equal(z, got[1], "target", (v, h, t))
            a = source.randrange(t)
            got = modules[-1].leaf_stats(hidden[a:], w, temperature[a:], target[a:], v)
            tally.equal(stats[:, a:], got[0], "slice of rows", (v, h, t, a))
    finally:
        tiles.TILE_BYTES = tile
    tally.done(probe=cublaslt.report())


@pytest.mark.parametrize("part", range(3))
def test_linear_logp_gradients_agree(part):
    from rl_kernel.ops.collectives import triton as collectives
    from rl_kernel.ops.linear_logp import library, tiles, triton
    from rl_kernel.ops.logp import triton as op

    tally, source = Tally(f"linear_logp_backward_{part}"), rng(33 + 100 * part)
    weights = {(v, h): data(-(-v // 1024) * 1024, h, seed=v, scale=0.02) for v, h in
               [(37984, 512), (40000, 256), (5000, 512), (777, 128)]}  # fmt: skip
    tile = tiles.TILE_BYTES
    try:
        while tally.cases < CASES // 3 + 1:
            (v, h), w = source.choice(list(weights.items()))
            t = rows(source, 1024)
            hidden = data(t, h, seed=source.randrange(1 << 30), heavy=False)
            target = torch.randint(0, v, (t,), device="cuda")
            temperature = torch.full((t,), source.choice([0.7, 1.0, 1.3]), device="cuda")
            padded = w.shape[0]
            layout = VocabLayout((0, padded), v)
            stats, z = triton.leaf_stats(hidden, w, temperature, target, v)
            m, out = finish(op, layout, [stats], z)
            state, grads = torch.stack([m, out[3], out[2]]), torch.randn(3, t, device="cuda")
            if source.random() < 0.5:
                grads[1:] = 0
            segments = source.choice([1, 2, 4, 8])
            whole = layout.local_segments(0, segments)
            dh, dw = triton.backward(hidden, w, temperature, target, state, grads, whole)
            what = (v, h, t, segments)
            tiles.TILE_BYTES = source.choice([1 << 20, 32 << 20, tile])
            for module in (library, triton):
                again = module.backward(hidden, w, temperature, target, state, grads, whole)
                tally.equal(dh, again[0], f"dH, {module.__name__.rsplit('.', 1)[1]}", what)
                tally.equal(dw, again[1], f"dW, {module.__name__.rsplit('.', 1)[1]}", what)
            if segments > 1:
                half = padded // 2
                ranks = VocabLayout((0, half, padded), v)
                parts = []
                for r in range(2):
                    local = target - r * half
                    local = torch.where((local >= 0) & (local < ranks.columns(r)), local, -1)
                    parts.append(
                        triton.backward(
                            hidden, w[r * half : (r + 1) * half], temperature, local, state, grads,
                            ranks.local_segments(r, segments),
                        )
                    )  # fmt: skip
                joined = collectives.reduce_parts(torch.stack([p[0] for p in parts]), BF16)
                tally.equal(dh.to(BF16), joined, "dH, two ranks", what)
                tally.equal(dw, torch.cat([p[1] for p in parts]), "dW, two ranks", what)
    finally:
        tiles.TILE_BYTES = tile
    tally.done(probe=cublaslt.report())


def test_what_linear_logp_keeps_changes_no_bit(monkeypatch):
    """Neither how much is kept nor the schedule itself: the registered operator, which tracers see, keeps nothing."""
    import rl_kernel
    from rl_kernel.ops.linear_logp import op, tiles

    tally, (v, h) = Tally("linear_logp_backward_kept"), (37984, 256)
    w, held, untraced = data(v, h, seed=v, scale=0.02), tiles.KEPT_BYTES, op.untraced
    backends = ["triton"] if cublaslt.unavailable("gfx942" if torch.version.hip else "sm90") else ["triton", "library"]
    for t in (333, 1820, 8192):
        hidden, target = data(t, h, seed=t, heavy=False), torch.randint(0, v - 9, (t,), device="cuda")
        target[3::7] = -100
        upstream = torch.randn(3, t, device="cuda")
        for temperature, segments in ((1.0, 1), (torch.rand(t, device="cuda") + 0.5, 4)):
            first = None
            for size in (None, 0, 2 * t * 16384, 2 * t * 33000, held):
                monkeypatch.setattr(tiles, "KEPT_BYTES", size or 0)
                monkeypatch.setattr(op, "untraced", (lambda *_: False) if size is None else untraced)
                for backend in backends:
                    x, weight = (a.detach().clone().requires_grad_() for a in (hidden, w))
                    out = rl_kernel.linear_logp(
                        x, weight, target, global_vocab_size=v - 9, temperature=temperature, grad_segments=segments,
                        backend=backend,
                    )  # fmt: skip
                    what = (t, segments, size)

                    def gradients(upstream, out=out, operands=(x, weight)):
                        return torch.autograd.grad(list(out), operands, list(upstream), retain_graph=True)

                    found = [*(a.detach() for a in out), *gradients(upstream)]
                    first = found if first is None else first
                    for name, a, b in zip(("logp", "lse", "entropy", "dH", "dW"), found, first, strict=True):
                        tally.equal(a, b, f"{name}, {backend}", what)
                    if size == held:
                        for a, b, c in zip(gradients(upstream), gradients(upstream.flip(0)), first[3:], strict=True):
                            tally.equal(a, c, f"second backward, {backend}", what)
                            assert differing(b, c), f"control: other gradients give the same {what}"
    tally.done(probe=cublaslt.report())


def test_public_operators_on_the_gpu():
    import rl_kernel

    hidden, w = data(300, 256, seed=1, heavy=False), data(5120, 256, seed=2, scale=0.05)
    target = torch.randint(0, 5000, (300,), device="cuda")
    target[::7] = -100
    for temperature in (1.0, 0.7):
        h, weight = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        fused = rl_kernel.linear_logp(h, weight, target, global_vocab_size=5000, temperature=temperature)
        logits = rl_kernel.lm_head(hidden, w)
        plain = rl_kernel.logp(logits, target, global_vocab_size=5000, temperature=temperature)
        for a, b in zip(fused, plain):
            assert differing(a.detach(), b) == 0
        (fused.logp.sum() + 0.1 * fused.entropy.sum()).backward()
        hd, wd = hidden.double().requires_grad_(), w.double().requires_grad_()
        z = (hd @ wd[:5000].t()) / temperature
        lp = z.log_softmax(-1)
        live = target != -100
        exact = lp.gather(1, target.clamp(min=0)[:, None])[:, 0][live].sum() - 0.1 * (lp.exp() * lp).sum(-1)[live].sum()
        exact.backward()
        he, we = hidden.clone().requires_grad_(), w.clone().requires_grad_()
        le = ((he @ we[:5000].t()).float() / temperature).log_softmax(-1)
        eager = le.gather(1, target.clamp(min=0)[:, None])[:, 0][live].sum() - 0.1 * (le.exp() * le).sum(-1)[live].sum()
        eager.backward()
        assert (h.grad - hd.grad).abs().sum() <= 2 * (he.grad - hd.grad).abs().sum()
        assert (weight.grad - wd.grad).abs().sum() <= 2 * (we.grad - wd.grad).abs().sum()


def test_special_values():
    from rl_kernel.ops.logp import triton as op

    x = torch.randn(5, 1000, device="cuda")
    x[0, 3], x[1, 5], x[2, 128:256], x[3] = float("nan"), float("inf"), float("-inf"), 1e30
    one = torch.ones(5, device="cuda")
    _, out = finish(op, VocabLayout((0, 1000), 1000), [op.leaf_stats(x, one, 1000)], x[:, 0])
    assert torch.isnan(out[0, 0]) and torch.isnan(out[0, 1])
    exact = torch.logsumexp(x[2:].double(), -1)
    assert torch.allclose(out[1, 2:].double(), exact, rtol=1e-6)


def test_negative_control_torch_log_softmax_differs_across_shards():
    x = torch.randn(64, 151936, device="cuda")
    whole = torch.logsumexp(x, -1)
    found = {}
    for tp in (2, 4, 8):
        parts = torch.stack([torch.logsumexp(p, -1) for p in x.chunk(tp, 1)])
        found[tp] = differing(whole, torch.logsumexp(parts, 0))
    folder = os.environ.get("RLK_REPORT_DIR")
    if folder:
        Path(folder, "control_log_softmax.json").write_text(json.dumps(found), encoding="utf-8")
    assert sum(found.values()) > 0
