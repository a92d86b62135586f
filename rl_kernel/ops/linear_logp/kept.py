"""Gradient of the logits from the kept value bf16(exp(z - m_leaf)), for backends that hold fp32 logits.

Same bits as csrc/sm90 (formula in :mod:`rl_kernel.ops.linear_logp.sm90`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.triton_utils import NEG_INF, device_guard, divide, exp_, options

LEAF = tl.constexpr(VOCAB_LEAF)


@triton.jit
def _gradient_of(e, m_leaf, column, row, target_ptr, state_ptr, grads_ptr, T, first_column, temperature):
    """dL/dz of [leaves, 128] columns of one row from e = bf16(exp(z - m_leaf)), widened."""
    g_logp, g_lse, g_ent = tl.load(grads_ptr + row), tl.load(grads_ptr + T + row), tl.load(grads_ptr + 2 * T + row)
    if temperature != 1.0:
        g_logp, g_lse, g_ent = divide(g_logp, temperature), divide(g_lse, temperature), divide(g_ent, temperature)
    log_l = tl.load(state_ptr + T + row)
    below = m_leaf - tl.load(state_ptr + row)
    p = e * exp_(below - log_l)[:, None]
    c = tl.zeros_like(p) + (g_lse - g_logp)
    if g_ent != 0.0:
        y = (tl.log(e) + below[:, None]) - log_l
        c = c - tl.where(p == 0.0, 0.0, g_ent * (y + tl.load(state_ptr + 2 * T + row)))
    dz = p * c
    return tl.where(column == tl.load(target_ptr + row) - first_column, dz + g_logp, dz)


@triton.jit(
    do_not_specialize=["T", "first_column"],
    do_not_specialize_on_alignment=["temperature_ptr", "target_ptr", "state_ptr", "grads_ptr"],
)
def _dlogits(
    logits_ptr, temperature_ptr, target_ptr, state_ptr, grads_ptr, out_ptr, T, stride, out_stride, columns, width,
    first_column, LEAVES: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    leaf = tl.program_id(1) * LEAVES + tl.arange(0, LEAVES)
    column = leaf[:, None] * LEAF + tl.arange(0, LEAF)[None, :]
    z = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < columns, other=NEG_INF)
    temperature = 1.0
    if DIVIDE:
        temperature = tl.load(temperature_ptr + row)
        if temperature != 1.0:
            z = divide(z, temperature)
    m_leaf = tl.max(z, 1) + 0.0
    shift = tl.where(m_leaf == NEG_INF, 0.0, m_leaf)
    e = exp_(z - shift[:, None]).to(tl.bfloat16).to(tl.float32)
    dz = _gradient_of(e, m_leaf, column, row, target_ptr, state_ptr, grads_ptr, T, first_column, temperature)
    dz = tl.where(column < columns, dz, 0.0)
    at = out_ptr + row.to(tl.int64) * out_stride + column
    tl.store(at, dz.to(out_ptr.dtype.element_ty), mask=column < width)


@triton.jit(
    do_not_specialize=["T", "maxima_stride", "first_column"],
    do_not_specialize_on_alignment=["maxima_ptr", "temperature_ptr", "target_ptr", "state_ptr", "grads_ptr"],
)
def _from_kept(
    kept_ptr, maxima_ptr, temperature_ptr, target_ptr, state_ptr, grads_ptr, T, stride, maxima_stride, columns,
    first_column, LEAVES: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    leaf = tl.program_id(1) * LEAVES + tl.arange(0, LEAVES)
    column = leaf[:, None] * LEAF + tl.arange(0, LEAF)[None, :]
    at = kept_ptr + row.to(tl.int64) * stride + column
    e = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)
    m_leaf = tl.load(
        maxima_ptr + row.to(tl.int64) * maxima_stride + first_column // LEAF + leaf,
        mask=leaf * LEAF < columns, other=NEG_INF,
    )  # fmt: skip
    temperature = 1.0
    if DIVIDE:
        temperature = tl.load(temperature_ptr + row)
    dz = _gradient_of(e, m_leaf, column, row, target_ptr, state_ptr, grads_ptr, T, first_column, temperature)
    tl.store(at, dz.to(kept_ptr.dtype.element_ty), mask=column < columns)


def write_dlogits(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    columns: int,
    out: torch.Tensor,
    first_column: int = 0,
) -> None:
    """Gradient of ``logits`` [T, >= columns] fp32 (local columns from ``first_column`` on, a leaf border) into ``out``.

    Args:
        targets: [T] int64 local columns, -1 where another rank owns the target.
        state: (m, log l, entropy) [3, T]; grads: upstream (g_logp, g_lse, g_ent) [3, T], both contiguous.
        out: [T, width] bf16; columns that are padding become zero.
    """
    rows, width = out.shape
    if rows == 0 or width == 0:
        return
    with device_guard(logits):
        _dlogits[(rows, triton.cdiv(width, 16 * VOCAB_LEAF))](
            logits, temperature, targets, state, grads, out, rows, logits.stride(0), out.stride(0),
            max(columns, 0), width, first_column, 16, temperature is not None, **options(4),
        )  # fmt: skip


def make_dlogits(
    kept: torch.Tensor,
    maxima: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    first_column: int = 0,
) -> None:
    """:func:`write_dlogits` in place, of ``kept`` [T, width] bf16 exp(z - m_leaf) from ``first_column`` on.

    Args:
        maxima: m_leaf [T, L] fp32, from leaf 0 on.
    """
    rows, width = kept.shape
    if rows == 0 or width == 0:
        return
    with device_guard(kept):
        _from_kept[(rows, triton.cdiv(width, 16 * VOCAB_LEAF))](
            kept, maxima, temperature, targets, state, grads, rows, kept.stride(0), maxima.stride(0), width,
            first_column, 16, temperature is not None, **options(4),
        )  # fmt: skip
