"""Backward of causal attention on Hopper: the arithmetic of :mod:`triton_backward`, laid out by hand in Gluon.

A program has one warp that fetches tiles by TMA and two warp groups that multiply with wgmma, each 64 keys (dK, dV) or
64 query rows (dQ) of the program's tile. Rows and keys are visited in the same ascending order, products are 16 deep,
P and dS are rounded to bf16 in registers: the bytes are those of the Triton kernels, which serve whatever
:func:`unusable` names.

TMA fetches whole boxes. What lies past the end of a sequence belongs to its neighbour and is cleared in shared memory
before a product reads it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernel.triton_utils import LOG2E, device_guard, launch_row, options, tree_sum

_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed in Triton 3.8
_REGISTERS = 240  # of a thread that multiplies; the fetching warp gives up its own


@triton.jit(do_not_specialize=["rows", "batch", "search", "R"])
def _prepare(
    dout_ptr, out_ptr, lse_ptr, stat_ptr, cu_ptr, rows, heads, G, batch, search, R, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """stat [Hkv, 2, R]: lse * log2 e and rowsum(dO * O), rows of a kv head contiguous (token, head of the group).

    Sequence s begins at ``(cu[s] * G // 4 + s) * 4``: TMA reads from multiples of 16 bytes only.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    live = (row < rows)[:, None]
    dout = tl.load(dout_ptr + element, mask=live, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + element, mask=live, other=0.0).to(tl.float32)
    token, head = row // heads, row % heads
    low = tl.zeros([ROWS], tl.int32)
    high = low + batch - 1
    for _ in range(search):
        middle = (low + high + 1) // 2
        below = tl.load(cu_ptr + middle) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    begin = tl.load(cu_ptr + low)
    at = (begin * G // 4 + low) * 4 + (token - begin) * G + head % G
    to = stat_ptr + (head // G * 2).to(tl.int64) * R + at
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    tl.store(to, lse * LOG2E, mask=row < rows)
    tl.store(to + R, tree_sum(dout * out, ROWS, D), mask=row < rows)


@gluon.jit
def _find(tile, cu_ptr, batch, steps, G: gl.constexpr, SIZE: gl.constexpr):
    """Sequence of a tile and its number inside; sequence s starts at tile ``cu[s] * G // SIZE + s``."""
    low = gl.to_tensor(0)
    high = batch - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        below = gl.load(cu_ptr + middle) * G // SIZE + middle <= tile
        low = gl.where(below, middle, low)
        high = gl.where(below, high, middle - 1)
    return low, tile - (gl.load(cu_ptr + low) * G // SIZE + low)


@gluon.jit
def _rows_at(q_begin, kv_head, plane, G: gl.constexpr, PACKED: gl.constexpr):
    """Where a box of query rows begins: in [T, Hq, D], or in the copy [Hkv * T * G, 1, D] of groups without boxes."""
    row = kv_head * plane + q_begin * G if PACKED else q_begin
    head = 0 if PACKED else kv_head * G
    return row, head


@gluon.jit
def _clear(tile, valid, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a tile from ``valid`` on: they belong to the next sequence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    x = tile.load(layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tile.store(gl.where((row < valid)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _store(ptr, begin, count, tile, stride, head, x, ROWS: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    x = gl.convert_layout(x, layout)
    row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = ((begin + row).to(gl.int64) * stride + head)[:, None] * D + column[None, :]
    gl.store(ptr + at, x, mask=(row < count)[:, None])


@gluon.jit
def _dkdv_load(
    q_desc, dout_desc, stat_desc, k_desc, v_desc, q_s, dout_s, lse_s, delta_s, k_s, v_s, kv_full, full, empty,
    first, steps, q_row, q_head, stat_row, k_row, kv_head,
    BOX: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(kv_full, 4 * 64 * D * 2)
    for w in gl.static_range(2):
        _fetch(k_desc, [k_row + 64 * w, kv_head, 0], kv_full, k_s.index(w))
        _fetch(v_desc, [k_row + 64 * w, kv_head, 0], kv_full, v_s.index(w))
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, 2 * BM * D * 2 + 2 * BM * 4)
        row = q_row + (first + i) * (BM // BOX)
        _fetch(q_desc, [row, q_head, 0], bar, q_s.index(s))
        _fetch(stat_desc, [kv_head * 2, stat_row + (first + i) * BM], bar, lse_s.index(s))
        _fetch(dout_desc, [row, q_head, 0], bar, dout_s.index(s))
        _fetch(stat_desc, [kv_head * 2 + 1, stat_row + (first + i) * BM], bar, delta_s.index(s))


@gluon.jit
def _dkdv_group(
    q_s, dout_s, lse_s, delta_s, k_s, v_s, kv_full, full, empty, dk_ptr, dv_ptr,
    first, steps, rows, k_begin, k_count, tile, shift, kv_head, kv_heads, scale, scale_log2,
    G: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    score: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    grad: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, grad, 2)
    k = k_s.index(W).reshape([64, D])
    v = v_s.index(W).reshape([64, D])
    key = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, score))
    column = gl.arange(0, BM, gl.SliceLayout(0, score))
    dk = gl.zeros([64, D], gl.float32, grad)
    dv = gl.zeros([64, D], gl.float32, grad)
    zero = gl.zeros([64, BM], gl.float32, score)
    # Rows from here on see every key of this tile.
    full_from = ((tile * 64 + 63 - shift) * G + BM - 1) // BM
    # The second group's keys begin later: no row of the first tiles sees them.
    skip = gl.minimum(gl.maximum((tile * 64 - shift) * G // BM - first, 0), steps)
    for i in range(skip):
        mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        mbarrier.arrive(empty.index(i % STAGES), count=1)
    mbarrier.wait(kv_full, 0)
    for i in range(skip, steps):
        s = i % STAGES
        j = first + i
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        q = q_s.index(s).reshape([BM, D])
        dout = dout_s.index(s).reshape([BM, D])
        valid = rows - j * BM
        if valid < BM:
            _clear(q, valid, BM, D)
            _clear(dout, valid, BM, D)
        scores = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse2 = lse_s.index(s).load(score)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
        if valid < BM:
            lse2 = gl.where((column < valid)[None, :], lse2, float("inf"))
        p = gl.exp2(gl.fma(scores, gl.full_like(scores, scale_log2), (-lse2).broadcast_to([64, BM])))
        if j < full_from:
            p = gl.where(key[:, None] <= ((j * BM + column) // G + shift)[None, :], p, 0.0)
        p16 = gl.convert_layout(p.to(gl.bfloat16), left)
        dv = warpgroup_mma(p16, dout, dv, is_async=True)
        delta = delta_s.index(s).load(score)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=[dp])
        if valid < BM:
            delta = gl.where((column < valid)[None, :], delta, 0.0)
        ds = gl.convert_layout((p * (dp - delta)).to(gl.bfloat16), left)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dv, dk, p16, ds = warpgroup_mma_wait(num_outstanding=0, deps=[dv, dk, p16, ds])
        mbarrier.arrive(empty.index(s), count=1)
    _store(dk_ptr, k_begin, k_count, tile, kv_heads, kv_head, (dk * scale).to(gl.bfloat16), 64, D)
    _store(dv_ptr, k_begin, k_count, tile, kv_heads, kv_head, dv.to(gl.bfloat16), 64, D)


@gluon.jit(do_not_specialize=["batch", "search", "kv_heads", "plane"])
def _dkdv(
    q_desc, dout_desc, stat_desc, k_desc, v_desc, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, batch, search, kv_heads, plane,
    scale, scale_log2,
    G: gl.constexpr, BOX: gl.constexpr, PACKED: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    REGS: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(0)
    sequence, tile = _find(gl.program_id(1), cu_k_ptr, batch, search, 1, 128)
    q_begin = gl.load(cu_q_ptr + sequence)
    k_begin = gl.load(cu_k_ptr + sequence)
    q_count = gl.load(cu_q_ptr + sequence + 1) - q_begin
    k_count = gl.load(cu_k_ptr + sequence + 1) - k_begin
    if tile * 128 < k_count:
        shift = k_count - q_count
        rows = q_count * G
        first = gl.maximum(tile * 128 - shift, 0) * G // BM
        steps = gl.maximum((rows + BM - 1) // BM - first, 0)
        q_row, q_head = _rows_at(q_begin, kv_head, plane, G, PACKED)
        stat_row = (q_begin * G // 4 + sequence) * 4
        q_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM // BOX, BOX, D], q_desc.layout)
        dout_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM // BOX, BOX, D], dout_desc.layout)
        lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stat_desc.layout)
        delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], stat_desc.layout)
        k_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 1, D], k_desc.layout)
        v_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 1, D], v_desc.layout)
        kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(kv_full, count=1)
        for s in gl.static_range(STAGES):
            mbarrier.init(full.index(s), count=1)
            mbarrier.init(empty.index(s), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _dkdv_group,
                    (
                        q_s, dout_s, lse_s, delta_s, k_s, v_s, kv_full, full, empty, dk_ptr, dv_ptr,
                        first, steps, rows, k_begin, k_count, tile * 2, shift, kv_head, kv_heads, scale, scale_log2,
                        G, BM, D, STAGES, 0,
                    ),
                ),
                (
                    _dkdv_group,
                    (
                        q_s, dout_s, lse_s, delta_s, k_s, v_s, kv_full, full, empty, dk_ptr, dv_ptr,
                        first, steps, rows, k_begin, k_count, tile * 2 + 1, shift, kv_head, kv_heads, scale, scale_log2,
                        G, BM, D, STAGES, 1,
                    ),
                ),
                (
                    _dkdv_load,
                    (
                        q_desc, dout_desc, stat_desc, k_desc, v_desc, q_s, dout_s, lse_s, delta_s, k_s, v_s,
                        kv_full, full, empty, first, steps, q_row, q_head, stat_row, k_begin + tile * 128, kv_head,
                        BOX, BM, D, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [REGS, 24],
        )  # fmt: skip


@gluon.jit
def _dq_load(
    q_desc, dout_desc, k_desc, v_desc, q_s, dout_s, k_s, v_s, q_full, full, empty, tile, steps, q_row, q_head, k_begin,
    kv_head, BOX: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(q_full, 4 * 64 * D * 2)
    for w in gl.static_range(2):
        row = q_row + (tile * 2 + w) * (64 // BOX)
        _fetch(q_desc, [row, q_head, 0], q_full, q_s.index(w))
        _fetch(dout_desc, [row, q_head, 0], q_full, dout_s.index(w))
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, 2 * BN * D * 2)
        _fetch(k_desc, [k_begin + i * BN, kv_head, 0], bar, k_s.index(s))
        _fetch(v_desc, [k_begin + i * BN, kv_head, 0], bar, v_s.index(s))


@gluon.jit
def _dq_group(
    q_s, dout_s, k_s, v_s, q_full, full, empty, stat_ptr, dq_ptr, R, steps, rows, q_begin, stat_row, k_count, tile,
    shift, kv_head, heads, scale, scale_log2,
    G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    score: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    grad: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, grad, 2)
    row = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, score))
    at = stat_ptr + (kv_head * 2).to(gl.int64) * R + stat_row + row
    lse2 = gl.load(at, mask=row < rows, other=float("inf"))
    delta = gl.load(at + R, mask=row < rows, other=0.0)
    limit = row // G + shift
    whole = (tile * 64) // G + shift  # the last key that every row sees
    column = gl.arange(0, BN, gl.SliceLayout(0, score))
    dq = gl.zeros([64, D], gl.float32, grad)
    zero = gl.zeros([64, BN], gl.float32, score)
    q = q_s.index(W).reshape([64, D])
    dout = dout_s.index(W).reshape([64, D])
    mbarrier.wait(q_full, 0)
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        k = k_s.index(s).reshape([BN, D])
        v = v_s.index(s).reshape([BN, D])
        valid = k_count - i * BN
        if valid < BN:
            _clear(k, valid, BN, D)
            _clear(v, valid, BN, D)
        scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
        p = gl.exp2(gl.fma(scores, gl.full_like(scores, scale_log2), (-lse2)[:, None].broadcast_to([64, BN])))
        if whole < i * BN + BN - 1:
            p = gl.where((i * BN + column)[None, :] <= limit[:, None], p, 0.0)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), left)
        dq = warpgroup_mma(ds, k, dq, is_async=True)
        dq, ds = warpgroup_mma_wait(num_outstanding=0, deps=[dq, ds])
        mbarrier.arrive(empty.index(s), count=1)
    # Rows of a kv head lie in G neighbouring heads of a token.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    x = gl.convert_layout((dq * scale).to(gl.bfloat16), layout)
    r = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    to = ((q_begin + r // G).to(gl.int64) * heads + kv_head * G + r % G)[:, None] * D + d[None, :]
    gl.store(dq_ptr + to, x, mask=(r < rows)[:, None])


@gluon.jit(do_not_specialize=["batch", "search", "heads", "R", "plane"])
def _dq(
    q_desc, dout_desc, k_desc, v_desc, stat_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, R, batch, search, heads, plane,
    scale, scale_log2,
    G: gl.constexpr, BOX: gl.constexpr, PACKED: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    REGS: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(0)
    sequence, tile = _find(gl.num_programs(1) - 1 - gl.program_id(1), cu_q_ptr, batch, search, G, 128)
    q_begin = gl.load(cu_q_ptr + sequence)
    k_begin = gl.load(cu_k_ptr + sequence)
    q_count = gl.load(cu_q_ptr + sequence + 1) - q_begin
    k_count = gl.load(cu_k_ptr + sequence + 1) - k_begin
    rows = q_count * G
    if tile * 128 < rows:
        shift = k_count - q_count
        last = gl.minimum((tile * 128 + 127) // G, q_count - 1) + shift
        steps = (last + BN) // BN
        q_row, q_head = _rows_at(q_begin, kv_head, plane, G, PACKED)
        stat_row = (q_begin * G // 4 + sequence) * 4
        q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64 // BOX, BOX, D], q_desc.layout)
        dout_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64 // BOX, BOX, D], dout_desc.layout)
        k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 1, D], k_desc.layout)
        v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 1, D], v_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        for s in gl.static_range(STAGES):
            mbarrier.init(full.index(s), count=1)
            mbarrier.init(empty.index(s), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _dq_group,
                    (
                        q_s, dout_s, k_s, v_s, q_full, full, empty, stat_ptr, dq_ptr, R, steps, rows, q_begin,
                        stat_row, k_count, tile * 2, shift, kv_head, heads, scale, scale_log2, G, BN, D, STAGES, 0,
                    ),
                ),
                (
                    _dq_group,
                    (
                        q_s, dout_s, k_s, v_s, q_full, full, empty, stat_ptr, dq_ptr, R, steps, rows, q_begin,
                        stat_row, k_count, tile * 2 + 1, shift, kv_head, heads, scale, scale_log2, G, BN, D, STAGES, 1,
                    ),
                ),
                (
                    _dq_load,
                    (
                        q_desc, dout_desc, k_desc, v_desc, q_s, dout_s, k_s, v_s, q_full, full, empty, tile, steps,
                        q_row, q_head, k_begin, kv_head, BOX, BN, D, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [REGS, 24],
        )  # fmt: skip


_MOST = 65535  # programs along the second axis of a grid


def unfetchable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> str | None:
    """Why these offsets cannot be read, or these rows not fetched by TMA, or ``None``."""
    if cu_q.numel() < 2 or cu_q.dtype is not torch.int32 or cu_k.dtype is not torch.int32:
        return "offsets must be int32, of at least one sequence"
    for name, x in (("q", q), ("k", k), ("v", v)):
        aligned = x.data_ptr() % 16 == x.stride(0) % 8 == x.stride(1) % 8 == 0
        if not x.shape[0]:
            return f"{name} has no rows"
        if not (aligned and x.stride(0) > 0 and x.stride(1) > 0 and x.stride(2) == 1):
            return f"{name} with strides {x.stride()} cannot be fetched in boxes of 16 bytes"
    return None


def unusable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> str | None:
    """Why the kernels below cannot serve these tensors, or ``None``."""
    group = q.shape[1] // k.shape[1]
    if q.dtype is not torch.bfloat16 or q.shape[2] != 128:
        return f"{q.dtype} heads of {q.shape[2]}; bfloat16 heads of 128 have kernels"
    if max(q.shape[0] * group, k.shape[0]) // 128 + cu_q.numel() > _MOST:
        return "more tiles than one launch has"
    return unfetchable(q, k, v, cu_q, cu_k)


def _descriptor(x: torch.Tensor, *block: int) -> TensorDescriptor:
    if x.dtype is torch.float32:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``triton_backward.backward`` with the same bytes, for tensors that :func:`unusable` has nothing against.

    q, k and v may be strided views; ``dout``, ``out`` and ``lse`` are copied unless contiguous, and
    q and dout always where the group does not divide 64. At least one query.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    dq = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    dk = torch.zeros((k.shape[0], kv_heads, dim), dtype=k.dtype, device=q.device)
    dv = torch.zeros_like(dk)
    batch = cu_q.numel() - 1
    row_stride = -(-tokens * group // 4) * 4 + 4 * batch  # TMA: rows start at multiples of 16 bytes
    stat = torch.empty((2 * kv_heads, row_stride), dtype=torch.float32, device=q.device)
    search = (batch - 1).bit_length()
    scale_log2 = scale / math.log(2)
    kv_row, q_row = launch_row("attention_dkdv_sm90", dim), launch_row("attention_dq_sm90", dim)
    rows, keys = 64, q_row["BN"]
    # Boxes have extents that are powers of two. The rows of other groups are copied to one row after the other.
    packed = rows % group != 0
    box, plane = (1, tokens * group) if packed else (group, 0)
    with device_guard(q):
        _prepare[(triton.cdiv(tokens * heads, 32),)](
            dout, out, lse, stat, cu_q, tokens * heads, heads, group, batch, search, row_stride, dim, 32, **options(4)
        )
        if packed:
            q, dout = (
                x.view(tokens, kv_heads, group, dim).transpose(0, 1).reshape(-1, 1, dim).contiguous() for x in (q, dout)
            )
        q_box, dout_box = (_descriptor(x, rows // box, box, dim) for x in (q, dout))
        k_box, v_box = (_descriptor(x, 64, 1, dim) for x in (k, v))
        _dkdv[(kv_heads, k.shape[0] // 128 + batch)](
            q_box, dout_box, _descriptor(stat, 1, rows), k_box, v_box, dk, dv, cu_q, cu_k, batch, search, kv_heads,
            plane, scale, scale_log2, group, box, packed, rows, dim, kv_row["stages"], _REGISTERS, **options(4),
        )  # fmt: skip
        k_box, v_box = (_descriptor(x, keys, 1, dim) for x in (k, v))
        _dq[(kv_heads, tokens * group // 128 + batch)](
            q_box, dout_box, k_box, v_box, stat, dq, cu_q, cu_k, row_stride, batch, search, heads,
            plane, scale, scale_log2, group, box, packed, keys, dim, q_row["stages"], _REGISTERS, **options(4),
        )  # fmt: skip
    return dq, dk, dv
