"""Which way linear_logp runs on Hopper: kept or recomputed logits or some of both, and the fused policy loss.

All of them call the kernels of :mod:`rl_kernel.ops.linear_logp.sm90`; none changes a bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_kernel.contract import VOCAB_BLOCK, VOCAB_LEAF
from rl_kernel.errors import ContractError
from rl_kernel.ops.collectives.op import all_reduce
from rl_kernel.ops.linear_logp import sm90
from rl_kernel.ops.linear_logp.call import LogpCall
from rl_kernel.ops.linear_logp.policy import divisor
from rl_kernel.ops.logp import shards
from rl_kernel.ops.logp.vocab_tree import VocabLayout, blocks
from rl_kernel.registry import resolve

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Call(LogpCall):
    """One call, and its steps on Hopper."""

    @property
    def most_columns(self) -> int:
        """Of any rank. It chooses schedules, not :attr:`columns`: ranks with other chunks would not meet."""
        return max(self.layout.columns(rank) for rank in range(self.layout.ranks))

    def kept_bytes(self, tokens: int) -> int:
        """At most, on any rank."""
        return 2 * tokens * sm90.kept_columns(self.most_columns)

    def columns_to_keep(self, tokens: int, width: int) -> int:
        """Local columns of which logits are kept: all where they fit the workspace, else those of the first chunk that
        backward has to hold in any case, beside a copy of the hidden states, in forward the statistics of all leaves
        and in backward the fp32 gradient of the hidden states."""
        if self.kept_bytes(tokens) <= sm90.WORKSPACE_BYTES:
            return self.columns
        if width <= sm90.SHORT_PRODUCT:
            return 0
        memory = sm90.WORKSPACE_BYTES - 2 * tokens * width
        fit = (memory - tokens * max(4 * width, 12 * self.layout.max_leaves())) // (tokens * (2 + 12 / VOCAB_LEAF))
        ends = (end for _, end in blocks(self.local_segments(), VOCAB_BLOCK))
        whole = (end for end in ends if end <= fit and (end % sm90.TILE_COLUMNS == 0 or end == self.columns))
        return max(whole, default=0)

    def select(self, hidden: torch.Tensor, out: torch.Tensor) -> sm90.Slots:
        """The rows that take part. An id outside the vocabulary has no column anywhere: its logp is NaN."""
        absent = torch.nan if self.group is None else 0.0
        return sm90.select(hidden, self.targets, self.temperature, self.ignore_index, out, absent)

    def forward(
        self,
        slots: sm90.Slots,
        weight: torch.Tensor,
        out: torch.Tensor,
        first: int = 0,
        count: int | None = None,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(logp, lse, entropy, m, log l) of the slots from ``first`` on into ``out`` [5, T], and their statistics."""
        stats = sm90.slot_stats(slots, weight, self.start, self.columns, first, count, kept)
        if self.group is None:
            sm90.merge(slots, stats, out, first)
        else:
            self.reduce(slots, stats, out, first)
        return stats

    def reduce(self, slots: sm90.Slots, stats: torch.Tensor, out: torch.Tensor, first: int = 0) -> None:
        """The statistics of all ranks to (logp, lse, entropy, m, log l) of the slots from ``first`` on."""
        part = slice(first, first + stats.shape[1])
        finish = resolve("logp", out.device, torch.float32).module
        m, values = shards.reduce_rows(
            finish, self.layout, self.group, slots.targets[part], stats, slots.z_target[part]
        )
        here = slots.order[part]
        values = torch.stack([*values[:3], m, values[3]])
        out[:, here] = torch.where(slots.place[here] >= 0, values, 0.0)

    def forward_all(
        self, hidden: torch.Tensor, weight: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, sm90.Slots, torch.Tensor, torch.Tensor | None]:
        """:meth:`select` and :meth:`forward` of all rows: out [5, T], slots, statistics, logits of ``keep`` columns."""
        absent = torch.nan if self.group is None else 0.0
        out, slots, stats, kept = sm90.forward(
            hidden, weight, self.targets, self.temperature, self.start, self.columns, self.ignore_index, absent, keep,
            self.group is None,
        )  # fmt: skip
        if self.group is not None:
            self.reduce(slots, stats, out)
        return out, slots, stats, kept

    def finish_hidden(self, dh: torch.Tensor, slots: sm90.Slots) -> torch.Tensor:
        """fp32 subtrees by slot [T, H] of all ranks to the gradient of the hidden states by row."""
        if self.group is None:
            return sm90.rounded(dh, slots.place)
        total = all_reduce(dh, self.group, out_dtype=slots.hidden.dtype)
        rows = total.index_select(0, slots.place.clamp(min=0).long())
        return torch.where((slots.place >= 0)[:, None], rows, 0.0)

    def gradients(
        self,
        weight: torch.Tensor,
        slots: sm90.Slots,
        kept: torch.Tensor | None,
        stats: torch.Tensor | None,
        out: torch.Tensor,
        upstream: tuple[torch.Tensor | None, ...],
        need_hidden: bool,
        dw: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Gradient of the hidden states by row, and that of the weight into ``dw``, or added to it if that is fp32."""
        columns = self.columns
        if not columns:
            zeros = torch.zeros(slots.hidden.shape, dtype=torch.float32, device=out.device)
            return self.finish_hidden(zeros, slots) if need_hidden else None
        segments = (
            (len(self.local_segments()), self.layout.segment_columns(self.segments)) if need_hidden else (1, columns)
        )
        dh = sm90.gradients(
            weight,
            slots,
            kept,
            stats,
            out,
            upstream,
            self.start,
            columns,
            segments,
            need_hidden,
            self.group is None,
            dw,
        )
        if not need_hidden:
            return None
        return dh if self.group is None else self.finish_hidden(dh, slots)


@dataclass
class _Made:
    """What a forward pass has made: results, and what its backward pass reads."""

    out: torch.Tensor  # [5, T]
    slots: sm90.Slots | None = None  # None without rows
    stats: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def _forward(hidden: torch.Tensor, weight: torch.Tensor, call: Call, keep: bool) -> _Made:
    total, width = hidden.shape
    if not total:
        return _Made(torch.empty((5, 0), dtype=torch.float32, device=hidden.device))
    leaves = 12 * max(1, call.layout.max_leaves())  # bytes of a row's leaf statistics, which stay within the workspace
    if (keep and call.kept_bytes(total) <= sm90.WORKSPACE_BYTES) or total * leaves <= sm90.WORKSPACE_BYTES:
        columns = call.columns_to_keep(total, width) if keep else 0
        out, slots, stats, kept = call.forward_all(hidden, weight, columns)
        if kept is None:
            return _Made(out, slots)
        if columns < call.columns:
            stats = stats[:, :, : -(-columns // VOCAB_LEAF)].contiguous()
        return _Made(out, slots, stats, kept)
    out = torch.empty((5, total), dtype=torch.float32, device=hidden.device)
    slots = call.select(hidden, out)
    step = max(256, sm90.WORKSPACE_BYTES // leaves // 256 * 256)
    for first in range(0, total, step):
        call.forward(slots, weight, out, first, step)
    return _Made(out, slots)


class _LinearLogp(torch.autograd.Function):
    """Puts what :func:`_forward` has made into the graph: the GPU is at work before autograd looks at the operands."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, call: Call, made: _Made, main_grad: torch.Tensor | None
    ) -> Rows:
        ctx.set_materialize_grads(False)  # an output that nobody used has no gradient, rather than zeros to read
        ctx.call, ctx.kept, ctx.stats = call, made.kept, made.stats
        ctx.slots = made.slots and replace(made.slots, whole=None)
        saved = hidden if made.slots and made.slots.whole is not None else None
        if saved is not None and saved.is_inference():  # of a frozen model: autograd keeps no such tensor
            saved = saved.clone()
        ctx.main_grad = main_grad
        ctx.parameter = weight if main_grad is not None else None
        output: Any = made.out.unbind(0)
        ctx.save_for_backward(weight, made.out, saved)  # autograd notices when they change
        ctx.mark_non_differentiable(*output[3:])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        weight, out, hidden = ctx.saved_tensors
        call, slots, (need_hidden, need_weight) = ctx.call, ctx.slots, ctx.needs_input_grad[:2]
        kept, stats, ctx.kept, ctx.stats = ctx.kept, ctx.stats, None, None  # a second backward recomputes
        if slots is None:  # no rows
            dw, flagged = None, hasattr(ctx.parameter, "grad_added_to_main_grad")
            if need_weight and (ctx.main_grad is None or flagged):
                dw = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            if flagged:
                ctx.parameter.grad_added_to_main_grad = True
            return weight.new_zeros((0, weight.shape[1])) if need_hidden else None, dw, None, None, None
        if hidden is not None:
            slots = replace(slots, whole=sm90.matrix(hidden, "hidden_states"))
        main_grad = ctx.main_grad if need_weight else None
        dw = sm90.new_weight_gradient(weight, call.columns) if need_weight and main_grad is None else None
        target = dw if main_grad is None else main_grad
        dh = call.gradients(weight, slots, kept, stats, out, upstream[:3], need_hidden, target)
        if main_grad is not None and hasattr(ctx.parameter, "grad_added_to_main_grad"):
            # Megatron's hooks run when a gradient arrives; with this flag they do not read it.
            ctx.parameter.grad_added_to_main_grad = True
            # They read it all the same where another gradient of a tied weight follows (zero_out_wgrad).
            read = getattr(ctx.parameter, "zero_out_wgrad", False)
            dw = (torch.zeros_like if read else torch.empty_like)(weight, memory_format=torch.contiguous_format)
        return dh, dw, None, None, None


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    """The fp32 buffer into which Megatron sums the gradient of ``weight``."""
    found = getattr(weight, "main_grad", None)
    if found is None:
        raise ContractError("accumulate_main_grad: lm_head_weight has no main_grad; wrap the model in Megatron's DDP")
    if found.dtype != torch.float32 or found.shape != weight.shape or not found.is_contiguous():
        raise ContractError(
            f"accumulate_main_grad: main_grad {found.dtype} {tuple(found.shape)} must be contiguous float32 of shape "
            f"{tuple(weight.shape)}"
        )
    if found.device != weight.device or found.data_ptr() % 8:
        raise ContractError(
            f"accumulate_main_grad: main_grad on {found.device} must be on {weight.device} and start at a multiple of "
            "8 bytes; an odd number of values lies in front of it in Megatron's buffer"
        )
    return found


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    layout: VocabLayout,
    ignore_index: int,
    segments: int,
    group: dist.ProcessGroup | None,
    accumulate: bool = False,
) -> Rows:
    """(logp, lse, entropy, m, log l), [T] each: linear_logp with the schedule that the workspace allows.

    ``temperature``: [T] fp32, or None for 1. ``accumulate``: add the weight's gradient to ``weight.main_grad``.
    """
    group = group if group is not None and group.size() > 1 else None
    call = Call(targets, temperature, layout, ignore_index, segments, group)
    needs = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    main_grad = _main_grad(weight) if needs and accumulate and weight.requires_grad else None
    with torch.no_grad():
        made = _forward(hidden, weight, call, needs)
    if not needs:
        return made.out.unbind(0)  # type: ignore[return-value]
    return _LinearLogp.apply(hidden, weight, call, made, main_grad)


# Numbers of rows up to this are exact in fp32, and sums of as many ones in whatever order.
_COUNTED = 2**24

# loss(rows, logp, entropy) -> (sum of the losses of these rows, metrics by name as sums): differentiable torch code.
# rows: index of the tokens, a slice or int64; tokens to ignore are among them and must add zero.
TokenLoss = Callable[[slice | torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class ClippedLoss:
    """The loss of :func:`~rl_kernel.ops.linear_logp.policy.linear_policy_loss` and its gradients in one kernel.

    The same operations on each token as the torch code there, in the same order: no gradient differs in a bit. The loss
    and the metrics are sums in an order of the kernel's own, which depends on the number of tokens alone.
    """

    old_logp: torch.Tensor  # [T] fp32
    advantages: torch.Tensor  # [T] fp32
    mask: torch.Tensor | None  # [T] fp32
    normalizer: torch.Tensor | float | None  # tensor: fp32 scalar on the GPU; None: the sum of the weights
    clip: tuple[float, float]
    entropy_weight: float

    @staticmethod
    def of(
        old_logp: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor | None,
        normalizer: float | torch.Tensor | None,
        clip: tuple[float, float],
        entropy_weight: float,
        device: torch.device,
    ) -> ClippedLoss | None:
        """``None`` where torch has to do it: other dtypes or devices, or inputs that want gradients."""
        tensors = [x for x in (old_logp, advantages, mask, normalizer) if isinstance(x, torch.Tensor)]
        served = all(x.dtype == torch.float32 and x.device == device and not x.requires_grad for x in tensors)
        if not served or os.environ.get("RLK_SM90_TOKEN_LOSS") == "0":
            return None
        if isinstance(normalizer, torch.Tensor):
            if normalizer.dim():
                return None
        elif normalizer is not None:
            normalizer = float(normalizer)
        return ClippedLoss(old_logp, advantages, mask, normalizer, clip, entropy_weight)

    def __call__(
        self, out: torch.Tensor, slots: sm90.Slots, call: Call, result: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What :func:`_loss_gradients` returns for all rows of ``out`` [5, T]."""
        targets, normalizer = call.targets.contiguous(), self.normalizer
        weights = None if self.mask is None else self.mask.contiguous()
        if normalizer is None and (weights is not None or len(targets) > _COUNTED):
            # Gradients depend on the order of this sum: it is torch's on every path.
            weights = torch.ops.rlk.sm90_token_weights.default(targets, call.ignore_index, weights)
            normalizer = divisor(weights)
        by = (normalizer, None) if isinstance(normalizer, torch.Tensor) else (None, normalizer)
        value, by_logp, by_entropy, metrics = torch.ops.rlk.sm90_token_loss.default(
            out, slots.ints, targets, call.ignore_index, self.old_logp.contiguous(), self.advantages.contiguous(),
            weights, *by, *self.clip, self.entropy_weight,
        )  # fmt: skip
        result.update(zip(("tokens", "clipped", "ratio", "k1_kl", "entropy"), metrics.unbind(), strict=True))
        return value, by_logp, by_entropy if self.entropy_weight else None


def _chunk_rows(call: Call, tokens: int, width: int) -> int:
    """Tokens of one chunk, the same on every rank.

    Chunks need an fp32 copy of the weight's gradient, so that one chunk may use its memory, too.
    """
    leaves = 12 * call.layout.max_leaves()
    row = 2 * sm90.kept_columns(call.most_columns) + leaves
    if tokens * row <= sm90.WORKSPACE_BYTES + 4 * call.most_columns * width:
        return tokens
    return max(256, sm90.WORKSPACE_BYTES // row // 256 * 256)


def _loss_gradients(
    out: torch.Tensor, rows: slice | torch.Tensor, loss: TokenLoss, result: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss of ``rows`` and its gradients by logp and entropy [T]; adds the metrics to ``result``."""
    leaves = out[0].detach().requires_grad_(), out[2].detach().requires_grad_()
    with torch.enable_grad():
        value, metrics = loss(rows, leaves[0][rows], leaves[1][rows])
        by_logp, by_entropy = torch.autograd.grad(value, leaves, allow_unused=True)
    for name, metric in metrics.items():
        result[name] = result[name] + metric.detach() if name in result else metric.detach()
    return value.detach(), by_logp, by_entropy


@dataclass
class _Loss:
    """What :func:`_fused` has made."""

    value: torch.Tensor
    logp: torch.Tensor  # [T]
    dh: torch.Tensor
    dw: torch.Tensor


def _fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    call: Call,
    loss: TokenLoss,
    once: ClippedLoss | None,
    result: dict[str, torch.Tensor],
) -> _Loss:
    (tokens, width), device, columns = hidden.shape, hidden.device, call.columns
    if not tokens:
        out, dw = torch.empty((5, 0), dtype=torch.float32, device=device), sm90.new_weight_gradient(weight, 0)
        dh = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        return _Loss(_loss_gradients(out, slice(None), loss, result)[0], out[0], dh, dw)
    step = _chunk_rows(call, tokens, width)
    if step >= tokens:
        out, slots, stats, whole = call.forward_all(hidden, weight, columns)
        grads = once(out, slots, call, result) if once is not None else _loss_gradients(out, slice(None), loss, result)
        dw = sm90.new_weight_gradient(weight, columns)
        by_hidden = call.gradients(weight, slots, whole, stats, out, (grads[1], None, grads[2]), True, dw)
        assert by_hidden is not None  # asked for
        return _Loss(grads[0], out[0], by_hidden, dw)
    out = torch.empty((5, tokens), dtype=torch.float32, device=device)
    slots = call.select(hidden, out)
    dw = sm90.new_weight_gradient(weight, columns)
    matrix = sm90.matrix(weight, "lm_head_weight")[:columns]
    buffer = sm90.new_kept(min(step, tokens), columns, device)
    carry = torch.empty(matrix.shape, dtype=torch.float32, device=device)
    value, partials = torch.zeros((), dtype=torch.float32, device=device), []
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        kept = buffer[: last - first]
        stats = call.forward(slots, matrix, out, first, step, kept)
        partial, *grad = _loss_gradients(out, slots.order[first:last], loss, result)
        value = value + partial
        sm90.make_gradients(kept, stats, out, (grad[0], None, grad[1]), slots, call.start, first)
        # The chain of dW over tokens goes on in fp32 until the last chunk.
        target, init = dw[:columns] if last == tokens else carry, carry if first else None
        part = sm90.both_products(
            slots.hidden[first:last], matrix, kept, call.local_segments(), target, init, slots.active, first
        )
        partials.append(part)
    return _Loss(value, out[0], call.finish_hidden(torch.cat(partials), slots), dw)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, made: _Loss) -> Any:
        ctx.gradients = made.dh, made.dw
        return made.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise ContractError(
                "linear_policy_loss: a second backward; its gradients were given away by the first one. Call it again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        torch.ops.rlk.sm90_scale_.default(*gradients, grad.to(torch.float32))
        return *gradients, None


def fused_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    call: Call,
    loss: TokenLoss,
    once: ClippedLoss | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of a batch whose token losses are known inside: (loss, logp [T], metrics), gradients made in the forward.

    6 THV operations and bounded memory: all logits kept as bf16 where that takes no more than
    :data:`sm90.WORKSPACE_BYTES` and an fp32 copy of the weight's gradient; otherwise chunks of tokens within the
    workspace, and that copy: the chain over tokens continues from it, so that chunks change no bit. The result equals
    :func:`run` followed by ``loss`` and backward where ``loss`` treats rows alone; the gradient is scaled by the
    upstream scalar in bf16 (exact for 1 and powers of two). ``once`` is ``loss`` in one kernel, used where all tokens
    are one chunk; it adds losses and metrics in another order.
    """
    if not hidden.requires_grad or not weight.requires_grad:
        raise ContractError("fused_loss: hidden_states and lm_head_weight must both require gradients")
    metrics: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        made = _fused(hidden, weight, call, loss, once, metrics)
    return _FusedLoss.apply(hidden, weight, made), made.logp, metrics
