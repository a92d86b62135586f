"""The loss of one micro-batch, as a function of what the training engine computed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from recipes.algorithms import grpo, ppo
from recipes.algorithms.common import Metrics
from recipes.batching import MicroBatch
from recipes.config import RunConfig
from recipes.engines.types import PackedBatch

Loss = Callable[..., tuple[torch.Tensor, Metrics]]


def make_loss(role: str, batch: MicroBatch, config: RunConfig, rows: torch.Tensor | None = None) -> Loss:
    """What ``forward_backward`` of a training engine wants: policy ``(logp, entropy, packed)``, critic
    ``(values, packed)`` -> (loss, metrics), float32 [T] each; under context parallelism [T_local], of the positions
    ``rows`` of the pack.

    Losses and metrics of micro-batches and of data- and context-parallel ranks add up to the minibatch's: a token's
    weight counts the tokens of the whole minibatch, so it does not matter who holds which. See
    ``recipes.algorithms.common``.
    """
    columns, mask = batch.columns, batch.packed.active
    if rows is not None:
        columns, mask = {name: column[rows] for name, column in columns.items()}, mask[rows]

    def policy(logp: torch.Tensor, entropy: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, Metrics]:
        c = {k: v.to(logp.device) for k, v in columns.items()}
        return grpo.loss(
            logp,
            c["old_logp"],
            c.get("ref_logp"),
            c["advantages"],
            mask.to(logp.device),
            entropy=entropy,
            weight=c["weight"],
            config=config.algorithm,
        )

    def critic(values: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, Metrics]:
        c = {k: v.to(values.device) for k, v in columns.items()}
        return ppo.value_loss(
            values,
            c["values"],
            c["returns"],
            mask.to(values.device),
            weight=c["weight"],
            clip=config.algorithm.value_clip,
        )

    return critic if role == "critic" else policy
