"""Sum over ranks on GPUs: the tree of the contract in one pass over the payloads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.registry import Request
from rl_kernel.triton_utils import device_guard, gpu_only, next_power_of_2, options, tree_rows


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit
def _reduce(parts_ptr, out_ptr, size, ranks, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS).to(tl.int64)
    inside = (at < size)[None, :] & (rank < ranks)[:, None]
    parts = tl.load(parts_ptr + rank[:, None] * size + at[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, tree_rows(parts, RANKS, BLOCK).to(out_ptr.dtype.element_ty), mask=at < size)


def reduce_parts(parts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Tree sum of [R, ...] over ranks in fp32, one rounding to ``out_dtype``."""
    parts = parts.contiguous()
    out = torch.empty(parts.shape[1:], dtype=out_dtype, device=parts.device)
    if out.numel():
        with device_guard(parts):
            _reduce[(triton.cdiv(out.numel(), 1024),)](
                parts, out, out.numel(), parts.shape[0], next_power_of_2(parts.shape[0]), 1024, **options(4)
            )
    return out
