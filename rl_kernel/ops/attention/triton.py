"""Causal attention on GPUs: packed, chunked and paged calls of any batch return the same bits.

The contract of the GPU families cuts the keys of a sequence into blocks from absolute position 0 (128 keys on sm90,
64 on gfx942) and makes every block self-contained::

    x_j  = s * c                      s = q . k (ascending d), c = softmax_scale * log2(e), fp32
    m_j  = max over the block of s, times c
    P_j  = bf16(exp2(fma(s, c, -m_j)))
    l_j  = P_j @ 1,  o_j = P_j @ v    fresh accumulators, ascending keys
    m'   = max(m, m_j);  a = exp2(m - m');  b = exp2(m_j - m')
    l    = fma(l_j, b, l*a);  o = fma(o_j, b, o*a)      blocks ascending
    out  = bf16(o * (1 / l)),  lse = (m + log2(l)) * ln 2

Blocks meet only in the last line, so a decode call may compute them in parallel over any number of programs and
merge afterwards: the number of splits is a matter of speed and never of bits.

A program serves one key/value head and a tile of *rows*; row ``r`` is query token ``r // G``, head ``r % G`` of the
group of G query heads that share the key/value head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rl_kernel.contract import KEY_BLOCK, attention_variant
from rl_kernel.errors import ContractError
from rl_kernel.ops.attention import hopper, triton_backward
from rl_kernel.ops.attention.triton_backward import find_sequence
from rl_kernel.registry import Request
from rl_kernel.triton_utils import (
    LN2,
    NEG_INF,
    device_guard,
    divide,
    gpu_only,
    is_hip,
    launch_row,
    next_power_of_2,
    options,
)

_FILL = 264  # programs that fill the largest chip of the families twice over: below it a decode call is split


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    if request.family != "cpu" and request.dtype is not torch.bfloat16:
        return f"{request.op}: GPU families define bfloat16 attention only, not {request.dtype}"
    if attention_variant(request.family) != "blocks":
        return "the attention contract of this process is 'fa3' (RLK_SM90_ATTENTION)"
    return gpu_only(request.family, request.op)


@triton.jit
def _block(
    q, k_tile, v_tile, key, limit, scale_log2, masked,
    BM: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """One self-contained block: ``(m_j, l_j, o_j)`` of the rows; ``limit`` [BM] is the last visible key of a row."""
    s = tl.dot(q, tl.trans(k_tile))
    if masked:
        s = tl.where(key[None, :] <= limit[:, None], s, NEG_INF)
    m = tl.max(s, 1)
    scaled = m * scale_log2
    # A row that sees no key of this block: exp2 of -inf, not of NaN.
    base = tl.where(m == NEG_INF, 0.0, scaled)
    p = tl.exp2(tl.fma(s, scale_log2, -base[:, None]))
    p = p.to(v_tile.dtype)
    ones = tl.full([KB, 16], 1.0, v_tile.dtype)
    # All columns of P @ 1 are equal: the maximum picks one, exactly.
    length = tl.max(tl.dot(p, ones), 1)
    return scaled, length, tl.dot(p, v_tile)


@triton.jit
def _merge(m, length, o, m_j, l_j, o_j):
    """Fold a block into the running state, in the order of the contract."""
    new = tl.maximum(m, m_j)
    a = tl.exp2(m - new)
    b = tl.exp2(m_j - new)
    return new, tl.fma(l_j, b, length * a), tl.fma(o_j, b[:, None], o * a[:, None])


@triton.jit
def _offsets(
    start, table, key_base, key_count, page_stride, slot_stride, token_stride,
    KB: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Element offsets of keys ``start ..`` (PAGE = 0: packed tensor; else a paged cache) and which of them exist."""
    key = start + tl.arange(0, KB)
    live = key < key_count
    if PAGE == 0:
        offset = (key_base + key).to(tl.int64) * token_stride
    else:
        page = tl.load(table + key // PAGE, mask=live, other=0).to(tl.int64)
        offset = page * page_stride + (key % PAGE).to(tl.int64) * slot_stride
    return key, live, offset


@triton.jit(
    do_not_specialize=["batch", "search", "table_stride"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "table_ptr"],
)
def _prefill(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, table_ptr, batch, search, G, scale_log2,
    q_token, q_head, k_page, k_slot, k_token, k_head, v_page, v_slot, v_token, v_head, table_stride, heads,
    BM: tl.constexpr, KB: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MINIMUM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of rows against all its keys. PAGE > 0: cu_k_ptr holds sequence lengths and the keys are paged.

    Sequences of at most MINIMUM rows are somebody else's.
    """
    # Heads are the fastest axis, and of every sequence the latest tiles, which see the most keys, come first.
    kv_heads = heads // G
    kv_head = tl.program_id(0) % kv_heads
    index = (tl.num_programs(0) - 1 - tl.program_id(0)) // kv_heads
    sequence, tile = find_sequence(index, cu_q_ptr, batch, search, G, BM)
    q_begin = tl.load(cu_q_ptr + sequence)
    q_count = tl.load(cu_q_ptr + sequence + 1) - q_begin
    if (tile < 0) | (tile * BM >= q_count * G) | (q_count * G <= MINIMUM):
        return
    if PAGE == 0:
        k_begin = tl.load(cu_k_ptr + sequence)
        k_count = tl.load(cu_k_ptr + sequence + 1) - k_begin
    else:
        k_begin = 0
        k_count = tl.load(cu_k_ptr + sequence)
    table = table_ptr + sequence.to(tl.int64) * table_stride
    row = tile * BM + tl.arange(0, BM)
    token = row // G
    head = kv_head * G + row % G
    live = token < q_count
    d = tl.arange(0, D)
    q_at = (q_begin + token).to(tl.int64) * q_token + head * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    limit = token + (k_count - q_count)
    first_limit = (tile * BM) // G + (k_count - q_count)
    last_limit = min((tile * BM + BM - 1) // G, q_count - 1) + (k_count - q_count)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    m = tl.full([BM], NEG_INF, tl.float32)
    length = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, D], tl.float32)
    # Blocks that every row sees entirely need no mask: a uniform branch skips it.
    full = (first_limit + 1) // KB
    for j in tl.range(0, (last_limit + KB) // KB, num_stages=STAGES):
        key, live_k, at = _offsets(j * KB, table, k_begin, k_count, k_page, k_slot, k_token, KB, PAGE)
        k_tile = tl.load(k_ptr + at[:, None] + d[None, :], mask=live_k[:, None], other=0.0)
        key, live_k, at = _offsets(j * KB, table, k_begin, k_count, v_page, v_slot, v_token, KB, PAGE)
        v_tile = tl.load(v_ptr + at[:, None] + d[None, :], mask=live_k[:, None], other=0.0)
        m_j, l_j, o_j = _block(q, k_tile, v_tile, key, limit, scale_log2, j >= full, BM, KB)
        m, length, o = _merge(m, length, o, m_j, l_j, o_j)
    out = o * divide(1.0, length)[:, None]
    out_at = ((q_begin + token).to(tl.int64) * heads + head) * D
    tl.store(out_ptr + out_at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=live[:, None])
    lse_at = (q_begin + token).to(tl.int64) * heads + head
    tl.store(lse_ptr + lse_at, (m + tl.log2(length)) * LN2, mask=live)


@triton.jit(
    do_not_specialize=["table_stride", "max_blocks", "blocks"],
    do_not_specialize_on_alignment=["cu_q_ptr", "lens_ptr", "table_ptr"],
)
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_m_ptr, part_l_ptr, part_o_ptr,
    cu_q_ptr, lens_ptr, table_ptr, G, scale_log2,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, table_stride, heads, kv_heads, max_blocks, blocks,
    BM: tl.constexpr, KB: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """At most BM rows of one sequence. SPLIT: ``blocks`` key blocks, each stored; else all blocks, merged."""
    sequence, kv_head, chunk = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    q_begin = tl.load(cu_q_ptr + sequence)
    q_count = tl.load(cu_q_ptr + sequence + 1) - q_begin
    k_count = tl.load(lens_ptr + sequence)
    first = chunk * blocks
    total = (k_count + KB - 1) // KB
    if (q_count == 0) | (q_count * G > BM) | (first >= total):
        return
    last = min(first + blocks, total)
    table = table_ptr + sequence.to(tl.int64) * table_stride
    row = tl.arange(0, BM)
    token = row // G
    head = kv_head * G + row % G
    live = token < q_count
    d = tl.arange(0, D)
    q_at = (q_begin + token).to(tl.int64) * q_token + head * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    limit = token + (k_count - q_count)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    m = tl.full([BM], NEG_INF, tl.float32)
    length = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, D], tl.float32)
    for j in tl.range(first, last, num_stages=STAGES):
        key, live_k, at = _offsets(j * KB, table, 0, k_count, k_page, k_slot, 0, KB, PAGE)
        k_tile = tl.load(k_ptr + at[:, None] + d[None, :], mask=live_k[:, None], other=0.0)
        key, live_k, at = _offsets(j * KB, table, 0, k_count, v_page, v_slot, 0, KB, PAGE)
        v_tile = tl.load(v_ptr + at[:, None] + d[None, :], mask=live_k[:, None], other=0.0)
        m_j, l_j, o_j = _block(q, k_tile, v_tile, key, limit, scale_log2, True, BM, KB)
        if SPLIT:
            part = ((sequence * kv_heads + kv_head) * max_blocks + j).to(tl.int64) * BM + row
            tl.store(part_m_ptr + part, m_j, mask=live)
            tl.store(part_l_ptr + part, l_j, mask=live)
            tl.store(part_o_ptr + part[:, None] * D + d[None, :], o_j, mask=live[:, None])
        else:
            m, length, o = _merge(m, length, o, m_j, l_j, o_j)
    if not SPLIT:
        out = o * divide(1.0, length)[:, None]
        at = (q_begin + token).to(tl.int64) * heads + head
        tl.store(out_ptr + at[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=live[:, None])
        tl.store(lse_ptr + at, (m + tl.log2(length)) * LN2, mask=live)


@triton.jit(
    do_not_specialize=["max_blocks"],
    do_not_specialize_on_alignment=["lse_ptr", "part_m_ptr", "part_l_ptr", "cu_q_ptr", "lens_ptr"],
)
def _combine(
    out_ptr, lse_ptr, part_m_ptr, part_l_ptr, part_o_ptr, cu_q_ptr, lens_ptr, G, heads, kv_heads, max_blocks,
    BM: tl.constexpr, KB: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The merge of :func:`_decode`'s stored blocks, ascending: one row a program."""
    sequence, kv_head, row = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    q_begin = tl.load(cu_q_ptr + sequence)
    q_count = tl.load(cu_q_ptr + sequence + 1) - q_begin
    if (row >= q_count * G) | (q_count * G > BM):
        return
    d = tl.arange(0, D)
    m = tl.full([1], NEG_INF, tl.float32)
    length = tl.zeros([1], tl.float32)
    o = tl.zeros([1, D], tl.float32)
    base = (sequence * kv_heads + kv_head).to(tl.int64) * max_blocks
    one = tl.arange(0, 1)
    for j in tl.range(0, (tl.load(lens_ptr + sequence) + KB - 1) // KB, num_stages=STAGES):
        part = (base + j) * BM + row + one
        o_j = tl.load(part_o_ptr + part[:, None] * D + d[None, :])
        m, length, o = _merge(m, length, o, tl.load(part_m_ptr + part), tl.load(part_l_ptr + part), o_j)
    out = o * divide(1.0, length)[:, None]
    at = (q_begin + row // G + one).to(tl.int64) * heads + kv_head * G + row % G
    tl.store(out_ptr + at[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + at, (m + tl.log2(length)) * LN2)


def key_block() -> int:
    """Keys of one block in this machine's family."""
    return KEY_BLOCK["gfx942" if is_hip() else "sm90"]


def _checked(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> tuple[int, float]:
    heads, kv_heads, dim = q.shape[1], k.shape[-2], q.shape[2]
    if heads % kv_heads:
        raise ContractError(f"attention: {heads} query heads do not divide among {kv_heads} key/value heads")
    if dim < 16 or dim & (dim - 1):
        raise ContractError(f"attention: head_dim {dim} must be a power of two and at least 16")
    if q.stride(2) != 1 or k.stride(-1) != 1:
        raise ContractError("attention: the head dimension of q, k and v must be contiguous")
    return heads // kv_heads, (dim**-0.5 if scale is None else scale) / math.log(2)


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of packed sequences, bottom-right aligned.

    Args:
        q: [T, Hq, D]; k, v: [Tk, Hkv, D]; strided views with contiguous last dimension are fine.
        cu_q, cu_k: [B + 1] int32 prefix sums of the sequence lengths (``cu_k`` None: the same as ``cu_q``).
        scale: softmax scale, ``D ** -0.5`` by default.

    Returns:
        ``(out [T, Hq, D], lse [T, Hq] fp32)``. No host synchronisation.

    Hopper takes :mod:`sm90_forward`, which has the same bytes, where that has a kernel for these tensors.
    """
    cu_k = cu_q if cu_k is None else cu_k
    group, _ = _checked(q, k, scale)
    if q.shape[0]:
        faster = hopper.choose("forward", q, k, v, cu_q, cu_k)
        if faster is not None:
            return faster.forward(q, k, v, cu_q, cu_k, q.shape[2] ** -0.5 if scale is None else scale, group)
    return portable_forward(q, k, v, cu_q, cu_k, scale)


def portable_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`varlen_forward` by the Triton kernel of this file, for every GPU and head size."""
    group, scale_log2 = _checked(q, k, scale)
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens:
        row = launch_row("attention", dim)
        batch = cu_q.numel() - 1
        tiles = tokens * group // row["BM"] + batch
        with device_guard(q):
            _prefill[(tiles * k.shape[1],)](
                q, k, v, out, lse, cu_q, cu_k, cu_k, batch, (batch - 1).bit_length(), group, scale_log2,
                q.stride(0), q.stride(1), 0, 0, k.stride(0), k.stride(1), 0, 0, v.stride(0), v.stride(1), 0, heads,
                row["BM"], key_block(), dim, 0, 0, row["stages"],
                **options(row["warps"], row["stages"], dot=True),
            )  # fmt: skip
    return out, lse


def paged_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None = None,
    *,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    split: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode and chunked prefill, mixed in any way, over a paged cache.

    Args:
        q: [T, Hq, D], the last ``cu_q[i+1] - cu_q[i]`` tokens of each sequence.
        k_cache, v_cache: [pages, page_size, Hkv, D], strided views allowed.
        block_table: [B, max_pages] int32; seq_lens: [B] int32, keys of each sequence, the new tokens included.
        max_query_len, max_seq_len: upper bounds known to the caller; they save empty programs and change no bits.
        split: force or forbid parallelism over key blocks (default: by the number of sequences).
        out: [T, Hq, D] contiguous, written and returned.

    Returns:
        [T, Hq, D]. No host synchronisation: safe under CUDA graph capture.
    """
    group, scale_log2 = _checked(q, k_cache, scale)
    tokens, heads, dim = q.shape
    kv_heads, page = k_cache.shape[2], k_cache.shape[1]
    batch = seq_lens.numel()
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out
    kb = key_block()
    decode, prefill = launch_row("attention_decode", batch), launch_row("attention", dim)
    small = max(decode["BM"], next_power_of_2(group))
    strides = (
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2), block_table.stride(0),
    )  # fmt: skip
    with device_guard(q):
        keys = min(block_table.shape[1] * page, max_seq_len or 1 << 31)
        max_blocks = triton.cdiv(keys, kb)
        split = batch * kv_heads < _FILL and max_blocks > decode["blocks"] if split is None else split
        blocks = decode["blocks"] if split else max_blocks
        rows = batch * kv_heads * max_blocks * small if split else 0
        part = torch.empty(rows * (dim + 2) + 1, dtype=torch.float32, device=q.device)
        part_o, part_m, part_l = part, part[rows * dim :], part[rows * (dim + 1) :]
        _decode[(triton.cdiv(max_blocks, blocks), kv_heads, batch)](
            q, k_cache, v_cache, out, lse, part_m, part_l, part_o, cu_q, seq_lens, block_table, group, scale_log2,
            *strides, heads, kv_heads, max_blocks, blocks,
            small, kb, dim, page, split, decode["stages"],
            **options(decode["warps"], decode["stages"], dot=True),
        )  # fmt: skip
        if split:
            _combine[(small, kv_heads, batch)](
                out, lse, part_m, part_l, part_o, cu_q, seq_lens, group, heads, kv_heads, max_blocks,
                small, kb, dim, 4, **options(1, 4),
            )  # fmt: skip
        if max_query_len is None or max_query_len * group > small:
            tiles = tokens * group // prefill["BM"] + batch
            _prefill[(tiles * kv_heads,)](
                q, k_cache, v_cache, out, lse, cu_q, seq_lens, block_table,
                batch, (batch - 1).bit_length(), group, scale_log2,
                q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), 0, k_cache.stride(2),
                v_cache.stride(0), v_cache.stride(1), 0, v_cache.stride(2), block_table.stride(0), heads,
                prefill["BM"], kb, dim, page, small, prefill["stages"],
                **options(prefill["warps"], prefill["stages"], dot=True),
            )  # fmt: skip
    return out


def varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dq, dk, dv)`` of :func:`varlen_forward`, without atomics: the same bits in every run."""
    group, _ = _checked(q, k, scale)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return triton_backward.backward(dout, q, k, v, out, lse, cu_q, cu_q if cu_k is None else cu_k, scale, group)
