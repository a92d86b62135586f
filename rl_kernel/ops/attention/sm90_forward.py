"""Prefill of packed sequences on Hopper: the arithmetic of ``triton._prefill``, laid out by hand in Gluon.

A program stays on its multiprocessor and takes tile after tile. One warp fetches tiles by TMA, two warp groups
multiply with wgmma, 64 rows each, in turns: the products of one group run under the softmax of the other, and the
scores of the next block are queued behind P V of this one. Blocks, their order and every rounding are those of the
Triton kernel, which serves whatever :func:`unusable` names: the bytes are equal.

TMA fetches whole boxes. Values past the end of a sequence belong to its neighbour and are cleared in shared memory;
keys past the end are masked, because no row sees them.
"""

from __future__ import annotations

import functools
import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_kernel.ops.attention.sm90_backward import _REGISTERS, _clear, _descriptor, _fetch, _find, unfetchable
from rl_kernel.triton_utils import LN2, NEG_INF, device_guard, launch_row, options

_KB = 128  # keys of a block of the contract


@gluon.jit
def _place(
    index, cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs,
    PACK: gl.constexpr, KB: gl.constexpr,
):  # fmt: skip
    """Unit of heads, sequence and steps of the ``index``-th tile: late tiles see the most keys and come first."""
    # Every other wave is dealt out backwards, so that each program gets about as many keys as the next.
    wave = index // programs
    index = gl.where(wave % 2 == 1, (2 * wave + 1) * programs - 1 - index, index)
    unit = index % units
    sequence, tile = _find(tiles - 1 - index // units, cu_q_ptr, batch, search, PACK, 128)
    q_begin = gl.load(cu_q_ptr + sequence)
    k_begin = gl.load(cu_k_ptr + sequence)
    q_count = gl.load(cu_q_ptr + sequence + 1) - q_begin
    k_count = gl.load(cu_k_ptr + sequence + 1) - k_begin
    last = gl.minimum((tile * 128 + 127) // PACK, q_count - 1) + k_count - q_count
    inside = (tile >= 0) & (tile * 128 < q_count * PACK) & (index < tiles * units)
    steps = gl.where(inside, gl.maximum((last + KB) // KB, 1), 0)
    return unit, tile, q_begin, k_begin, q_count, k_count, steps


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, ends,
    PACK: gl.constexpr, GROUP: gl.constexpr, KB: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    done = gl.to_tensor(0)
    fetched = gl.to_tensor(0)
    for index in range(gl.program_id(0), ends, programs):
        unit, tile, q_begin, k_begin, _, _, steps = _place(
            index, cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, PACK, KB
        )
        if steps > 0:
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, 2 * 64 * D * 2)
            for w in gl.static_range(2):
                token = q_begin + (tile * 2 + w) * (64 // PACK)
                _fetch(q_desc, [token, unit * PACK, 0], q_full, q_s.index(w))
            kv_head = unit * PACK // GROUP
            for i in range(steps):
                s = (fetched + i) % STAGES
                phase = (((fetched + i) // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(s), phase)
                mbarrier.expect(k_full.index(s), KB * D * 2)
                _fetch(k_desc, [k_begin + i * KB, kv_head, 0], k_full.index(s), k_s.index(s))
                mbarrier.wait(v_empty.index(s), phase)
                mbarrier.expect(v_full.index(s), KB * D * 2)
                _fetch(v_desc, [k_begin + i * KB, kv_head, 0], v_full.index(s), v_s.index(s))
            fetched += steps
            done += 1


@gluon.jit
def _softmax(s, j, full, limit, column, scale_log2, KB: gl.constexpr):
    """P of a block, and the block's maximum times the scale."""
    if j >= full:
        s = gl.where((j * KB + column)[None, :] <= limit[:, None], s, NEG_INF)
    m = gl.max(s, 1)
    scaled = m * scale_log2
    base = gl.where(m == NEG_INF, 0.0, scaled)
    p = gl.exp2(gl.fma(s, gl.full_like(s, scale_log2), (-base)[:, None].broadcast_to([64, KB])))
    return p.to(gl.bfloat16), scaled


@gluon.jit
def _merge(m, length, o, m_j, l_j, o_j, D: gl.constexpr, grad: gl.constexpr):
    new = gl.maximum(m, m_j)
    a = gl.exp2(m - new)
    b = gl.exp2(m_j - new)
    length = gl.fma(l_j, b, length * a)
    a = gl.convert_layout(a, gl.SliceLayout(1, grad))
    b = gl.convert_layout(b, gl.SliceLayout(1, grad))
    return new, length, gl.fma(o_j, b[:, None].broadcast_to([64, D]), o * a[:, None])


@gluon.jit
def _sums(p, KB: gl.constexpr, rows: gl.constexpr):
    """P @ 1 by mma.sync, which adds in the order of wgmma and leaves the queue of asynchronous products alone."""
    pair: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, pair, 2))
    ones = gl.full([KB, 8], 1.0, gl.bfloat16, gl.DotOperandLayout(1, pair, 2))
    product = mma_v2(p, ones, gl.zeros([64, 8], gl.float32, pair))
    return gl.convert_layout(gl.max(product, 1), rows)


@gluon.jit
def _group(
    q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_ptr, lse_ptr,
    cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, ends, heads, scale_log2,
    PACK: gl.constexpr, KB: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    score: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KB, 16])
    grad: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, grad, 2)
    rows_of: gl.constexpr = gl.SliceLayout(1, score)
    column = gl.arange(0, KB, gl.SliceLayout(0, score))
    q = q_s.index(W).reshape([64, D])
    zero_s = gl.zeros([64, KB], gl.float32, score)
    zero_o = gl.zeros([64, D], gl.float32, grad)
    done = gl.to_tensor(0)
    seen = gl.to_tensor(0)
    turns = gl.to_tensor(0)
    for index in range(gl.program_id(0), ends, programs):
        unit, tile, q_begin, k_begin, q_count, k_count, steps = _place(
            index, cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, PACK, KB
        )
        if steps > 0:
            shift = k_count - q_count
            row = (tile * 2 + W) * 64 + gl.arange(0, 64, rows_of)
            limit = row // PACK + shift
            full = ((tile * 2 + W) * 64 // PACK + shift + 1) // KB  # from here on some row does not see every key
            m = gl.full([64], NEG_INF, gl.float32, rows_of)
            length = gl.zeros([64], gl.float32, rows_of)
            o = gl.zeros([64, D], gl.float32, grad)
            mbarrier.wait(q_full, done & 1)
            mbarrier.wait(k_full.index(seen % STAGES), (seen // STAGES) & 1)
            k = k_s.index(seen % STAGES).reshape([KB, D])
            s_a = warpgroup_mma(q, k.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=0, deps=[s_a])
            mbarrier.arrive(k_empty.index(seen % STAGES), count=1)
            for j in range(steps - 1):
                at = (seen + j) % STAGES
                then = (seen + j + 1) % STAGES
                k = k_s.index(then).reshape([KB, D])
                v = v_s.index(at).reshape([KB, D])
                p, m_j = _softmax(s, j, full, limit, column, scale_log2, KB)
                mbarrier.wait(v_full.index(at), ((seen + j) // STAGES) & 1)
                pl = gl.convert_layout(p, left)
                mbarrier.wait(k_full.index(then), ((seen + j + 1) // STAGES) & 1)
                # The groups take turns: the products of one run under the softmax of the other.
                mbarrier.wait(turn.index(W), (turns & 1) ^ (1 - W))
                o_j = warpgroup_mma(pl, v, zero_o, use_acc=False, is_async=True)
                s_a = warpgroup_mma(q, k.permute((1, 0)), zero_s, use_acc=False, is_async=True)
                mbarrier.arrive(turn.index(1 - W), count=1)
                turns += 1
                l_j = _sums(p, KB, rows_of)
                o_j, pl = warpgroup_mma_wait(num_outstanding=1, deps=[o_j, pl])
                mbarrier.arrive(v_empty.index(at), count=1)
                m, length, o = _merge(m, length, o, m_j, l_j, o_j, D, grad)
                s = warpgroup_mma_wait(num_outstanding=0, deps=[s_a])
                mbarrier.arrive(k_empty.index(then), count=1)
            mbarrier.arrive(q_empty, count=1)
            j = steps - 1
            at = (seen + j) % STAGES
            p, m_j = _softmax(s, j, full, limit, column, scale_log2, KB)
            mbarrier.wait(v_full.index(at), ((seen + j) // STAGES) & 1)
            v = v_s.index(at).reshape([KB, D])
            if k_count - j * KB < KB:
                _clear(v, k_count - j * KB, KB, D)
            pl = gl.convert_layout(p, left)
            o_j = warpgroup_mma(pl, v, zero_o, use_acc=False, is_async=True)
            l_j = _sums(p, KB, rows_of)
            o_j, pl = warpgroup_mma_wait(num_outstanding=0, deps=[o_j, pl])
            mbarrier.arrive(v_empty.index(at), count=1)
            m, length, o = _merge(m, length, o, m_j, l_j, o_j, D, grad)
            rows = q_count * PACK
            to = (q_begin + row // PACK).to(gl.int64) * heads + unit * PACK + row % PACK
            gl.store(lse_ptr + to, (m + gl.log2(length)) * LN2, mask=row < rows)
            inverse = gl.div_rn(gl.full_like(length, 1.0), length)
            x = (o * gl.convert_layout(inverse, gl.SliceLayout(1, grad))[:, None]).to(gl.bfloat16)
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
            x = gl.convert_layout(x, layout)
            r = (tile * 2 + W) * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            d = gl.arange(0, D, gl.SliceLayout(0, layout))
            to = ((q_begin + r // PACK).to(gl.int64) * heads + unit * PACK + r % PACK)[:, None] * D + d[None, :]
            gl.store(out_ptr + to, x, mask=(r < rows)[:, None])
            seen += steps
            done += 1


@gluon.jit(do_not_specialize=["batch", "search", "tiles", "units", "programs", "ends", "heads"])
def _prefill(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, ends, heads,
    scale_log2,
    PACK: gl.constexpr, GROUP: gl.constexpr, KB: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    REGS: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64 // PACK, PACK, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KB, 1, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KB, 1, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _group,
                (
                    q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_ptr, lse_ptr,
                    cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, ends, heads, scale_log2,
                    PACK, KB, D, STAGES, 0,
                ),
            ),
            (
                _group,
                (
                    q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, out_ptr, lse_ptr,
                    cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, ends, heads, scale_log2,
                    PACK, KB, D, STAGES, 1,
                ),
            ),
            (
                _load,
                (
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    cu_q_ptr, cu_k_ptr, batch, search, tiles, units, programs, ends,
                    PACK, GROUP, KB, D, STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGS, 24],
    )  # fmt: skip


@functools.cache
def _processors(device: torch.device) -> int:
    """Programs that run at once: a multiprocessor holds one. Tensors without a GPU (the audit) count as one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def unusable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> str | None:
    """Why the kernel cannot serve these tensors, or ``None``."""
    if q.dtype is not torch.bfloat16 or q.shape[2] not in (64, 128):
        return f"{q.dtype} heads of {q.shape[2]}; bfloat16 heads of 64 and 128 have a kernel"
    return unfetchable(q, k, v, cu_q, cu_k)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``triton.varlen_forward`` with the same bytes, for tensors that :func:`unusable` has nothing against."""
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    row = launch_row("attention_sm90", dim)
    pack = min(group & -group, 16)  # heads of a kv head that share a tile: a power of two that divides the group
    batch, units = cu_q.numel() - 1, heads // pack
    tiles = tokens * pack // 128 + batch
    programs = min(_processors(q.device), tiles * units)
    ends = -(-tiles * units // programs) * programs
    with device_guard(q):
        _prefill[(programs,)](
            _descriptor(q, 64 // pack, pack, dim), _descriptor(k, _KB, 1, dim), _descriptor(v, _KB, 1, dim),
            out, lse, cu_q, cu_k, batch, (batch - 1).bit_length(), tiles, units, programs, ends, heads,
            scale / math.log(2),
            pack, group, _KB, dim, row["stages"], _REGISTERS, **options(4),
        )  # fmt: skip
    return out, lse
