"""The torch specification of the cpu primitives, and the compiled ones against it."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch

from rl_kernel.ops import _primitives as P
from tests.ops.numerics import assert_same, backend, heavy, normal

SPECIAL = torch.tensor(
    [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 88.72283, 88.72284, -87.3, -103.97, -104.0, 1e-45, 1e-38]
)


def any_bits(count: int, seed: int = 0) -> torch.Tensor:
    """Every exponent, sign and special value is as likely as its number of encodings."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def compiled(name: str):
    backend("linear", "native")  # loads the library or skips
    return getattr(torch.ops.rlk, name)


def test_fma_rounds_once():
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b, c = heavy(3000, seed=1), heavy(3000, seed=2), heavy(3000, seed=3)
    c[:1000] = -(a * b)[:1000]  # cancellation leaves only the rounding error of the product
    a[1000:1500] *= 1e-25
    b[1000:1500] *= 1e-18  # subnormal results
    c[1000:1500] *= 1e-42
    expected = torch.tensor([library.fmaf(*map(float, row)) for row in zip(a, b, c)])
    assert_same(P.fma(a, b, c), expected)
    assert (P.fma(a, b, c) != a * b + c).any()


@pytest.mark.parametrize("name", ("exp", "log"))
def test_exp_and_log(name):
    x = torch.cat((SPECIAL, any_bits(200_000), normal(200_000, seed=4, scale=30.0), normal(100_000, seed=5).exp()))
    ours = getattr(P, name)(x)
    assert_same(compiled(name)(x), ours)
    exact = getattr(torch, name)(x.double())
    assert torch.equal(torch.isnan(ours), torch.isnan(exact))
    regular = torch.isfinite(exact) & (exact.abs() > 1.2e-38) & (exact.abs() < 3.4e38)
    ulp = torch.from_numpy(np.spacing(exact[regular].abs().float().numpy())).double()
    assert float(((ours[regular].double() - exact[regular]).abs() / ulp).max()) < (1.1 if name == "exp" else 1.0)
    rest = ~regular & ~torch.isnan(exact)  # zeros, infinities and subnormals
    assert torch.allclose(ours[rest].double(), exact[rest].float().double(), rtol=0, atol=3e-45)


def test_exact_values():
    assert P.exp(torch.tensor([-torch.inf, 0.0, -0.0])).tolist() == [0.0, 1.0, 1.0]
    assert P.log(torch.tensor([0.0, 1.0, torch.inf])).tolist() == [-torch.inf, 0.0, torch.inf]


@pytest.mark.parametrize("n", (0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 100, 128, 1187))
def test_tree(n):
    x = heavy(20, n, seed=n)
    assert_same(compiled("tree")(x), P.tree_sum(x))


def test_tree_by_hand():
    x = heavy(7)
    assert_same(P.tree_sum(x), ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + 0.0)))


def test_dot16_by_hand():
    a, b = heavy(37, seed=1), heavy(37, seed=2)
    lanes = []
    for lane in range(16):
        acc = torch.tensor(0.0)
        for k in range(lane, 37, 16):
            acc = P.fma(a[k], b[k], acc)
        lanes.append(acc)
    assert_same(P.dot16(a, b), P.tree_sum(torch.stack(lanes)))


def test_sqrt_and_divide_are_ieee():
    x, y = heavy(5000, seed=1).abs(), heavy(5000, seed=2)
    with np.errstate(all="ignore"):
        assert_same(P.sqrt(x), torch.from_numpy(np.sqrt(x.numpy())))
        assert_same(P.divide(x, y), torch.from_numpy(x.numpy() / y.numpy()))


def test_flush_to_zero_mode_of_the_process_changes_nothing():
    x = normal(100, seed=1) - 98.0
    expected = compiled("exp")(x)
    assert bool(((expected > 0) & (expected < 1.17e-38)).any())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        found = compiled("exp")(x)
    finally:
        torch.set_flush_denormal(False)
    assert_same(found, expected)
