"""rms_norm, with and without a residual, as block norm and as q/k norm."""

from __future__ import annotations

import pytest
import torch

import rl_kernel
from rl_kernel.errors import ContractError
from rl_kernel.ops.rms_norm import reference
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

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 5, 16, 24, 100, 256))
@pytest.mark.parametrize("rows", (0, 1, 7, 33))
def test_native_equals_reference(rows, width, dtype):
    native = backend("rms_norm", "native")
    x, r, dy, dr = (heavy(rows, width, dtype=dtype, seed=s) for s in range(4))
    w = normal(width, dtype=dtype, seed=9)
    for residual in (None, r):
        found, expected = (b.forward(x, w, EPS, residual) for b in (native, reference))
        assert_same(found, expected)
        z, rstd = expected[1] if residual is not None else x, expected[2]
        for dres in (None, dr):
            assert_same(native.backward(dy, dres, z, w, rstd), reference.backward(dy, dres, z, w, rstd))


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_does_not_depend_on_batch_or_threads(dtype):
    x, w, r = heavy(300, 192, dtype=dtype), normal(192, dtype=dtype, seed=1), heavy(300, 192, dtype=dtype, seed=2)
    dy = normal(300, 192, dtype=dtype, seed=3)

    def run(x, r):
        a, b, weight = x.clone().requires_grad_(), r.clone().requires_grad_(), w.clone().requires_grad_()
        y, total = rl_kernel.rms_norm(a, weight, EPS, b)
        grads = torch.autograd.grad((y, total), (a, weight), (dy[: len(x)], dy[: len(x)]))
        return y.detach(), total.detach(), *grads

    with threads(2):
        whole = run(x, r)
    with threads(1):
        assert_same(run(x, r), whole)
        for first, count in ((0, 1), (17, 1), (3, 40), (299, 1)):
            part = slice(first, first + count)
            assert_same(rl_kernel.rms_norm(x[part], w, EPS, r[part]), tuple(t[part] for t in whole[:2]))
    assert_same(rl_kernel.rms_norm(x.view(100, 3, 192), w, EPS).view(300, 192), rl_kernel.rms_norm(x, w, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_the_rounded_sum(dtype):
    x, r, w = normal(20, 64, dtype=dtype), normal(20, 64, dtype=dtype, seed=1), normal(64, dtype=dtype, seed=2)
    y, total = rl_kernel.rms_norm(x, w, EPS, r)
    assert_same(total, x + r)
    assert_same(y, rl_kernel.rms_norm(total, w, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_control(dtype):
    x, w = normal(64, 200, dtype=dtype), normal(200, dtype=dtype, seed=1)
    eager = backend("rms_norm", "torch").forward(x, w, EPS)[0]
    assert_differ(rl_kernel.rms_norm(x, w, EPS), eager)
    with rl_kernel.set_mode("native"):
        assert_same(rl_kernel.rms_norm(x, w, EPS), eager)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", (False, True))
def test_gradients(dtype, with_residual):
    x, r, w = normal(65, 96, dtype=dtype), normal(65, 96, dtype=dtype, seed=1), normal(96, dtype=dtype, seed=2)
    dy, dr = normal(65, 96, dtype=dtype, seed=3), normal(65, 96, dtype=dtype, seed=4)

    def eager(a, b, c):
        total = a + b if with_residual else a
        return torch.nn.functional.rms_norm(total, (96,), c, EPS), total

    def ours(a, b, c):
        return rl_kernel.rms_norm(a, c, EPS, b) if with_residual else (rl_kernel.rms_norm(a, c, EPS), a)

    def run(function, kind):
        leaves = [t.to(kind).requires_grad_() for t in (x, r, w)]
        y, total = function(*leaves)
        used = leaves if with_residual else leaves[::2]
        out = (y, total) if with_residual else (y,)
        return (y.detach(), *torch.autograd.grad(out, used, [g.to(kind) for g in (dy, dr)[: len(out)]]))

    for a, b, c in zip(run(ours, dtype), run(eager, dtype), run(eager, torch.float64)):
        assert_as_good_as_eager(a, b, c)


def test_nan_and_infinity_stay_in_their_row():
    x, w = normal(6, 40), normal(40, seed=1)
    x[1, 3], x[4, 2] = torch.nan, torch.inf
    y = rl_kernel.rms_norm(x, w, EPS)
    assert torch.isnan(y[1]).all() and torch.isnan(y[4, 2]) and torch.isfinite(y[[0, 2, 3, 5]]).all()
    assert_same(y, reference.forward(x, w, EPS)[0])


def test_operator_registration():
    x, r, w = normal(5, 16).requires_grad_(), normal(5, 16, seed=1).requires_grad_(), normal(16).requires_grad_()
    torch.library.opcheck(torch.ops.rl_kernel.rms_norm.default, (x, w, EPS))
    torch.library.opcheck(torch.ops.rl_kernel.add_rms_norm.default, (x, r, w, EPS))
    args = (normal(5, 16), None, x.detach(), w.detach(), normal(5).abs())
    torch.library.opcheck(torch.ops.rl_kernel.rms_norm_backward.default, args)


def test_errors():
    x = normal(4, 32)
    with pytest.raises(ContractError, match="keep norm weights in the model's dtype"):
        rl_kernel.rms_norm(x.bfloat16(), normal(32), EPS)
    with pytest.raises(ContractError, match="must be \\[H\\]"):
        rl_kernel.rms_norm(x, normal(16), EPS)
    with pytest.raises(ContractError, match="above 0"):
        rl_kernel.rms_norm(x[:, :0], normal(0), EPS)
    with pytest.raises(ContractError, match="must match x"):
        rl_kernel.rms_norm(x, normal(32), EPS, normal(3, 32))
