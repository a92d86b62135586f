"""linear_logp of the portable backends outside of tracing: one autograd function around ``tiles.py``.

The bits are those of the registered operator, which tracers see. What it adds: the forward pass keeps what its
backward pass would recompute, as far as the workspace allows (:class:`rl_kernel.ops.linear_logp.tiles.Kept`), and
backward does not wait for the GPU to learn which rows take part: forward has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rl_kernel.errors import UnsupportedError
from rl_kernel.ops.collectives.op import all_reduce
from rl_kernel.ops.linear_logp import tiles
from rl_kernel.ops.linear_logp.call import LogpCall
from rl_kernel.ops.logp import shards
from rl_kernel.ops.logp import triton as finish
from rl_kernel.ops.logp.vocab_tree import VocabLayout

STATS_BYTES = 64 << 20  # leaf statistics, 12 bytes a leaf: tokens are taken in chunks below this
LEAST_ROWS = 64

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Call(LogpCall):
    products: tiles.Products


@dataclass
class _Made:
    """What backward reads of a forward pass, by row that takes part."""

    rows: torch.Tensor | None  # indices of these rows, None for all
    local: torch.Tensor  # targets as local columns
    temperature: torch.Tensor | None  # perhaps the caller's: autograd saves it, and so notices changes
    state: torch.Tensor  # (m, log l, entropy) [3, T]
    kept: tiles.Kept | None


def _forward(hidden: torch.Tensor, weight: torch.Tensor, call: _Call, keep: bool) -> tuple[torch.Tensor, _Made | None]:
    """(logp, lse, entropy) [3, T] of all rows; ``None`` if no row takes part."""
    targets, temperature, layout = call.targets, call.temperature, call.layout
    total, rows = targets.shape[0], shards.active_rows(targets, call.ignore_index)
    if rows is not None:
        hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
        temperature = None if temperature is None else temperature.index_select(0, rows)
    tokens, columns = targets.shape[0], call.columns
    if tokens == 0:
        return torch.zeros((3, total), dtype=torch.float32, device=hidden.device), None
    local = shards.local_targets(targets, call.start, columns)
    kept = tiles.Kept.of(hidden, call.local_segments()) if keep else None
    step = max(LEAST_ROWS, STATS_BYTES // (12 * max(1, layout.max_leaves())))  # the same on every rank
    maxima, outputs = [], []
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        stats, z_target = tiles.leaf_stats(
            call.products,
            hidden[part],
            weight,
            None if temperature is None else temperature[part],
            local[part],
            columns,
            kept,
            first,
        )
        m, out = shards.reduce_rows(finish, layout, call.group, targets[part], stats, z_target)
        maxima.append(m)
        outputs.append(out)
    m = maxima[0] if len(maxima) == 1 else torch.cat(maxima)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    made = _Made(rows, local, temperature, torch.stack([m, out[3], out[2]]), kept) if keep else None
    return shards.scatter_rows(out[:3], rows, total), made


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, call: _Call) -> Any:
        ctx.set_materialize_grads(False)
        out, made = _forward(hidden, weight, call, True)
        ctx.call, ctx.made = call, made
        ctx.save_for_backward(hidden, weight, None if made is None else made.temperature)
        return tuple(x.clone() for x in out)  # views could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, temperature = ctx.saved_tensors
        call, made = ctx.call, ctx.made
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if made is None:
            dw = torch.zeros_like(weight, memory_format=torch.contiguous_format) if need_weight else None
            return torch.zeros_like(hidden) if need_hidden else None, dw, None
        kept, made.kept = made.kept, None  # a second backward recomputes
        full, rows = hidden, made.rows
        upstream = shards.upstream(grads, torch.empty(call.targets.shape, dtype=torch.float32, device=hidden.device))
        if rows is not None:
            hidden, upstream = hidden.index_select(0, rows), upstream[:, rows]
        partial, dw = tiles.backward(
            call.products,
            hidden,
            weight,
            temperature,
            made.local,
            made.state,
            upstream,
            call.local_segments(),
            need_hidden,
            need_weight,
            kept,
        )
        dh = None
        if partial is not None:
            dh = all_reduce(partial, call.group, out_dtype=full.dtype)
            if rows is not None:
                dh = torch.zeros(full.shape, dtype=full.dtype, device=full.device).index_copy_(0, rows, dh)
        return dh, dw, None


def run(
    products: tiles.Products,
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
    """(logp, lse, entropy), [T] each: linear_logp with the products of a backend.

    ``temperature``: [T] fp32, or None for 1. A second backward pass, after one with retain_graph, recomputes what the
    first one has used up; a derivative of gradients is refused by autograd.

    Raises:
        UnsupportedError: ``accumulate``, which needs kernels that add to the buffer of a gradient.
    """
    if accumulate:
        raise UnsupportedError("linear_logp: accumulate_main_grad needs backend sm90, outside torch.compile")
    group = group if group is not None and group.size() > 1 else None
    call = _Call(targets, temperature, layout, ignore_index, segments, group, products)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearLogp.apply(hidden, weight, call)
    with torch.no_grad():
        return _forward(hidden, weight, call, False)[0].unbind(0)  # type: ignore[return-value]
