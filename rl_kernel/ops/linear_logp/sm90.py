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
  place while it multiplies. 6 THV operations, 2 bytes a logit of memory until backward has run. Taken when that fits
  :data:`WORKSPACE_BYTES`.
* recompute: the forward kernel runs again over chunks of the vocabulary and writes d at once. 8 THV operations,
  workspace within :data:`WORKSPACE_BYTES`. What these chunks need in backward holds e of the first columns until
  then, so that only the others are made again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from rl_kernel.contract import VOCAB_BLOCK, VOCAB_LEAF
from rl_kernel.errors import ContractError, UnsupportedError
from rl_kernel.ops.linear_logp.workspace import workspace_bytes
from rl_kernel.registry import Request

TILE_COLUMNS = 256
SHORT_PRODUCT = 256  # hidden sizes up to this keep all logits or none
_SEPARATE = 1320  # 20 rounds of the 66 clusters of an H100 or H200
WORKSPACE_BYTES = workspace_bytes(512)


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
    if x.stride(1) != 1 or x.stride(0) % 8 or x.stride(0) < x.shape[1] or x.data_ptr() % 16:
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


@dataclass(frozen=True)
class Slots:
    """The rows of a call that take part, moved to the front in order.

    Sizes stay those of all rows: how many take part is known to the GPU alone, and the kernels read it there.

    Attributes:
        ints: [64 + T] int32, longs: [2, T] int64, reals: [10, T] fp32: the memory of what the properties name, and in
            the first eight rows of ``reals`` room for what gradients of logits need.
        hidden: [T, H] by slot; with ``whole`` not written where all rows take part.
        tempered: whether the call has a temperature.
        whole: [T, H] by row, read instead where all rows take part, which saves the copy; None: never.
    """

    ints: torch.Tensor
    longs: torch.Tensor
    reals: torch.Tensor
    hidden: torch.Tensor
    tempered: bool
    whole: torch.Tensor | None = None

    @property
    def active(self) -> torch.Tensor:
        """int32; the first value is the number of rows that take part, the others are zero (counters of launches)."""
        return self.ints[:COUNTERS]

    @property
    def place(self) -> torch.Tensor:
        """[T] int32, the slot of each row, -1 if it does not take part."""
        return self.ints[COUNTERS:]

    @property
    def order(self) -> torch.Tensor:
        """[T] int64, the row of each slot; rows that do not take part come last."""
        return self.longs[0]

    @property
    def targets(self) -> torch.Tensor:
        """[T] int64 by slot."""
        return self.longs[1]

    @property
    def temperature(self) -> torch.Tensor | None:
        """[T] fp32 by slot; ``None`` for 1."""
        return self.reals[8] if self.tempered else None

    @property
    def z_target(self) -> torch.Tensor:
        """[T] fp32 by slot."""
        return self.reals[9]


COUNTERS = 64


def select(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    ignore_index: int,
    out: torch.Tensor,
    absent: float = 0.0,
) -> Slots:
    """Rows whose target is not ``ignore_index``, without waiting for the GPU.

    Args:
        hidden: [T, H] bf16; targets: [T] int64; temperature: [T] fp32 or ``None`` for 1.
        out: [5, T] fp32, set to zero in the rows that do not take part.
        absent: z of rows without a target here.
    """
    tokens, device = hidden.shape[0], hidden.device
    hidden = matrix(hidden, "hidden_states")
    slots = Slots(
        torch.empty(COUNTERS + tokens, dtype=torch.int32, device=device),
        torch.empty((2, tokens), dtype=torch.int64, device=device),
        torch.empty((10, tokens), dtype=torch.float32, device=device),
        torch.empty(hidden.shape, dtype=hidden.dtype, device=device),
        temperature is not None,
    )
    torch.ops.rlk.sm90_prepare(
        hidden, targets.contiguous(), temperature, ignore_index, absent, slots.active, slots.order, slots.targets,
        slots.place, slots.temperature, slots.z_target, slots.hidden, out,
    )  # fmt: skip
    return slots


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    start: int,
    columns: int,
    ignore_index: int,
    absent: float,
    keep: int,
    whole: bool,
) -> tuple[torch.Tensor, Slots, torch.Tensor, torch.Tensor | None]:
    """:func:`select`, :func:`slot_stats` of all rows and, with ``whole``, :func:`merge`, in one operator.

    Returns:
        out [5, T], the slots, leaf statistics [3, T, L], and bf16 exp(z - m_leaf) of the first ``keep`` columns
        [T, :func:`kept_columns`], ``None`` for 0 of them.
    """
    hidden = matrix(hidden, "hidden_states")
    out, ints, longs, reals, picked, stats, kept = torch.ops.rlk.sm90_linear_logp.default(
        hidden, matrix(weight, "lm_head_weight"), targets.contiguous(), temperature, start,
        columns, ignore_index, absent, keep, whole,
    )  # fmt: skip
    return out, Slots(ints, longs, reals, picked, temperature is not None, hidden), stats, kept if keep else None


def gradients(
    weight: torch.Tensor,
    slots: Slots,
    kept: torch.Tensor | None,
    stats: torch.Tensor | None,
    out: torch.Tensor,
    upstream: tuple[torch.Tensor | None, ...],
    start: int,
    columns: int,
    segments: tuple[int, int],
    need_hidden: bool,
    by_row: bool,
    dw: torch.Tensor | None,
) -> torch.Tensor:
    """Gradients with kept or recomputed logits, in one operator.

    Args:
        segments: how many, a power of two, and the columns of each; the last ones may be cut off or empty.
        kept, stats: of :func:`forward`; ``kept`` becomes the gradient of its logits. ``stats``: [3, T, >= its leaves].
            Columns that are not kept are recomputed.
        upstream: (g_logp, g_lse, g_ent) by row, ``None`` for zero.
        dw: bf16, or fp32 to which the gradient is added; rows from ``columns`` on are left alone.

    Returns:
        The gradient of the hidden states: fp32 sums by slot, or with ``by_row`` rounded and by row.
    """
    return torch.ops.rlk.sm90_linear_logp_backward.default(
        matrix(weight, "lm_head_weight"), slots.hidden, slots.whole, kept, stats if kept is not None else None,
        slots.ints, slots.longs, slots.reals, out, *(g if g is None else g.to(torch.float32) for g in upstream), start,
        columns, *segments, slots.tempered, need_hidden, by_row, dw, WORKSPACE_BYTES,
    )  # fmt: skip


def new_stats(tokens: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised leaf statistics (m, s, u) [3, tokens, L] fp32."""
    return torch.empty((3, tokens, -(-columns // VOCAB_LEAF)), dtype=torch.float32, device=device)


def leaf_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    columns: int,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, s, u) of every leaf [3, T, L] fp32, and z of the target [T] (0 where another rank owns it).

    Args:
        hidden: [T, H] bf16.
        weight: [V_local, H] bf16; its first ``columns`` rows are real vocabulary.
        temperature: [T] fp32, or ``None`` for 1.
        targets: [T] int64 local columns, -1 where another rank owns the target.
        kept: from :func:`new_kept` with these sizes; receives bf16 exp(z - m_leaf).
    """
    tokens, device = hidden.shape[0], hidden.device
    stats = new_stats(tokens, columns, device)
    z_target = torch.zeros(tokens, dtype=torch.float32, device=device)
    if tokens and columns:
        torch.ops.rlk.sm90_statistics(
            matrix(hidden, "hidden_states"), matrix(weight, "lm_head_weight")[:columns], targets.contiguous(),
            temperature, 0, columns, None, 0, _ints(1, device), stats, z_target, kept,
        )  # fmt: skip
    return stats, z_target


def slot_stats(
    slots: Slots,
    weight: torch.Tensor,
    start: int,
    columns: int,
    first: int = 0,
    count: int | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Leaf statistics of the slots ``first`` to ``first + count``; z of their targets goes to ``slots.z_target``.

    Args:
        start: global column of the first row of ``weight``.
    """
    part = slice(first, slots.hidden.shape[0] if count is None else min(first + count, slots.hidden.shape[0]))
    hidden = slots.hidden[part]
    stats = new_stats(hidden.shape[0], columns, hidden.device)
    if columns:
        counter = slots.active[1:2] if first == 0 else _ints(1, hidden.device)
        torch.ops.rlk.sm90_statistics(
            hidden, matrix(weight, "lm_head_weight")[:columns], slots.targets[part],
            None if slots.temperature is None else slots.temperature[part], start, columns, slots.active, first,
            counter, stats, slots.z_target[part], kept,
        )  # fmt: skip
    return stats


def merge(slots: Slots, stats: torch.Tensor, out: torch.Tensor, first: int = 0) -> None:
    """(logp, lse, entropy, m, log l) of the slots from ``first`` on, into ``out`` [5, T] (one rank)."""
    part = slice(first, first + stats.shape[1])
    torch.ops.rlk.sm90_merge(stats, slots.z_target[part], slots.active, first, slots.order[part], out)


def make_gradients(
    kept: torch.Tensor,
    stats: torch.Tensor,
    out: torch.Tensor,
    upstream: tuple[torch.Tensor | None, ...],
    slots: Slots,
    start: int,
    first: int = 0,
) -> None:
    """Kept bf16 exp(z - m_leaf) [count, columns] of the slots from ``first`` on becomes d in place; rows after the last
    active one become zero, as far as the product over tokens reads them.

    Args:
        stats: [3, count, L] of :func:`slot_stats`; out: [5, T] of :func:`merge`.
        upstream: (g_logp, g_lse, g_ent) [T] by row, ``None`` for zero.
        start: global column of the first row of the weight.
    """
    if kept.numel():
        part = slice(first, first + kept.shape[0])
        temperature = None if slots.temperature is None else slots.temperature[part]
        torch.ops.rlk.sm90_gradient_(
            kept, stats, slots.targets[part], temperature, start, out,
            *(None if g is None else g.to(torch.float32) for g in upstream), slots.order[part], slots.active, first,
        )  # fmt: skip


def rounded(values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """bf16 of the row ``place[i]`` of fp32 ``values`` [T, H] in row i, zeros where it is -1."""
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    torch.ops.rlk.sm90_place(values, place, out)
    return out


def products(
    dlogits: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    *,
    first: int = 0,
    last: int | None = None,
    dh: torch.Tensor | None = None,
    dw: torch.Tensor | None = None,
    dw_init: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    skipped: int = 0,
) -> None:
    """``dh`` [T, H] fp32 from the columns [first, last) of ``dlogits`` [T, V] and ``weight`` [V, H], and ``dw`` [V, H].

    Args:
        dw: bf16 or fp32.
        dw_init: fp32 [V, H] the chain over tokens continues from (token chunks); the result equals one chain.
        active, skipped: only the first ``active[0] - skipped`` tokens take part.
    """
    tokens, width = hidden.shape
    last = dlogits.shape[1] if last is None else last
    if tokens == 0 or last <= first:
        raise UnsupportedError("products of an empty matrix: the caller fills the result with zeros")
    orders = (tokens + 255) // 256 * ((width + 255) // 256)
    counters = _ints(4 + 4 * orders, hidden.device)

    def launch(counter: torch.Tensor, dh: torch.Tensor | None, dw: torch.Tensor | None) -> None:
        torch.ops.rlk.sm90_backward(
            dlogits, weight, hidden, counter, first, last - first, dh, counters[4:] if dh is not None else None, dw,
            dw_init, active, skipped,
        )  # fmt: skip

    # Few tiles of dH leave processors idle at the end: tiles of dW fill them. Many do not.
    if dh is not None and dw is not None and orders * -(-(last - first) // VOCAB_BLOCK) > _SEPARATE:
        launch(counters[:1], dh, None)
        launch(counters[1:2], None, dw)
    else:
        launch(counters[:1], dh, dw)


def new_weight_gradient(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Uninitialised gradient of ``weight`` in its dtype, zero in the rows from ``columns`` on."""
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if columns < dw.shape[0]:
        dw[columns:].zero_()
    return dw


def both_products(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    dlogits: torch.Tensor,
    segments: list[tuple[int, int]],
    dw: torch.Tensor | None,
    dw_init: torch.Tensor | None,
    active: torch.Tensor,
    skipped: int,
) -> torch.Tensor:
    """fp32 subtree of dH over ``segments``, and ``dw`` (see :func:`products`)."""
    finished: list[tuple[int, torch.Tensor]] = []  # subtrees waiting for their right neighbour, with their sizes
    for begin, end in segments:
        make = torch.empty if end > begin else torch.zeros
        total, size = make(hidden.shape, dtype=torch.float32, device=hidden.device), 1
        if end > begin:  # the first launch makes dW too
            products(
                dlogits, weight, hidden, first=begin, last=end, dh=total, dw=dw, dw_init=dw_init, active=active,
                skipped=skipped,
            )  # fmt: skip
            dw = None
        while finished and finished[-1][0] == size:
            total = finished.pop()[1].add_(total)
            size *= 2
        finished.append((size, total))
    return finished[0][1]


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
        targets: [T] int64 local columns, -1 where another rank owns the target.
        state: (m, log l, entropy) [3, T] of the forward pass; grads: upstream (g_logp, g_lse, g_ent) [3, T].
        segments: ranges of columns that are not padding, a power of two of them: equal ones, the last cut off or empty.
    """
    columns = max((end for _, end in segments), default=0) if hidden.shape[0] else 0
    dw = new_weight_gradient(weight, columns) if need_weight else None
    if not columns:
        return torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if need_hidden else None, dw
    m, log_l, entropy = state
    out = torch.stack((m, m, entropy, m, log_l))  # nothing reads the first two
    slots = select(hidden, targets, temperature, -2, out)  # all of them
    # Neighbours are whole where there is a second one.
    size = segments[0][1] if columns > segments[0][1] else -(-columns // VOCAB_LEAF) * VOCAB_LEAF
    cut = (len(segments), size) if need_hidden and len(segments) > 1 else (1, columns)
    dh = gradients(weight, slots, None, None, out, tuple(grads), 0, columns, cut, need_hidden, False, dw)
    return dh if need_hidden else None, dw


def operator():
    """The whole operator with autograd, when nothing traces: it picks between kept and recomputed logits."""
    from rl_kernel.ops.linear_logp import sm90_schedules

    return sm90_schedules.run
