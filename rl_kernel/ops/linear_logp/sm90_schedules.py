"""Which way linear_logp runs on Hopper: kept or recomputed logits, and the fused policy loss over chunks of tokens.

All of them call the kernels of :mod:`rl_kernel.ops.linear_logp.sm90`; none changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_kernel.errors import ContractError
from rl_kernel.ops.collectives.op import all_reduce
from rl_kernel.ops.linear_logp import sm90
from rl_kernel.ops.logp import shards
from rl_kernel.ops.logp.vocab_tree import VocabLayout
from rl_kernel.registry import resolve

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """Everything but the operands of one call, on one rank."""

    targets: torch.Tensor  # [T] global ids
    temperature: torch.Tensor | None  # [T], None for 1
    layout: VocabLayout
    ignore_index: int
    segments: int
    group: dist.ProcessGroup | None
    accumulate: bool = False  # dW is added to weight.main_grad

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group is not None else 0

    @property
    def columns(self) -> int:
        return self.layout.columns(self.rank)

    @property
    def start(self) -> int:
        return self.layout.borders[self.rank]

    def local_segments(self) -> list[tuple[int, int]]:
        return self.layout.local_segments(self.rank, self.segments)

    def kept_bytes(self, tokens: int) -> int:
        return 2 * tokens * sm90.kept_columns(self.columns)

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
            return stats
        part = slice(first, first + stats.shape[1])
        finish = resolve("logp", out.device, torch.float32).module
        m, values = shards.reduce_rows(
            finish, self.layout, self.group, slots.targets[part], stats, slots.z_target[part]
        )
        here = slots.order[part]
        values = torch.stack([*values[:3], m, values[3]])
        out[:, here] = torch.where(slots.place[here] >= 0, values, 0.0)
        return stats

    def finish_hidden(self, dh: torch.Tensor, slots: sm90.Slots) -> torch.Tensor:
        """fp32 subtrees by slot [T, H] of all ranks to the gradient of the hidden states by row."""
        if self.group is None:
            return sm90.rounded(dh, slots.place)
        total = all_reduce(dh, self.group, out_dtype=slots.hidden.dtype)
        rows = total.index_select(0, slots.place.clamp(min=0).long())
        return torch.where((slots.place >= 0)[:, None], rows, 0.0)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, call: Call) -> Rows:
        # The GPU has nothing to do until the first kernels are launched, so what can come later does.
        total = hidden.shape[0]
        out = torch.empty((5, total), dtype=torch.float32, device=hidden.device)
        ctx.call, ctx.slots, ctx.kept, ctx.stats = call, None, None, None
        ctx.main_grad = _main_grad(weight) if call.accumulate and ctx.needs_input_grad[1] else None
        ctx.parameter = weight if ctx.main_grad is not None else None
        if total:
            slots = call.select(hidden, out)
            if any(ctx.needs_input_grad[:2]) and call.kept_bytes(total) <= sm90.WORKSPACE_BYTES:
                ctx.kept = sm90.new_kept(total, call.columns, hidden.device)
                ctx.stats = call.forward(slots, weight, out, kept=ctx.kept)
            else:  # leaf statistics stay within the workspace
                step = max(256, sm90.WORKSPACE_BYTES // (12 * max(1, call.layout.max_leaves())) // 256 * 256)
                for first in range(0, total, step):
                    call.forward(slots, weight, out, first, step)
            if any(ctx.needs_input_grad[:2]):
                ctx.slots = slots
        output = (out[0], out[1], out[2], out[3], out[4])
        ctx.save_for_backward(weight, *output[2:])
        ctx.mark_non_differentiable(*output[3:])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        weight, entropy, m, log_l = ctx.saved_tensors
        call, slots, (need_hidden, need_weight) = ctx.call, ctx.slots, ctx.needs_input_grad[:2]
        kept, stats, ctx.kept, ctx.stats = ctx.kept, ctx.stats, None, None  # a second backward recomputes
        columns = call.columns
        if slots is None:  # no rows
            dw = torch.zeros_like(weight, memory_format=torch.contiguous_format) if need_weight else None
            return weight.new_zeros((0, weight.shape[1])) if need_hidden else None, dw, None
        main_grad = ctx.main_grad if need_weight else None
        dw = sm90.new_weight_gradient(weight, columns) if need_weight and main_grad is None else None
        target = dw if main_grad is None else main_grad
        target = None if target is None or not columns else target[:columns]
        table = sm90.row_table((m, log_l, entropy), upstream[:3], slots, call.start)
        segments = call.local_segments() if need_hidden or kept is None else []
        common: dict[str, Any] = {"dw_accumulate": main_grad is not None, "active": slots.active}
        if kept is not None:
            sm90.make_gradients(kept, stats, table, slots.active)
            rows = sm90.matrix(weight, "lm_head_weight")[:columns]
            partial = sm90.both_products(slots.hidden, rows, kept, segments, target, **common)
        else:
            partial = sm90.recomputed(
                slots.hidden, weight, slots.temperature, slots.targets, call.start, table, segments, target,
                need_hidden=need_hidden, **common,
            )  # fmt: skip
        if main_grad is not None and hasattr(ctx.parameter, "grad_added_to_main_grad"):
            # Megatron's hooks run when a gradient arrives; with this flag they do not read it.
            ctx.parameter.grad_added_to_main_grad = True
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        return call.finish_hidden(partial, slots) if need_hidden else None, dw, None


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
    call = Call(targets, temperature, layout, ignore_index, segments, group, accumulate)
    return _LinearLogp.apply(hidden, weight, call)


# loss(rows, logp, entropy) -> (sum of the losses of these rows, metrics by name as sums): differentiable torch code.
# rows: index of the tokens, a slice or int64; tokens to ignore are among them and must add zero.
TokenLoss = Callable[[slice | torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def _chunk_rows(call: Call, tokens: int, width: int) -> int:
    """Tokens of one chunk. Chunks need an fp32 copy of the weight's gradient, so one chunk may use its memory, too."""
    leaves = 12 * call.layout.max_leaves()
    row = 2 * sm90.kept_columns(call.columns) + leaves
    if tokens * row <= sm90.WORKSPACE_BYTES + 4 * call.columns * width:
        return tokens
    return max(256, sm90.WORKSPACE_BYTES // row // 256 * 256)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, call: Call, loss: TokenLoss, result: dict) -> Any:
        (tokens, width), device, columns = hidden.shape, hidden.device, call.columns
        out = torch.empty((5, tokens), dtype=torch.float32, device=device)
        value = torch.zeros((), dtype=torch.float32, device=device)
        dw = sm90.new_weight_gradient(weight, columns if tokens else 0)
        if not tokens:
            ctx.save_for_backward(torch.zeros_like(hidden), dw)
            result["logp"] = out[0]
            return value
        slots = call.select(hidden, out)
        matrix = sm90.matrix(weight, "lm_head_weight")[:columns]
        step = _chunk_rows(call, tokens, width)
        chunks = range(0, tokens, step)
        buffer = sm90.new_kept(min(step, tokens), columns, device)
        carry = torch.empty(matrix.shape, dtype=torch.float32, device=device) if len(chunks) > 1 else None
        partials = []
        for first in chunks:
            last = min(first + step, tokens)
            kept = buffer[: last - first]
            stats = call.forward(slots, matrix, out, first, step, kept)
            rows = slice(None) if len(chunks) == 1 else slots.order[first:last]
            leaves = out[0].detach().requires_grad_(), out[2].detach().requires_grad_()
            with torch.enable_grad():
                partial, metrics = loss(rows, leaves[0][rows], leaves[1][rows])
                grad = torch.autograd.grad(partial, leaves, allow_unused=True)
            value = value + partial.detach()
            for name, metric in metrics.items():
                result[name] = result[name] + metric.detach() if name in result else metric.detach()
            table = sm90.row_table((out[3], out[4], out[2]), (grad[0], None, grad[1]), slots, call.start, first, step)
            sm90.make_gradients(kept, stats, table, slots.active, first)
            # The chain of dW over tokens goes on in fp32 until the last chunk.
            target, init = dw[:columns] if last == tokens else carry, carry if first else None
            part = sm90.both_products(
                slots.hidden[first:last], matrix, kept, call.local_segments(), target, init,
                active=slots.active, skipped=first,
            )  # fmt: skip
            assert part is not None  # dH is always asked for here
            partials.append(part)
        dh = call.finish_hidden(partials[0] if len(partials) == 1 else torch.cat(partials), slots)
        ctx.save_for_backward(dh, dw)
        result["logp"] = out[0]
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        return dh * grad.to(dh.dtype), dw * grad.to(dw.dtype), None, None, None


def fused_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    call: Call,
    loss: TokenLoss,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of a batch whose token losses are known inside: (loss, logp [T], metrics), gradients made in the forward.

    6 THV operations and bounded memory: all logits kept as bf16 where that takes no more than
    :data:`sm90.WORKSPACE_BYTES` and an fp32 copy of the weight's gradient; otherwise chunks of tokens within the
    workspace, and that copy: the chain over tokens continues from it, so that chunks change no bit. The result equals
    :func:`run` followed by ``loss`` and backward where ``loss`` treats rows alone; the gradient is scaled by the
    upstream scalar in bf16 (exact for 1 and powers of two).
    """
    if not hidden.requires_grad or not weight.requires_grad:
        raise ContractError("fused_loss: hidden_states and lm_head_weight must both require gradients")
    metrics: dict[str, torch.Tensor] = {}
    value = _FusedLoss.apply(hidden, weight, call, loss, metrics)
    return value, metrics.pop("logp"), metrics
