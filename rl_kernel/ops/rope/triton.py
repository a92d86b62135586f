"""Rotary embedding on GPUs, alone or fused behind the q/k norm (both rounding points kept)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.registry import Request
from rl_kernel.triton_utils import device_guard, divide, gpu_only, launch_row, next_power_of_2, options, tree_sum


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit
def _rope(
    x_ptr, position_ptr, cache_ptr, weight_ptr, y_ptr, heads, token_stride, head_stride, eps,
    HALF: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = head < heads
    column = tl.arange(0, HALF)
    at = token * token_stride + (head * head_stride)[:, None] + column[None, :]
    x1 = tl.load(x_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
    if NORM:
        # The tree over the whole head: its root adds the trees of the two halves.
        squares = tree_sum(x1 * x1, ROWS, HALF) + tree_sum(x2 * x2, ROWS, HALF)
        rstd = divide(1.0, tl.sqrt_rn(divide(squares, 2.0 * HALF) + eps))
        w1 = tl.load(weight_ptr + column).to(tl.float32)
        w2 = tl.load(weight_ptr + HALF + column).to(tl.float32)
        x1 = ((x1 * rstd[:, None]) * w1[None, :]).to(y_ptr.dtype.element_ty).to(tl.float32)
        x2 = ((x2 * rstd[:, None]) * w2[None, :]).to(y_ptr.dtype.element_ty).to(tl.float32)
    table = cache_ptr + tl.load(position_ptr + token).to(tl.int64) * (2 * HALF) + column
    cos = tl.load(table)[None, :]
    sin = tl.load(table + HALF)[None, :]
    if INVERSE:
        sin = -sin
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    out = ((token * heads + head) * (2 * HALF))[:, None] + column[None, :]
    tl.store(y_ptr + out, y1.to(y_ptr.dtype.element_ty), mask=live[:, None])
    tl.store(y_ptr + out + HALF, y2.to(y_ptr.dtype.element_ty), mask=live[:, None])


def _launch(
    x: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    *,
    inverse: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, dim = x.shape
    y = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if y.numel():
        launch = launch_row("rope", heads)
        per = min(next_power_of_2(heads), max(1, launch["block"] // dim))
        with device_guard(x):
            _rope[(tokens, triton.cdiv(heads, per))](
                x, positions, cache, weight, y, heads, x.stride(0), x.stride(1), eps,
                dim // 2, per, inverse, weight is not None, **options(launch["warps"]),
            )  # fmt: skip
    return y


def forward(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """``y1 = x1*c - x2*s``, ``y2 = x2*c + x1*s``; x [T, heads, D], positions [T], cache [max_pos, D] fp32."""
    return _launch(x, positions, cache)


def backward(dy: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`forward`: the inverse rotation."""
    return _launch(dy, positions, cache, inverse=True)


def norm_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, positions: torch.Tensor, cache: torch.Tensor
) -> torch.Tensor:
    """``rope(rms_norm(x, weight, eps))`` in one pass: the same bits as the two operators one after the other."""
    return _launch(x, positions, cache, weight=weight, eps=eps)
