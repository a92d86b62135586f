"""Backward of causal attention on GPUs without atomics.

Two kernels recompute P from the log-sum-exp: one walks the query rows for a tile of keys (dK, dV), one walks the keys
for a tile of query rows (dQ). Rows and keys are visited in ascending order of tiles that start at row 0 and key 0 of
the sequence, so neither neighbours in the batch nor the number of heads on a rank enter the bits.

On Hopper :mod:`sm90_backward` makes the same bytes faster, where it has kernels (:mod:`hopper`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rl_kernel.ops.attention import hopper
from rl_kernel.triton_utils import LOG2E, device_guard, launch_row, options, tree_sum


@triton.jit(do_not_specialize=["rows"])
def _delta(dout_ptr, out_ptr, delta_ptr, rows, D: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    live = (row < rows)[:, None]
    dout = tl.load(dout_ptr + at, mask=live, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tree_sum(dout * out, ROWS, D), mask=row < rows)


@triton.jit
def find_sequence(tile, cu_ptr, batch, search, G, SIZE: tl.constexpr):
    """Sequence of a tile of ``SIZE`` rows and its number inside; sequence s starts at tile ``cu[s] * G // SIZE + s``.

    ``search`` halvings find it among ``batch``: a loop, so that no number of sequences has a kernel of its own. Up to
    one tile a sequence begins past its rows.
    """
    low = tl.full([], 0, tl.int32)
    high = batch - 1
    for _ in range(search):
        middle = (low + high + 1) // 2
        below = tl.load(cu_ptr + middle) * G // SIZE + middle <= tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    return low, tile - (tl.load(cu_ptr + low) * G // SIZE + low)


@triton.jit(
    do_not_specialize=["batch", "search"],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "cu_q_ptr", "cu_k_ptr"],
)
def _dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, batch, search, G,
    scale, scale_log2, q_token, q_head, k_token, k_head, v_token, v_head, heads, kv_heads,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence, tile = find_sequence(tl.program_id(0), cu_k_ptr, batch, search, 1, BN)
    kv_head = tl.program_id(1)
    q_begin, k_begin = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    q_count = tl.load(cu_q_ptr + sequence + 1) - q_begin
    k_count = tl.load(cu_k_ptr + sequence + 1) - k_begin
    if (tile < 0) | (tile * BN >= k_count):
        return
    shift = k_count - q_count
    key = tile * BN + tl.arange(0, BN)
    live_k = (key < k_count)[:, None]
    d = tl.arange(0, D)
    k_at = (k_begin + key).to(tl.int64)[:, None]
    k = tl.load(k_ptr + k_at * k_token + kv_head * k_head + d[None, :], mask=live_k, other=0.0)
    v = tl.load(v_ptr + k_at * v_token + kv_head * v_head + d[None, :], mask=live_k, other=0.0)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    first = max(tile * BN - shift, 0) * G // BM
    for j in tl.range(first, (q_count * G + BM - 1) // BM, num_stages=STAGES):
        row = j * BM + tl.arange(0, BM)
        token = row // G
        head = kv_head * G + row % G
        live = token < q_count
        at = (q_begin + token).to(tl.int64)
        stat = at * heads + head
        q = tl.load(q_ptr + (at * q_token + head * q_head)[:, None] + d[None, :], mask=live[:, None], other=0.0)
        dout = tl.load(dout_ptr + stat[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        lse2 = tl.load(lse_ptr + stat, mask=live, other=float("inf")) * LOG2E
        delta = tl.load(delta_ptr + stat, mask=live, other=0.0)
        # Transposed scores [keys, rows]: P^T and dS^T feed the next products from registers.
        p = tl.exp2(tl.fma(tl.dot(k, tl.trans(q)), scale_log2, -lse2[None, :]))
        if (j * BM) // G + shift < tile * BN + BN - 1:
            p = tl.where(key[:, None] <= (token + shift)[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        dp = tl.dot(v, tl.trans(dout))
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    out = ((k_begin + key).to(tl.int64) * kv_heads + kv_head)[:, None] * D + d[None, :]
    tl.store(dk_ptr + out, (dk * scale).to(dk_ptr.dtype.element_ty), mask=live_k)
    tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=live_k)


@triton.jit(
    do_not_specialize=["batch", "search"],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "cu_q_ptr", "cu_k_ptr"],
)
def _dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, batch, search, G,
    scale, scale_log2, q_token, q_head, k_token, k_head, v_token, v_head, heads,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence, tile = find_sequence(tl.program_id(0), cu_q_ptr, batch, search, G, BM)
    kv_head = tl.program_id(1)
    q_begin, k_begin = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    q_count = tl.load(cu_q_ptr + sequence + 1) - q_begin
    k_count = tl.load(cu_k_ptr + sequence + 1) - k_begin
    if (tile < 0) | (tile * BM >= q_count * G):
        return
    row = tile * BM + tl.arange(0, BM)
    token = row // G
    head = kv_head * G + row % G
    live = token < q_count
    d = tl.arange(0, D)
    at = (q_begin + token).to(tl.int64)
    stat = at * heads + head
    q = tl.load(q_ptr + (at * q_token + head * q_head)[:, None] + d[None, :], mask=live[:, None], other=0.0)
    dout = tl.load(dout_ptr + stat[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    lse2 = tl.load(lse_ptr + stat, mask=live, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + stat, mask=live, other=0.0)
    limit = token + (k_count - q_count)
    last = min((tile * BM + BM - 1) // G, q_count - 1) + (k_count - q_count)
    dq = tl.zeros([BM, D], tl.float32)
    for j in tl.range(0, (last + BN) // BN, num_stages=STAGES):
        key = j * BN + tl.arange(0, BN)
        k_at = (k_begin + key).to(tl.int64)[:, None]
        live_k = (key < k_count)[:, None]
        k = tl.load(k_ptr + k_at * k_token + kv_head * k_head + d[None, :], mask=live_k, other=0.0)
        v = tl.load(v_ptr + k_at * v_token + kv_head * v_head + d[None, :], mask=live_k, other=0.0)
        p = tl.exp2(tl.fma(tl.dot(q, tl.trans(k)), scale_log2, -lse2[:, None]))
        if (tile * BM) // G + (k_count - q_count) < j * BN + BN - 1:
            p = tl.where(key[None, :] <= limit[:, None], p, 0.0)
        dp = tl.dot(dout, tl.trans(v))
        ds = (p * (dp - delta[:, None])).to(q.dtype)
        dq = tl.dot(ds, k, dq)
    out = (at * heads + head)[:, None] * D + d[None, :]
    tl.store(dq_ptr + out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=live[:, None])


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
    """``dS = P * (dO V^T - rowsum(dO * O))``, P and dS rounded to the input dtype, fp32 accumulators.

    Shapes as in ``attention.triton.varlen_forward``; ``dout`` and ``out`` [T, Hq, D], ``lse`` [T, Hq].
    """
    if q.shape[0]:
        faster = hopper.choose("backward", q, k, v, cu_q, cu_k)
        if faster is not None:
            return faster.backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, group)
    return portable(dout, q, k, v, out, lse, cu_q, cu_k, scale, group)


def portable(
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
    """:func:`backward` by the Triton kernels of this file, for every GPU, head size and group."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    dq = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    dk = torch.zeros((k.shape[0], kv_heads, dim), dtype=k.dtype, device=q.device)
    dv = torch.zeros_like(dk)
    if tokens == 0:
        return dq, dk, dv
    delta = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    batch = cu_q.numel() - 1
    search = (batch - 1).bit_length()
    kv_row, q_row = launch_row("attention_dkdv", dim), launch_row("attention_dq", dim)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    scale_log2 = scale / math.log(2)
    with device_guard(q):
        _delta[(triton.cdiv(tokens * heads, 32),)](dout, out, delta, tokens * heads, dim, 32, **options(4))
        _dkdv[(k.shape[0] // kv_row["BN"] + batch, kv_heads)](
            q, k, v, dout, lse, delta, dk, dv, cu_q, cu_k, batch, search, group, scale, scale_log2, *strides,
            heads, kv_heads, kv_row["BM"], kv_row["BN"], dim, kv_row["stages"],
            **options(kv_row["warps"], kv_row["stages"], dot=True),
        )  # fmt: skip
        _dq[(tokens * group // q_row["BM"] + batch, kv_heads)](
            q, k, v, dout, lse, delta, dq, cu_q, cu_k, batch, search, group, scale, scale_log2, *strides, heads,
            q_row["BM"], q_row["BN"], dim, q_row["stages"],
            **options(q_row["warps"], q_row["stages"], dot=True),
        )  # fmt: skip
    return dq, dk, dv
