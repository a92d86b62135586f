"""Primitives of the cpu arithmetic family in plain torch, bit for bit what ``csrc/cpu/primitives.h`` computes.

They are slow and meant as the specification: references are written with them and compiled kernels are compared with
references byte for byte (every NaN counts as equal to every other). All functions take and return float32 tensors.
"""

from __future__ import annotations

import torch

LANES = 16


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` rounded once.

    The product of two fp32 values is exact in float64. The float64 sum is rounded to odd (its last bit set whenever
    it is inexact), so the final rounding to fp32 is that of the exact value.
    """
    p, c = torch.broadcast_tensors(a.double() * b.double(), c.double())
    s = p + c
    # Knuth's two-sum: s + error is the exact sum.
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(torch.int64)
    inexact_even = (error != 0) & torch.isfinite(s) & (bits & 1 == 0)
    away = (error > 0) == (s > 0)
    bits = torch.where(inexact_even, torch.where(away, bits + 1, bits - 1), bits)
    return bits.view(torch.float64).float()


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp32 square root. ``torch.sqrt`` is not: its vector library may be off by one ulp."""
    return x.double().sqrt().float()


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """Correctly rounded fp32 ``a / b``, by way of float64 (twice the bits and two more: rounding twice is harmless)."""
    a, b = (torch.as_tensor(v, dtype=torch.float32).double() for v in (a, b))
    return (a / b).float()


def tree_sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``((x0+x1)+(x2+x3))+...`` along ``dim``, padded with +0.0 to a power of two; an empty ``dim`` gives +0.0."""
    x = x.movedim(dim, -1)
    n = x.shape[-1]
    size = 1 if n == 0 else 1 << (n - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - n))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def dot16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Dot product over the last dimension (batch dimensions broadcast).

    Lane ``j`` of 16 takes ``k = j, j+16, ...`` ascending with :func:`fma` from +0.0; K is padded with +0.0 to a
    multiple of 16; lanes merge with :func:`tree_sum`.
    """
    pad = -a.shape[-1] % LANES
    a = torch.nn.functional.pad(a.float(), (0, pad)).unflatten(-1, (-1, LANES))
    b = torch.nn.functional.pad(b.float(), (0, pad)).unflatten(-1, (-1, LANES))
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    acc = torch.zeros(*shape, LANES, dtype=torch.float32, device=a.device)
    for k in range(a.shape[-2]):
        acc = fma(a[..., k, :], b[..., k, :], acc)
    return tree_sum(acc)


def ascending_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [..., M, R] @ b [..., R, N]``: one accumulator an output, r ascending, :func:`fma` from +0.0."""
    a, b = a.float(), b.float()
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    acc = torch.zeros(*shape, a.shape[-2], b.shape[-1], dtype=torch.float32, device=a.device)
    for r in range(a.shape[-1]):
        acc = fma(a[..., :, r : r + 1], b[..., r : r + 1, :], acc)
    return acc


def _constant(value: str, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float.fromhex(value), dtype=torch.float32, device=like.device)


_EXP_Q = ("0x1.6db47ep-10", "0x1.123b92p-7", "0x1.55545ep-5", "0x1.55548ep-3", "0x1.0p-1")
_LOG_P = (
    "-0x1.0e36bcp-3",
    "0x1.1dfdbap-3",
    "-0x1.f036a6p-4",
    "0x1.1eefb2p-3",
    "-0x1.55b818p-3",
    "0x1.99ce5cp-3",
    "-0x1.fffe5ep-3",
    "0x1.55550cp-2",
)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp by x = n ln2 + r and a polynomial of degree 6 in r; below 1.1 ulp; exp(-inf) = 0, NaN stays NaN."""
    c = torch.where(x > -104.0, x, torch.full_like(x, -104.0))
    c = torch.where(c < 89.0, c, torch.full_like(x, 89.0))
    n = fma(c, _constant("0x1.715476p+0", x), torch.full_like(x, 12582912.0)) - 12582912.0
    r = fma(n, _constant("-0x1.62e430p-1", x), c)
    r = fma(n, _constant("0x1.05c610p-29", x), r)
    q = _constant(_EXP_Q[0], x)
    for coefficient in _EXP_Q[1:]:
        q = fma(q, r, _constant(coefficient, x))
    p = fma(q, r * r, r) + 1.0
    i = n.to(torch.int32)
    half = i >> 1
    y = (p * _power_of_two(half)) * _power_of_two(i - half)
    return torch.where(torch.isnan(x), x, y)


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm by x = 2^e m, m in [2/3, 4/3); below 1 ulp; log(0) = -inf, log(inf) = inf, log(<0) = NaN."""
    subnormal = x < 2.0**-126
    scaled = torch.where(subnormal, x * 8388608.0, x)
    i = scaled.view(torch.int32)
    e = (i - 0x3F2AAAAB) >> 23
    f = (i - (e << 23)).view(torch.float32) - 1.0
    n = e.float() + torch.where(subnormal, -23.0, 0.0)
    p = _constant(_LOG_P[0], x)
    for coefficient in _LOG_P[1:]:
        p = fma(p, f, _constant(coefficient, x))
    r = fma(fma(p, f, _constant("-0x1.0p-1", x)), f * f, f)
    r = fma(n, _constant("-0x1.05c610p-29", x), r)
    y = fma(n, _constant("0x1.62e430p-1", x), r)
    y = torch.where(x == 0, torch.full_like(x, -torch.inf), y)
    y = torch.where(x == torch.inf, x, y)
    return torch.where((x < 0) | torch.isnan(x), torch.full_like(x, torch.nan), y)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; any NaN equals any NaN (payloads are not part of the contract)."""
    return a.shape == b.shape and a.dtype == b.dtype and count_different(a, b) == 0


def count_different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of elements whose bytes differ, two NaNs counting as equal."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.contiguous().view(integer) != b.contiguous().view(integer)
    return int((differs & ~(torch.isnan(a) & torch.isnan(b))).sum())
