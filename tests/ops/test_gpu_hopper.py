"""Bytes of the Hopper kernels over random cases, beside Triton and the library: the defaults on an H100 or H200."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from rl_kernel import registry
from rl_kernel.ops.linear import sm90 as linear
from rl_kernel.ops.linear import triton as own_linear
from rl_kernel.ops.linear_logp import linear_logp, sm90
from rl_kernel.ops.linear_logp.policy import linear_policy_loss
from rl_kernel.triton_utils import override_launch
from tests.ops.gpu_harness import BF16, CASES, Tally, data, rng, rows

pytestmark = pytest.mark.gpu
MISSING = linear.supports(registry.Request("linear", "sm90", BF16))
if MISSING:
    pytest.skip(MISSING, allow_module_level=True)
PARTS = 4


@contextlib.contextmanager
def some_launch(source, n, k, segments):
    """The launch table, or kernels that it would not pick here."""
    with contextlib.ExitStack() as stack:
        if source.random() < 0.7:
            few = {"rows": source.choice([32, 64]) if segments == 1 else 32, "per_processor": source.choice([1, 2]),
                   "dependent": source.choice([0, 1])}  # fmt: skip
            table = "linear_few_sm90" if segments > 1 else f"linear_few_{n}x{k}_sm90"
            stack.enter_context(override_launch(table, few))
            narrow = source.choice([0, 1 << 60])
            stack.enter_context(override_launch("linear_segments_sm90", {"narrow": narrow, "wide": 1 << 60}))
        yield


@pytest.mark.parametrize("part", range(PARTS))
def test_linear(part):
    tally, source = Tally(f"linear_hopper_{part}"), rng(41 + 100 * part)
    fixed = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096, 1024), (1536, 4096), (4096, 3072)]
    while tally.cases < CASES // PARTS:
        segments = source.choice([1, 1, 2, 4, 8])
        if source.random() < 0.3:
            n, k = source.choice(fixed)
        else:
            n, k = 8 * source.randint(1, 200), segments * 64 * source.randint(1, 24 // segments + 1)
        m = rows(source, 64) if source.random() < 0.4 else rows(source, 8192 if n * k < 1 << 22 else 1024)
        w, wide = data(n, k, seed=source.randrange(1 << 30), scale=0.02), data(m, k + 64, seed=tally.cases)
        x = wide[:, 8 : k + 8] if source.random() < 0.3 else wide[:, :k].contiguous()  # a view of wider rows
        out = source.choice([BF16, torch.float32])
        right = own_linear.matmul(x, w, segments=segments, out_dtype=out)
        what = (n, k, m, segments, out, x.stride(0))
        with some_launch(source, n, k, segments):
            y = linear.matmul(x, w, segments=segments, out_dtype=out)
        tally.equal(y, right, "triton", what)
        a = source.randrange(m)
        b = min(m, a + source.choice([1, 2, 5, 16, 33, 64, 200]))
        with some_launch(source, n, k, segments):
            tally.equal(linear.matmul(x[a:b], w, segments=segments, out_dtype=out), y[a:b], "slice of rows", what)
        if k % 8 == 0 and n % (segments * 64) == 0 and n * k < 1 << 24:
            parts = source.choice([1, 2]) if n % (segments * 128) == 0 else 1
            dy = data(m, n, seed=tally.cases + 1)
            right = own_linear.dgrad(dy, w, segments=segments, parts=parts, out_dtype=out)
            with some_launch(source, n, k, segments):
                found = linear.dgrad(dy, w, segments=segments, parts=parts, out_dtype=out)
            tally.equal(found, right, "dgrad, triton", (*what, parts))
    tally.done()


@pytest.mark.parametrize("part", range(PARTS))
def test_linear_logp(part):
    tally, source = Tally(f"linear_logp_hopper_{part}"), rng(42 + 100 * part)
    before = sm90.WORKSPACE_BYTES

    def run(h, w, t, mib, backend="auto", **arguments):
        sm90.WORKSPACE_BYTES = mib << 20
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        out = linear_logp(h, w, t, backend=backend, **arguments)
        used = out if entropy else out[:1]
        return [*(x.detach() for x in out), *torch.autograd.grad(used, (h, w), upstream[: len(used)])]

    try:
        while tally.cases < CASES // PARTS:
            vocabulary = source.choice([128, 777, 5003, 20000, 40000, 33 * 128])
            padded = -(-vocabulary // 1024) * 1024
            hidden = 8 * source.randint(1, 64) if source.random() < 0.3 else source.choice([128, 256, 512, 1024])
            tokens = rows(source, 1024 if vocabulary > 10000 else 2048)
            seed = source.randrange(1 << 30)
            g = torch.Generator(device="cuda").manual_seed(seed)
            h, w = data(tokens, hidden, seed=seed, heavy=False), data(padded, hidden, seed=seed + 1, scale=0.02)
            t = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=g)
            share = source.choice([0.0, 0.0, 0.1, 0.9, 1.0])
            t[torch.rand(tokens, device="cuda", generator=g) < share] = -100
            temperature = source.choice([1.0, torch.rand(tokens, device="cuda", generator=g) + 0.5])
            upstream, entropy = list(torch.randn(3, tokens, device="cuda", generator=g)), source.random() < 0.5
            segments = source.choice([1, 1, 2, 8])
            common = {"temperature": temperature, "global_vocab_size": vocabulary, "grad_segments": segments}
            what = (tokens, hidden, vocabulary, segments, share, entropy, torch.is_tensor(temperature))
            kept = run(h, w, t, 512, **common)
            again = run(h, w, t, source.choice([1, 512]), **common)
            other = run(h, w, t, 512, backend=source.choice(["library", "triton"]), **common)
            for name, x, y, z in zip(("logp", "lse", "entropy", "dH", "dW"), kept, again, other, strict=True):
                tally.equal(x, y, f"{name}, schedule or second run", what)
                tally.equal(x, z, f"{name}, library or triton", what)
            one = source.randrange(tokens)
            row = slice(one, one + 1)
            alone = {**common, "temperature": temperature[row] if torch.is_tensor(temperature) else temperature}
            with torch.no_grad():
                tally.equal(linear_logp(h[row], w, t[row], **alone).logp, kept[0][row], "row alone", what)
            old = kept[0] + 0.3 * upstream[1]
            losses = []
            for backend in ("auto", source.choice(["library", "triton"])):
                x, y = h.clone().requires_grad_(), w.clone().requires_grad_()
                loss, logp, _ = linear_policy_loss(
                    x, y, t, old, upstream[2], normalizer=37.7, backend=backend, **common
                )
                losses.append([logp.detach(), *torch.autograd.grad(loss, (x, y))])
            for name, x, y in zip(("logp", "dH", "dW"), *losses, strict=True):
                tally.equal(x, y, f"fused loss, {name}", what)
    finally:
        sm90.WORKSPACE_BYTES = before
    tally.done()


@pytest.mark.parametrize("part", range(PARTS))
def test_attention(part):
    from rl_kernel.ops.attention import hopper, triton
    from rl_kernel.ops.attention.triton_backward import portable

    device = torch.device("cuda", torch.cuda.current_device())
    forward, backward = (hopper.module(device, direction) for direction in ("forward", "backward"))
    for found in (forward, backward):
        if isinstance(found, str):
            pytest.skip(found)
    tally, source = Tally(f"attention_hopper_{part}"), rng(43 + 100 * part)
    while tally.cases < CASES // PARTS:
        heads, kv = source.choice([(32, 8), (16, 8), (40, 8), (8, 8), (32, 2), (6, 2), (4, 1)])
        n = [source.choice([0, 1, rows(source, 1500)]) for _ in range(source.choice([1, 2, 5, 20]))]
        if sum(n) == 0:
            continue
        keys = [x + source.choice([0, 0, 1, 77, 300]) for x in n] if source.random() < 0.3 else n
        seed = source.randrange(1 << 30)
        q = data(sum(n), heads + 2 * kv, 128, seed=seed, heavy=False)[:, :heads]
        k = data(sum(keys), kv, 128, seed=seed + 1, heavy=False)
        v = data(sum(keys), heads + 2 * kv, 128, seed=seed + 2, heavy=False)[:, -kv:]
        dout = data(sum(n), heads, 128, seed=seed + 3)
        cu, cu_k = (torch.tensor([0, *x], device="cuda").cumsum(0).to(torch.int32) for x in (n, keys))
        assert forward.unusable(q, k, v, cu, cu_k) is None and backward.unusable(q, k, v, cu, cu_k) is None
        out = triton.varlen_forward(q, k, v, cu, cu_k)
        for name, x, y in zip(("out", "lse"), out, triton.portable_forward(q, k, v, cu, cu_k), strict=True):
            tally.equal(x, y, name, (heads, kv, n, keys))
        case = (dout, q, k, v, *out, cu, cu_k, 128**-0.5, heads // kv)
        for name, x, y in zip(("dq", "dk", "dv"), backward.backward(*case), portable(*case), strict=True):
            tally.equal(x, y, name, (heads, kv, n, keys))
    tally.done()
