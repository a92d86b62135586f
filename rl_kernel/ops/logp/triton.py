"""Log-probability, log-sum-exp and entropy on GPUs: the tree of the contract, one pass over the logits.

The functions are those of ``reference.py``; only ``exp`` and ``log`` are the primitives of the GPU family.
What follows the row count is kept out of the kernels' specialisation, see :mod:`rl_kernel.triton_utils`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernel.contract import VOCAB_LEAF
from rl_kernel.registry import Request
from rl_kernel.triton_utils import (
    NEG_INF,
    device_guard,
    divide,
    exp_,
    gpu_only,
    launch_row,
    next_power_of_2,
    options,
    tree_sum,
)

LEAF = tl.constexpr(VOCAB_LEAF)


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return gpu_only(request.family, request.op)


@triton.jit
def _leaf_tree(x, LEAVES: tl.constexpr):
    """[LEAVES * 8, 4, 4] (group, chunk, column) -> [LEAVES]: :func:`tree_sum` over 16 group + 4 chunk + column."""
    GROUPS: tl.constexpr = LEAVES * 8
    x = tl.sum(tl.sum(tl.reshape(x, [GROUPS, 4, 2, 2]), 3), 2)
    x = tl.sum(tl.sum(tl.reshape(x, [GROUPS, 2, 2]), 2), 1)
    for level in tl.static_range(3):
        x = tl.sum(tl.reshape(x, [GROUPS >> (level + 1), 2]), 1)
    return x


@triton.jit
def leaf_of(z, LEAVES: tl.constexpr):
    """(m, s, u) of leaves z [LEAVES * 8, 4, 4], 128 columns a leaf, and exp(z - m); absent columns hold -inf.

    A thread holds sixteen neighbouring columns, so four of the seven levels of a tree stay inside of it.
    """
    GROUPS: tl.constexpr = LEAVES * 8
    top = tl.max(tl.max(z, 2), 1)
    m = tl.max(tl.reshape(top, [LEAVES, 8]), 1) + 0.0
    d = z - tl.reshape(tl.broadcast_to(m[:, None], [LEAVES, 8]), [GROUPS])[:, None, None]
    e = exp_(d)
    # An absent column gives e = 0; so does a whole absent leaf, whose d would be NaN.
    e = tl.where(z == NEG_INF, 0.0, e)
    t = tl.where(e == 0.0, 0.0, e * d)
    return m, _leaf_tree(e, LEAVES), _leaf_tree(t, LEAVES), e


@triton.jit(
    do_not_specialize=["plane", "leaves_total", "leaf_offset", "leaf_stride", "first_column"],
    do_not_specialize_on_alignment=["temperature_ptr", "stats_ptr", "target_ptr", "z_target_ptr"],
)
def _leaf_stats(
    logits_ptr, temperature_ptr, stats_ptr, target_ptr, z_target_ptr, kept_ptr,
    plane, stride, columns, leaves_total, leaf_offset, leaf_stride, first_column, kept_stride,
    LEAVES: tl.constexpr, DIVIDE: tl.constexpr, TARGETS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    leaf = tl.program_id(1) * LEAVES + tl.arange(0, LEAVES)
    four = tl.arange(0, 4)
    group = tl.program_id(1) * (LEAVES * 8) + tl.arange(0, LEAVES * 8)
    column = group[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
    z = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < columns, other=NEG_INF)
    temperature = 1.0
    if DIVIDE:
        temperature = tl.load(temperature_ptr + row)
        if temperature != 1.0:
            z = divide(z, temperature)
    if TARGETS:
        target = tl.load(target_ptr + row) - first_column
        begin = tl.program_id(1) * (LEAVES * LEAF)
        if (target >= begin) & (target < begin + LEAVES * LEAF) & (target < columns):
            picked = tl.load(logits_ptr + row.to(tl.int64) * stride + target)
            tl.store(z_target_ptr + row, divide(picked, temperature))
    m, s, u, e = leaf_of(z, LEAVES)
    if KEEP:
        kept = kept_ptr + row.to(tl.int64) * kept_stride + column
        tl.store(kept, e.to(kept_ptr.dtype.element_ty), mask=column < columns)
    at = stats_ptr + row.to(tl.int64) * leaf_stride + leaf_offset + leaf
    live = leaf < leaves_total
    tl.store(at, m, mask=live)
    tl.store(at + plane, s, mask=live)
    tl.store(at + 2 * plane, u, mask=live)


def write_leaf_stats(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    columns: int,
    stats: torch.Tensor,
    leaf_offset: int,
    targets: torch.Tensor | None = None,
    first_column: int = 0,
    z_target: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> None:
    """Leaf statistics of ``logits`` [T, >= columns] into ``stats`` [3, T, L], from leaf ``leaf_offset`` on.

    With ``targets`` [T] (local columns, counted like ``first_column``, the first of ``logits``), z of those that lie in
    this part goes to ``z_target`` [T]. ``kept`` [T, columns] receives exp(z - m), rounded to its dtype.
    """
    rows = logits.shape[0]
    leaves = triton.cdiv(columns, VOCAB_LEAF)
    if rows == 0 or leaves == 0:
        return
    launch = launch_row("logp", leaves)
    with device_guard(logits):
        _leaf_stats[(rows, triton.cdiv(leaves, launch["leaves"]))](
            logits, temperature, stats, targets, z_target, kept,
            stats.stride(0), logits.stride(0), columns, leaves, leaf_offset, stats.stride(1), first_column,
            0 if kept is None else kept.stride(0),
            launch["leaves"], temperature is not None, targets is not None, kept is not None,
            **options(launch["warps"]),
        )  # fmt: skip


def leaf_stats(logits: torch.Tensor, temperature: torch.Tensor | None, columns: int) -> torch.Tensor:
    """(m, s, u) of every leaf, [3, T, L] fp32.

    Args:
        logits: [T, V_local] fp32, last dimension contiguous.
        temperature: [T] fp32, or ``None`` for 1.0 everywhere (division by one is exact).
        columns: columns that are not padding.
    """
    leaves = triton.cdiv(columns, VOCAB_LEAF)
    stats = torch.empty((3, logits.shape[0], leaves), dtype=torch.float32, device=logits.device)
    write_leaf_stats(logits, temperature, columns, stats, 0)
    return stats


def target_logits(logits: torch.Tensor, temperature: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """z of the target [T]; +0.0 where ``targets`` is -1 (another rank owns it)."""
    z = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    if temperature is not None:
        z = z / temperature
    return torch.where(targets < 0, torch.zeros_like(z), z)


@triton.jit(
    do_not_specialize=["T", "plane", "leaf_stride", "begin", "end"],
    do_not_specialize_on_alignment=["m_ptr", "nodes_ptr"],
)
def _tree_nodes(stats_ptr, m_ptr, nodes_ptr, T, plane, leaf_stride, begin, end, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    leaf = begin + tl.arange(0, N)
    live = leaf < end
    at = stats_ptr + row * leaf_stride + leaf
    d = tl.load(at, mask=live, other=NEG_INF) - tl.load(m_ptr + row)
    s = tl.load(at + plane, mask=live, other=0.0)
    u = tl.load(at + 2 * plane, mask=live, other=0.0)
    w = exp_(d)
    gone = (w == 0.0) | (leaf >= end)
    length = tl.where(gone, 0.0, s * w)
    moment = tl.where(gone, 0.0, w * (u + d * s))
    one = tl.arange(0, 1)
    tl.store(nodes_ptr + row + one, tree_sum(tl.reshape(length, [1, N]), 1, N))
    tl.store(nodes_ptr + T + row + one, tree_sum(tl.reshape(moment, [1, N]), 1, N))


def tree_nodes(stats: torch.Tensor, m: torch.Tensor, ranges: list[tuple[int, int]], slots: int) -> torch.Tensor:
    """(l, u) of the aligned subtrees ``ranges`` of local leaves, [slots, 2, T]; unused slots are zero."""
    rows = stats.shape[1]
    nodes = torch.zeros((slots, 2, rows), dtype=torch.float32, device=stats.device)
    if rows:
        with device_guard(stats):
            for slot, (begin, end) in enumerate(ranges):
                if end > begin:
                    n = next_power_of_2(end - begin)
                    _tree_nodes[(rows,)](
                        stats, m, nodes[slot], rows, stats.stride(0), stats.stride(1), begin, end, n,
                        **options(4 if n > 512 else 1),
                    )  # fmt: skip
    return nodes


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["nodes_ptr", "m_ptr", "z_ptr", "out_ptr"])
def _finish(nodes_ptr, m_ptr, z_ptr, out_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < T
    length = tl.load(nodes_ptr + row, mask=live, other=1.0)
    moment = tl.load(nodes_ptr + T + row, mask=live, other=0.0)
    m = tl.load(m_ptr + row, mask=live, other=0.0)
    z = tl.load(z_ptr + row, mask=live, other=0.0)
    log_l = tl.log(length)
    tl.store(out_ptr + row, (z - m) - log_l, mask=live)
    tl.store(out_ptr + T + row, m + log_l, mask=live)
    tl.store(out_ptr + 2 * T + row, log_l - divide(moment, length), mask=live)
    tl.store(out_ptr + 3 * T + row, log_l, mask=live)


def finish(
    nodes: torch.Tensor, merges: list[tuple[int, int]], first_slot: int, m: torch.Tensor, z_target: torch.Tensor
) -> torch.Tensor:
    """Remaining additions of the tree, then (logp, lse, entropy, log l) [4, T]."""
    slots = list(nodes.unbind(0))
    zero = torch.zeros_like(slots[0]) if merges else None
    for left, right in merges:
        slots.append((zero if left < 0 else slots[left]) + (zero if right < 0 else slots[right]))  # type: ignore[operator]
    root = (slots[-1] if merges else slots[first_slot]).contiguous()
    rows = m.numel()
    out = torch.empty((4, rows), dtype=torch.float32, device=m.device)
    if rows:
        with device_guard(m):
            _finish[(triton.cdiv(rows, 256),)](root, m, z_target, out, rows, 256, **options(4))
    return out


@triton.jit(
    do_not_specialize=["T", "plane", "leaf_stride", "leaves"],
    do_not_specialize_on_alignment=["z_ptr", "m_ptr", "out_ptr"],
)
def _whole_rows(stats_ptr, z_ptr, m_ptr, out_ptr, T, plane, leaf_stride, leaves, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    leaf = tl.arange(0, N)
    live = leaf < leaves
    at = stats_ptr + row * leaf_stride + leaf
    m_leaf = tl.load(at, mask=live, other=NEG_INF)
    m = tl.max(m_leaf, 0)
    d = m_leaf - m
    s = tl.load(at + plane, mask=live, other=0.0)
    u = tl.load(at + 2 * plane, mask=live, other=0.0)
    w = exp_(d)
    gone = (w == 0.0) | (leaf >= leaves)
    one = tl.arange(0, 1)
    length = tree_sum(tl.reshape(tl.where(gone, 0.0, s * w), [1, N]), 1, N)
    moment = tree_sum(tl.reshape(tl.where(gone, 0.0, w * (u + d * s)), [1, N]), 1, N)
    log_l = tl.log(length)
    out = out_ptr + row + one
    tl.store(m_ptr + row, m)
    tl.store(out, (tl.load(z_ptr + row + one) - m) - log_l)
    tl.store(out + T, m + log_l)
    tl.store(out + 2 * T, log_l - divide(moment, length))
    tl.store(out + 3 * T, log_l)


def whole_rows(stats: torch.Tensor, z_target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum, tree and results of rows whose leaves are all here: m [T] and (logp, lse, entropy, log l) [4, T]."""
    rows, leaves = stats.shape[1:]
    m = torch.empty(rows, dtype=torch.float32, device=stats.device)
    out = torch.empty((4, rows), dtype=torch.float32, device=stats.device)
    if rows:
        n = next_power_of_2(leaves)
        with device_guard(stats):
            _whole_rows[(rows,)](
                stats, z_target, m, out, rows, stats.stride(0), stats.stride(1), leaves, n,
                **options(4 if n > 512 else 1),
            )  # fmt: skip
    return m, out


@triton.jit
def gradient_of(z, m, log_l, entropy, g_logp, g_lse, g_ent, is_target):
    """dL/dz of columns with scaled logits z; the row's values broadcast."""
    y = (z - m) - log_l
    p = exp_(y)
    c = g_lse - g_logp
    # Where p is zero, y may be -inf: without the guard 0 * inf would be NaN.
    c = c - tl.where(p == 0.0, 0.0, g_ent * (y + entropy))
    dz = p * c
    return tl.where(is_target, dz + g_logp, dz)


@triton.jit(
    do_not_specialize=["T", "first_column"],
    do_not_specialize_on_alignment=["temperature_ptr", "target_ptr", "state_ptr", "grads_ptr"],
)
def _dlogits(
    logits_ptr, temperature_ptr, target_ptr, state_ptr, grads_ptr, out_ptr, T, stride, out_stride, columns, width,
    first_column, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < columns, other=0.0)
    temperature = 1.0
    if DIVIDE:
        temperature = tl.load(temperature_ptr + row)
        if temperature != 1.0:
            z = divide(z, temperature)
    target = tl.load(target_ptr + row) - first_column
    dz = gradient_of(
        z, tl.load(state_ptr + row), tl.load(state_ptr + T + row), tl.load(state_ptr + 2 * T + row),
        tl.load(grads_ptr + row), tl.load(grads_ptr + T + row), tl.load(grads_ptr + 2 * T + row), column == target,
    )  # fmt: skip
    if temperature != 1.0:
        dz = divide(dz, temperature)
    dz = tl.where(column < columns, dz, 0.0)
    at = out_ptr + row.to(tl.int64) * out_stride + column
    tl.store(at, dz.to(out_ptr.dtype.element_ty), mask=column < width)


def write_dlogits(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    columns: int,
    out: torch.Tensor,
    first_column: int = 0,
) -> None:
    """Gradient of ``logits`` (local columns from ``first_column`` on) into ``out``, rounded to its dtype."""
    rows, width = out.shape
    if rows == 0 or width == 0:
        return
    with device_guard(logits):
        _dlogits[(rows, triton.cdiv(width, 2048))](
            logits, temperature, targets, state, grads, out, rows, logits.stride(0), out.stride(0),
            max(columns, 0), width, first_column, 2048, temperature is not None, **options(4),
        )  # fmt: skip


def dlogits(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """Gradient with respect to the logits, [T, V_local] fp32, zero in padded columns.

    Args:
        logits, temperature, columns: as in :func:`leaf_stats`.
        targets: [T] int64 local columns, -1 where another rank owns the target.
        state: (m, log l, entropy) [3, T] fp32; grads: upstream (g_logp, g_lse, g_ent) [3, T] fp32.
    """
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    write_dlogits(logits, temperature, targets, state.contiguous(), grads.contiguous(), columns, out)
    return out


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["temperature_ptr", "state_ptr"])
def _log_softmax(
    logits_ptr, temperature_ptr, state_ptr, out_ptr, T, stride, columns, width,
    BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=column < columns, other=NEG_INF)
    if DIVIDE:
        temperature = tl.load(temperature_ptr + row)
        if temperature != 1.0:
            z = divide(z, temperature)
    y = (z - tl.load(state_ptr + row)) - tl.load(state_ptr + T + row)
    y = tl.where(column < columns, y, NEG_INF)
    tl.store(out_ptr + row.to(tl.int64) * width + column, y, mask=column < width)


def log_softmax(
    logits: torch.Tensor, temperature: torch.Tensor | None, state: torch.Tensor, columns: int
) -> torch.Tensor:
    """``(z - m) - log l`` [T, V] with state (m, log l) [2, T]; padded columns are -inf."""
    rows, width = logits.shape
    out = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    if rows and width:
        state = state.contiguous()
        with device_guard(logits):
            _log_softmax[(rows, triton.cdiv(width, 2048))](
                logits, temperature, state, out, rows, logits.stride(0), columns, width, 2048,
                temperature is not None, **options(4),
            )  # fmt: skip
    return out
