"""Registration of every operator with GPU tensors, and compiled graphs that return the bits of eager calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C import _dispatch_get_all_op_names

import rl_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU"),
]
DEVICE = "cuda"
BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6


def normal(*shape, dtype=BF16, grad=False, seed=0):
    generator = torch.Generator().manual_seed(3000 + seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_(grad)


def integers(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _linear():
    x, w, dy = normal(24, 128, grad=True), normal(64, 128, grad=True, seed=1), normal(24, 64, seed=2)
    yield "linear", (x, w, 2, 2, 1, None)
    yield "linear", (x.detach(), w.detach(), 1, 1, 2, F32)
    yield "linear_dgrad", (dy, w.detach(), 2, 2, BF16)
    yield "linear_wgrad", (dy, x.detach(), None)


def _elementwise():
    x, r, w = normal(5, 64, grad=True), normal(5, 64, grad=True, seed=1), normal(64, grad=True, seed=2)
    yield "rms_norm", (x, w, EPS)
    yield "add_rms_norm", (x, r, w, EPS)
    yield "rms_norm_backward", (normal(5, 64), None, x.detach(), w.detach(), normal(5, dtype=F32).abs())
    cache = rl_kernel.build_cos_sin_cache(10, 64, 1e4).to(DEVICE)
    positions = torch.arange(5, device=DEVICE)
    q, k, v = normal(5, 4, 64, grad=True), normal(5, 2, 64, grad=True, seed=1), normal(64, grad=True, seed=3)
    yield "rope", (q, positions, cache)
    yield "rope_backward", (q.detach(), positions, cache)
    yield "qk_norm_rope", (q, k, w, v, EPS, positions, cache)
    q, k, w, v = (t.detach() for t in (q, k, w, v))
    rstd = torch.ops.rl_kernel.qk_norm_rope(q, k, w, v, EPS, positions, cache)[2]
    yield "qk_norm_rope_backward", (q, k, q, k, w, v, rstd, positions, cache)
    yield "swiglu", (x,)
    yield "swiglu_backward", (normal(5, 32), x.detach())
    yield "embedding", (positions, x, 0)
    yield "embedding_backward", (x.detach(), positions, 7, 0)


def _attention():
    q, k, v = normal(9, 4, 64, grad=True), normal(9, 2, 64, grad=True, seed=1), normal(9, 2, 64, grad=True, seed=2)
    cu = integers(0, 4, 9)
    yield "attention_varlen", (q, k, v, cu, cu, 0.125)
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = torch.ops.rl_kernel.attention_varlen(q, k, v, cu, cu, 0.125)
    yield "attention_varlen_backward", (out, q, k, v, out, lse, cu, cu, 0.125)
    pages = [normal(3, 16, 2, 64, seed=seed) for seed in (3, 4)]
    table = integers(2, 0).view(2, 1)
    yield "attention_paged", (q, *pages, table, cu, integers(4, 5), 0.125, 5, 16)


def _logits():
    x, t, state, grads = (
        normal(6, 384, dtype=F32, grad=True),
        torch.full((6,), 0.7, device=DEVICE),
        *normal(2, 3, 6, dtype=F32),
    )
    targets = integers(5, 7, -100, 289, 0, 128, dtype=torch.int64)
    yield "logp", (x, targets, t, [0, 384], 290, -100, "", "auto")
    yield "logp_backward", (x.detach(), targets, t, state, grads, 0, 290, -100, "auto")
    yield "log_softmax", (x.detach(), t, 290, "auto")
    h, w = normal(6, 128, grad=True), normal(384, 128, grad=True, seed=1)
    shared = ([0, 384], 290, -100, 4, "", "auto")
    yield "linear_logp", (h, w, targets, t, *shared)
    yield "linear_logp_backward", (h.detach(), w.detach(), targets, t, state, grads, *shared, True, True)
    numbers = torch.rand(6, dtype=torch.float64, device=DEVICE)
    yield "sample", (x.detach(), t, numbers, 290, "auto")
    yield "draw", (x.detach().log_softmax(-1), numbers, "auto")
    seeds = torch.arange(6, device=DEVICE)
    yield "uniforms", (seeds, seeds)


GROUPS = {"linear": _linear, "elementwise": _elementwise, "attention": _attention, "logits": _logits}
COLLECTIVES = {"all_reduce": (BF16,), "reduce_scatter": (F32,), "all_gather": (True,)}


@pytest.mark.parametrize("group", GROUPS)
def test_registration(group):
    for name, arguments in GROUPS[group]():
        torch.library.opcheck(getattr(torch.ops.rl_kernel, name).default, arguments)


def test_registration_of_collectives(tmp_path):
    from rl_kernel.ops.collectives import op

    if dist.is_initialized():
        pytest.skip("another test holds the process group")
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        group = dist.group.WORLD
        op._groups[group.group_name] = group  # a group of one has no name of its own: nothing would be called
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        for name, rest in COLLECTIVES.items():
            x = normal(8, 64, dtype=F32, grad=True)
            function = getattr(torch.ops.rl_kernel, name).default
            torch.library.opcheck(function, (x, group.group_name, *rest), test_utils=tests)
    finally:
        op._groups.pop(dist.group.WORLD.group_name, None)
        dist.destroy_process_group()


def test_no_operator_is_left_out():
    registered = {
        name.split("::")[1].split(".")[0] for name in _dispatch_get_all_op_names() if name.startswith("rl_kernel::")
    }
    assert registered == {name for make in GROUPS.values() for name, _ in make()} | set(COLLECTIVES)


def same(left, right):
    views = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.int64: torch.int64}
    return [bool(torch.equal(a.view(views[a.dtype]), b.view(views[b.dtype]))) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_block_has_the_bits_of_eager(backend):
    """One graph without breaks: norm, projection, rope, attention, SwiGLU and residual, forward and backward."""
    cache, cu = rl_kernel.build_cos_sin_cache(64, 64, 1e4).to(DEVICE), integers(0, 4, 10)
    positions = torch.arange(10, device=DEVICE)

    def block(x, w, n):
        h, total = rl_kernel.rms_norm(x, n, EPS, x)
        q = rl_kernel.rope(rl_kernel.linear(h, w, segments=2).view(-1, 4, 64), positions, cache)
        return rl_kernel.swiglu(rl_kernel.attention_varlen(q, q, q, cu).flatten(1)) + total[:, :128]

    leaves = [normal(10, 256, grad=True), normal(256, 256, grad=True, seed=1), normal(256, grad=True, seed=2)]
    upstream = normal(10, 128, seed=3)

    def run(function, weight=None):
        inputs = leaves if weight is None else [leaves[0], weight, leaves[2]]
        out = function(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, upstream)

    torch._dynamo.reset()
    eager = run(block)
    assert same(run(torch.compile(block, fullgraph=True, backend=backend)), eager) == [True] * 4
    other = (leaves[1].detach() * 1.01).requires_grad_()  # negative control
    assert not any(same(run(block, other), eager)[:2])


def test_a_compiled_loss_has_the_bits_of_eager():
    hidden, weight = normal(12, 128, grad=True), normal(384, 128, grad=True, seed=1)
    targets = torch.arange(12, device=DEVICE) * 20

    def loss(h, w):
        out = rl_kernel.linear_logp(h, w, targets, temperature=0.7, global_vocab_size=300)
        return out.logp, out.lse, out.entropy

    def run(function):
        out = function(hidden, weight)
        total = sum((x * (i + 1)).sum() for i, x in enumerate(out))
        return *(x.detach() for x in out), *torch.autograd.grad(total, (hidden, weight))

    torch._dynamo.reset()
    assert same(run(torch.compile(loss, fullgraph=True, backend="aot_eager")), run(loss)) == [True] * 5


def test_a_compiled_sampler_draws_the_tokens_of_eager():
    logits, seeds = normal(7, 1000, dtype=F32), torch.arange(7, device=DEVICE)

    def step(x, position):
        return tuple(rl_kernel.sample(x, rl_kernel.uniforms(seeds, position), 0.7))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for position in (seeds, seeds + 5):
        assert same(compiled(logits, position), step(logits, position)) == [True] * 3
