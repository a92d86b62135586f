"""Exact train/rollout mismatch counts of a vime step: ``--rollout-data-postprocess-path recipes.vime.mismatch.record``.

vime calls the hook on every training rank, after log-probabilities and advantages exist and before training. Each
rank counts its own tokens (its samples, its context-parallel rows); counts are summed and maxima taken over the
data- and context-parallel ranks, on tensor-parallel rank 0 only, and the result goes to vime's own W&B run. It is also
appended to ``consistency.jsonl`` in the folder that RL_KERNEL_RUN_DIR names (the launcher sets it): a run without
W&B, or with its log turned down, leaves the same evidence.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

from recipes.errors import EngineError
from recipes.metrics.mismatch import MismatchStats

logger = logging.getLogger(__name__)


def no_correction(
    args: Namespace, *, pg_loss: torch.Tensor, loss_masks: list[torch.Tensor], **_: Any
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """``--custom-tis-function-path``: no importance correction.

    vime recomputes old log-probabilities before training only when mismatch metrics are on, and then wants a
    correction function. Bit-identical engines need none: every ratio is 1.
    """
    return pg_loss, loss_masks, {}


def _positions(total_length: int, response_length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Response positions of this context-parallel rank, in the order of its rows (zig-zag: chunk r, chunk 2c-1-r)."""
    if cp_size == 1:
        return torch.arange(response_length)
    chunk = (total_length + 2 * cp_size - 1) // (2 * cp_size)
    prompt = total_length - response_length
    parts = []
    for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        # Row i predicts token i + 1, so rows prompt-1 .. total-2 carry response positions 0 .. response-1.
        start, stop = max(index * chunk, prompt - 1), min((index + 1) * chunk, total_length - 1)
        parts.append(torch.arange(start, max(start, stop)) - (prompt - 1))
    return torch.cat(parts)


def local_stats(rollout_data: dict[str, Any], cp_size: int, cp_rank: int) -> MismatchStats:
    """Statistics of this rank's rows.

    Raises:
        EngineError: log-probabilities are missing on one side, or rollout ones are the zeros vime puts in for missing
            ones.
    """
    for key, fix in (
        ("rollout_log_probs", "Ask vLLM for logprobs (--rollout-top-p 1 and a vime that stores them)."),
        ("log_probs", "Pass --get-mismatch-metrics, so that they are computed before training."),
    ):
        if not rollout_data.get(key):
            raise EngineError("not in rollout_data", where=key, fix=fix)
    train, rollout, masks, index, position = [], [], [], [], []
    indices = rollout_data.get("sample_indices") or range(len(rollout_data["log_probs"]))
    for i, sample in enumerate(indices):
        total, response = int(rollout_data["total_lengths"][i]), int(rollout_data["response_lengths"][i])
        where = _positions(total, response, cp_size, cp_rank)
        p, q = rollout_data["log_probs"][i], rollout_data["rollout_log_probs"][i]
        if len(p) != len(where) or len(q) != len(where):
            raise EngineError(
                f"sample {sample} has {len(p)} training and {len(q)} rollout log-probabilities for {len(where)} rows",
                where="rollout_data",
                fix="The context-parallel layout of this vime differs from the tested one.",
            )
        mask = rollout_data["loss_masks"][i].detach().to("cpu", torch.bool)[where]
        zeros = int((q.detach().to("cpu")[mask] == 0).sum()) if len(where) else 0
        if response > 1 and zeros == int(mask.sum()) and zeros > 1:
            raise EngineError(
                f"all {zeros} rollout log-probabilities of sample {sample} are 0.0",
                where="rollout_log_probs",
                fix="vLLM returned none and vime filled zeros in; set --vllm-logprobs-mode processed_logprobs.",
            )
        train.append(p.detach().to("cpu", torch.float32))
        rollout.append(q.detach().to("cpu", torch.float32))
        masks.append(mask)
        index.append(torch.full((len(where),), int(sample)))
        position.append(where)
    if not train:
        return MismatchStats()
    return MismatchStats.from_tokens(*(torch.cat(part) for part in (train, rollout, masks, index, position)))


def record(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> dict[str, float | int] | None:
    """The hook. Returns the step's metrics on the logging rank and ``None`` elsewhere.

    Raises:
        EngineError: as in :func:`local_stats`; or, with ``RL_KERNEL_MODE=strict``, a log-probability differs. On every
            rank at once, so that the job stops instead of hanging.
    """
    from megatron.core import mpu

    stats, problem = MismatchStats(), None
    try:
        stats = local_stats(rollout_data, mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank())
    except EngineError as error:  # the other ranks wait in the gather below: tell them
        problem = error
    group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, (stats, problem), group=group)
    for _, found in parts:
        if found is not None:
            raise found
    merged = MismatchStats.merge_all(part for part, _ in parts)
    metrics = None
    if mpu.get_tensor_model_parallel_rank() == 0 and dist.get_rank(group) == 0:
        metrics = merged.metrics()
        _log(args, rollout_id, metrics)
    if os.environ.get("RL_KERNEL_MODE", "strict") == "strict" and merged.mismatch_count:
        sample, position = merged.first
        raise EngineError(
            f"{merged.mismatch_count} of {merged.active_tokens} log-probabilities differ in rollout {rollout_id}",
            where=f"sample {sample}, response position {position}",
            fix="Check that both engines log the same contract fingerprint; consistency=audit reports and goes on.",
        )
    return metrics


def _log(args: Namespace, rollout_id: int, metrics: dict[str, float | int]) -> None:
    from vime.utils import logging_utils
    from vime.utils.metric_utils import compute_rollout_step

    logger.info("consistency %d: %s", rollout_id, metrics)
    append(rollout_id, metrics)
    if getattr(args, "use_wandb", False):
        _define_metrics()
    logging_utils.log(
        args, {**metrics, "rollout/step": compute_rollout_step(args, rollout_id)}, step_key="rollout/step"
    )


@functools.cache
def _define_metrics() -> None:
    """Plot the counts over rollouts, as vime does with its own names."""
    import wandb

    wandb.define_metric("consistency/*", step_metric="rollout/step")


def append(rollout_id: int, metrics: dict[str, float | int]) -> None:
    """One line of ``$RL_KERNEL_RUN_DIR/consistency.jsonl``; nothing without the variable.

    A folder that cannot be written is a warning: an error on this rank alone would leave the others waiting.
    """
    folder = os.environ.get("RL_KERNEL_RUN_DIR")
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "consistency.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"rollout": rollout_id, **metrics}) + "\n")
    except OSError as error:
        logger.warning("RL_KERNEL_RUN_DIR=%s: consistency.jsonl cannot be written: %s", folder, error)
