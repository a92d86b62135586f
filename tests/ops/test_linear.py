"""linear: one order whatever the tile, the batch, the threads and the tensor-parallel size."""

from __future__ import annotations

import pytest
import torch

import rl_kernel
from rl_kernel.errors import ContractError
from rl_kernel.ops.linear import reference
from tests.ops.numerics import (
    DTYPES,
    assert_as_good_as_eager,
    assert_differ,
    assert_same,
    backend,
    heavy,
    normal,
    threads,
    tree,
)

SHAPES = [(m, n, k) for m in (0, 1, 3, 4, 7, 13) for n in (1, 16, 24) for k in (1, 8, 40, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_equals_reference(shape, dtype):
    native = backend("linear", "native")
    m, n, k = shape
    x, w = heavy(m, k, dtype=dtype, seed=1), heavy(n, k, dtype=dtype, seed=2, scale=0.02)
    for segments in (1, 2, 4, 8):
        if k % segments == 0:
            for out_dtype in (None, torch.float32):
                args = {"segments": segments, "out_dtype": out_dtype}
                assert_same(native.matmul(x, w, **args), reference.matmul(x, w, **args), f"segments={segments}")
    dy = heavy(m, n, dtype=dtype, seed=3)
    for segments, parts in ((1, 1), (2, 1), (8, 1), (1, 2), (4, 2)):
        if n % (segments * parts) == 0:
            for out_dtype in (None, torch.float32):
                args = {"segments": segments, "parts": parts, "out_dtype": out_dtype}
                assert_same(native.dgrad(dy, w, **args), reference.dgrad(dy, w, **args), f"dgrad {args}")
    assert_same(native.wgrad(dy, x), reference.wgrad(dy, x), "wgrad")
    assert_same(native.wgrad(dy, x, out_dtype=torch.float32), reference.wgrad(dy, x, out_dtype=torch.float32), "wgrad")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", (1, 2, 8))
def test_row_does_not_depend_on_batch_or_threads(dtype, segments):
    """403 rows cross the cache chunk, the tile's tail and the path for few rows."""
    x, w = heavy(403, 96, dtype=dtype, seed=1), normal(72, 96, dtype=dtype, seed=2, scale=0.02)
    with threads(2):
        whole = rl_kernel.linear(x, w, segments=segments)
    with threads(1):
        assert_same(rl_kernel.linear(x, w, segments=segments), whole)
        for count in (1, 2, 3, 4, 5, 6, 7, 64, 200):
            for first in (0, 17, 190, 403 - count):
                assert_same(
                    rl_kernel.linear(x[first : first + count], w, segments=segments), whole[first : first + count]
                )
        assert_same(rl_kernel.linear(x, w[24:43], segments=segments), whole[:, 24:43].contiguous())
        order = torch.randperm(403, generator=torch.Generator().manual_seed(0))
        assert_same(rl_kernel.linear(x[order], w, segments=segments), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_parallel_slices_give_the_same_bits(dtype):
    """Row-parallel forward and column-parallel dX, every TP size inside a virtual TP of 8."""
    x, w, dy = (
        heavy(37, 128, dtype=dtype),
        normal(48, 128, dtype=dtype, seed=1, scale=0.02),
        normal(37, 48, dtype=dtype),
    )
    native = backend("linear", "native")
    whole = native.matmul(x, w, segments=8)
    whole_dx = native.dgrad(dy, w, segments=8)
    gate_up, dgu = normal(64, 128, dtype=dtype, seed=3), normal(37, 64, dtype=dtype, seed=4)
    whole_parts = native.dgrad(dgu, gate_up, segments=8, parts=2)
    for ranks in (1, 2, 4, 8):
        args = {"segments": 8 // ranks, "out_dtype": torch.float32}
        y = tree([native.matmul(a, b, **args) for a, b in zip(x.chunk(ranks, 1), w.chunk(ranks, 1))])
        assert_same(y.to(dtype), whole, f"forward, {ranks} ranks")
        dx = tree([native.dgrad(a, b, **args) for a, b in zip(dy.chunk(ranks, 1), w.chunk(ranks, 0))])
        assert_same(dx.to(dtype), whole_dx, f"dX, {ranks} ranks")

        def shard(t: torch.Tensor, dim: int, rank: int, ranks: int = ranks) -> torch.Tensor:
            return torch.cat([half.chunk(ranks, dim)[rank] for half in t.chunk(2, dim)], dim)

        parts = [
            native.dgrad(shard(dgu, 1, r).contiguous(), shard(gate_up, 0, r), parts=2, **args) for r in range(ranks)
        ]
        assert_same(tree(parts).to(dtype), whole_parts, f"gate_up dX, {ranks} ranks")
    # Controls: without segments, and with gate and up taken as one range, the bits are others.
    assert_differ(
        native.matmul(x, w, segments=1, out_dtype=torch.float32),
        native.matmul(x, w, segments=8, out_dtype=torch.float32),
    )
    assert_differ(
        native.dgrad(dgu, gate_up, segments=8, parts=1, out_dtype=torch.float32),
        native.dgrad(dgu, gate_up, segments=8, parts=2, out_dtype=torch.float32),
    )


def _parallel(group, dtype, sequence_parallel):
    """MLP-like block on one rank: column-parallel, then row-parallel. Results are this rank's share."""
    ranks, rank = group.size(), group.rank()
    x = normal(16, 32, dtype=dtype, seed=1)
    w1, w2 = normal(64, 32, dtype=dtype, seed=2, scale=0.1), normal(24, 64, dtype=dtype, seed=3, scale=0.1)
    local_x = (x.chunk(ranks)[rank] if sequence_parallel else x).clone().requires_grad_()
    w1, w2 = w1.chunk(ranks)[rank].clone().requires_grad_(), w2.chunk(ranks, 1)[rank].clone().requires_grad_()
    options = {"tp_group": group, "sequence_parallel": sequence_parallel}
    h = rl_kernel.column_parallel_linear(local_x, w1, grad_segments=8, **options)
    y = rl_kernel.linear(h, w2, segments=8, **options)
    dy = normal(16, 24, dtype=dtype, seed=4)
    y.backward(dy.chunk(ranks)[rank] if sequence_parallel else dy)
    return tuple(t.detach() for t in (y, local_x.grad, w1.grad, w2.grad))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_real_ranks(ranks, dtype, sequence_parallel):
    (one,) = ranks.run(1, _parallel, dtype, False)
    for size in (2, 4, 8):
        found = ranks.run(size, _parallel, dtype, sequence_parallel)
        for index, dim in enumerate((0, 0, 0, 1)):
            if index < 2 and not sequence_parallel:
                for result in found:
                    assert_same(result[index], one[index], f"{size} ranks, output {index}")
            else:
                whole = torch.cat([result[index] for result in found], dim)
                assert_same(whole, one[index], f"{size} ranks, output {index}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_controls(dtype):
    x, w = normal(64, 256, dtype=dtype), normal(64, 256, dtype=dtype, seed=1, scale=0.02)
    ours = rl_kernel.linear(x, w, out_dtype=torch.float32)
    assert_differ(ours, x.float() @ w.float().t())
    assert_differ(ours, rl_kernel.linear(x, w, segments=2, out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", (False, True))
def test_gradients(dtype, column):
    x, w, dy = normal(65, 96, dtype=dtype), normal(48, 96, dtype=dtype, seed=1), normal(65, 48, dtype=dtype, seed=2)

    def run(function, kind):
        a, b = (t.to(kind).requires_grad_() for t in (x, w))
        y = function(a, b)
        return (y, *torch.autograd.grad(y, (a, b), dy.to(kind)))

    def ours(a, b):
        return rl_kernel.column_parallel_linear(a, b, grad_segments=4) if column else rl_kernel.linear(a, b, segments=4)

    exact = run(torch.nn.functional.linear, torch.float64)
    for a, b, c in zip(run(ours, dtype), run(torch.nn.functional.linear, dtype), exact):
        assert_as_good_as_eager(a.detach(), b.detach(), c.detach())


@pytest.mark.parametrize("rows", (1, 5, 40))
def test_nan_and_infinity_stay_in_their_row_and_are_seen(rows):
    x, w = normal(rows, 48), normal(16, 48, seed=1)
    x[0, 5], w[3, 7] = torch.nan, torch.inf
    y = rl_kernel.linear(x, w)
    assert torch.isnan(y[0]).all() and torch.isfinite(y[1:, :3]).all() and not torch.isfinite(y[:, 3]).any()
    assert_same(y, reference.matmul(x, w))


def test_leading_dimensions_strides_and_empty_input():
    x, w = normal(2, 5, 32), normal(8, 32, seed=1)
    assert_same(rl_kernel.linear(x, w), rl_kernel.linear(x.reshape(10, 32), w).reshape(2, 5, 8))
    assert_same(rl_kernel.linear(normal(32, 10).t(), w), rl_kernel.linear(normal(32, 10).t().contiguous(), w))
    empty = torch.zeros(0, 32, requires_grad=True)
    weight = w.clone().requires_grad_()
    rl_kernel.linear(empty, weight).sum().backward()
    assert empty.grad.shape == (0, 32) and not weight.grad.any()


def test_operator_registration():
    x, w = normal(5, 16).requires_grad_(), normal(8, 16, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.rl_kernel.linear.default, (x, w, 2, 2, 1, None))
    torch.library.opcheck(torch.ops.rl_kernel.linear.default, (x.detach(), w.detach(), 1, 1, 2, torch.float32))
    torch.library.opcheck(torch.ops.rl_kernel.linear_dgrad.default, (normal(5, 8), w.detach(), 2, 2, torch.bfloat16))
    torch.library.opcheck(torch.ops.rl_kernel.linear_wgrad.default, (normal(5, 8), x.detach(), None))


def test_direct_call_and_registered_operator_agree():
    x, w, dy = normal(9, 32), normal(16, 32, seed=1), normal(9, 16, seed=2)

    def run(function):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = function(a, b)
        return (y.detach(), *torch.autograd.grad(y, (a, b), dy))

    direct = run(lambda a, b: rl_kernel.column_parallel_linear(a, b, grad_segments=4))
    assert_same(run(lambda a, b: torch.ops.rl_kernel.linear(a, b, 1, 4, 1, None)), direct)


def test_modes():
    x, w = normal(64, 256), normal(64, 256, seed=1)
    with rl_kernel.set_mode("native"):
        assert_same(rl_kernel.linear(x, w), x @ w.t())
    assert_differ(rl_kernel.linear(x, w), x @ w.t())


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda x, w: rl_kernel.linear(x, w, segments=3), "segments=3 must be 1, 2, 4 or 8"),
        (lambda x, w: rl_kernel.linear(x[:, :28], w[:, :28], segments=8), "K=28 is not divisible by 8"),
        (lambda x, w: rl_kernel.linear(x[:, :16], w), "must equal K=32"),
        (lambda x, w: rl_kernel.linear(x.bfloat16(), w), "use one dtype"),
        (lambda x, w: rl_kernel.linear(x, w[0]), "weight must be"),
        (lambda x, w: rl_kernel.linear(x[:, :0], w[:, :0]), "with K above 0"),
        (lambda x, w: rl_kernel.linear(x, w.to("meta")), "x is on cpu and weight on meta"),
        (lambda x, w: rl_kernel.linear(x, w, out_dtype=torch.float16), "out_dtype=torch.float16 must be"),
        (lambda x, w: rl_kernel.column_parallel_linear(x, w, parts=0), "parts=0"),
        (lambda x, w: rl_kernel.column_parallel_linear(x, w[:9], grad_segments=2), "not divisible by 2 leaves"),
    ),
)
def test_errors(call, message):
    with pytest.raises(ContractError, match=message):
        call(normal(4, 32), normal(12, 32))


def test_a_second_derivative_is_refused():
    """Gradients run compiled code that torch cannot differentiate; it must not take them for constants."""
    x, w = normal(4, 32).requires_grad_(), normal(12, 32).requires_grad_()
    (dx,) = torch.autograd.grad(rl_kernel.linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


def test_compiled_graph_calls_the_same_operators():
    """torch.compile sees registered operators (no graph break) and returns the eager bits, gradients included."""
    cache, cu = rl_kernel.build_cos_sin_cache(64, 16, 1e4), torch.tensor([0, 4, 10], dtype=torch.int32)
    positions = torch.arange(10)

    def block(x, w, n):
        h, total = rl_kernel.rms_norm(x, n, 1e-6, x)
        q = rl_kernel.rope(rl_kernel.linear(h, w, segments=2).view(-1, 4, 16), positions, cache)
        return rl_kernel.swiglu(rl_kernel.attention_varlen(q, q, q, cu).flatten(1)) + total[:, :32]

    leaves = [normal(10, 64).requires_grad_(), normal(64, 64, seed=1).requires_grad_(), normal(64).requires_grad_()]

    def run(function):
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out.sum(), leaves)

    assert_same(run(torch.compile(block, fullgraph=True, backend="aot_eager")), run(block))
