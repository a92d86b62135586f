"""Specification of attention of the cpu family, in plain torch.

A row is one query head of one token. Its keys come in blocks of 32 from position 0 of the sequence on. State (m, l, o)
starts at (-inf, 0, 0); a block does

    s_j = dot16(q, k_j) * scale        m' = max(m, max_j s_j)      a = exp(m - m')      p_j = exp(s_j - m')
    l = l * a + tree(p over 32, +0.0 where there is no key)
    o = o * a, then o = fma(round_to_dtype(p_j), v_j, o) for j ascending

and at the end out = round(o / l), lse = m + log(l). Keys beyond the row's own position never enter.
"""

from __future__ import annotations

import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops._common import supports_cpu as supports
from rl_kernel.ops._primitives import divide, dot16, exp, fma, log, tree_sum

__all__ = ["paged_forward", "supports", "varlen_backward", "varlen_forward"]

KEY_BLOCK = 32


def _sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], k and v [m, Hkv, D], m >= n -> out [n, Hq, D], lse [n, Hq]; query i sees m - n + i + 1 keys."""
    n, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    k, v = (x.float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
    seen = torch.arange(keys - n, keys)[:, None, None] + 1
    m = torch.full((n, heads, 1), -torch.inf)
    l = torch.zeros(n, heads, 1)  # noqa: E741
    o = torch.zeros(q.shape, dtype=torch.float32)
    for start in range(0, keys, KEY_BLOCK):
        kb, vb = k[:, start : start + KEY_BLOCK], v[:, start : start + KEY_BLOCK]
        valid = torch.arange(start, start + kb.shape[1]) < seen
        s = dot16(q.float()[:, :, None, :], kb[None]) * scale
        top = torch.maximum(m, torch.where(valid, s, -torch.inf).amax(-1, keepdim=True))
        a = exp(m - top)
        p = torch.where(valid, exp(s - top), 0.0)
        rounded = p.to(q.dtype).float()
        mixed = o * a
        for j in range(kb.shape[1]):
            mixed = torch.where(valid[..., j : j + 1], fma(rounded[..., j : j + 1], vb[None, :, j], mixed), mixed)
        # A row that sees no key of this block keeps its state.
        some = valid[..., :1]
        l = torch.where(some, l * a + tree_sum(p)[..., None], l)  # noqa: E741
        m, o = torch.where(some, top, m), torch.where(some, mixed, o)
    return divide(o, l).to(q.dtype), (m + log(l))[..., 0]


def _spans(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    q, k = cu_q.tolist(), cu_k.tolist()
    spans = [(slice(a, b), slice(c, d)) for a, b, c, d in zip(q, q[1:], k, k[1:])]
    for index, (rows, keys) in enumerate(spans):
        if keys.stop - keys.start < rows.stop - rows.start:
            raise ContractError(f"attention: sequence {index} has fewer keys than queries")
    return spans


def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k and v [Tk, Hkv, D], cu_q and cu_k [B + 1] -> out [T, Hq, D], lse [T, Hq] fp32.

    Causal, bottom-right aligned. Rows outside every sequence are zero.
    """
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=torch.float32)
    for rows, keys in _spans(cu_q, cu_k):
        if rows.stop > rows.start:
            out[rows], lse[rows] = _sequence(q[rows], k[keys], v[keys], torch.tensor(scale, dtype=torch.float32))
    return out, lse


def varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v.

    p_j = exp(s_j - lse), dp_j = dot16(dout, v_j), delta = dot16(dout, out), ds_j = (p_j * (dp_j - delta)) * scale;
    dq = fma of ds_j * k_j, j ascending; dk_j = fma of ds_j * q and dv_j = fma of p_j * dout, the query heads of the
    group outside and tokens ascending inside. fp32 throughout, one rounding each.
    """
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    factor = torch.tensor(scale, dtype=torch.float32)
    for rows, span in _spans(cu_q, cu_k):
        n, keys = rows.stop - rows.start, span.stop - span.start
        if n == 0:
            continue
        heads, kv_heads = q.shape[1], k.shape[1]
        group = heads // kv_heads
        qf, gf = q[rows].float(), dout[rows].float()
        kf, vf = (x[span].float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))  # [Hq, m, D]
        valid = torch.arange(keys) < torch.arange(keys - n, keys)[:, None] + 1  # [n, m]
        p = exp(dot16(qf[:, :, None], kf[None]) * factor - lse[rows][..., None])
        delta = dot16(gf, out[rows].float())[..., None]
        ds = (p * (dot16(gf[:, :, None], vf[None]) - delta)) * factor  # [n, Hq, m]
        acc = torch.zeros_like(qf)
        for j in range(keys):
            acc = torch.where(valid[:, j, None, None], fma(ds[..., j : j + 1], kf[None, :, j], acc), acc)
        dq[rows] = acc.to(q.dtype)
        ak, av = torch.zeros(kv_heads, keys, q.shape[2]), torch.zeros(kv_heads, keys, q.shape[2])
        for g in range(group):
            for i in range(n):
                mask = valid[i][None, :, None]
                ak = torch.where(mask, fma(ds[i, g::group, :, None], qf[i, g::group, None], ak), ak)
                av = torch.where(mask, fma(p[i, g::group, :, None], gf[i, g::group, None], av), av)
        dk[span], dv[span] = ak.transpose(0, 1).to(k.dtype), av.transpose(0, 1).to(v.dtype)
    return dq, dk, dv


def paged_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [T, Hq, D], caches [blocks, block size, Hkv, D], block_table [B, pages], cu_q [B + 1], seq_lens [B] -> out.

    The last queries of a sequence of ``seq_lens[b]`` keys, whose key j lies in slot ``j % block size`` of page
    ``block_table[b, j // block size]``.
    """
    out = torch.zeros_like(q)
    factor = torch.tensor(scale, dtype=torch.float32)
    offsets = cu_q.tolist()
    for b, (first, last, length) in enumerate(zip(offsets, offsets[1:], seq_lens.tolist())):
        if last > first:
            pages = block_table[b, : -(-length // k_cache.shape[1])].long()
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            out[first:last] = _sequence(q[first:last], k, v, factor)[0]
    return out
