"""RMSNorm with fused residual add on GPUs: one row, one binary tree of squares, whatever the launch."""

# Kernels grow tuples, which have a type for every length.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_kernel.registry import Request
from rl_kernel.triton_utils import (
    device_guard,
    divide,
    early,
    gpu_only,
    launch_row,
    next_power_of_2,
    options,
    tree_rows,
    tree_sum,
)

ROWS_A_PARTIAL = 64  # rows of one partial sum of the weight gradient: part of the arithmetic, not of the launch


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit
def _mean(total, H: tl.constexpr):
    """``total / H``; for a power of two the product with its inverse, which has the same bits."""
    if H & (H - 1) == 0:
        mean = total * (1.0 / H)
    else:
        mean = divide(total, H * 1.0)
    return mean


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, residual_out_ptr, rstd_ptr,
    rows, heads, x_token_stride, x_head_stride, r_token_stride, eps,
    H: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of a program; ``WHOLE``: nothing to mask, so that the loads are single wide instructions."""
    if PDL:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, P)
    if WHOLE:
        inside = tl.full([ROWS, P], True, tl.int1)
    else:
        inside = (row < rows)[:, None] & (column < H)[None, :]
    token, head = row // heads, row % heads
    start = token.to(tl.int64) * x_token_stride + head * x_head_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0)
    out = row.to(tl.int64)[:, None] * H + column[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + row.to(tl.int64)[:, None] * r_token_stride + column[None, :], mask=inside, other=0.0
        )
        if PDL == 2:
            gdc_launch_dependents()
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + out, x, mask=inside)
    elif PDL == 2:
        gdc_launch_dependents()
    x = x.to(tl.float32)
    variance = _mean(tree_sum(x * x, ROWS, P), H)
    rstd = divide(1.0, tl.sqrt_rn(variance + eps))
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    y = (x * rstd[:, None]) * weight[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


def _rows_a_program(h: int, p: int, block: int) -> int:
    return max(1, block // p)


def _strides(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """``(x, heads, token stride, head stride)`` of [T, H] or [T, heads, H] with contiguous last dimension."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 2:
        return x, 1, x.stride(0), 0
    if x.dim() == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    x = x.reshape(-1, x.shape[-1])
    return x, 1, x.stride(0), 0


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``y = round((s * rstd) * weight)`` with ``s = round(x + residual)`` and ``rstd = 1 / sqrt(tree(s^2) / H + eps)``.

    Args:
        x: [..., H], last dimension contiguous; may be a strided view [T, heads, H].
        weight: [H].
        eps: added to the mean square.
        residual: [..., H] or ``None``.

    Returns:
        ``(y, residual_out or None, rstd)`` with rstd fp32 of shape [...].
    """
    shape, h = x.shape, x.shape[-1]
    if residual is not None:
        x, residual = x.reshape(-1, h), residual.reshape(-1, h)
        if residual.stride(-1) != 1:
            residual = residual.contiguous()
    x, heads, token_stride, head_stride = _strides(x)
    rows = x.numel() // h
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    residual_out = torch.empty_like(y) if residual is not None else None
    rstd = torch.empty(shape[:-1], dtype=torch.float32, device=x.device)
    if rows:
        launch = launch_row("rms_norm" if residual is None else "add_rms_norm", h)
        p = next_power_of_2(h)
        per = _rows_a_program(h, p, launch["block"])
        with device_guard(x):
            _forward[(triton.cdiv(rows, per),)](
                x, residual, weight, y, residual_out, rstd, rows, heads, token_stride, head_stride,
                residual.stride(0) if residual is not None else 0, eps,
                h, p, per, h == p and per == 1, residual is not None, early(launch),
                **options(launch["warps"], pdl=early(launch)),
            )  # fmt: skip
    return y, residual_out, rstd


@triton.jit
def _read(
    dy_ptr, dres_ptr, x_ptr, rstd_ptr, first, rows, x_row_stride, column,
    H: tl.constexpr, ROWS: tl.constexpr, HAS_DRES: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows from ``first`` on, as tuples of dy, dres, x and rstd; zeros past the last row."""
    dy, dres, x, rstd = (), (), (), ()
    for i in tl.static_range(ROWS):
        row = first + i
        live = (row + tl.zeros_like(column) < rows) & (column < H)
        dy += (tl.load(dy_ptr + row * H + column, mask=live, other=0.0),)
        x += (tl.load(x_ptr + row * x_row_stride + column, mask=live, other=0.0),)
        rstd += (tl.load(rstd_ptr + row, mask=row < rows, other=0.0),)
        if HAS_DRES:
            dres += (tl.load(dres_ptr + row * H + column, mask=live, other=0.0),)
    return dy, dres, x, rstd


@triton.jit
def _sums(x, P: tl.constexpr, ROWS: tl.constexpr):
    """The tree over each of ``ROWS`` (1, 2 or 4) tensors [P], in the steps of one: a tuple of fp32 [1]."""
    if ROWS == 1:
        totals = (tree_sum(tl.reshape(x[0], [1, P]), 1, P),)
    else:
        if ROWS == 2:
            packed = tl.join(x[0], x[1])
        else:
            packed = tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), [P, 4])
        bits = tree_rows(packed, P, ROWS).to(tl.int32, bitcast=True)
        totals = ()
        for i in tl.static_range(ROWS):
            # One of them, through integers: a sum with zeros would lose the sign of a zero.
            totals += (tl.sum(tl.where(tl.arange(0, ROWS) == i, bits, 0), 0).to(tl.float32, bitcast=True),)
    return totals


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["rstd_ptr"])
def _backward(
    dy_ptr, dres_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, x_row_stride,
    H: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HAS_DRES: tl.constexpr,
):  # fmt: skip
    """A block of ``TOKENS`` rows, ``ROWS`` at a time, with the next ones under way; dW adds them one by one."""
    block = tl.program_id(0)
    column = tl.arange(0, P)
    valid = column < H
    weight = tl.load(weight_ptr + column, mask=valid, other=0.0)
    dweight = tl.zeros([P], dtype=tl.float32)
    first = block.to(tl.int64) * TOKENS
    last = first + (TOKENS - ROWS)
    dy, dres, x, rstd = _read(dy_ptr, dres_ptr, x_ptr, rstd_ptr, first, rows, x_row_stride, column, H, ROWS, HAS_DRES)
    for i in range(0, min(TOKENS, rows - block * TOKENS), ROWS):
        row = first + i
        dy_next, dres_next, x_next, rstd_next = _read(
            dy_ptr, dres_ptr, x_ptr, rstd_ptr, tl.minimum(row + ROWS, last), rows, x_row_stride, column,
            H, ROWS, HAS_DRES,
        )  # fmt: skip
        w = weight.to(tl.float32)
        products = ()
        for j in tl.static_range(ROWS):
            g, normed = dy[j].to(tl.float32), x[j].to(tl.float32) * rstd[j]
            dweight += g * normed
            products += ((g * w) * normed,)
        totals = _sums(products, P, ROWS)
        for j in tl.static_range(ROWS):
            # Made again rather than kept: registers are for the rows under way.
            normed = x[j].to(tl.float32) * rstd[j]
            dx = (dy[j].to(tl.float32) * w - normed * _mean(totals[j], H)) * rstd[j]
            if HAS_DRES:
                dx += dres[j].to(tl.float32)
            live = valid & (row + j + tl.zeros_like(column) < rows)
            tl.store(dx_ptr + (row + j) * H + column, dx.to(dx_ptr.dtype.element_ty), mask=live)
        dy, dres, x, rstd = dy_next, dres_next, x_next, rstd_next
    tl.store(partial_ptr + block.to(tl.int64) * H + column, dweight, mask=valid)


@triton.jit(do_not_specialize=["blocks"])
def _sum_partials(partial_ptr, out_ptr, blocks, H, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Blocks in ascending order, ``AHEAD`` of them under way at a time (what is past the last adds +0.0)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, blocks, AHEAD):
        parts = ()
        for i in tl.static_range(AHEAD):
            live = (column < H) & (first + i + tl.zeros_like(column) < blocks)
            parts += (tl.load(partial_ptr + (first + i) * H + column, mask=live, other=0.0),)
        for i in tl.static_range(AHEAD):
            total += parts[i]
    tl.store(out_ptr + column, total.to(out_ptr.dtype.element_ty), mask=column < H)


def add_partials(partial: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` [H] = the rows of ``partial`` [blocks, H] added in ascending order, one rounding."""
    blocks, h = partial.shape
    _sum_partials[(triton.cdiv(h, 32),)](partial, out, blocks, h, 32, 64, **options(1))


def backward(
    dy: torch.Tensor,
    dres: torch.Tensor | None,
    x_in: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`forward` at ``x_in`` (the residual sum when there was one).

    dX: ``(dy * w - n * mean(dy * w * n)) * rstd + dres`` with ``n = x * rstd``, one rounding. dW: tokens in blocks of
    64, ascending inside a block, blocks ascending; no atomics.
    """
    h = x_in.shape[-1]
    shape = x_in.shape
    dy = dy.reshape(-1, h).contiguous()
    x = x_in.reshape(-1, h)
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    dx = torch.empty(shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty(h, dtype=weight.dtype, device=x.device)
    blocks = triton.cdiv(rows, ROWS_A_PARTIAL)
    partial = torch.empty((blocks, h), dtype=torch.float32, device=x.device)
    if dres is not None:
        dres = dres.reshape(-1, h).contiguous()
    p = next_power_of_2(h)
    with device_guard(x):
        if rows:
            # A gradient of the residual is a third tensor under way: registers for fewer rows at a time.
            launch = launch_row("rms_norm_backward" if dres is None else "add_rms_norm_backward", h)
            _backward[(blocks,)](
                dy, dres, x, weight, rstd.reshape(-1).contiguous(), dx, partial, rows, x.stride(0),
                h, p, ROWS_A_PARTIAL, launch["rows"], dres is not None,
                **options(launch["warps"]),
            )  # fmt: skip
        add_partials(partial, dweight)
    return dx, dweight


__all__ = ["backward", "forward", "supports"]
