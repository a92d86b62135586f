"""Runs the Triton kernels of one group on the CPU through Triton's interpreter; prints one JSON object of findings.

A process of its own, because the interpreter is chosen by an environment variable when a kernel is decorated. The
interpreter neither rounds to bfloat16 as hardware does nor multiplies bfloat16 matrices: both are replaced here, so
what is tested is the kernels' logic (indices, masks, order of merges), not hardware arithmetic.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import importlib
import json
import sys
import types

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from rl_kernel import triton_utils

BF16 = torch.bfloat16
torch.set_num_threads(1)
torch.manual_seed(0)
np.seterr(all="ignore")

_convert, _dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot


def _round(x, source, target, mode):
    if source == tl.float32 and target == tl.bfloat16:
        bits = torch.from_numpy(np.ascontiguousarray(x)).to(BF16).view(torch.int16)
        return bits.numpy().view(np.uint16)
    return _convert(x, source, target, mode)


def _wide(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


interpreter._convert_float = _round
interpreter.InterpreterBuilder.create_dot = lambda self, a, b, d, *rest: _dot(self, _wide(a), _wide(b), d, *rest)


def backend(op):
    return importlib.import_module(f"rl_kernel.ops.{op}.triton")


def randn(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


def error(value, exact):
    """Largest error relative to the largest magnitude."""
    return float((value.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def same(a, b):
    return bool(torch.equal(a, b))


def elementwise():
    norm, rope, swiglu, embedding = (backend(name) for name in ("rms_norm", "rope", "swiglu", "embedding"))
    found = {}
    x, r, w = randn(5, 96), randn(5, 96), randn(96)
    y, out, rstd = norm.forward(x, w, 1e-6, r)
    found["rms_norm residual"] = same(out, (x.float() + r.float()).to(BF16))
    s = out.double().requires_grad_()
    exact = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * w.double()
    found["rms_norm error"] = error(y, exact.detach())
    dy, dres = randn(5, 96), randn(5, 96)
    exact.backward(dy.double())
    dx, dw = norm.backward(dy, dres, out, w, rstd)
    exact_dw = (dy.double() * out.double() * torch.rsqrt(out.double().pow(2).mean(-1, keepdim=True) + 1e-6)).sum(0)
    found["rms_norm backward error of the weight"] = error(dw, exact_dw)
    # 67 rows: more than one partial sum of the weight, the second of which ends inside a group of rows.
    many, many_rstd = (randn(67, 96), randn(67, 96), randn(67, 96)), torch.rand(67) + 0.5
    for table, a, b in (("add_rms_norm_backward", many[0], many[1]), ("rms_norm_backward", many[0], None)):
        once = norm.backward(a, b, many[2], w, many_rstd)
        for count in (1, 2, 4):
            with triton_utils.override_launch(table, {"warps": 1, "rows": count}):
                again = norm.backward(a, b, many[2], w, many_rstd)
            found[f"{table}, {count} rows at a time"] = same(again[0], once[0]) and same(again[1], once[1])
    found["rms_norm backward error"] = error(dx, s.grad + dres.double())
    with triton_utils.override_launch("add_rms_norm", {"block": 512, "warps": 1}):
        found["rms_norm rows"] = same(norm.forward(x[2:], w, 1e-6, r[2:])[0], y[2:])
    q = randn(4, 3 * 32 + 8)[:, :96].view(4, 3, 32)
    position, cache, head = torch.tensor([3, 0, 7, 1]), torch.randn(16, 32), randn(32)
    c, sn = cache[position, None, :16], cache[position, None, 16:]
    a, b = q[..., :16].float(), q[..., 16:].float()
    found["rope"] = same(rope.forward(q, position, cache), torch.cat([a * c - b * sn, b * c + a * sn], -1).to(BF16))
    normed = norm.forward(q, head, 1e-6)[0]
    k, k_head = randn(4, 3 * 32 + 8)[:, 8:72].view(4, 2, 32), randn(32)
    k_normed, _, k_rstd = norm.forward(k, k_head, 1e-6)
    fused, k_fused, rstd = rope.qk_norm_forward(q, k, head, k_head, 1e-6, position, cache)
    found["norm and rope fused"] = same(fused, rope.forward(normed, position, cache))
    found["norm and rope of k fused"] = same(k_fused, rope.forward(k_normed, position, cache))
    found["rstd of the fused norms"] = same(rstd[:, 3:], k_rstd)
    whole = {"tokens": 2, "rows": 8, "warps": 1, "least": 1, "most": 4096}
    with triton_utils.override_launch("qk_norm_rope", whole):
        found["whole tokens"] = all(
            same(a, b)
            for a, b in zip(rope.qk_norm_forward(q, k, head, k_head, 1e-6, position, cache), (fused, k_fused, rstd))
        )
        two, k_two, _ = rope.qk_norm_forward(q[1:, 1:], k[1:], head, k_head, 1e-6, position[1:], cache)
        found["whole tokens, two heads at a time"] = same(two, fused[1:, 1:]) and same(k_two, k_fused[1:])
    dy = randn(4, 3, 32)
    fused_grads = rope.qk_norm_backward(dy, q, head, rstd[:, :3], position, cache)
    turned = rope.backward(dy, position, cache).reshape(-1, 32)
    composed = norm.backward(turned, None, q.reshape(-1, 32), head, rstd[:, :3].reshape(-1))
    found["backward of both fused"] = all(same(a.flatten(), b.flatten()) for a, b in zip(fused_grads, composed))
    dy, wide = randn(34, 4, 32), randn(34, 4, 32)
    four_rstd, far = torch.rand(34, 4) + 0.5, torch.arange(34) % 16
    turned = rope.backward(dy, far, cache).reshape(-1, 32)
    composed = norm.backward(turned, None, wide.reshape(-1, 32), head, four_rstd.reshape(-1))
    for count in (1, 2, 4):
        with triton_utils.override_launch("rms_norm_backward", {"warps": 1, "rows": count}):
            grads = rope.qk_norm_backward(dy, wide, head, four_rstd, far, cache)
        found[f"backward of both fused, {count} heads at a time"] = all(
            same(a.flatten(), b.flatten()) for a, b in zip(grads, composed)
        )
    g = randn(3, 80)
    exact_in = g.double().requires_grad_()
    exact = torch.nn.functional.silu(exact_in[:, :40]) * exact_in[:, 40:]
    found["swiglu error"] = error(swiglu.forward(g), exact.detach())
    dy = randn(3, 40)
    exact.backward(dy.double())
    found["swiglu backward error"] = error(swiglu.backward(dy, g), exact_in.grad)
    table, ids = randn(20, 24), torch.tensor([3, 3, 19, 0, 7, 3])
    parts = [embedding.forward(ids, table[i : i + 10], i) for i in (0, 10)]
    found["embedding"] = same(embedding.forward(ids, table), table[ids])
    found["embedding shards"] = same(parts[0] + parts[1], table[ids])
    dy = randn(6, 24)
    found["embedding backward error"] = error(
        embedding.backward(dy, ids, 20), torch.zeros(20, 24).index_add_(0, ids, dy.float()).double()
    )
    from rl_kernel.ops.collectives import reference, triton

    parts = torch.randn(5, 300)
    found["reduce_parts"] = same(triton.reduce_parts(parts, BF16), reference.reduce_parts(parts, BF16))
    return found


def linear():
    op = backend("linear")
    found = {}
    x, w = randn(5, 256), randn(40, 256)
    row = {"BM": 16, "BN": 32, "BK": 32, "warps": 4, "stages": 1, "swap": 0, "group": 4, "split": 0}
    for segments in (1, 2, 8):
        exact = x.double() @ w.double().t()
        for split, swap in ((0, 0), (1, 1)) if segments < 8 else ((1, 0), (0, 1)):
            chosen = {**row, "split": split, "swap": swap}
            with (
                triton_utils.override_launch("linear", chosen),
                triton_utils.override_launch("linear_segments", chosen),
            ):
                y = op.matmul(x, w, segments=segments, out_dtype=torch.float32)
                found[f"matmul error S={segments} split={split} swap={swap}"] = error(y, exact)
    with triton_utils.override_launch("linear", row), triton_utils.override_launch("wgrad", row):
        dy, w = randn(5, 48), randn(48, 40)
        exact = dy.double() @ w.double()
        found["dgrad error"] = error(op.dgrad(dy, w, out_dtype=torch.float32), exact)
        with triton_utils.override_launch("linear_segments", row):
            y = op.dgrad(dy, w, segments=2, parts=2, out_dtype=torch.float32)
        found["dgrad parts error"] = error(y, exact)
        x = randn(5, 40)
        found["wgrad error"] = error(op.wgrad(dy, x, out_dtype=torch.float32), dy.double().t() @ x.double())
        many, x = randn(37, 48), randn(37, 40)
        exact = many.double().t() @ x.double()
        found["wgrad error, whole blocks and a rest"] = error(op.wgrad(many, x, out_dtype=torch.float32), exact)
        start = torch.randn(5, 40)
        # Which k the products see, in order: column k of the left operand holds k (exact in bf16 up to 256).
        order: list[int] = []
        multiply = interpreter.InterpreterBuilder.create_dot

        def watched(self, a, b, d, *rest):
            order.extend(_wide(a).data[0].astype(int).tolist())
            return multiply(self, a, b, d, *rest)

        interpreter.InterpreterBuilder.create_dot = watched
        counting = torch.arange(256).to(BF16).expand(8, 256).contiguous()
        op.matmul(counting, randn(32, 256))
        found["k ascends"] = order == list(range(256))
        order.clear()
        with triton_utils.override_launch("linear_segments", row):
            op.dgrad(counting, randn(256, 32), segments=2, parts=2)
        found["k ascends in segments of two parts"] = order == [
            *range(64), *range(128, 192), *range(64, 128), *range(192, 256)
        ]  # fmt: skip
        interpreter.InterpreterBuilder.create_dot = multiply
        fresh = op.product(dy, w, torch.empty(5, 40))
        found["add is one addition"] = same(op.add_product(dy, w, start.clone()), start + fresh)
    return found


def _exact_attention(q, k, v, cu_q, cu_k):
    parts = []
    for i in range(len(cu_q) - 1):
        if cu_q[i] == cu_q[i + 1]:
            continue
        group = q.shape[1] // k.shape[1]
        a = q[cu_q[i] : cu_q[i + 1]]
        b, c = (x[cu_k[i] : cu_k[i + 1]].repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("qhd,khd->hqk", a, b) * q.shape[-1] ** -0.5
        mask = torch.ones(s.shape[1:], dtype=torch.bool).tril(s.shape[2] - s.shape[1])
        parts.append(torch.einsum("hqk,khd->qhd", s.masked_fill(~mask, -torch.inf).softmax(-1), c))
    return torch.cat(parts)


def attention():
    op = backend("attention")
    found = {}
    cu_q = torch.tensor([0, 5, 5, 27], dtype=torch.int32)
    cu_k = torch.tensor([0, 140, 140, 170], dtype=torch.int32)
    q, k, v = randn(27, 4, 16), randn(170, 2, 16), randn(170, 2, 16)
    small = {"BM": 16, "warps": 4, "stages": 1}
    with triton_utils.override_launch("attention", small):
        out, lse = op.varlen_forward(q, k, v, cu_q, cu_k)
        exact_in = [x.double().requires_grad_() for x in (q, k, v)]
        exact = _exact_attention(*exact_in, cu_q, cu_k)
        found["forward error"] = error(out, exact.detach())
        lens = cu_k[1:] - cu_k[:-1]
        page, order = 16, torch.randperm(16)
        caches = torch.full((2, 16, page, 2, 16), float("nan"), dtype=BF16)
        table = torch.zeros((3, 9), dtype=torch.int32)
        used = 0
        for i in range(3):
            for j in range(-(-int(lens[i]) // page)):
                table[i, j] = order[used]
                begin = int(cu_k[i]) + j * page
                n = min(page, int(lens[i]) - j * page)
                caches[0, order[used], :n], caches[1, order[used], :n] = k[begin : begin + n], v[begin : begin + n]
                used += 1
        for split in (True, False):
            got = op.paged_forward(q, caches[0], caches[1], table, cu_q, lens, split=split)
            found[f"paged equals packed, split {split}"] = same(got, out)
        one = torch.tensor([0, 1], dtype=torch.int32)
        got = op.paged_forward(q[2:3], caches[0], caches[1], table[:1], one, lens[:1] - 2, split=True)
        found["decode equals packed"] = same(got, out[2:3])
    dout = randn(27, 4, 16)
    exact.backward(dout.double())
    tile = {"BM": 16, "BN": 32, "warps": 4, "stages": 1}
    with triton_utils.override_launch("attention_dkdv", tile), triton_utils.override_launch("attention_dq", tile):
        grads = op.varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k)
    for name, own, x in zip("qkv", grads, exact_in):
        found[f"d{name} error"] = error(own, x.grad)
    return found


def logp():
    op, fused, matmul = backend("logp"), backend("linear_logp"), backend("linear")
    from rl_kernel.ops.linear_logp import tiles

    found = {}
    t, h, columns = 6, 32, 300
    hidden, weight = randn(t, h), randn(384, h) * 0.3
    temperature, target = torch.tensor([0.7, 1, 1.3, 1, 2, 0.5]), torch.tensor([5, -1, 249, 299, 0, 128])
    tiles.VOCAB_BLOCK, tiles._tile_columns = 256, lambda *_: 128
    row = {"BM": 16, "BN": 128, "BK": 32, "warps": 4, "stages": 1, "swap": 0, "group": 4, "split": 0}
    with (
        triton_utils.override_launch("linear", row),
        triton_utils.override_launch("wgrad", row),
        triton_utils.override_launch("logp", {"leaves": 2, "warps": 1}),
    ):
        stats, z = fused.leaf_stats(hidden, weight, temperature, target, columns)
        logits = matmul.matmul(hidden, weight, out_dtype=torch.float32)
        found["leaves of linear_logp equal those of logp"] = same(stats, op.leaf_stats(logits, temperature, columns))
        found["target logits"] = same(z, op.target_logits(logits, temperature, target))
        m, out = op.whole_rows(stats, z)
        nodes = op.tree_nodes(stats, m, [(0, 2), (2, 3)], 2)
        found["subtrees finish the same tree"] = same(op.finish(nodes, [(0, 1)], 0, m, z), out)
        exact_in = [x.double().requires_grad_() for x in (hidden, weight)]
        scaled = (exact_in[0] @ exact_in[1][:columns].t()) / temperature.double()[:, None]
        lp = scaled.log_softmax(-1)
        entropy = -(lp.exp() * lp).sum(-1)
        rows = torch.tensor([0, 2, 3, 4, 5])
        picked = lp.gather(1, target.clamp(min=0)[:, None])[:, 0]
        found["logp error"] = error(out[0][rows], picked[rows].detach())
        found["entropy error"] = error(out[2], entropy.detach())
        state = torch.stack([m, out[3], out[2]])
        full = op.log_softmax(logits, temperature, state[:2], columns)
        found["log_softmax column"] = same(full.gather(1, target.clamp(min=0)[:, None])[rows, 0], out[0][rows])
        grads = torch.randn(3, t)
        grads[0, 1] = 0
        loss = (grads[0] * picked).sum() + (grads[1] * scaled.logsumexp(-1)).sum() + (grads[2] * entropy).sum()
        loss.backward()
        dh, dw = fused.backward(hidden, weight, temperature, target, state, grads, [(0, 192), (192, 300)])
        found["dH error"], found["dW error"] = error(dh, exact_in[0].grad), error(dw, exact_in[1].grad)
        found["padding has no gradient"] = same(dw[columns:], torch.zeros_like(dw[columns:]))
        schedules(found, matmul, hidden, weight)
    return found


def schedules(found, products, hidden, weight):
    """What is kept changes no bit: nothing, the first blocks, all blocks, all columns in one matrix."""
    from rl_kernel.ops.linear_logp import schedule, tiles
    from rl_kernel.ops.logp.vocab_tree import VocabLayout

    t, layout = hidden.shape[0], VocabLayout((0, 384), 300)
    target, upstream = torch.tensor([5, -100, 249, 299, 0, 128]), torch.randn(3, t)
    divisor = torch.tensor([0.7, 1, 1.3, 1, 2, 0.5])
    tiles.VOCAB_BLOCK, tiles.LEAST_COLUMNS, schedule.LEAST_ROWS = 128, 128, 2
    plans = ((0, 0), (2, 0), (3, 0), (3, 1 << 28))
    few = ((0, 0), (1, 0))
    for segments, temperature, chunk, cases in (
        (1, None, 64 << 20, plans),
        (1, divisor, 64 << 20, few),
        (4, divisor, 0, plans),
    ):
        if segments == 4:
            layout = VocabLayout((0, 512), 300)
            weight = torch.cat([weight, weight[:128]])
        first = None
        for kept, one in cases:
            tiles.KEPT_BYTES, tiles.ONE_MATRIX, schedule.STATS_BYTES = kept * 128 * 2 * (t - 1), one, chunk
            operands = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
            out = schedule.run(products, *operands, target, temperature, layout, -100, segments, None)
            torch.autograd.backward(out, tuple(upstream), retain_graph=True)
            results = [*(x.detach() for x in out), *(x.grad.clone() for x in operands)]
            for x in operands:
                x.grad = None
            torch.autograd.backward(out, tuple(upstream))
            results += [x.grad for x in operands]
            with torch.no_grad():
                results += schedule.run(products, *operands, target, temperature, layout, -100, segments, None)
            case = f"segments {segments}, temperature {temperature is not None}, kept {kept}, one {bool(one)}"
            plan = tiles.Kept.of(hidden[1:], layout.local_segments(0, segments))
            ranges = [] if plan is None else plan.ranges
            found[f"{case}: ranges"] = len(ranges) == (1 if one else kept)
            first = results if first is None else first
            found[f"{case}: bits"] = all(map(same, results, first))
        registered(found, layout, hidden, weight, target, temperature, segments, first[:5], upstream)
    corners(found, products, layout, hidden, weight, target)


def registered(found, layout, hidden, weight, target, temperature, segments, expected, upstream):
    """The operator that tracers see has the bits of the schedule; other upstream gradients have others."""
    from rl_kernel.ops.linear_logp import op

    op.resolve = lambda name, *_: types.SimpleNamespace(module=backend(name))
    t = torch.ones(target.shape[0]) if temperature is None else temperature
    common = list(layout.borders), layout.global_vocab_size, -100, segments, "", "triton"
    out = op._linear_logp_rows(hidden, weight, target, t, *common)
    state = torch.stack([out[3], out[4], out[2]])
    gradients = op._linear_logp_gradients(hidden, weight, target, t, state, upstream, *common, True, True)
    case = f"registered, segments {segments}, temperature {temperature is not None}"
    found[case] = all(map(same, (*out[:3], *gradients), expected))
    other = op._linear_logp_gradients(hidden, weight, target, t, state, upstream.flip(0), *common, True, True)
    found[f"{case}: control"] = not any(map(same, other, expected[3:]))


def corners(found, products, layout, hidden, weight, target):
    """One operand, one output, few rows or none, and what autograd has to refuse."""
    from rl_kernel.ops.linear_logp import schedule

    divisor, upstream = torch.full((len(target),), 0.7), torch.randn(3, len(target))

    def run(rows, needs=(True, True), ids=None):
        operands = [x.clone().requires_grad_(need) for x, need in zip((hidden[rows], weight), needs)]
        ids, t = (target if ids is None else ids)[rows], divisor[rows].clone()
        return operands, t, schedule.run(products, *operands, ids, t, layout, -100, 4, None)

    whole = slice(None)
    operands, _, out = run(whole)
    full = torch.autograd.grad(out, operands, tuple(upstream))
    for needs in ((True, False), (False, True)):
        (x, w), _, out = run(whole, needs)
        torch.autograd.backward(out, tuple(upstream))
        pairs = [(a.grad, b) for a, b in zip((x, w), full)]
        found[f"gradients {needs}"] = all(same(a, b) if need else a is None for need, (a, b) in zip(needs, pairs))
    for used in range(3):
        zero = torch.zeros_like(upstream)
        zero[used] = upstream[used]
        operands, _, out = run(whole)
        one = torch.autograd.grad(out[used], operands, upstream[used], retain_graph=True)
        found[f"output {used} alone"] = all(map(same, one, torch.autograd.grad(out, operands, tuple(zero))))
    operands, _, out = run(whole)
    out[0].mul_(2)
    changed = torch.autograd.grad(out, operands, tuple(upstream))
    operands, _, out = run(whole)
    doubled = torch.stack([2 * upstream[0], *upstream[1:]])
    found["output changed in place"] = all(map(same, changed, torch.autograd.grad(out, operands, tuple(doubled))))
    alone = torch.tensor([-100, -100, 249, -100, -100, -100])
    operands, _, out = run(slice(2, 3))
    single = [*(x.detach() for x in out), *torch.autograd.grad(out, operands, tuple(upstream[:, 2:3]))]
    operands, _, out = run(whole, ids=alone)
    dh, dw = torch.autograd.grad(out, operands, tuple(upstream))
    found["one row"] = all(map(same, [*(x.detach()[2:3] for x in out), dh[2:3], dw], single))
    found["rows that take no part"] = not bool(dh[:2].any() or dh[3:].any() or torch.stack(out).detach()[:, 3:].any())
    for name, rows, ids in (("no rows", slice(0, 0), None), ("all ignored", whole, torch.full((len(target),), -100))):
        operands, _, out = run(rows, ids=ids)
        grads = torch.autograd.grad(out, operands, tuple(upstream[:, rows]))
        zeros = not any(bool(x.any()) for x in (*out, *grads))
        found[name] = zeros and [x.shape for x in grads] == [x.shape for x in operands]

    def refused(call, text):
        try:
            call()
        except RuntimeError as problem:
            return text in str(problem)
        return False

    operands, _, out = run(whole)
    grads = torch.autograd.grad(out, operands, tuple(upstream.clone().requires_grad_()), create_graph=True)
    found["no second derivative"] = refused(lambda: grads[0].sum().backward(), "once_differentiable")
    operands, _, out = run(whole)
    torch.autograd.grad(out, operands, tuple(upstream))
    again = refused(lambda: torch.autograd.grad(out, operands, tuple(upstream)), "second time")
    found["no second backward pass of a graph that is gone"] = again
    operands, t, out = run(whole, ids=target.clamp(min=0))
    t.add_(1)
    found["changed temperature"] = refused(lambda: torch.autograd.grad(out, operands, tuple(upstream)), "inplace")


def sampling():
    from rl_kernel.ops.sampling import reference

    op, logits_op = backend("sampling"), backend("logp")
    found = {}
    seeds = torch.tensor([0, 1, (1 << 63) - 1, 12345, 1 << 40, 7, 7])
    positions = torch.tensor([0, 3, 1 << 20, 0, 9, 1, 2])
    numbers, exact = (torch.empty(7, dtype=torch.float64) for _ in range(2))
    op.fill_uniforms(seeds, positions, numbers)
    reference.fill_uniforms(seeds, positions, exact)
    found["uniforms"] = same(numbers.view(torch.int64), exact.view(torch.int64))
    b, columns = 23, 2700
    padded = torch.randn(b, 3000) * 4
    padded[:, columns:] = 1e9
    padded[3, 40:2600] = -torch.inf
    padded[5] = -torch.inf
    padded[5, 2111] = 1.0
    temperature = torch.tensor([0.7, 1.0, 1.3])[torch.arange(b) % 3]
    temperature[7] = temperature[8] = 0.0
    padded[8, [300, 1400]] = 99.0
    u = torch.rand(b, dtype=torch.float64)
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    divisor = torch.where(temperature == 0, torch.ones(()), temperature)
    first = None
    for launch in ({"chunk": 128, "warps": 4}, {"chunk": 1024, "warps": 1}, {"chunk": 4096, "warps": 4}):
        with (
            triton_utils.override_launch("logp", {"leaves": 4, "warps": 1}),
            triton_utils.override_launch("sampling", launch),
        ):
            tokens, logp, lse = op.sample(padded[:, :2900], temperature, u, columns)
            if first is None:
                first = tokens
                m, out = logits_op.whole_rows(logits_op.leaf_stats(padded, divisor, columns), divisor)
                y = logits_op.log_softmax(padded, divisor, torch.stack([m, out[3]]), columns)[:, :columns]
                # The weights of the kernel, whose exp is the fp32 primitive of the GPU families.
                p = torch.from_numpy(np.exp2(y.numpy() * np.float32(1.4426950408889634)))
                weights = (p * float(1 << 50)).to(torch.int64)
                expected = reference.draw_weights(weights, u)
                greedy = temperature == 0
                found["draw equals the reference given its weights"] = same(tokens[~greedy], expected[~greedy])
                found["greedy is the first maximum"] = same(tokens[greedy], padded[greedy, :columns].argmax(1))
                found["the first of two maxima"] = int(tokens[8]) == 300
                found["only token"] = int(tokens[5]) == 2111
                found["never a token without weight"] = bool((weights.gather(1, tokens[:, None]) > 0).all())
                found["logp is that of log_softmax"] = same(logp, y.gather(1, tokens[:, None])[:, 0])
                found["lse"] = same(lse, out[1])
                # Not the rounding of y, which both engines share: the primitive alone.
                exact_p = y.double().exp()
                bound = (exact_p * (2 + y.abs())).nan_to_num(0.0) * 2.0**-22 + 2.0**-50
                found["weights are probabilities"] = bool(((weights / 2.0**50 - exact_p).abs() <= bound).all())
            found[f"launch {launch}"] = same(tokens, first)
            found[f"given log-probabilities {launch}"] = same(op.draw(y, u)[~greedy], first[~greedy])
            alone = [op.sample(padded[i : i + 1, :2900], temperature[i : i + 1], u[i : i + 1], columns) for i in (4, 8)]
            found[f"alone {launch}"] = [int(x[0]) for x in alone] == [int(first[4]), int(first[8])]
    padded[2, 17] = torch.nan
    tokens, logp, _ = op.sample(padded, temperature, u, columns)
    found["NaN stays in range"] = 0 <= int(tokens[2]) < columns and bool(logp[2].isnan())
    found["and touches no other row"] = same(tokens[3:], first[3:])
    return found


if __name__ == "__main__":
    groups = {"elementwise": elementwise, "linear": linear, "attention": attention, "logp": logp, "sampling": sampling}
    print(json.dumps(groups[sys.argv[1]]()))
