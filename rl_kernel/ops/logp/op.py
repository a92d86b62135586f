"""logp and log_softmax of fp32 logits, with tensor-parallel vocabulary and autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import Operator
from rl_kernel.ops.collectives.op import group_name, group_of
from rl_kernel.ops.logp import shards
from rl_kernel.ops.logp.vocab_tree import VocabLayout
from rl_kernel.registry import resolve


class LinearLogpOutput(NamedTuple):
    """fp32 [T] each: log-probability of the target, log-sum-exp of the tempered logits, entropy in nats."""

    logp: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor


def _logp_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    borders: list[int],
    global_vocab_size: int,
    ignore_index: int,
    group: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    layout = VocabLayout(tuple(borders), global_vocab_size)
    process_group = group_of(group) if group else None
    rank = process_group.rank() if process_group else 0
    module = resolve("logp", logits.device, logits.dtype, backend).module
    total = targets.shape[0]
    rows = shards.active_rows(targets, ignore_index)
    if rows is not None:
        logits, targets, temperature = (x.index_select(0, rows) for x in (logits, targets, temperature))
    if targets.shape[0] == 0:
        return shards.five(None, logits.new_zeros(4, 0), rows, total)
    columns = layout.columns(rank)
    local = shards.local_targets(targets, layout.borders[rank], columns)
    stats = module.leaf_stats(logits, temperature, columns)
    z_target = module.target_logits(logits, temperature, local)
    m, out = shards.reduce_rows(module, layout, process_group, targets, stats, z_target)
    return shards.five(m, out, rows, total)


def _logp_dlogits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    start: int,
    columns: int,
    ignore_index: int,
    backend: str,
) -> torch.Tensor:
    module = resolve("logp", logits.device, logits.dtype, backend).module
    rows = shards.active_rows(targets, ignore_index)
    if rows is None:
        local = shards.local_targets(targets, start, columns)
        return module.dlogits(logits, temperature, local, state, grads, columns)
    out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    local = shards.local_targets(targets[rows], start, columns)
    part = module.dlogits(
        logits[rows], temperature[rows], local, state[:, rows].contiguous(), grads[:, rows].contiguous(), columns
    )
    out[rows] = part
    return out


class _Gradient:
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        logits, targets, temperature, borders, global_vocab_size, ctx.ignore_index, group, ctx.backend = inputs
        ctx.save_for_backward(logits, targets, temperature, *output[2:])
        rank = group_of(group).rank() if group else 0
        ctx.start = borders[rank]
        ctx.columns = VocabLayout(tuple(borders), global_vocab_size).columns(rank)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        logits, targets, temperature, entropy, m, log_l = ctx.saved_tensors
        state, upstream = torch.stack([m, log_l, entropy]), shards.upstream(grads[:3], m)
        args = (ctx.start, ctx.columns, ctx.ignore_index, ctx.backend)
        return _logp_backward(logits, targets, temperature, state, upstream, *args), *(None,) * 7


def _log_softmax_rows(
    logits: torch.Tensor, temperature: torch.Tensor, global_vocab_size: int, backend: str
) -> torch.Tensor:
    if logits.shape[0] == 0:
        return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    module = resolve("logp", logits.device, logits.dtype, backend).module
    layout = VocabLayout((0, logits.shape[1]), global_vocab_size)
    stats = module.leaf_stats(logits, temperature, layout.columns(0))
    zero = torch.zeros_like(temperature)
    m, out = shards.reduce_rows(module, layout, None, zero.to(torch.int64), stats, zero)
    return module.log_softmax(logits, temperature, torch.stack([m, out[3]]), layout.columns(0))


def _empty_rows(logits: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(5))


def _empty_logits(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


_logp = Operator("logp", _logp_rows, _empty_rows, _Gradient)
_logp_backward = Operator("logp_backward", _logp_dlogits, _empty_logits)
_log_softmax = Operator("log_softmax", _log_softmax_rows, _empty_logits)


def _check_logits(name: str, logits: torch.Tensor) -> torch.Tensor:
    if logits.dim() != 2 or not logits.is_floating_point() or logits.dtype == torch.float64:
        raise ContractError(
            f"{name}: logits {logits.dtype} {tuple(logits.shape)} must be [T, V] in float32 (or narrower, which is "
            "widened exactly)"
        )
    return logits.to(torch.float32)


def logp(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start_index: int = 0,
    global_vocab_size: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    backend: str = "auto",
) -> LinearLogpOutput:
    """Log-probability of each row's target, lse and entropy of ``softmax(logits / temperature)``.

    Args:
        logits: [T, V_local] fp32, the columns from ``vocab_start_index`` on of the global vocabulary.
        target_ids: [T] int64 or int32 ids in the global vocabulary, or ``ignore_index``.
        tp_group: ranks that own the vocabulary together, in order of their shards. Collective: all ranks call.
        vocab_start_index: first global column of this rank, a multiple of 128.
        global_vocab_size: columns from here on are padding and never enter; default: all columns of all ranks.
        temperature: finite and above 0; one for all rows, or [T].
        ignore_index: rows with this target give 0, have zero gradient and are not read.
        backend: ``auto`` or the name of one (see :func:`rl_kernel.explain`).

    Returns:
        (logp, lse, entropy), fp32 [T] each; differentiable in ``logits`` through all three. NaN in a row gives NaN.

    Guarantee: a row's bits depend on that row alone, and not on the number of ranks, the borders of their shards, the
    padding, the other rows or the number of threads. :func:`rl_kernel.linear_logp` returns the same bits.

    Raises:
        ContractError: an argument is out of range, or the ranks disagree.
    """
    logits = _check_logits("logp", logits)
    layout = shards.vocab_layout(tp_group, vocab_start_index, logits.shape[1], global_vocab_size, logits.shape[0])
    targets = shards.check_targets(target_ids, logits.shape[0], layout.global_vocab_size, ignore_index, logits.device)
    t = shards.temperature_rows(temperature, logits.shape[0], logits.device)
    out = _logp(
        logits,
        targets,
        t,
        list(layout.borders),
        layout.global_vocab_size,
        ignore_index,
        group_name(tp_group),
        backend,
    )
    return LinearLogpOutput(*out[:3])


def log_softmax(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    global_vocab_size: int | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Log-probabilities of every column, fp32 [T, V]: column ``t`` has the bits of ``logp(logits, t)``.

    For samplers, which need the distribution. Columns from ``global_vocab_size`` on are -inf. No gradient.
    Arguments and errors as for :func:`logp`.
    """
    logits = _check_logits("log_softmax", logits.detach())
    layout = shards.vocab_layout(None, 0, logits.shape[1], global_vocab_size, logits.shape[0])
    t = shards.temperature_rows(temperature, logits.shape[0], logits.device)
    return _log_softmax(logits, t, layout.global_vocab_size, backend)
