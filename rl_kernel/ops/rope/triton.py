"""Rotary embedding on GPUs, alone or fused behind the norms of q and k (both rounding points kept)."""

# Kernels grow tuples, which have a type for every length.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rl_kernel.ops.rms_norm import triton as norm
from rl_kernel.registry import Request
from rl_kernel.triton_utils import (
    device_guard,
    divide,
    early,
    gpu_only,
    is_hip,
    launch_row,
    next_power_of_2,
    options,
    tree_sum,
)


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit
def _rounded(x, ty: tl.constexpr, PACKED: tl.constexpr):
    """fp32 ``x`` rounded to ``ty`` and back; ``PACKED``: by the upper half of NVIDIA's packed conversion."""
    if PACKED:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = x.to(ty).to(tl.float32)
    return y


@triton.jit
def _normed(
    x1, x2, w1, w2, eps,
    HALF: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, ty: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The norm of some heads in two halves [TOKENS, ROWS, HALF] fp32, rounded to ``ty``, and rstd [TOKENS, ROWS, 1]."""
    # The tree over the whole head: its root adds the trees of the two halves.
    a, b = tl.reshape(x1, [TOKENS * ROWS, HALF]), tl.reshape(x2, [TOKENS * ROWS, HALF])
    squares = tree_sum(a * a, TOKENS * ROWS, HALF) + tree_sum(b * b, TOKENS * ROWS, HALF)
    # HALF is a power of two: the product has the bits of the quotient.
    rstd = tl.reshape(divide(1.0, tl.sqrt_rn(squares * (1.0 / (2 * HALF)) + eps)), [TOKENS, ROWS, 1])
    x1 = _rounded((x1 * rstd) * w1.to(tl.float32), ty, PACKED)
    x2 = _rounded((x2 * rstd) * w2.to(tl.float32), ty, PACKED)
    return x1, x2, rstd


@triton.jit
def _wide(HALF: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Columns in the shape of the heads: tables and weights read with it need no change of layout afterwards."""
    return tl.arange(0, HALF)[None, None, :] + tl.zeros([TOKENS, ROWS, HALF], tl.int32)


@triton.jit
def _heads(
    x_ptr, y_ptr, rstd_ptr, weight_ptr, cos, sin, token, head, heads, token_stride, head_stride, rstd_stride, eps,
    HALF: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, INVERSE: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Some heads [ROWS] of some tokens [TOKENS] with their angles; ``WHOLE``: every head exists."""
    column = tl.arange(0, HALF)[None, None, :]
    live = tl.full([1, ROWS, 1], True, tl.int1) if WHOLE else (head < heads)[None, :, None]
    at = (token * token_stride)[:, None, None] + (head * head_stride)[None, :, None] + column
    x1 = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at + HALF, mask=live, other=0.0).to(tl.float32)
    if NORM:
        wide = _wide(HALF, TOKENS, ROWS)
        w1, w2 = tl.load(weight_ptr + wide), tl.load(weight_ptr + HALF + wide)
        x1, x2, rstd = _normed(x1, x2, w1, w2, eps, HALF, TOKENS, ROWS, y_ptr.dtype.element_ty, PACKED)
        tl.store(rstd_ptr + (token * rstd_stride)[:, None, None] + head[None, :, None], rstd, mask=live)
    if INVERSE:
        sin = -sin
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    out = (token[:, None, None] * heads + head[None, :, None]) * (2 * HALF) + column
    tl.store(y_ptr + out, y1.to(y_ptr.dtype.element_ty), mask=live)
    tl.store(y_ptr + out + HALF, y2.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _angles(cache_ptr, position_ptr, token, HALF: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """cos and sin of some tokens in the shape of their heads, [TOKENS, ROWS, HALF]."""
    row = cache_ptr + (tl.load(position_ptr + token).to(tl.int64) * (2 * HALF))[:, None, None]
    at = row + _wide(HALF, TOKENS, ROWS)
    return tl.load(at), tl.load(at + HALF)


@triton.jit
def _tokens(tokens, TOKENS: tl.constexpr):
    """The tokens of a program; past the last, that one again, which the program then writes twice alike."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    return token if TOKENS == 1 else tl.minimum(token, tokens - 1)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["position_ptr"])
def _rope(
    x_ptr, position_ptr, cache_ptr, y_ptr, tokens, heads, token_stride, head_stride,
    HALF: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = _tokens(tokens, TOKENS)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cos, sin = _angles(cache_ptr, position_ptr, token, HALF, TOKENS, ROWS)
    _heads(
        x_ptr, y_ptr, x_ptr, x_ptr, cos, sin, token, head, heads, token_stride, head_stride, 0, 0.0,
        HALF, TOKENS, ROWS, WHOLE, INVERSE, False, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["position_ptr", "rstd_ptr"])
def _qk_norm_rope(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, position_ptr, cache_ptr, q_out_ptr, k_out_ptr, rstd_ptr,
    tokens, q_heads, k_heads, q_blocks, q_token, q_head, k_token, k_head, eps,
    HALF: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The first ``q_blocks`` programs of some tokens serve their query heads, the others their key heads."""
    token = _tokens(tokens, TOKENS)
    block = tl.program_id(1)
    cos, sin = _angles(cache_ptr, position_ptr, token, HALF, TOKENS, ROWS)
    if block < q_blocks:
        head = block * ROWS + tl.arange(0, ROWS)
        _heads(
            q_ptr, q_out_ptr, rstd_ptr, q_weight_ptr, cos, sin, token, head, q_heads, q_token, q_head,
            q_heads + k_heads, eps, HALF, TOKENS, ROWS, WHOLE, False, True, PACKED,
        )  # fmt: skip
    else:
        head = (block - q_blocks) * ROWS + tl.arange(0, ROWS)
        _heads(
            k_ptr, k_out_ptr, rstd_ptr + q_heads, k_weight_ptr, cos, sin, token, head, k_heads, k_token, k_head,
            q_heads + k_heads, eps, HALF, TOKENS, ROWS, WHOLE, False, True, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["position_ptr", "rstd_ptr"])
def _qk_norm_rope_token(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, position_ptr, cache_ptr, q_out_ptr, k_out_ptr, rstd_ptr,
    tokens, q_token, q_head, k_token, k_head, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every head of some tokens: all loads first, then ``ROWS`` heads at a time; angles and weights are read once."""
    if PDL:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()
    ty: tl.constexpr = q_out_ptr.dtype.element_ty
    token = _tokens(tokens, TOKENS)
    column = tl.arange(0, HALF)[None, None, :]
    head = tl.arange(0, ROWS)[None, :, None]
    q_at = q_ptr + (token * q_token)[:, None, None] + head * q_head + column
    k_at = k_ptr + (token * k_token)[:, None, None] + head * k_head + column
    low, high = (), ()
    for i in tl.static_range(Q_HEADS // ROWS):
        low += (tl.load(q_at + i * ROWS * q_head),)
        high += (tl.load(q_at + i * ROWS * q_head + HALF),)
    for i in tl.static_range(K_HEADS // ROWS):
        low += (tl.load(k_at + i * ROWS * k_head),)
        high += (tl.load(k_at + i * ROWS * k_head + HALF),)
    cos, sin = _angles(cache_ptr, position_ptr, token, HALF, TOKENS, ROWS)
    if PDL == 2:
        gdc_launch_dependents()
    wide = _wide(HALF, TOKENS, ROWS)
    q1, q2 = tl.load(q_weight_ptr + wide), tl.load(q_weight_ptr + HALF + wide)
    k1, k2 = tl.load(k_weight_ptr + wide), tl.load(k_weight_ptr + HALF + wide)
    q_out = q_out_ptr + (token * (Q_HEADS * 2 * HALF))[:, None, None] + head * (2 * HALF) + column
    k_out = k_out_ptr + (token * (K_HEADS * 2 * HALF))[:, None, None] + head * (2 * HALF) + column
    rstd_at = rstd_ptr + (token * (Q_HEADS + K_HEADS))[:, None, None] + head
    for i in tl.static_range((Q_HEADS + K_HEADS) // ROWS):
        x1, x2 = low[i].to(tl.float32), high[i].to(tl.float32)
        if i < Q_HEADS // ROWS:
            x1, x2, rstd = _normed(x1, x2, q1, q2, eps, HALF, TOKENS, ROWS, ty, PACKED)
            out = q_out + i * ROWS * 2 * HALF
        else:
            x1, x2, rstd = _normed(x1, x2, k1, k2, eps, HALF, TOKENS, ROWS, ty, PACKED)
            out = k_out + (i - Q_HEADS // ROWS) * ROWS * 2 * HALF
        tl.store(out, (x1 * cos - x2 * sin).to(ty))
        tl.store(out + HALF, (x2 * cos + x1 * sin).to(ty))
        tl.store(rstd_at + i * ROWS, rstd)


def _blocks(tokens: int, heads: int, dim: int, launch: dict[str, int]) -> tuple[int, int]:
    """``(tokens, heads)`` of a program; fewer heads when there are few tokens, so that more programs share them."""
    per = min(next_power_of_2(heads), max(1, launch["block"] // dim))
    if tokens * heads < 1024 * per:
        return 1, max(1, per // 4)
    return launch["tokens"], per


def _rows_of_whole_tokens(tokens: int, q_heads: int, k_heads: int, dim: int, launch: dict[str, int]) -> int:
    """Heads that a program with whole tokens turns at a time; 0 when heads should be spread over programs instead.

    Few tokens leave the GPU idle, a block must not mix query and key heads, and all of a token waits in registers.
    """
    rows = math.gcd(math.gcd(q_heads, k_heads), launch["rows"])
    if tokens < launch["least"] or (q_heads + k_heads) // rows > 10 or (q_heads + k_heads) * dim > launch["most"]:
        return 0
    return rows


def _packed(x: torch.Tensor) -> bool:
    """Whether NVIDIA's packed conversion can round to the dtype of ``x`` (and no interpreter has to run it)."""
    return x.dtype == torch.bfloat16 and not is_hip() and not triton.knobs.runtime.interpret


def _launch(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, inverse: bool) -> torch.Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, dim = x.shape
    y = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if y.numel():
        launch = launch_row("rope", heads)
        some, per = _blocks(tokens, heads, dim, launch)
        with device_guard(x):
            _rope[(triton.cdiv(tokens, some), triton.cdiv(heads, per))](
                x, positions, cache, y, tokens, heads, x.stride(0), x.stride(1),
                dim // 2, some, per, heads % per == 0, inverse, **options(launch["warps"]),
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
        launch = launch_row("qk_norm_rope", q_heads)
        rows = _rows_of_whole_tokens(tokens, q_heads, k_heads, dim, launch)
        with device_guard(q):
            if rows:
                some = launch["tokens"]
                _qk_norm_rope_token[(triton.cdiv(tokens, some),)](
                    q, k, q_weight, k_weight, positions, cache, q_out, k_out, rstd,
                    tokens, q.stride(0), q.stride(1), k.stride(0), k.stride(1), eps,
                    q_heads, k_heads, dim // 2, some, rows, _packed(q), early(launch),
                    **options(launch["warps"], pdl=early(launch)),
                )  # fmt: skip
                return q_out, k_out, rstd
            launch = launch_row("rope", q_heads)
            some, per = _blocks(tokens, min(q_heads, k_heads), dim, launch)
            q_blocks, k_blocks = triton.cdiv(q_heads, per), triton.cdiv(k_heads, per)
            _qk_norm_rope[(triton.cdiv(tokens, some), q_blocks + k_blocks)](
                q, k, q_weight, k_weight, positions, cache, q_out, k_out, rstd,
                tokens, q_heads, k_heads, q_blocks, q.stride(0), q.stride(1), k.stride(0), k.stride(1), eps,
                dim // 2, some, per, q_heads % per == k_heads % per == 0, _packed(q), **options(launch["warps"]),
            )  # fmt: skip
    return q_out, k_out, rstd


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["rstd_ptr", "position_ptr"])
def _head_backward(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, position_ptr, cache_ptr, dx_ptr, partial_ptr, rows, heads,
    dy_token, dy_head, x_token, x_head, rstd_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` rows (token, head), in the order of the norm's backward: dX of each, and one partial sum of dW.

    ``ROWS`` heads of a token are under way at a time; it divides ``heads`` and ``BLOCK``, so none is past the last.
    """
    column = tl.arange(0, HALF)
    w1 = tl.load(weight_ptr + column).to(tl.float32)
    w2 = tl.load(weight_ptr + HALF + column).to(tl.float32)
    sum1 = tl.zeros([HALF], tl.float32)
    sum2 = tl.zeros([HALF], tl.float32)
    block = tl.program_id(0)
    ty: tl.constexpr = dx_ptr.dtype.element_ty
    for i in range(0, min(BLOCK, rows - block * BLOCK), ROWS):
        row = block * BLOCK + i
        token, head = (row // heads).to(tl.int64), row % heads
        dy_low, dy_high, x_low, x_high, rstd = (), (), (), (), ()
        for j in tl.static_range(ROWS):
            at = dy_ptr + token * dy_token + (head + j) * dy_head + column
            dy_low += (tl.load(at),)
            dy_high += (tl.load(at + HALF),)
            at = x_ptr + token * x_token + (head + j) * x_head + column
            x_low += (tl.load(at),)
            x_high += (tl.load(at + HALF),)
            rstd += (tl.load(rstd_ptr + token * rstd_stride + head + j),)
        table = cache_ptr + tl.load(position_ptr + token).to(tl.int64) * (2 * HALF) + column
        cos, sin = tl.load(table), -tl.load(table + HALF)
        for j in tl.static_range(ROWS):
            dy1, dy2 = dy_low[j].to(tl.float32), dy_high[j].to(tl.float32)
            # The rotation rounds its result: it is an operator of its own.
            g1 = _rounded(dy1 * cos - dy2 * sin, ty, PACKED)
            g2 = _rounded(dy2 * cos + dy1 * sin, ty, PACKED)
            n1, n2 = x_low[j].to(tl.float32) * rstd[j], x_high[j].to(tl.float32) * rstd[j]
            sum1 += g1 * n1
            sum2 += g2 * n2
            s1, s2 = g1 * w1, g2 * w2
            a, b = tl.reshape(s1 * n1, [1, HALF]), tl.reshape(s2 * n2, [1, HALF])
            # HALF is a power of two: the product has the bits of the quotient.
            mean = (tree_sum(a, 1, HALF) + tree_sum(b, 1, HALF)) * (1.0 / (2 * HALF))
            out = dx_ptr + (row + j).to(tl.int64) * (2 * HALF) + column
            tl.store(out, ((s1 - n1 * mean) * rstd[j]).to(ty))
            tl.store(out + HALF, ((s2 - n2 * mean) * rstd[j]).to(ty))
    out = partial_ptr + block.to(tl.int64) * (2 * HALF) + column
    tl.store(out, sum1)
    tl.store(out + HALF, sum2)


def qk_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dX, dW)`` of one side of :func:`qk_norm_forward`: :func:`backward`, then that of the norm, in one pass.

    dy and x [T, heads, D] may be strided views, and so may rstd [T, heads].
    """
    dy, x = (t if t.stride(-1) == 1 else t.contiguous() for t in (dy, x))
    tokens, heads, dim = x.shape
    rows = tokens * heads
    dx = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    dweight = torch.empty(dim, dtype=weight.dtype, device=x.device)
    blocks = triton.cdiv(rows, norm.ROWS_A_PARTIAL)
    partial = torch.empty((blocks, dim), dtype=torch.float32, device=x.device)
    with device_guard(x):
        if rows:
            launch = launch_row("rms_norm_backward", dim)
            _head_backward[(blocks,)](
                dy, x, weight, rstd, positions, cache, dx, partial, rows, heads,
                dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), rstd.stride(0),
                dim // 2, norm.ROWS_A_PARTIAL, math.gcd(heads, launch["rows"]), _packed(x), **options(launch["warps"]),
            )  # fmt: skip
        norm.add_partials(partial, dweight)
    return dx, dweight
