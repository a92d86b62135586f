"""The sums of :mod:`recipes.engines.weights` in one pass over memory (CUDA and ROCm)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_G = tl.constexpr(0x9E3779B97F4A7C15)
_M1 = tl.constexpr(0xBF58476D1CE4E5B9)
_M2 = tl.constexpr(0x94D049BB133111EB)
_M3 = tl.constexpr(0xD6E8FEB86659FD93)
_BLOCK, _STEPS = 1024, 8


@triton.jit
def _sums(words, count, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    z_sum = tl.zeros([BLOCK], tl.int64)
    y_sum = tl.zeros([BLOCK], tl.int64)
    for step in range(STEPS):
        index = first + step * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        word = tl.load(words + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
        z = word ^ ((index + 1).to(tl.uint64, bitcast=True) * _G)
        z = (z ^ (z >> 30)) * _M1
        z = (z ^ (z >> 27)) * _M2
        z = z ^ (z >> 31)
        y = (z ^ (z >> 32)) * _M3
        y = y ^ (y >> 29)
        z_sum += tl.where(inside, z.to(tl.int64, bitcast=True), 0)
        y_sum += tl.where(inside, y.to(tl.int64, bitcast=True), 0)
    # Integer sums: exact in every order, so atomics are deterministic here.
    tl.atomic_add(out, tl.sum(z_sum, axis=0))
    tl.atomic_add(out + 1, tl.sum(y_sum, axis=0))


def sums_triton(words: torch.Tensor) -> torch.Tensor:
    """``(sum of z, sum of y)`` of int64 [N] ``words``; int64 [2] on their device."""
    out = torch.zeros(2, dtype=torch.int64, device=words.device)
    if words.numel():
        grid = (triton.cdiv(words.numel(), _BLOCK * _STEPS),)
        with torch.cuda.device_of(words):
            _sums[grid](words, words.numel(), out, BLOCK=_BLOCK, STEPS=_STEPS, num_warps=4)
    return out
