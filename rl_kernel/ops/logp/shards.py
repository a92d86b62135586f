"""What logp and linear_logp share: argument checks, and the exchange between the ranks that own the vocabulary.

Three exchanges, all of them plain gathers of bytes: the layout (a few integers), the local maxima with the target's
logit, and the values of the maximal aligned subtrees. Everything that is summed is summed locally, in the tree's order.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType

import torch
import torch.distributed as dist

from rl_kernel.errors import ContractError
from rl_kernel.ops._operator import untraced
from rl_kernel.ops.collectives.op import gather_bytes
from rl_kernel.ops.logp.vocab_tree import VocabLayout, whole_vocabulary

# Of groups on accelerators, by (start, size, global_vocab_size, hidden): see vocab_layout.
_layouts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], VocabLayout]] = weakref.WeakKeyDictionary()
_LEAST, _MOST = 2.0**-149, torch.finfo(torch.float32).max  # what float32 holds, subnormals included


def vocab_layout(
    group: dist.ProcessGroup | None, start: int, size: int, global_vocab_size: int | None, rows: int, hidden: int = 0
) -> VocabLayout:
    """Agree with the other ranks on who owns which columns. All ranks raise together.

    Reading the other ranks' sizes from an accelerator waits for all work queued there. So a layout that was agreed on
    is kept for each (group, start, size, global_vocab_size, hidden), if global_vocab_size is given: shards do not move
    while a group lives. Later calls rely on the ranks having equal numbers of rows. On the CPU every call asks.

    Raises:
        ContractError: the shards do not tile the vocabulary, or the ranks disagree on another argument.
    """
    if group is None or group.size() == 1:
        if start != 0:
            raise ContractError(f"vocab_start_index={start} needs tp_group: one rank owns the vocabulary from column 0")
        return whole_vocabulary(size, size if global_vocab_size is None else global_vocab_size)
    header = torch.tensor([start, size, -1 if global_vocab_size is None else global_vocab_size, rows, hidden])
    known: dict[tuple[int, ...], VocabLayout] = {}
    key = (start, size, -1 if global_vocab_size is None else global_vocab_size, hidden)
    if dist.get_backend(group) != "gloo":
        if global_vocab_size is not None:
            known = _layouts.setdefault(group, known)
            if key in known:
                return known[key]
        header = header.cuda()
    table = gather_bytes(header, group).tolist()
    for column, name in ((2, "global_vocab_size"), (3, "number of rows"), (4, "hidden size")):
        values = [row[column] for row in table]
        if len(set(values)) > 1:
            raise ContractError(f"{name} differs between the ranks of tp_group: {values}")
    expected = 0
    for rank, row in enumerate(table):
        if row[0] != expected:
            raise ContractError(
                f"vocab_start_index={row[0]} of rank {rank} must be {expected}, the end of the previous rank's shard; "
                f"shards (start, columns): {[tuple(r[:2]) for r in table]}"
            )
        expected += row[1]
    layout = VocabLayout((*(row[0] for row in table), expected), expected if table[0][2] < 0 else table[0][2])
    known[key] = layout
    return layout


def temperature_rows(temperature: float | torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """``temperature`` as one fp32 value a row.

    Raises:
        ContractError: not above zero, not finite, of the wrong shape, or asking for a gradient.
    """
    if isinstance(temperature, torch.Tensor):
        if temperature.requires_grad:
            raise ContractError("temperature: no gradient is defined; pass temperature.detach()")
        if temperature.dim() > 1 or (temperature.dim() == 1 and temperature.shape[0] != rows):
            raise ContractError(f"temperature: shape {tuple(temperature.shape)} must be () or ({rows},)")
        values = temperature.to(device=device, dtype=torch.float32).expand(rows).contiguous()
        if device.type == "cpu" and rows and not bool(((values > 0) & torch.isfinite(values)).all()):
            bad = int(((values > 0) & torch.isfinite(values)).logical_not().nonzero()[0, 0])
            raise ContractError(f"temperature: row {bad} is {float(values[bad])}; it must be finite and above 0")
        return values
    if not _LEAST <= temperature <= _MOST:
        raise ContractError(f"temperature={temperature} must be finite and above 0, in float32")
    return torch.full((rows,), temperature, dtype=torch.float32, device=device)


def check_targets(
    targets: torch.Tensor, rows: int, global_vocab_size: int, ignore_index: int, device: torch.device
) -> torch.Tensor:
    """``targets`` as int64 [rows].

    Raises:
        ContractError: wrong shape, dtype or device, or (CPU tensors) an id outside the vocabulary that is not
            ignore_index. On an accelerator the check would stop the stream: such a row becomes NaN instead.
    """
    if targets.dtype not in (torch.int64, torch.int32) or targets.shape != (rows,):
        raise ContractError(
            f"target_ids: {targets.dtype} {tuple(targets.shape)} must be int64 or int32 of shape ({rows},)"
        )
    if targets.device != device:
        raise ContractError(f"target_ids are on {targets.device}, what they choose from is on {device}")
    targets = targets.to(torch.int64)
    if targets.device.type == "cpu":
        bad = ((targets < 0) | (targets >= global_vocab_size)) & (targets != ignore_index)
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise ContractError(
                f"target_ids: row {row} is {int(targets[row])}, outside [0, {global_vocab_size}) and not "
                f"ignore_index={ignore_index}"
            )
    return targets


def active_rows(targets: torch.Tensor, ignore_index: int) -> torch.Tensor | None:
    """Indices of the rows that take part, or None for all of them."""
    rows = (targets != ignore_index).nonzero()[:, 0]
    return None if rows.shape[0] == targets.shape[0] else rows


def local_targets(targets: torch.Tensor, start: int, columns: int) -> torch.Tensor:
    """Targets as columns of the local shard; -1 where another rank owns them."""
    local = targets - start
    return torch.where((local >= 0) & (local < columns), local, -1)


@functools.lru_cache(maxsize=64)
def _kept_ends(borders: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(borders[1:], device=device)


def _ends(borders: tuple[int, ...], targets: torch.Tensor) -> torch.Tensor:
    """Where shards end, beside ``targets``. Kept: copying them to an accelerator would wait for it at every call."""
    if untraced(targets):
        return _kept_ends(borders, targets.device)
    return torch.tensor(borders[1:], device=targets.device)


def reduce_rows(
    backend: ModuleType,
    layout: VocabLayout,
    group: dist.ProcessGroup | None,
    targets: torch.Tensor,
    stats: torch.Tensor,
    z_target: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 2 to 4 of the reference across ranks.

    Args:
        targets: [T] global ids.
        stats: [3, T, L] leaf statistics of this rank.
        z_target: [T] z of the target where this rank owns it, else +0.0.

    Returns:
        m [T] and (logp, lse, entropy, log l) [4, T].
    """
    whole = getattr(backend, "whole_rows", None)
    if group is None and whole is not None:
        if targets.device.type != "cpu":  # check_targets leaves ids outside the vocabulary to become NaN here
            z_target = torch.where((targets >= 0) & (targets < layout.global_vocab_size), z_target, torch.nan)
        return whole(stats, z_target)
    m = stats[0].amax(1) if stats.shape[2] else torch.full_like(z_target, -torch.inf)
    rank = 0
    if group is not None:
        rank = group.rank()
        parts = gather_bytes(torch.stack([m, z_target]), group)  # [R, 2, T]
        m = parts[:, 0].amax(0)
        owner = torch.bucketize(targets, _ends(layout.borders, targets), right=True)
        z_target = parts[:, 1].gather(0, owner.clamp(max=layout.ranks - 1)[None])[0]
    inside = (targets >= 0) & (targets < layout.global_vocab_size)
    z_target = torch.where(inside, z_target, torch.nan)
    nodes = backend.tree_nodes(stats, m, layout.local_ranges(rank), layout.max_nodes())
    if group is not None:
        nodes = gather_bytes(nodes, group).flatten(0, 1)  # [R * slots, 2, T]
    return m, backend.finish(nodes, layout.merges(), layout.first_slot(), m, z_target)


def scatter_rows(values: torch.Tensor, rows: torch.Tensor | None, total: int) -> torch.Tensor:
    """values [..., active] -> [..., total] with zeros in the rows that do not take part."""
    if rows is None:
        return values
    out = values.new_zeros(*values.shape[:-1], total)
    out[..., rows] = values
    return out


def five(
    m: torch.Tensor | None, out: torch.Tensor, rows: torch.Tensor | None, total: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp, lse, entropy, m, log l), [total] each, in memory of their own."""
    logp, lse, entropy, log_l = scatter_rows(out, rows, total)
    m = scatter_rows(out[0] if m is None else m, rows, total)
    return logp.clone(), lse.clone(), entropy.clone(), m.clone(), log_l.clone()


def upstream(grads: tuple[torch.Tensor | None, ...], like: torch.Tensor) -> torch.Tensor:
    """(g_logp, g_lse, g_ent) [3, T] f32; an output that nobody used has gradient zero."""
    return torch.stack([torch.zeros_like(like) if g is None else g.to(torch.float32) for g in grads])
