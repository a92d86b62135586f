"""linear_logp (no logits in memory) and lm_head (the logits), with tensor-parallel vocabulary and autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rl_kernel.errors import ContractError, UnsupportedError
from rl_kernel.ops._operator import Operator, untraced
from rl_kernel.ops.collectives.op import all_reduce, group_name, group_of, group_size
from rl_kernel.ops.linear import column_parallel_linear
from rl_kernel.ops.logp import shards
from rl_kernel.ops.logp.op import LinearLogpOutput
from rl_kernel.ops.logp.vocab_tree import VocabLayout
from rl_kernel.registry import get_mode, resolve

# Forward workspace of a token: 12 bytes a leaf (2.3 % of its logits) and an fp32 copy of its hidden state. Tokens are
# taken in chunks below this.
_FORWARD_BYTES = 64 << 20


def _chunk_rows(layout: VocabLayout, hidden: int) -> int:
    """Tokens of one chunk, the same on every rank."""
    return max(64, _FORWARD_BYTES // (12 * layout.max_leaves() + 4 * hidden))


def _row_backend(backend: str) -> str:
    """Backend of the sums over leaves, a few numbers a row: every backend of a family has the same bits there."""
    return backend if backend in ("reference", "native", "triton", "torch") else "auto"


def _linear_logp_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    borders: list[int],
    global_vocab_size: int,
    ignore_index: int,
    grad_segments: int,
    group: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = VocabLayout(tuple(borders), global_vocab_size)
    process_group = group_of(group) if group else None
    rank = process_group.rank() if process_group else 0
    module = resolve("linear_logp", hidden.device, hidden.dtype, backend).module
    finish = resolve("logp", hidden.device, torch.float32, _row_backend(backend)).module
    total = targets.shape[0]
    rows = shards.active_rows(targets, ignore_index)
    if rows is not None:
        hidden, targets, temperature = (x.index_select(0, rows) for x in (hidden, targets, temperature))
    columns, step = layout.columns(rank), _chunk_rows(layout, hidden.shape[1])
    maxima, outputs = [], []
    for first in range(0, targets.shape[0], step):
        part = slice(first, first + step)
        local = shards.local_targets(targets[part], layout.borders[rank], columns)
        stats, z_target = module.leaf_stats(hidden[part], weight, temperature[part], local, columns)
        m, out = shards.reduce_rows(finish, layout, process_group, targets[part], stats, z_target)
        maxima.append(m)
        outputs.append(out)
    if not outputs:
        return shards.five(None, temperature.new_zeros(4, 0), rows, total)
    return shards.five(torch.cat(maxima), torch.cat(outputs, dim=1), rows, total)


def _linear_logp_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    borders: list[int],
    global_vocab_size: int,
    ignore_index: int,
    grad_segments: int,
    group: str,
    backend: str,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = VocabLayout(tuple(borders), global_vocab_size)
    process_group = group_of(group) if group else None
    rank = process_group.rank() if process_group else 0
    module = resolve("linear_logp", hidden.device, hidden.dtype, backend).module
    segments = layout.local_segments(rank, grad_segments)
    full, rows = hidden, shards.active_rows(targets, ignore_index)
    if rows is not None:
        hidden, targets, temperature = (x.index_select(0, rows) for x in (hidden, targets, temperature))
        state, grads = state[:, rows].contiguous(), grads[:, rows].contiguous()
    dh, dw = hidden.new_zeros(0), weight.new_zeros(0)
    if targets.shape[0] == 0:
        return (
            torch.zeros_like(full) if need_hidden else dh,
            torch.zeros_like(weight, memory_format=torch.contiguous_format) if need_weight else dw,
        )
    local = shards.local_targets(targets, layout.borders[rank], layout.columns(rank))
    partial, own = module.backward(hidden, weight, temperature, local, state, grads, segments, need_hidden, need_weight)
    if need_hidden:
        dh = all_reduce(partial, process_group, out_dtype=full.dtype)
        if rows is not None:
            dh = torch.zeros(full.shape, dtype=full.dtype, device=full.device).index_copy_(0, rows, dh)
    return dh, own if need_weight else dw


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:4], *output[2:])
        ctx.args = inputs[4:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        hidden, weight, targets, temperature, entropy, m, log_l = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        state, upstream = torch.stack([m, log_l, entropy]), shards.upstream(grads[:3], m)
        dh, dw = _linear_logp_backward(hidden, weight, targets, temperature, state, upstream, *ctx.args, *needs)
        return dh if needs[0] else None, dw if needs[1] else None, *(None,) * 8


def _empty_rows(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(targets.shape, dtype=torch.float32, device=hidden.device) for _ in range(5))


def _empty_gradients(hidden: torch.Tensor, weight: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    need_hidden, need_weight = args[-2:]
    return (
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        weight.new_empty(weight.shape if need_weight else (0,)),
    )


_linear_logp = Operator("linear_logp", _linear_logp_rows, _empty_rows, _Gradient)
_linear_logp_backward = Operator("linear_logp_backward", _linear_logp_gradients, _empty_gradients)


def check_operands(name: str, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises :class:`ContractError` where shapes, dtypes or devices of the operands of ``name`` do not fit."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ContractError(
            f"{name}: hidden_states {tuple(hidden.shape)} must be [T, H] and lm_head_weight {tuple(weight.shape)} "
            "[V, H] with the same H"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ContractError(
            f"{name}: hidden_states are {hidden.dtype} and lm_head_weight is {weight.dtype}; both must be bfloat16 or "
            "both float32"
        )
    if hidden.device != weight.device:
        raise ContractError(f"{name}: hidden_states are on {hidden.device}, lm_head_weight is on {weight.device}")


@functools.lru_cache(maxsize=64)
def own_schedules(device: torch.device, dtype: torch.dtype, backend: str, mode: str) -> Callable[..., Any] | None:
    """``run`` of a backend that brings its own schedules, ``None`` for the others (``mode``: the one in force)."""
    module = resolve("linear_logp", device, dtype, backend).module
    return module.operator() if hasattr(module, "operator") else None


def linear_logp(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start_index: int = 0,
    global_vocab_size: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    grad_segments: int | None = None,
    accumulate_main_grad: bool = False,
    backend: str = "auto",
) -> LinearLogpOutput:
    """``logp(lm_head(hidden_states, lm_head_weight), target_ids)``, byte for byte, without the logits in memory.

    Args:
        hidden_states: [T, H] float32 or bfloat16, the same on every rank. Not to be changed in place before backward.
        lm_head_weight: [V_local, H], same dtype: the rows from ``vocab_start_index`` on of the padded vocabulary.
        target_ids: [T] int64 or int32 ids in the global vocabulary, or ``ignore_index``.
        tp_group: ranks that own the vocabulary together, in order of their shards. Collective: all ranks call,
            forward and backward.
        vocab_start_index: first row of this rank, a multiple of 128.
        global_vocab_size: rows from here on are padding and never enter; default: all rows of all ranks.
        temperature: finite and above 0; one for all rows, or [T]. It divides the logits once.
        ignore_index: rows with this target give 0, have zero gradient and are not read.
        grad_segments: S, the segments of the padded vocabulary over which the gradient of ``hidden_states`` is reduced
            (virtual tensor parallelism): a power of two and a multiple of the ranks, the number of ranks by default.
        accumulate_main_grad: add the weight's gradient to ``lm_head_weight.main_grad`` (fp32, not rounded before the
            addition) instead of returning it, and set ``lm_head_weight.grad_added_to_main_grad`` where Megatron-Core
            has put that flag. Backend sm90.
        backend: ``auto`` or the name of one (see :func:`rl_kernel.explain`).

    Returns:
        (logp, lse, entropy), fp32 [T] each; differentiable in both operands through all three. NaN in a row of
        ``hidden_states``, or anywhere in the weight, gives NaN.

    Guarantee: the forward bits of a row depend on that row and the weight alone: not on the number of ranks, the
    borders of their shards, the padding, the other rows or the number of threads. The gradient of ``hidden_states``
    has the same bits for every number of ranks that divides ``grad_segments``; that of the weight for every number of
    ranks.
    Memory: no fp32 [T, V] tensor forward or backward. Workspace on the CPU: 64 MiB forward; backward 64 MiB of dlogits,
    256 rows of the weight and 3 to 6 fp32 tensors of the size of ``hidden_states`` (two orders of it, and one for each
    pending level of the segment tree). On GPUs a forward pass that will be differentiated keeps bf16 values, so that
    its backward pass need not compute them again: with backend sm90 one for each logit if all of them fit
    RLK_WORKSPACE_MIB (512), else those of the first columns that fit it beside what either pass needs (whole blocks of
    16384 columns of a segment, or whole segments; none for a hidden size up to 256); with the others those of the first
    blocks of 16384 columns that fit it (672), and 4 bytes a row for each 128 of these columns. As many forward passes
    as wait for backward hold that. Beside logits that all fit sm90 stays within the same figure. The others hold 64 MiB
    of statistics forward, tiles of fp32 logits of at most 448 MiB (or 1024 columns), in backward also 32 KiB of dlogits
    a row where what was kept is too small for both, and one fp32 tensor of the size of ``hidden_states``, and one more
    for each pending level.

    Raises:
        ContractError: an argument is out of range, or the ranks disagree.
    """
    check_operands("linear_logp", hidden_states, lm_head_weight)
    rows, hidden = hidden_states.shape
    layout = shards.vocab_layout(tp_group, vocab_start_index, lm_head_weight.shape[0], global_vocab_size, rows, hidden)
    segments = layout.ranks if grad_segments is None else grad_segments
    if torch.is_grad_enabled() and (hidden_states.requires_grad or lm_head_weight.requires_grad):
        layout.local_segments(0, segments)  # fail here, not in backward
    targets = shards.check_targets(target_ids, rows, layout.global_vocab_size, ignore_index, hidden_states.device)
    one = isinstance(temperature, float) and temperature == 1.0
    t = None if one else shards.temperature_rows(temperature, rows, hidden_states.device)
    if hidden_states.is_cuda and untraced(hidden_states, lm_head_weight, targets, t):
        run = own_schedules(hidden_states.device, hidden_states.dtype, backend, get_mode())
        if run is not None:
            arguments = (targets, t, layout, ignore_index, segments, tp_group, accumulate_main_grad)
            return LinearLogpOutput(*run(hidden_states, lm_head_weight, *arguments)[:3])
    if accumulate_main_grad:
        raise UnsupportedError("linear_logp: accumulate_main_grad needs backend sm90, outside torch.compile")
    if t is None:
        t = shards.temperature_rows(1.0, rows, hidden_states.device)
    out = _linear_logp(
        hidden_states,
        lm_head_weight,
        targets,
        t,
        list(layout.borders),
        layout.global_vocab_size,
        ignore_index,
        segments,
        group_name(tp_group),
        backend,
    )
    return LinearLogpOutput(*out[:3])


class _RoundGradient(torch.autograd.Function):
    """Identity whose gradient is rounded to ``dtype``: dlogits enter the matrix products in the model's dtype."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.to(ctx.dtype).to(grad.dtype), None


def lm_head(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    grad_segments: int | None = None,
) -> torch.Tensor:
    """Logits ``hidden_states @ lm_head_weight.T`` in fp32, not rounded.

    Args:
        hidden_states: [..., H] float32 or bfloat16.
        lm_head_weight: [V_local, H], same dtype.
        tp_group, grad_segments: for the gradient of ``hidden_states``, as in :func:`linear_logp`.

    Returns:
        [..., V_local] fp32: one dot product over H an element, in the order of the contract.

    Guarantee: a row's bits depend on that row and the weight alone. ``logp(lm_head(h, w), t)`` has the bits of
    ``linear_logp(h, w, t)``, and so have its gradients if the weight is padded to a multiple of 128 * S rows.

    Raises:
        ContractError: shapes or dtypes do not fit.
    """
    segments = group_size(tp_group) if grad_segments is None else grad_segments
    logits = column_parallel_linear(
        hidden_states, lm_head_weight, grad_segments=segments, tp_group=tp_group, out_dtype=torch.float32
    )
    return logits if hidden_states.dtype == torch.float32 else _RoundGradient.apply(logits, hidden_states.dtype)
