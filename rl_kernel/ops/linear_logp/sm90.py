"""linear_logp on Hopper: logits live in the registers of a matrix-product kernel (csrc/sm90).

Forward (:func:`leaf_stats`): one persistent kernel computes 128 x 256 tiles of logits with wgmma and turns each into
the (m, s, u) of its two leaves; nothing of size [T, V] is written. The kept value of a logit is
e = bf16(exp(z - m_leaf)).

Backward, with state (m, log l, entropy) and upstream gradients g, all divided by the row's temperature first::

    p = e * exp((m_leaf - m) - log l)
    c = (g_lse - g_logp) - g_ent * (((log e + (m_leaf - m)) - log l) + entropy)     (without the last term where p is 0)
    d = bf16(p * c [+ g_logp at the target])
    dW = d^T hidden, tokens in one ascending chain;  dH = d W, blocks of 16384 columns, each a chain, added in order

One arithmetic, two schedules; bits do not tell them apart:

* kept (:mod:`rl_kernel.ops.linear_logp.sm90_schedules`): the forward kernel also writes e; backward turns it into d in
  place and multiplies. 6 THV operations, 2 bytes a logit of memory until backward has run. Taken when that fits
  :data:`WORKSPACE_BYTES`.
* recompute (:func:`backward`): the forward kernel runs again over chunks of the vocabulary and writes d at once.
  8 THV operations, workspace within :data:`WORKSPACE_BYTES`.
"""

from __future__ import annotations

import functools
import os

import torch

from rl_kernel.contract import VOCAB_BLOCK, VOCAB_LEAF
from rl_kernel.errors import ContractError, UnsupportedError
from rl_kernel.registry import Request

_SEPARATE = 1320  # 20 rounds of the 66 clusters of an H100 or H200
WORKSPACE_BYTES = int(os.environ.get("RLK_WORKSPACE_MIB", "512")) << 20


@functools.cache
def _missing() -> str | None:
    try:
        import rl_kernel._C_gpu  # noqa: F401 - registers torch.ops.rlk.sm90_*
    except (ImportError, OSError) as error:
        return f"the CUDA operators are not built ({error}); run pip install with RLK_BUILD=cuda and nvcc"
    return None


def supports(request: Request) -> str | None:
    """bfloat16 on H100 / H200, when the extension is built."""
    if request.family != "sm90":
        return f"wgmma kernels serve sm90, not {request.family}"
    if request.dtype is not torch.bfloat16:
        return f"hidden states must be bfloat16, not {request.dtype}"
    return _missing()


def matrix(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` as the copy engine reads it: contiguous rows, 16-byte aligned."""
    if x.shape[1] % 8:
        raise ContractError(f"{name}: hidden size {x.shape[1]} must be a multiple of 8 for backend sm90; use triton")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _ints(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def kept_columns(columns: int) -> int:
    """Row stride of kept logits: whole groups of 8 columns (16 bytes)."""
    return (columns + 7) // 8 * 8


def new_kept(tokens: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised [tokens, columns] bf16 with an aligned row stride."""
    return torch.empty((tokens, kept_columns(columns)), dtype=torch.bfloat16, device=device)[:, :columns]


def leaf_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    columns: int,
    kept: torch.Tensor | None = None,
    absent: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, s, u) of every leaf [3, T, L] fp32, and z of the target [T].

    Args:
        hidden: [T, H] bf16.
        weight: [V_local, H] bf16; its first ``columns`` rows are real vocabulary.
        temperature: [T] fp32, or ``None`` for 1.
        targets: [T] int64 local columns, -1 where another rank owns the target.
        kept: from :func:`new_kept` with these sizes; receives bf16 exp(z - m_leaf).
        absent: z of rows without a target here.
    """
    tokens, device = hidden.shape[0], hidden.device
    stats = torch.empty((3, tokens, -(-columns // VOCAB_LEAF)), dtype=torch.float32, device=device)
    z_target = torch.full((tokens,), absent, dtype=torch.float32, device=device)
    if tokens and columns:
        torch.ops.rlk.sm90_statistics(
            matrix(hidden, "hidden_states"),
            matrix(weight, "lm_head_weight")[:columns],
            targets.contiguous(),
            temperature,
            columns,
            _ints(1, device),
            stats,
            z_target,
            kept,
        )
    return stats, z_target


def whole_rows(stats: torch.Tensor, z_target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank owns the vocabulary: (m [T], (logp, lse, entropy, log l) [4, T]) in one pass over the leaves."""
    tokens = stats.shape[1]
    m = torch.empty(tokens, dtype=torch.float32, device=stats.device)
    out = torch.empty((4, tokens), dtype=torch.float32, device=stats.device)
    if tokens:
        torch.ops.rlk.sm90_merge(stats, z_target, m, out)
    return m, out


def make_gradients(
    kept: torch.Tensor,
    stats: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
) -> None:
    """Kept bf16 exp(z - m_leaf) [T, columns] becomes d in place. state, grads: [3, T] fp32."""
    if kept.numel():
        table = torch.empty((kept.shape[0], 8), dtype=torch.float32, device=kept.device)
        torch.ops.rlk.sm90_gradient_(
            kept, targets.contiguous(), temperature, stats, state.contiguous(),
            grads.contiguous(), table,
        )  # fmt: skip


def products(
    dlogits: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    *,
    first: int = 0,
    last: int | None = None,
    dh: torch.Tensor | None = None,
    dh_continues: bool = False,
    dw: torch.Tensor | None = None,
    dw_accumulate: bool = False,
    dw_init: torch.Tensor | None = None,
) -> None:
    """``dh`` [T, H] fp32 from the columns [first, last) of ``dlogits`` [T, V] and ``weight`` [V, H], and ``dw`` [V, H].

    Args:
        dh_continues: add to ``dh`` instead of starting from its first block.
        dw: bf16, or fp32 with ``dw_accumulate`` for ``dw += sum``.
        dw_init: fp32 [V, H] the chain over tokens continues from (token chunks); the result equals one chain.
    """
    tokens, width = hidden.shape
    last = dlogits.shape[1] if last is None else last
    if tokens == 0 or last <= first:
        raise UnsupportedError("products of an empty matrix: the caller fills the result with zeros")
    orders = (tokens + 255) // 256 * ((width + 255) // 256)
    counters = _ints(4 + 4 * orders, hidden.device)

    def launch(counter: torch.Tensor, dh: torch.Tensor | None, dw: torch.Tensor | None) -> None:
        torch.ops.rlk.sm90_backward(
            dlogits, weight, hidden, counter, first, last - first, dh, dh_continues,
            counters[4:] if dh is not None else None, dw, dw_accumulate, dw_init,
        )  # fmt: skip

    # Few tiles of dH leave processors idle at the end: tiles of dW fill them. Many do not.
    if dh is not None and dw is not None and orders * -(-(last - first) // VOCAB_BLOCK) > _SEPARATE:
        launch(counters[:1], dh, None)
        launch(counters[1:2], None, dw)
    else:
        launch(counters[:1], dh, dw)


class _Tree:
    """Balanced binary sum of subtrees that arrive in order."""

    def __init__(self) -> None:
        self.finished: list[tuple[int, torch.Tensor]] = []

    def push(self, total: torch.Tensor) -> None:
        size = 1
        while self.finished and self.finished[-1][0] == size:
            total = self.finished.pop()[1].add_(total)
            size *= 2
        self.finished.append((size, total))


def _new_total(hidden: torch.Tensor, empty: bool) -> torch.Tensor:
    make = torch.zeros if empty else torch.empty
    return make(hidden.shape, dtype=torch.float32, device=hidden.device)


def backward_kept(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    dlogits: torch.Tensor,
    segments: list[tuple[int, int]],
    need_hidden: bool = True,
    need_weight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both products from d [T, columns] of :func:`make_gradients`; result as :func:`backward`."""
    columns, tokens = dlogits.shape[1], hidden.shape[0]
    hidden, rows = matrix(hidden, "hidden_states"), matrix(weight, "lm_head_weight")[:columns]
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
    if dw is not None:
        dw[columns if tokens else 0 :].zero_()
    target = dw[:columns] if dw is not None and columns and tokens else None
    return both_products(hidden, rows, dlogits, segments if need_hidden else [], target), dw


def both_products(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    dlogits: torch.Tensor,
    segments: list[tuple[int, int]],
    dw: torch.Tensor | None,
    dw_init: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """fp32 subtree of dH over ``segments`` (None without any), and ``dw`` unless it is ``None`` (:func:`products`)."""
    tree = _Tree()
    for begin, end in segments:
        empty = end <= begin or not hidden.shape[0]
        total = _new_total(hidden, empty)
        if not empty:  # the first launch makes dW too
            products(dlogits, weight, hidden, first=begin, last=end, dh=total, dw=dw, dw_init=dw_init)
            dw = None
        tree.push(total)
    if dw is not None:
        products(dlogits, weight, hidden, dw=dw, dw_init=dw_init)
    return tree.finished[0][1] if segments else None


def _chunk_columns(tokens: int, width: int) -> int:
    """Columns of one chunk of the recompute schedule: whole blocks of the contract within the workspace."""
    left = WORKSPACE_BYTES - 4 * tokens * width
    return max(1, left // (2 * max(tokens, 1)) // VOCAB_BLOCK) * VOCAB_BLOCK


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    segments: list[tuple[int, int]],
    need_hidden: bool = True,
    need_weight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The recompute schedule: fp32 subtree of dH over ``segments``, and dW in the dtype of ``weight``.

    Args:
        state: (m, log l, entropy) [3, T] of the forward pass; grads: upstream (g_logp, g_lse, g_ent) [3, T].
        segments: ranges of columns that are not padding, a power of two of them.
    """
    tokens, width = hidden.shape
    hidden, rows = matrix(hidden, "hidden_states"), matrix(weight, "lm_head_weight")
    targets = targets.contiguous()
    state, grads = state.contiguous(), grads.contiguous()
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
    if dw is not None:
        dw[max((end for _, end in segments), default=0) if tokens else 0 :].zero_()
    step = _chunk_columns(tokens, width)
    widest = max((min(step, end - begin) for begin, end in segments), default=0)
    buffer = torch.empty(tokens * kept_columns(max(widest, 0)), dtype=torch.bfloat16, device=hidden.device)
    tree = _Tree()
    for begin, end in segments:
        empty = end <= begin or not tokens
        total = _new_total(hidden, empty) if need_hidden else None
        for first in range(begin, end, step) if not empty else []:
            last = min(first + step, end)
            stride = kept_columns(last - first)
            dlogits = buffer[: tokens * stride].view(tokens, stride)[:, : last - first]
            torch.ops.rlk.sm90_recompute(
                hidden, rows[first:last], targets, temperature, first, last - first, _ints(1, hidden.device),
                state, grads, dlogits,
            )  # fmt: skip
            products(
                dlogits, rows[first:last], hidden, dh=total, dh_continues=first > begin,
                dw=None if dw is None else dw[first:last],
            )  # fmt: skip
        if total is not None:
            tree.push(total)
    return tree.finished[0][1] if need_hidden else None, dw


def operator():
    """The whole operator with autograd, when nothing traces: it picks between kept and recomputed logits."""
    from rl_kernel.ops.linear_logp import sm90_schedules

    return sm90_schedules.run
