"""Public attention: packed sequences (training) and a paged cache (rollout), one arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernel import registry
from rl_kernel.ops._common import need

__all__ = ["attention_paged", "attention_varlen"]


def _module(x: torch.Tensor) -> Any:
    return registry.resolve("attention", x.device, x.dtype).module


@torch.library.custom_op("rl_kernel::attention_varlen", mutates_args=())
def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _module(q).varlen_forward(q, k, v, cu_q, cu_k, scale)


@_varlen.register_fake
def _(q, k, v, cu_q, cu_k, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("rl_kernel::attention_varlen_backward", mutates_args=())
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


@_varlen_backward.register_fake
def _(dout, q, k, v, out, lse, cu_q, cu_k, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("rl_kernel::attention_paged", mutates_args=())
def _paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _module(q).paged_forward(q, k_cache, v_cache, block_table, cu_q, seq_lens, scale)


@_paged.register_fake
def _(q, k_cache, v_cache, block_table, cu_q, seq_lens, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple:
    q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
    grads = torch.ops.rl_kernel.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, ctx.scale)
    return *grads, None, None, None


_varlen.register_autograd(_backward, setup_context=_setup)


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
        ContractError: shapes or dtypes do not fit.  RuntimeError: offsets do not (cpu).

    Guarantee: a row's bits depend on its query and the keys and values of its own sequence up to its own position,
    and equal those of :func:`attention_paged`. Keys in blocks of 32 from position 0 (cpu family), online softmax,
    fp32 state, P rounded to the dtype before P V, one final rounding.
    """
    need(
        q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2],
        f"attention_varlen: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be [T, heads, D]",
    )
    need(
        k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        f"attention_varlen: {q.shape[1]} query heads are not a multiple of {k.shape[1]} kv heads",
    )
    need(q.dtype == k.dtype == v.dtype, f"attention_varlen: q {q.dtype}, k {k.dtype}, v {v.dtype} must be one dtype")
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    need(
        cu_seqlens_q.dim() == 1 and cu_seqlens_q.shape == cu_k.shape and cu_k.numel() > 0,
        "attention_varlen: cu_seqlens_q and cu_seqlens_k must both be [B + 1]",
    )
    out, lse = torch.ops.rl_kernel.attention_varlen(q, k, v, cu_seqlens_q, cu_k, _scale(q, softmax_scale))
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
) -> torch.Tensor:
    """Causal attention over a paged cache; decode steps and prefill chunks of any length in one call, forward only.

    Args:
        q: [T, Hq, D] the new tokens of all sequences; their keys are already in the cache.
        k_cache, v_cache: [blocks, block size, Hkv, D], strided views allowed as long as D is contiguous.
        block_table: [B, pages] int32; key j of sequence b is in page ``block_table[b, j // block size]``.
        cu_seqlens_q: [B + 1] int32 offsets of the sequences in q (empty sequences allowed).
        seq_lens: [B] int32 number of keys, new tokens included.
        softmax_scale: default ``D ** -0.5``.

    Returns:
        out [T, Hq, D]; rows outside every sequence are zero.

    Raises:
        ContractError: shapes or dtypes do not fit.  RuntimeError: a length or page is out of range (cpu).

    Guarantee: the bits of :func:`attention_varlen` on the same sequence, whatever the page size, the order of pages,
    the chunking and the other sequences of the call.
    """
    need(
        q.dim() == 3 and k_cache.dim() == 4 and k_cache.shape == v_cache.shape and q.shape[2] == k_cache.shape[3],
        f"attention_paged: q {tuple(q.shape)} must be [T, heads, D] and the caches {tuple(k_cache.shape)}, "
        f"{tuple(v_cache.shape)} [blocks, block size, kv heads, D]",
    )
    need(
        k_cache.shape[2] > 0 and q.shape[1] % k_cache.shape[2] == 0,
        f"attention_paged: {q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} kv heads",
    )
    need(
        q.dtype == k_cache.dtype == v_cache.dtype,
        f"attention_paged: q {q.dtype}, caches {k_cache.dtype}, {v_cache.dtype} must be one dtype",
    )
    need(
        block_table.dim() == 2 and cu_seqlens_q.numel() == seq_lens.numel() + 1,
        "attention_paged: block_table must be [B, pages], cu_seqlens_q [B + 1] and seq_lens [B]",
    )
    return torch.ops.rl_kernel.attention_paged(
        q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, _scale(q, softmax_scale)
    )
