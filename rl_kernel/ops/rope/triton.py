"""Rotary embedding on GPUs, alone or fused behind the norms of q and k (both rounding points kept)."""

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
def _heads(
    x_ptr, y_ptr, rstd_ptr, weight_ptr, table, token, head, heads, token_stride, head_stride, rstd_stride, eps,
    HALF: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; ``table`` points at the token's row of the cos/sin table."""
    live = head < heads
    column = tl.arange(0, HALF)
    at = token * token_stride + (head * head_stride)[:, None] + column[None, :]
    x1 = tl.load(x_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
    if NORM:
        # The tree over the whole head: its root adds the trees of the two halves.
        squares = tree_sum(x1 * x1, ROWS, HALF) + tree_sum(x2 * x2, ROWS, HALF)
        rstd = divide(1.0, tl.sqrt_rn(divide(squares, 2.0 * HALF) + eps))
        tl.store(rstd_ptr + token * rstd_stride + head, rstd, mask=live)
        w1 = tl.load(weight_ptr + column).to(tl.float32)
        w2 = tl.load(weight_ptr + HALF + column).to(tl.float32)
        x1 = ((x1 * rstd[:, None]) * w1[None, :]).to(y_ptr.dtype.element_ty).to(tl.float32)
        x2 = ((x2 * rstd[:, None]) * w2[None, :]).to(y_ptr.dtype.element_ty).to(tl.float32)
    cos = tl.load(table + column)[None, :]
    sin = tl.load(table + HALF + column)[None, :]
    if INVERSE:
        sin = -sin
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    out = ((token * heads + head) * (2 * HALF))[:, None] + column[None, :]
    tl.store(y_ptr + out, y1.to(y_ptr.dtype.element_ty), mask=live[:, None])
    tl.store(y_ptr + out + HALF, y2.to(y_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _rope(
    x_ptr, position_ptr, cache_ptr, y_ptr, heads, token_stride, head_stride,
    HALF: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    table = cache_ptr + tl.load(position_ptr + token).to(tl.int64) * (2 * HALF)
    _heads(
        x_ptr, y_ptr, x_ptr, x_ptr, table, token, head, heads, token_stride, head_stride, 0, 0.0,
        HALF, ROWS, INVERSE, False,
    )  # fmt: skip


@triton.jit
def _qk_norm_rope(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, position_ptr, cache_ptr, q_out_ptr, k_out_ptr, rstd_ptr,
    q_heads, k_heads, q_blocks, q_token, q_head, k_token, k_head, eps,
    HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first ``q_blocks`` programs of a token serve its query heads, the others its key heads."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    table = cache_ptr + tl.load(position_ptr + token).to(tl.int64) * (2 * HALF)
    if block < q_blocks:
        head = block * ROWS + tl.arange(0, ROWS)
        _heads(
            q_ptr, q_out_ptr, rstd_ptr, q_weight_ptr, table, token, head, q_heads, q_token, q_head,
            q_heads + k_heads, eps, HALF, ROWS, False, True,
        )  # fmt: skip
    else:
        head = (block - q_blocks) * ROWS + tl.arange(0, ROWS)
        _heads(
            k_ptr, k_out_ptr, rstd_ptr + q_heads, k_weight_ptr, table, token, head, k_heads, k_token, k_head,
            q_heads + k_heads, eps, HALF, ROWS, False, True,
        )  # fmt: skip


def _launch(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, inverse: bool) -> torch.Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, dim = x.shape
    y = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if y.numel():
        launch = launch_row("rope", heads)
        per = min(next_power_of_2(heads), max(1, launch["block"] // dim))
        with device_guard(x):
            _rope[(tokens, triton.cdiv(heads, per))](
                x, positions, cache, y, heads, x.stride(0), x.stride(1),
                dim // 2, per, inverse, **options(launch["warps"]),
            )  # fmt: skip
    return y


def forward(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """``y1 = x1*c - x2*s``, ``y2 = x2*c + x1*s``; x [T, heads, D], positions [T], cache [max_pos, D] fp32."""
    return _launch(x, positions, cache, False)


def backward(dy: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`forward`: the inverse rotation."""
    return _launch(dy, positions, cache, True)


def qk_norm_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rope(rms_norm(x, weight, eps))`` of q [T, Hq, D] and k [T, Hk, D] in one launch, both rounding points kept.

    q and k may be strided views of one projection. Returns ``(q', k', rstd [T, Hq + Hk] fp32)``.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (tokens, q_heads, dim), k_heads = q.shape, k.shape[1]
    q_out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, k_heads, dim), dtype=q.dtype, device=q.device)
    rstd = torch.empty((tokens, q_heads + k_heads), dtype=torch.float32, device=q.device)
    if tokens:
        launch = launch_row("rope", q_heads)
        per = min(next_power_of_2(q_heads), max(1, launch["block"] // dim))
        if tokens * (q_heads + k_heads) < 1024 * per:  # few tokens: more programs finish sooner
            per = max(1, per // 4)
        q_blocks, k_blocks = triton.cdiv(q_heads, per), triton.cdiv(k_heads, per)
        with device_guard(q):
            _qk_norm_rope[(tokens, q_blocks + k_blocks)](
                q, k, q_weight, k_weight, positions, cache, q_out, k_out, rstd,
                q_heads, k_heads, q_blocks, q.stride(0), q.stride(1), k.stride(0), k.stride(1), eps,
                dim // 2, per, **options(launch["warps"]),
            )  # fmt: skip
    return q_out, k_out, rstd
