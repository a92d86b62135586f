"""Which way linear_logp runs on Hopper: kept or recomputed logits, and the fused policy loss over chunks of tokens.

All of them call the kernels of :mod:`rl_kernel.ops.linear_logp.sm90`; none changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group is not None else 0

    @property
    def columns(self) -> int:
        return self.layout.columns(self.rank)

    def active(self) -> torch.Tensor | None:
        """Indices of the rows that take part, or None for all of them."""
        if not bool((self.targets == self.ignore_index).any()):
            return None
        return (self.targets != self.ignore_index).nonzero()[:, 0]

    def select(
        self, hidden: torch.Tensor, active: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(hidden, targets, temperature) of the rows that take part."""
        if active is None:
            return hidden, self.targets, self.temperature
        t = self.temperature
        return hidden.index_select(0, active), self.targets[active], None if t is None else t[active]

    def local_targets(self, targets: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return targets  # what is no column of this rank is never met
        return shards.local_targets(targets, self.layout.borders[self.rank], self.columns)

    def local_segments(self) -> list[tuple[int, int]]:
        return self.layout.local_segments(self.rank, self.segments)

    def fits(self, tokens: int) -> bool:
        """Whether the kept logits of ``tokens`` rows are within the workspace."""
        return 2 * tokens * sm90.kept_columns(self.columns) <= sm90.WORKSPACE_BYTES

    def rows(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        kept: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(m [T], (logp, lse, entropy, log l) [4, T], leaf statistics [3, T, L]) of rows that all take part."""
        local = self.local_targets(targets)
        if self.group is None:
            # An id outside the vocabulary has no column here: its logp is NaN.
            stats, z_target = sm90.leaf_stats(hidden, weight, temperature, local, self.columns, kept, torch.nan)
            return *sm90.whole_rows(stats, z_target), stats
        stats, z_target = sm90.leaf_stats(hidden, weight, temperature, local, self.columns, kept)
        finish = resolve("logp", hidden.device, torch.float32).module
        return *shards.reduce_rows(finish, self.layout, self.group, targets, stats, z_target), stats

    def rows_in_chunks(
        self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same without the leaf statistics, which stay within the workspace."""
        step = max(256, sm90.WORKSPACE_BYTES // (12 * max(1, self.layout.max_leaves())) // 256 * 256)
        parts = [
            self.rows(hidden[i : i + step], weight, targets[i : i + step], part_of(temperature, i, i + step))[:2]
            for i in range(0, targets.shape[0], step)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([m for m, _ in parts]), torch.cat([out for _, out in parts], dim=1)


def part_of(values: torch.Tensor | None, first: int, last: int) -> torch.Tensor | None:
    return None if values is None else values[first:last]


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, call: Call) -> Rows:
        # Nothing may run between the look at the targets, for which the CPU waits, and the kernel that does the work.
        total = call.targets.shape[0]
        keep = any(ctx.needs_input_grad[:2]) and call.fits(total)
        kept = sm90.new_kept(total, call.columns, hidden.device) if keep else None
        active = call.active()
        operand, targets, temperature = call.select(hidden, active)
        ctx.call, ctx.active, ctx.kept, ctx.stats = call, active, None, None
        if targets.shape[0] == 0:
            m, out = hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros((4, 0), dtype=torch.float32)
        elif kept is not None:
            ctx.kept = kept[: targets.shape[0]]
            m, out, ctx.stats = call.rows(operand, weight, targets, temperature, ctx.kept)
        else:
            m, out = call.rows_in_chunks(operand, weight, targets, temperature)
        m, out = shards.scatter_rows(m, active, total), shards.scatter_rows(out, active, total)
        output = (out[0], out[1], out[2], m, out[3])
        ctx.save_for_backward(hidden, weight, *output[2:])
        ctx.mark_non_differentiable(*output[3:])
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, entropy, m, log_l = ctx.saved_tensors
        call, active, needs = ctx.call, ctx.active, ctx.needs_input_grad[:2]
        kept, stats, ctx.kept, ctx.stats = ctx.kept, ctx.stats, None, None  # a second backward recomputes
        state, grads = torch.stack([m, log_l, entropy]), shards.upstream(upstream[:3], m)
        operand, targets, temperature = call.select(hidden, active)
        if active is not None:
            state, grads = state[:, active], grads[:, active]
        local = call.local_targets(targets)
        if kept is not None:
            sm90.make_gradients(kept, stats, temperature, local, state, grads)
            dh, dw = sm90.backward_kept(operand, weight, kept, call.local_segments(), *needs)
        else:
            dh, dw = sm90.backward(operand, weight, temperature, local, state, grads, call.local_segments(), *needs)
        if dh is not None:
            dh = all_reduce(dh, call.group, out_dtype=hidden.dtype)
            if active is not None:
                dh = torch.zeros_like(hidden, memory_format=torch.contiguous_format).index_copy_(0, active, dh)
        return dh, dw, None


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    layout: VocabLayout,
    ignore_index: int,
    segments: int,
    group: dist.ProcessGroup | None,
) -> Rows:
    """(logp, lse, entropy, m, log l), [T] each: linear_logp with the schedule that the workspace allows.

    ``temperature``: [T] fp32, or None for 1.
    """
    group = group if group is not None and group.size() > 1 else None
    return _LinearLogp.apply(hidden, weight, Call(targets, temperature, layout, ignore_index, segments, group))


# loss(rows, logp, entropy) -> (sum of the losses of these rows, metrics by name as sums): differentiable torch code.
# rows: indices of the tokens, without those to ignore.
TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, call: Call, loss: TokenLoss, out: dict) -> Any:
        total_rows, device, columns = call.targets.shape[0], hidden.device, call.columns
        active = call.active()
        operand, targets, temperature = call.select(hidden, active)
        operand, matrix = sm90.matrix(operand, "hidden_states"), sm90.matrix(weight, "lm_head_weight")[:columns]
        tokens, stride = targets.shape[0], sm90.kept_columns(columns)
        step = sm90.WORKSPACE_BYTES // (2 * stride + 12 * call.layout.max_leaves())
        step = max(256, min(step // 256 * 256, (tokens + 255) // 256 * 256))
        chunks = range(0, tokens, step)
        buffer = torch.empty(min(step, tokens) * stride, dtype=torch.bfloat16, device=device)
        dh = torch.empty(operand.shape, dtype=hidden.dtype, device=device)
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        dw[columns if tokens else 0 :].zero_()
        carry = torch.empty(matrix.shape, dtype=torch.float32, device=device) if len(chunks) > 1 else None
        value, logp = torch.zeros((), dtype=torch.float32, device=device), torch.empty(tokens, device=device)
        for first in chunks:
            part = slice(first, min(first + step, tokens))
            rows, local = operand[part], call.local_targets(targets[part])
            kept = buffer[: rows.shape[0] * stride].view(-1, stride)[:, :columns]
            m, values, stats = call.rows(rows, matrix, targets[part], part_of(temperature, part.start, part.stop), kept)
            index = torch.arange(part.start, part.stop, device=device) if active is None else active[part]
            leaves = values[[0, 2]].requires_grad_()
            with torch.enable_grad():
                partial, metrics = loss(index, leaves[0], leaves[1])
                (grad,) = torch.autograd.grad(partial, leaves)
            value, logp[part] = value + partial.detach(), values[0]
            for name, metric in metrics.items():
                out[name] = out[name] + metric.detach() if name in out else metric.detach()
            grads = torch.stack([grad[0], torch.zeros_like(grad[0]), grad[1]])
            sm90.make_gradients(
                kept,
                stats,
                part_of(temperature, part.start, part.stop),
                local,
                torch.stack([m, values[3], values[2]]),
                grads,
            )
            # The chain of dW over tokens goes on in fp32 until the last chunk.
            target_dw, init = dw[:columns] if part.stop == tokens else carry, carry if first else None
            dh_part = sm90.both_products(rows, matrix, kept, call.local_segments(), target_dw, init)
            assert dh_part is not None  # dH is always asked for here
            dh[part] = all_reduce(dh_part, call.group, out_dtype=hidden.dtype)
        if active is not None:
            dh = torch.zeros_like(hidden, memory_format=torch.contiguous_format).index_copy_(0, active, dh)
            logp = shards.scatter_rows(logp, active, total_rows)
        ctx.save_for_backward(dh, dw)
        out["logp"] = logp
        return value

    @staticmethod
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

    Chunks of tokens, 6 THV operations, one chunk of kept logits in memory (:data:`sm90.WORKSPACE_BYTES`), and an fp32
    copy of the weight's gradient when there is more than one chunk: the chain over tokens continues from it, so that
    chunks change no bit. The result equals :func:`run` followed by ``loss`` and backward where ``loss`` treats rows
    alone; the gradient is scaled by the upstream scalar in bf16 (exact for 1 and powers of two).
    """
    if not hidden.requires_grad or not weight.requires_grad:
        raise ContractError("fused_loss: hidden_states and lm_head_weight must both require gradients")
    metrics: dict[str, torch.Tensor] = {}
    value = _FusedLoss.apply(hidden, weight, call, loss, metrics)
    return value, metrics.pop("logp"), metrics
