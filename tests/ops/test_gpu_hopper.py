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
from rl_kernel.ops.linear_logp import linear_logp, sm90, sm90_schedules
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
            stack.enter_context(override_launch("linear_segments_sm90", {"longest": 1 << 60}))
        yield


@contextlib.contextmanager
def one_tile():
    """One tile of the Triton products for every size: bits do not depend on it, and it is compiled once."""
    tile = {"BM": 64, "BN": 128, "BK": 64, "warps": 4, "stages": 3, "swap": 0, "group": 8, "split": 0}
    with override_launch("linear", tile), override_launch("linear_segments", {**tile, "split": 1}):
        yield


@pytest.mark.parametrize("part", range(PARTS))
@one_tile()
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


def linear_logp_case(source):
    """Operands [T, H], [V padded, H], [T], upstream gradients [3, T], arguments, and a description."""
    vocabulary = source.choice([128, 777, 5003, 20000, 40000, 33 * 128])
    padded = -(-vocabulary // 1024) * 1024 + source.choice([0, 0, 1024])
    hidden = source.choice([128, 256, 512, 1024]) if vocabulary != 777 else source.choice([104, 256])
    tokens = rows(source, 1024 if vocabulary > 10000 else 2048)
    seed = source.randrange(1 << 30)
    g = torch.Generator(device="cuda").manual_seed(seed)
    apart = source.random() < 0.3
    h = data(tokens, hidden + 16 * apart, seed=seed, heavy=False)[:, 16 * apart :]  # a view of wider rows
    w = data(padded, hidden, seed=seed + 1, scale=0.02)
    t = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=g)
    share = source.choice([0.0, 0.0, 0.1, 0.9, 1.0])
    t[torch.rand(tokens, device="cuda", generator=g) < share] = -100
    temperature = source.choice([1.0, torch.rand(tokens, device="cuda", generator=g) + 0.5])
    upstream = torch.randn(3, tokens, device="cuda", generator=g)
    segments = source.choice([1, 1, 2, 8])
    common = {"temperature": temperature, "global_vocab_size": vocabulary, "grad_segments": segments}
    what = (tokens, hidden, vocabulary, padded, segments, share, h.stride(0), torch.is_tensor(temperature))
    return h, w, t, upstream, common, what


@pytest.mark.parametrize("part", range(PARTS))
@one_tile()
def test_linear_logp(part, monkeypatch):
    """Kept logits beside recomputed ones, the library (Triton in a quarter of the cases), rows alone, and main_grad."""
    tally, source = Tally(f"linear_logp_hopper_{part}"), rng(42 + 100 * part)

    def run(mib=512, backend="auto", **more):
        """(logp, lse, entropy, dH, dW)."""
        monkeypatch.setattr(sm90, "WORKSPACE_BYTES", mib << 20)
        x, y = h.detach().requires_grad_(), w.detach().requires_grad_()
        if more:
            y.main_grad = main_grad.clone()
        out = linear_logp(x, y, t, backend=backend, **common, **more)
        used = out if entropy else out[:1]
        torch.autograd.backward(used, list(upstream[: len(used)]))
        return [*(value.detach() for value in out), x.grad, y.main_grad if more else y.grad]

    def loss(backend):
        x, y = h.detach().requires_grad_(), w.detach().requires_grad_()
        value, logp, _ = linear_policy_loss(
            x, y, t, old, upstream[2], normalizer=37.7, entropy_weight=0.01 * entropy, backend=backend, **common
        )
        return [logp.detach(), *torch.autograd.grad(value, (x, y))]

    def compare(left, right, names, kind):
        for name, x, y in zip(names, left, right, strict=True):
            tally.equal(x, y, f"{name}, {kind}", what)

    names = ("logp", "lse", "entropy", "dH", "dW")
    while tally.cases < CASES // PARTS:
        h, w, t, upstream, common, what = linear_logp_case(source)
        entropy, other = source.random() < 0.5, source.choice(["library", "library", "library", "triton"])
        what = (*what, entropy, other)
        kept = run()
        some = max(1, 2 * len(t) * len(w) * 2 // 3 >> 20)  # for the logits of some columns
        compare(run(mib=source.choice([1, some, 512])), kept, names, "schedule or second run")
        compare(run(backend=other), kept, names, "library or triton")
        one = source.randrange(len(t))
        row = slice(one, one + 1)
        temperature = common["temperature"]
        alone = {**common, "temperature": temperature[row] if torch.is_tensor(temperature) else temperature}
        with torch.no_grad():
            tally.equal(linear_logp(h[row], w, t[row], **alone).logp, kept[0][row], "row alone", what)
        if source.random() < 0.3:
            # From -0, which adds nothing to anything, it is the sum that rounds to dW. Padding is left alone.
            main_grad, real = torch.full(w.shape, -0.0, device="cuda"), common["global_vocab_size"]
            dw = kept[4].clone()
            found = run(accumulate_main_grad=True)
            compare(found[:4], kept[:4], names[:4], "main_grad instead of dW")
            tally.equal(found[4].bfloat16()[:real], dw[:real], "main_grad from zero", what)
            tally.equal(kept[4], dw, "dW stays as it is", what)
            main_grad.normal_()
            sums = [run(mib=mib, accumulate_main_grad=True)[4] for mib in (512, source.choice([1, some]))]
            tally.equal(*sums, "main_grad, both schedules", what)
            tally.equal(sums[0][real:], main_grad[real:], "main_grad, padding", what)
        old = kept[0] + 0.3 * upstream[1]
        monkeypatch.setattr(sm90, "WORKSPACE_BYTES", 512 << 20)
        with monkeypatch.context() as patch:
            if source.random() < 0.4:  # the fused loss in chunks of tokens
                patch.setattr(sm90_schedules, "_chunk_rows", lambda call, tokens, width: min(tokens, 256))
            fused = loss("auto")
        compare(fused, loss(other), ("logp", "dH", "dW"), "fused loss")
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
