"""Matrix products on GPUs with a contract on the reduction: ascending k in a segment, segments in a binary tree.

One kernel computes ``C[m, n] = tree_s( sum over k of segment s, ascending, A[m, k] * B[k, n] )`` from strides, so that
forward, dgrad, wgrad and the operand-swapped variants (``C^T = B^T A^T``) share one loop. The bits do not depend on
the tile: every accumulator is one fp32 register fed by 16-wide matrix instructions in ascending k.

A segment may consist of several *parts* of K (dgrad of gate_up: the gate slice, then the up slice).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ContractError
from rl_kernel.registry import Request
from rl_kernel.triton_utils import device_guard, gpu_only, launch_row, options, tree_rows

SMALL_M = 64


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    if request.family != "cpu" and request.dtype is not torch.bfloat16:
        return f"{request.op}: GPU families define bfloat16 products only, not {request.dtype}"
    return gpu_only(request.family, request.op)


@triton.jit
def _chain(
    a, b, acc, k_start, k_end, a_k_stride, b_k_stride,
    BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Continue the ascending chain ``acc`` over k in [k_start, k_end); EVEN: no block of it is cut off."""
    k = tl.arange(0, BK)
    whole = k_end if EVEN else k_start + (k_end - k_start) // BK * BK
    for start in tl.range(k_start, whole, BK, num_stages=STAGES):
        a_tile = tl.load(a + (start + k).to(tl.int64)[None, :] * a_k_stride)
        b_tile = tl.load(b + (start + k).to(tl.int64)[:, None] * b_k_stride)
        acc = tl.dot(a_tile, b_tile, acc)
    if not EVEN:  # noqa: SIM102 - known to the compiler, unlike what follows
        if whole < k_end:
            live = whole + k < k_end
            a_tile = tl.load(a + (whole + k).to(tl.int64)[None, :] * a_k_stride, mask=live[None, :], other=0.0)
            b_tile = tl.load(b + (whole + k).to(tl.int64)[:, None] * b_k_stride, mask=live[:, None], other=0.0)
            acc = tl.dot(a_tile, b_tile, acc)
    return acc


@triton.jit
def _segment(
    a, b, segment, K, a_k_stride, b_k_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SEGMENTS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, K_16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    length = K // (16 * PARTS * SEGMENTS) * 16 if K_16 else K // (PARTS * SEGMENTS)
    part_length = length * SEGMENTS
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        start = part * part_length + segment * length
        acc = _chain(a, b, acc, start, start + length, a_k_stride, b_k_stride, BK, EVEN, STAGES)
    return acc


@triton.jit(do_not_specialize=["M", "N", "K"])
def _gemm(
    a_ptr, b_ptr, c_ptr, M, N, K,
    a_m_stride, a_k_stride, b_k_stride, b_n_stride, c_m_stride, c_n_stride, c_segment_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr, M_16: tl.constexpr, N_16: tl.constexpr, K_16: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One output tile. SPLIT: grid axis 1 is the segment and C holds [SEGMENTS, M, N] fp32 partial results.

    ADD: the result is added to what C holds, one fp32 addition (a block of a longer reduction).
    M_16, N_16, K_16: multiples of 16 (K: of each segment), which the compiler must see to make wide accesses.
    """
    if M_16:
        M = M // 16 * 16
    if N_16:
        N = N // 16 * 16
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    in_group = GROUP * tiles_n
    first = (tile // in_group) * GROUP
    size = min(tiles_m - first, GROUP)
    tile_m = first + (tile % in_group) % size
    tile_n = (tile % in_group) // size
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    # Rows past the end repeat valid ones: their results are not stored, and the loads need no mask.
    a = a_ptr + (m % M).to(tl.int64)[:, None] * a_m_stride
    b = b_ptr + (n % N).to(tl.int64)[None, :] * b_n_stride
    c = c_ptr + m.to(tl.int64)[:, None] * c_m_stride + n.to(tl.int64)[None, :] * c_n_stride
    if SPLIT:
        segment = tl.program_id(1)
        total = _segment(a, b, segment, K, a_k_stride, b_k_stride, BM, BN, BK, SEGMENTS, PARTS, EVEN, K_16, STAGES)
        c += segment.to(tl.int64) * c_segment_stride
    else:
        # A binary counter holds at most log2(SEGMENTS) finished subtrees.
        one = tl.zeros([1, 1], dtype=tl.float32)
        two = tl.zeros([1, 1], dtype=tl.float32)
        four = tl.zeros([1, 1], dtype=tl.float32)
        total = one
        for s in tl.static_range(SEGMENTS):
            total = _segment(a, b, s, K, a_k_stride, b_k_stride, BM, BN, BK, SEGMENTS, PARTS, EVEN, K_16, STAGES)
            if SEGMENTS > 1:
                if s % 2 == 0:
                    one = total
                else:
                    total = one + total
                    if s % 4 == 1:
                        two = total
                    else:
                        total = two + total
                        if s % 8 == 3:
                            four = total
                        else:
                            total = four + total
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        total = tl.load(c, mask=inside, other=0.0) + total
    tl.store(c, total.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merge_segments(partial_ptr, out_ptr, size, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.arange(0, SEGMENTS).to(tl.int64)
    parts = tl.load(partial_ptr + segment[:, None] * size + at[None, :], mask=(at < size)[None, :], other=0.0)
    total = tree_rows(parts, SEGMENTS, BLOCK)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def _launch(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, segments: int, parts: int, split: bool, add: bool, row: dict
) -> None:
    """``c = a @ b`` for a [M, K], b [K, N] of any strides; ``split``: c is [segments, M, N]."""
    (m, k), n = a.shape, b.shape[1]
    bm, bn, bk = row["BM"], row["BN"], row["BK"]
    length = k // parts // segments
    # An extent along which nothing is contiguous may be a number of tokens: the kernel must not depend on it.
    along_m, along_n, along_k = (
        1 in strides
        for strides in ((a.stride(0), c.stride(-2)), (b.stride(1), c.stride(-1)), (a.stride(1), b.stride(0)))
    )
    while along_k and bk > 16 and length % bk and length < bk:
        bk //= 2
    grid = (triton.cdiv(m, bm) * triton.cdiv(n, bn), segments if split else 1)
    with device_guard(a):
        _gemm[grid](
            a, b, c, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
            c.stride(-2), c.stride(-1), c.stride(0) if split else 0,
            bm, bn, bk, row["group"], segments, parts, split, add,
            along_k and length % bk == 0, along_m and m % 16 == 0, along_n and n % 16 == 0,
            along_k and length % 16 == 0, row["stages"],
            **options(row["warps"], row["stages"], dot=True),
        )  # fmt: skip


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    add: bool = False,
    table: str = "linear",
) -> torch.Tensor:
    """``a [M, K] @ b [K, N]`` of any strides, reduced as the contract says.

    Args:
        segments: leaves of the tree over K.
        parts: K consists of this many blocks; segment s takes slice s of each (default 1).
        out_dtype: result dtype, bfloat16 by default; float32 is not rounded.
        out: result tensor, last two strides free; its dtype wins over ``out_dtype``.
        add: add to ``out`` with one fp32 addition instead of storing.
        table: operator name in the launch table.

    Raises:
        ContractError: K does not divide into segments and parts.
    """
    (m, k), n = a.shape, b.shape[1]
    if k % (segments * parts):
        raise ContractError(
            f"linear: a reduction of {k} does not divide into {segments} segments of {parts} part(s); "
            "virtual_tp must divide the dimension"
        )
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype or a.dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    row = launch_row(table if segments == 1 else f"{table}_segments", m)
    if segments > 1 and row["split"] and not add:
        partial = torch.empty((segments, m, n), dtype=torch.float32, device=a.device)
        _dispatch(a, b, partial, segments, parts, True, False, row)
        size = m * n
        target = out if out.is_contiguous() else torch.empty((m, n), dtype=out.dtype, device=a.device)
        with device_guard(a):
            _merge_segments[(triton.cdiv(size, 1024),)](partial, target, size, segments, 1024, **options(4))
        if target is not out:
            out.copy_(target)
        return out
    _dispatch(a, b, out, segments, parts, False, add, row)
    return out


def _dispatch(a, b, c, segments, parts, split, add, row) -> None:  # type: ignore[no-untyped-def]
    if row["swap"]:
        a, b, c = b.t(), a.t(), c.transpose(-1, -2)
    _launch(a, b, c, segments, parts, split, add, row)


def multiply_as(row: dict[str, int], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = a @ b`` in one ascending chain, by one row of the launch table whatever the size."""
    _dispatch(a, b, out, 1, 1, False, False, row)
    return out


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = a @ b`` in one ascending chain."""
    return multiply(a, b, out=out)


def add_product(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """``total += a @ b``: one ascending chain, then one fp32 addition."""
    return multiply(a, b, out=total, add=True)


def matmul(
    x: torch.Tensor, w: torch.Tensor, *, segments: int = 1, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``round(tree_s(x[:, segment s] @ w[:, segment s]^T))``; x [M, K], w [N, K] -> [M, N]."""
    return multiply(x, w.t(), segments=segments, out_dtype=out_dtype)


def dgrad(
    dy: torch.Tensor,
    w: torch.Tensor,
    *,
    segments: int = 1,
    parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """dX [M, K] = dy [M, N] @ w [N, K], N in ``segments`` leaves of ``parts`` slices each."""
    return multiply(dy, w, segments=segments, parts=parts, out_dtype=out_dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """dW [N, K] = dy^T @ x, tokens ascending in one chain; dy [M, N], x [M, K]."""
    return multiply(dy.t(), x, out_dtype=out_dtype, table="wgrad")
