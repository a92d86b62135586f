"""rope, swiglu and embedding."""

from __future__ import annotations

import pytest
import torch

import rl_kernel
from rl_kernel.errors import ContractError
from rl_kernel.ops.embedding import reference as embedding_reference
from rl_kernel.ops.rope import reference as rope_reference
from rl_kernel.ops.swiglu import reference as swiglu_reference
from tests.ops.numerics import (
    DTYPES,
    assert_as_good_as_eager,
    assert_differ,
    assert_same,
    backend,
    heavy,
    normal,
    threads,
)


def positions_of(count: int, limit: int = 500) -> torch.Tensor:
    return torch.randint(0, limit, (count,), generator=torch.Generator().manual_seed(count))


# ---- rope -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (2, 10, 16, 64))
@pytest.mark.parametrize("tokens", (0, 1, 7))
def test_rope_native_equals_reference(tokens, width, dtype):
    native = backend("rope", "native")
    cache = rl_kernel.build_cos_sin_cache(500, width, 1e6)
    x, positions = heavy(tokens, 3, width, dtype=dtype), positions_of(tokens)
    for function in ("forward", "backward"):
        expected = getattr(rope_reference, function)(x, positions, cache)
        assert_same(getattr(native, function)(x, positions, cache), expected)
        assert_same(getattr(native, function)(x, positions.int(), cache), expected)


def test_rope_table():
    cache = rl_kernel.build_cos_sin_cache(1000, 8, 1e4)
    angle = 777 * 1e4 ** (-2 * 3 / 8)
    expected = torch.tensor([angle], dtype=torch.float64)
    assert cache.shape == (1000, 8) and cache.dtype == torch.float32
    assert cache[777, 3] == expected.cos().float() and cache[777, 7] == expected.sin().float()
    assert_same(rl_kernel.build_cos_sin_cache(10, 8, 1e4), cache[:10])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_on_a_view_of_qkv_alone_and_in_a_batch(dtype):
    cache, positions = rl_kernel.build_cos_sin_cache(500, 16, 1e6), positions_of(70)
    qkv = normal(70, 8 * 16 + 5, dtype=dtype)
    q = qkv[:, 5:69].view(70, 4, 16)
    with threads(2):
        whole = rl_kernel.rope(q, positions, cache)
    assert_same(whole, rl_kernel.rope(q.contiguous(), positions, cache))
    for t in (0, 33, 69):
        assert_same(rl_kernel.rope(q[t : t + 1, 1:3], positions[t : t + 1], cache), whole[t : t + 1, 1:3].contiguous())
    assert_differ(backend("rope", "torch").forward(q, positions, cache), whole) if dtype == torch.bfloat16 else None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_gradient(dtype):
    cache, positions, stock = rl_kernel.build_cos_sin_cache(500, 32, 1e6), positions_of(40), backend("rope", "torch")
    x, dy = normal(40, 2, 32, dtype=dtype), normal(40, 2, 32, dtype=dtype, seed=1)

    def run(function, kind):
        a = x.to(kind).requires_grad_()
        y = function(a, positions, cache.to(torch.float64) if kind == torch.float64 else cache)
        return y.detach(), *torch.autograd.grad(y, a, dy.to(kind))

    eager, exact = run(stock.forward, dtype), run(stock.forward, torch.float64)
    for a, b, c in zip(run(rl_kernel.rope, dtype), eager, exact):
        assert_as_good_as_eager(a, b, c)


@pytest.mark.parametrize("position", (-1, 10))
def test_rope_errors(position):
    cache, x = rl_kernel.build_cos_sin_cache(10, 16, 1e4), normal(2, 1, 16)
    bad = torch.tensor([0, position])
    with pytest.raises(ContractError, match=f"position {position} must lie in"):
        rl_kernel.rope(x, bad, cache)
    with pytest.raises(ContractError, match=f"position {position} must lie in"):
        rope_reference.forward(x, bad, cache)
    with pytest.raises(ContractError, match="cos_sin_cache"):
        rl_kernel.rope(normal(2, 1, 8), bad, cache)
    with pytest.raises(ContractError, match="with D even"):  # half a pair would be left unwritten
        rl_kernel.rope(normal(2, 1, 15), bad.clamp(0, 9), cache[:, :15])
    with pytest.raises(ContractError, match="must be even"):
        rl_kernel.build_cos_sin_cache(4, 7, 1e4)


# ---- swiglu ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (2, 10, 16, 96))
@pytest.mark.parametrize("tokens", (0, 1, 7))
def test_swiglu_native_equals_reference(tokens, width, dtype):
    native = backend("swiglu", "native")
    x, dy = heavy(tokens, width, dtype=dtype, scale=5.0), heavy(tokens, width // 2, dtype=dtype, seed=1)
    assert_same(native.forward(x), swiglu_reference.forward(x))
    assert_same(native.backward(dy, x), swiglu_reference.backward(dy, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_alone_and_in_a_batch(dtype):
    x = heavy(400, 2 * 128, dtype=dtype)
    with threads(2):
        whole = rl_kernel.swiglu(x)
    with threads(1):
        assert_same(rl_kernel.swiglu(x), whole)
    assert_same(rl_kernel.swiglu(x[123]), whole[123])
    # A tensor-parallel shard: gate and up columns 32 .. 63.
    assert_same(rl_kernel.swiglu(torch.cat((x[:, 32:64], x[:, 160:192]), 1)), whole[:, 32:64].contiguous())
    assert_differ(backend("swiglu", "torch").forward(x), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_gradient(dtype):
    x, dy = normal(64, 64, dtype=dtype, scale=3.0), normal(64, 32, dtype=dtype, seed=1)

    def eager(a):
        gate, up = a.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def run(function, kind):
        a = x.to(kind).requires_grad_()
        y = function(a)
        return y.detach(), *torch.autograd.grad(y, a, dy.to(kind))

    for a, b, c in zip(run(rl_kernel.swiglu, dtype), run(eager, dtype), run(eager, torch.float64)):
        assert_as_good_as_eager(a, b, c)


def test_swiglu_extremes():
    x = torch.tensor([[-200.0, 200.0, torch.nan, 0.0, 1.0, 2.0, 3.0, torch.inf]])
    y = rl_kernel.swiglu(x)
    assert y[0, 0] == 0 and y[0, 1] == 400 and torch.isnan(y[0, 2]) and torch.isnan(y[0, 3])
    assert_same(y, swiglu_reference.forward(x))
    with pytest.raises(ContractError, match="must be even"):
        rl_kernel.swiglu(normal(2, 7))
    with pytest.raises(ContractError, match="above 0"):
        rl_kernel.swiglu(normal(2, 0))


# ---- embedding ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 8, 20, 100))
@pytest.mark.parametrize("start", (0, 5))
def test_embedding_native_equals_reference(start, width, dtype):
    native = backend("embedding", "native")
    weight = heavy(9, width, dtype=dtype)
    for tokens in (0, 1, 7, 40):
        ids, dy = positions_of(tokens, 20), heavy(tokens, width, dtype=dtype, seed=1)
        assert_same(native.forward(ids, weight, start), embedding_reference.forward(ids, weight, start))
        assert_same(native.forward(ids.int(), weight, start), embedding_reference.forward(ids, weight, start))
        expected = embedding_reference.backward(dy, ids, 9, start)
        for count in (1, 2):
            with threads(count):
                assert_same(native.backward(dy, ids, 9, start), expected)


def _embed(group, dtype, sequence_parallel):
    ranks, rank = group.size(), group.rank()
    weight = heavy(32, 24, dtype=dtype).chunk(ranks)[rank].clone().requires_grad_()
    ids, dy = positions_of(16, 32), normal(16, 24, dtype=dtype, seed=1)
    options = {"tp_group": group, "vocab_start_index": rank * 32 // ranks, "sequence_parallel": sequence_parallel}
    y = rl_kernel.embedding(ids, weight, **options)
    y.backward(dy.chunk(ranks)[rank] if sequence_parallel else dy)
    return y.detach(), weight.grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_on_real_ranks(ranks, dtype):
    ((y, grad),) = ranks.run(1, _embed, dtype, False)
    assert_same(y, heavy(32, 24, dtype=dtype)[positions_of(16, 32)] + 0.0)
    for size in (2, 4):
        for sequence_parallel in (False, True):
            found = ranks.run(size, _embed, dtype, sequence_parallel)
            assert_same(torch.cat([g for _, g in found]), grad)
            if sequence_parallel:
                assert_same(torch.cat([part for part, _ in found]), y)
            else:
                for part, _ in found:
                    assert_same(part, y)


def test_embedding_shapes_and_errors():
    weight = normal(10, 8)
    ids = torch.tensor([[1, 9], [0, 3]])
    assert_same(rl_kernel.embedding(ids, weight), weight[ids])
    for bad in (-1, 10):
        with pytest.raises(ContractError, match="must lie in"):
            rl_kernel.embedding(torch.tensor([0, bad]), weight)
    with pytest.raises(ContractError, match="int64 or int32"):
        rl_kernel.embedding(torch.tensor([0.0]), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_rope_is_both_operators_after_each_other(dtype):
    qkv = normal(7, 6, 16, dtype=dtype)
    weights, table = (normal(16, dtype=dtype), normal(16, dtype=dtype)), rl_kernel.build_cos_sin_cache(20, 16, 1e4)
    positions = torch.tensor([3, 0, 19, 7, 7, 1, 2], dtype=torch.int32)

    def run(fused):
        x = qkv.clone().requires_grad_()
        w = [weight.clone().requires_grad_() for weight in weights]
        q, k = x[:, :3], x[:, 3:5]
        if fused:
            out = rl_kernel.qk_norm_rope(q, k, *w, 1e-6, positions, table)
        else:
            out = [rl_kernel.rope(rl_kernel.rms_norm(y, z, 1e-6), positions, table) for y, z in zip((q, k), w)]
        (out[0].sum() + (out[1] * 2).sum()).backward()
        return [*out, x.grad, w[0].grad, w[1].grad]

    for one, two in zip(run(True), run(False), strict=True):
        assert_same(one.detach(), two.detach())
    with pytest.raises(ContractError, match="k_weight .* keep norm weights"):
        rl_kernel.qk_norm_rope(qkv[:, :3], qkv[:, 3:], weights[0], weights[1].double(), 1e-6, positions, table)
    with pytest.raises(ContractError, match="of one dtype"):
        rl_kernel.qk_norm_rope(qkv[:, :3], qkv[:2, 3:], *weights, 1e-6, positions, table)


def test_operator_registration():
    ops, x = torch.ops.rl_kernel, normal(5, 16).requires_grad_()
    cache, positions = rl_kernel.build_cos_sin_cache(10, 16, 1e4), torch.arange(5)
    heads = normal(5, 2, 16).requires_grad_()
    torch.library.opcheck(ops.rope.default, (heads, positions, cache))
    torch.library.opcheck(ops.rope_backward.default, (heads.detach(), positions, cache))
    w = normal(16).requires_grad_()
    torch.library.opcheck(ops.qk_norm_rope.default, (heads, heads.detach()[:, :1], w, w, 1e-6, positions, cache))
    q, k, v = heads.detach(), heads.detach()[:, :1], w.detach()
    torch.library.opcheck(
        ops.qk_norm_rope_backward.default, (q, k, q, k, v, v, q[:, :, 0].repeat(1, 2)[:, :3].abs(), positions, cache)
    )
    torch.library.opcheck(ops.swiglu.default, (x,))
    torch.library.opcheck(ops.swiglu_backward.default, (normal(5, 8), x.detach()))
    torch.library.opcheck(ops.embedding.default, (positions, x, 0))
    torch.library.opcheck(ops.embedding_backward.default, (x.detach(), positions, 7, 0))
