"""Public attention: packed sequences (training) and a paged cache (rollout), one arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator, untraced

__all__ = ["attention_paged", "attention_varlen"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("attention", x.device, x.dtype).module


def _varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _module(q).varlen_forward(q, k, v, cu_q, cu_k, scale)


def _varlen_backward(
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
    return _module(q).varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale)


def _paged_forward(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
) -> torch.Tensor:
    arguments = (q, k_cache, v_cache, block_table, cu_q, seq_lens, scale)
    return _module(q).paged_forward(*arguments, **_hints(q, max_query_len, max_seq_len))


def _hints(q: torch.Tensor, max_query_len: int, max_seq_len: int) -> dict[str, int]:
    """Bounds for the GPU backends; the others walk the real lengths."""
    if q.device.type == "cpu":
        return {}
    given = {"max_query_len": max_query_len, "max_seq_len": max_seq_len}
    return {name: value for name, value in given.items() if value}


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple:
        q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
        return *_attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, ctx.scale), None, None, None


_attention_varlen = Operator(
    "attention_varlen",
    _varlen_forward,
    lambda q, k, v, cu_q, cu_k, scale: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)),
    _Gradient,
)
_attention_varlen_backward = Operator(
    "attention_varlen_backward",
    _varlen_backward,
    lambda dout, q, k, v, out, lse, cu_q, cu_k, scale: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
_attention_paged = Operator(
    "attention_paged",
    _paged_forward,
    lambda q, k_cache, v_cache, block_table, cu_q, seq_lens, scale, max_query_len, max_seq_len: q.new_empty(q.shape),
)


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of packed sequences: ``softmax(q k^T * scale) v`` with grouped kv heads.

    Args:
        q: [T, Hq, D] float32 or bfloat16 (cpu family); D contiguous, other strides free.
        k, v: [Tk, Hkv, D], same dtype; Hq is a multiple of Hkv and head h reads kv head ``h // (Hq / Hkv)``.
        cu_seqlens_q: [B + 1] int32 offsets of the sequences in q.
        cu_seqlens_k: the same for k and v, default ``cu_seqlens_q``. A sequence has at least as many keys as queries;
            its last query sees all of them (bottom-right aligned).
        softmax_scale: default ``D ** -0.5``.
        return_lse: also return the log of the softmax's denominator, [T, Hq] float32, not differentiable.

    Returns:
        out [T, Hq, D] (rows outside every sequence are zero), or (out, lse).

    Raises:
        ContractError: shapes, dtypes or (cpu) offsets do not fit.

    Guarantee: a row's bits depend on its query and the keys and values of its own sequence up to its own position,
    and equal those of :func:`attention_paged`. Keys in blocks of 32 from position 0 (cpu family), online softmax,
    fp32 state, P rounded to the dtype before P V, one final rounding.
    """
    if not (q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2] > 0):
        raise ContractError(
            f"attention_varlen: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be [T, heads, D]"
        )
    if not (k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0):
        raise ContractError(f"attention_varlen: {q.shape[1]} query heads are not a multiple of {k.shape[1]} kv heads")
    if not (q.dtype == k.dtype == v.dtype):
        raise ContractError(f"attention_varlen: q {q.dtype}, k {k.dtype}, v {v.dtype} must be one dtype")
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if not (cu_seqlens_q.dim() == 1 and cu_seqlens_q.shape == cu_k.shape and cu_k.numel() > 0):
        raise ContractError("attention_varlen: cu_seqlens_q and cu_seqlens_k must both be [B + 1]")
    out, lse = _attention_varlen(q, k, v, cu_seqlens_q, cu_k, _scale(q, softmax_scale))
    return (out, lse) if return_lse else out


def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over a paged cache; decode steps and prefill chunks of any length in one call, forward only.

    Args:
        q: [T, Hq, D] the new tokens of all sequences; their keys are already in the cache.
        k_cache, v_cache: [blocks, block size, Hkv, D], strided views allowed as long as D is contiguous.
        block_table: [B, pages] int32; key j of sequence b is in page ``block_table[b, j // block size]``.
        cu_seqlens_q: [B + 1] int32 offsets of the sequences in q (empty sequences allowed).
        seq_lens: [B] int32 number of keys, new tokens included.
        softmax_scale: default ``D ** -0.5``.
        max_query_len, max_seq_len: upper bounds of the query and key counts, if the caller knows them. They change
            speed and no bit. Under CUDA graph capture they must hold for every replay.
        out: [T, Hq, D] contiguous, written and returned.

    Returns:
        out [T, Hq, D]; rows outside every sequence are zero on the CPU, undefined on GPUs.

    Raises:
        ContractError: shapes or dtypes do not fit, a gradient is asked for, or (cpu) a length or page is out of range.

    Guarantee: the bits of :func:`attention_varlen` on the same sequence, whatever the page size, the order of pages,
    the chunking and the other sequences of the call.
    """
    shapes = q.dim() == 3 and k_cache.dim() == 4 and k_cache.shape == v_cache.shape
    if not (shapes and q.shape[2] == k_cache.shape[3] > 0):
        raise ContractError(
            f"attention_paged: q {tuple(q.shape)} must be [T, heads, D] and the caches {tuple(k_cache.shape)}, "
            f"{tuple(v_cache.shape)} [blocks, block size, kv heads, D]"
        )
    if not (k_cache.shape[2] > 0 and q.shape[1] % k_cache.shape[2] == 0):
        raise ContractError(
            f"attention_paged: {q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} kv heads"
        )
    if not (q.dtype == k_cache.dtype == v_cache.dtype):
        raise ContractError(f"attention_paged: q {q.dtype}, caches {k_cache.dtype}, {v_cache.dtype} must be one dtype")
    if not (block_table.dim() == 2 and cu_seqlens_q.numel() == seq_lens.numel() + 1):
        raise ContractError("attention_paged: block_table must be [B, pages], cu_seqlens_q [B + 1] and seq_lens [B]")
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        raise ContractError("attention_paged: it has no gradient; use attention_varlen, or torch.no_grad()")
    arguments = (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, _scale(q, softmax_scale))
    bounds = (max_query_len or 0, max_seq_len or 0)
    if out is None:
        return _attention_paged(*arguments, *bounds)
    if not (out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()):
        raise ContractError(
            f"attention_paged: out {tuple(out.shape)} {out.dtype} must be contiguous and match q {tuple(q.shape)} "
            f"{q.dtype}"
        )
    if q.device.type != "cpu" and untraced(q, k_cache, v_cache, out):
        return _module(q).paged_forward(*arguments, **_hints(q, *bounds), out=out)
    return out.copy_(_attention_paged(*arguments, *bounds))
