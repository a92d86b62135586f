"""Stock scaled dot product attention: no contract, used by the modes fast and native and as a negative control."""

from __future__ import annotations

import torch

from rl_kernel.registry import Request

__all__ = ["paged_forward", "supports", "varlen_backward", "varlen_forward"]


def supports(request: Request) -> str | None:
    return None


def _mask(n: int, m: int, device: torch.device) -> torch.Tensor:
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = _mask(q.shape[1], k.shape[1], q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _lse(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("nhd,mhd->nhm", q.float(), k.float()) * scale
    return s.masked_fill(~_mask(q.shape[0], k.shape[0], q.device)[:, None], -torch.inf).logsumexp(-1)


def _spans(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    q, k = cu_q.tolist(), cu_k.tolist()
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(q, q[1:], k, k[1:]) if b > a]


def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)
    for rows, keys in _spans(cu_q, cu_k):
        out[rows], lse[rows] = _sequence(q[rows], k[keys], v[keys], scale), _lse(q[rows], k[keys], scale)
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
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _spans(cu_q, cu_k):
        with torch.enable_grad():
            a, b, c = (x.detach().requires_grad_() for x in (q[rows], k[keys], v[keys]))
            found = torch.autograd.grad(_sequence(a, b, c, scale), (a, b, c), dout[rows])
        for grad, part, span in zip(grads, found, (rows, keys, keys)):
            grad[span] = part
    return grads


def paged_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    out = torch.zeros_like(q)
    offsets = cu_q.tolist()
    for b, (first, last, length) in enumerate(zip(offsets, offsets[1:], seq_lens.tolist())):
        if last > first:
            pages = block_table[b, : -(-length // k_cache.shape[1])].long()
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            out[first:last] = _sequence(q[first:last], k, v, scale)
    return out
