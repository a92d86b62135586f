"""Embedding on GPUs: gather forward, ordered segment sums backward (no atomics)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.registry import Request
from rl_kernel.triton_utils import device_guard, gpu_only, options

_BLOCK = 1024


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit(do_not_specialize=["start", "num_rows"], do_not_specialize_on_alignment=["ids_ptr"])
def _gather(ids_ptr, weight_ptr, y_ptr, start, num_rows, H, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids_ptr + token).to(tl.int64) - start + tl.zeros([BLOCK], tl.int64)
    mine = (column < H) & (local >= 0) & (local < num_rows)
    value = tl.load(weight_ptr + local * H + column, mask=mine, other=0.0)
    # Adding +0.0 turns -0.0 into +0.0, so that the sum over tensor-parallel ranks gives the same bits.
    tl.store(y_ptr + token * H + column, (value.to(tl.float32) + 0.0).to(y_ptr.dtype.element_ty), mask=column < H)


@triton.jit(
    do_not_specialize=["tokens", "start", "num_rows"], do_not_specialize_on_alignment=["sorted_ptr", "order_ptr"]
)
def _scatter(sorted_ptr, order_ptr, dy_ptr, dweight_ptr, tokens, start, num_rows, H, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    token_id = tl.load(sorted_ptr + at)
    before = tl.load(sorted_ptr + at - 1, mask=at > 0, other=-1)
    local = token_id.to(tl.int64) - start
    if (local >= 0) & (local < num_rows) & ((at == 0) | (before != token_id)):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        index = at
        current = token_id
        while current == token_id:
            source = tl.load(order_ptr + index).to(tl.int64)
            total += tl.load(dy_ptr + source * H + column, mask=inside, other=0.0).to(tl.float32)
            index += 1
            current = tl.load(sorted_ptr + index, mask=index < tokens, other=-1)
        tl.store(dweight_ptr + local * H + column, total.to(dweight_ptr.dtype.element_ty), mask=inside)


def forward(ids: torch.Tensor, weight: torch.Tensor, vocab_start_index: int = 0) -> torch.Tensor:
    """``weight[ids - vocab_start_index]``, +0.0 for rows outside this shard; ids [...], weight [V_local, H]."""
    h = weight.shape[1]
    y = torch.empty((*ids.shape, h), dtype=weight.dtype, device=weight.device)
    if y.numel():
        with device_guard(y):
            _gather[(ids.numel(), triton.cdiv(h, _BLOCK))](
                ids.reshape(-1), weight.contiguous(), y, vocab_start_index, weight.shape[0], h, _BLOCK, **options(4)
            )
    return y


def backward(dy: torch.Tensor, ids: torch.Tensor, num_rows: int, vocab_start_index: int = 0) -> torch.Tensor:
    """dW [num_rows, H]: for each row, dy of its tokens in ascending order, fp32, one rounding."""
    h = dy.shape[-1]
    dweight = torch.zeros((num_rows, h), dtype=dy.dtype, device=dy.device)
    if ids.numel():
        ids_sorted, order = torch.sort(ids.reshape(-1), stable=True)
        with device_guard(dy):
            _scatter[(ids.numel(), triton.cdiv(h, _BLOCK))](
                ids_sorted, order, dy.reshape(-1, h).contiguous(), dweight, ids.numel(),
                vocab_start_index, num_rows, h, _BLOCK, **options(4),
            )  # fmt: skip
    return dweight
