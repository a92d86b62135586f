"""Sampling on GPUs: two passes over the logits, one value a chunk in between, and no [B, V] temporary.

Leaf statistics and tree are those of logp. Integer weights are summed chunk by chunk; one program a row then finds the
chunk of the token and scans it again. Integer sums are exact, so neither chunk nor launch can change a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.ops.logp.triton import leaf_stats, whole_rows
from rl_kernel.ops.sampling.reference import WEIGHT_BITS
from rl_kernel.registry import Request
from rl_kernel.triton_utils import (
    NEG_INF,
    device_guard,
    divide,
    exp_,
    gpu_only,
    launch_row,
    next_power_of_2,
    options,
)

LEAF = tl.constexpr(VOCAB_LEAF)
SCALE = tl.constexpr(float(1 << WEIGHT_BITS))
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_B = tl.constexpr(0x94D049BB133111EB)
UNIT = tl.constexpr(2.0**-53)


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit
def mix(value):
    """splitmix64's finaliser of uint64."""
    value = (value ^ (value >> 30)) * MIX_A
    value = (value ^ (value >> 27)) * MIX_B
    return value ^ (value >> 31)


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=["seeds_ptr", "positions_ptr"])
def _uniforms(seeds_ptr, positions_ptr, out_ptr, B, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < B
    seed = tl.load(seeds_ptr + row, mask=live, other=0).to(tl.uint64)
    position = tl.load(positions_ptr + row, mask=live, other=0).to(tl.uint64)
    state = mix(mix(seed + GAMMA) + (position + 1) * GAMMA)
    # Below 2^53, so the conversion is exact, by way of the signed type that all targets convert in one instruction.
    number = (state >> 11).to(tl.int64).to(tl.float64) * UNIT
    tl.store(out_ptr + row, number, mask=live)


def fill_uniforms(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """u of each (seed, position): int64 [B] each, float64 [B] out, all contiguous."""
    rows = seeds.shape[0]
    if rows:
        with device_guard(seeds):
            _uniforms[(triton.cdiv(rows, 128),)](seeds, positions, out, rows, 128, **options(1))


@triton.jit
def weights_of(y, live):
    """Integer weights of log-probabilities; exact after exp, since the scale is a power of two."""
    p = exp_(y)
    p = tl.where(live & (p == p), p, 0.0)
    return (p * SCALE).to(tl.int64)


@triton.jit
def log_probabilities(z, row, temperature, m_ptr, out_ptr, B, GIVEN: tl.constexpr):
    """y of logits z, or z itself where the caller already has log-probabilities (GIVEN)."""
    if not GIVEN:
        if temperature != 1.0:
            z = divide(z, temperature)
        z = (z - tl.load(m_ptr + row)) - tl.load(out_ptr + 3 * B + row)
    return z


@triton.jit
def _temperature(temperature_ptr, row, GIVEN: tl.constexpr):
    """The row's divisor: 1 in greedy rows."""
    temperature = 1.0
    if not GIVEN:
        temperature = tl.load(temperature_ptr + row)
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
    return temperature


@triton.jit(
    do_not_specialize=["B", "chunks"],
    do_not_specialize_on_alignment=["temperature_ptr", "m_ptr", "out_ptr", "sums_ptr"],
)
def _chunk_sums(
    logits_ptr, temperature_ptr, m_ptr, out_ptr, sums_ptr, B, stride, columns, chunks,
    CHUNK: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    live = column < columns
    z = tl.load(logits_ptr + row * stride + column, mask=live, other=NEG_INF)
    y = log_probabilities(z, row, _temperature(temperature_ptr, row, GIVEN), m_ptr, out_ptr, B, GIVEN)
    tl.store(sums_ptr + row * chunks + chunk, tl.sum(weights_of(y, live), 0))


@triton.jit(
    do_not_specialize=["B", "chunks", "leaves", "leaf_stride"],
    do_not_specialize_on_alignment=[
        "temperature_ptr", "uniforms_ptr", "m_ptr", "out_ptr", "leaf_m_ptr", "sums_ptr", "tokens_ptr", "logp_ptr",
        "lse_ptr",
    ],
)  # fmt: skip
def _pick(
    logits_ptr, temperature_ptr, uniforms_ptr, m_ptr, out_ptr, leaf_m_ptr, sums_ptr,
    tokens_ptr, logp_ptr, lse_ptr, B, stride, columns, chunks, leaves, leaf_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEAVES: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    temperature = _temperature(temperature_ptr, row, GIVEN)
    index = tl.arange(0, CHUNKS)
    sums = tl.load(sums_ptr + row * chunks + index, mask=index < chunks, other=0)
    total = tl.sum(sums, 0)
    target = (tl.load(uniforms_ptr + row) * total.to(tl.float64)).to(tl.int64)  # not negative: truncation is floor
    target = tl.minimum(tl.maximum(target, 0), total - 1)
    chunk = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    rest = target - tl.sum(tl.where(index < chunk, sums, 0), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    live = column < columns
    z = tl.load(logits + column, mask=live, other=NEG_INF)
    y = log_probabilities(z, row, temperature, m_ptr, out_ptr, B, GIVEN)
    token = chunk * CHUNK + tl.sum((tl.cumsum(weights_of(y, live), 0) <= rest).to(tl.int32), 0)
    if not GIVEN:
        if tl.load(temperature_ptr + row) == 0.0:
            m = tl.load(m_ptr + row)
            leaf = tl.arange(0, LEAVES)
            found = tl.load(leaf_m_ptr + row * leaf_stride + leaf, mask=leaf < leaves, other=NEG_INF)
            best = tl.min(tl.where((found == m) & (leaf < leaves), leaf, leaves - 1), 0)
            place = best * LEAF + tl.arange(0, LEAF)
            x = tl.load(logits + place, mask=place < columns, other=NEG_INF)
            token = tl.min(tl.where((x == m) & (place < columns), place, columns - 1), 0)
        z_token = tl.load(logits + token)
        tl.store(logp_ptr + row, log_probabilities(z_token, row, temperature, m_ptr, out_ptr, B, GIVEN))
        tl.store(lse_ptr + row, tl.load(out_ptr + B + row))
    tl.store(tokens_ptr + row, token.to(tl.int64))


def _search(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    uniforms: torch.Tensor,
    columns: int,
    m: torch.Tensor | None,
    out: torch.Tensor | None,
    leaf_m: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chunk sums and search; m [B] and out [4, B] are those of ``whole_rows``.

    Without ``out`` the "logits" are log-probabilities and only the tokens are written.
    """
    rows, device = logits.shape[0], logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logp, lse = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    if not rows:
        return tokens, logp, lse
    launch = launch_row("sampling", rows)
    chunks = triton.cdiv(columns, launch["chunk"])
    sums = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    given = out is None
    leaves = 0 if leaf_m is None else leaf_m.shape[1]
    leaf_stride = 0 if leaf_m is None else leaf_m.stride(0)
    with device_guard(logits):
        _chunk_sums[(rows, chunks)](
            logits, temperature, m, out, sums, rows, logits.stride(0), columns, chunks, launch["chunk"], given,
            **options(launch["warps"]),
        )  # fmt: skip
        _pick[(rows,)](
            logits, temperature, uniforms, m, out, leaf_m, sums,
            tokens, logp, lse, rows, logits.stride(0), columns, chunks, leaves, leaf_stride,
            launch["chunk"], next_power_of_2(chunks), next_power_of_2(leaves), given, **options(launch["warps"]),
        )  # fmt: skip
    return tokens, logp, lse


def draw(y: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [B] from log-probabilities [B, V] fp32 (last dimension contiguous) and float64 [B]."""
    return _search(y, None, uniforms, y.shape[1], None, None, None)[0]


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens [B] int64, logp and lse [B] fp32 of logits [B, V] fp32 whose last dimension is contiguous."""
    divisor = torch.where(temperature == 0, 1.0, temperature)
    stats = leaf_stats(logits, divisor, columns)
    m, out = whole_rows(stats, divisor)  # its logp, of a target nobody asked for, is not read
    return _search(logits, temperature, uniforms, columns, m, out, stats[0])
