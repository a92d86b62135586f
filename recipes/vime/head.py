"""Hidden states instead of logits out of Megatron's ``GPTModel``, without touching its class.

The policy's ``output_layer`` is a ``ColumnParallelLinear``; its ``forward`` is replaced on the instance by one that
returns the hidden states it was given. vime then carries them, as "logits" of width H, to the log-probability function.
A critic's output layer (vime's ``LinearForLastLayer``) is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes.engines.megatron_layers import OPTIONS, make_strict
from recipes.engines.megatron_model import LMHead, lm_head_of, unwrap
from recipes.errors import EngineError

_MARK = "_rl_kernel_hidden_states"
_current: LMHead | None = None


def attach(models: Sequence[torch.nn.Module], global_vocab_size: int) -> int:
    """Make every policy model of ``models`` return hidden states; returns how many were changed. Idempotent.

    The embedding, which has no slot in Megatron's layer spec, is exchanged for the strict one here as well.

    Raises:
        EngineError: pipeline parallelism splits the model, so that the head is not on this rank.
    """
    changed = 0
    for wrapped in models:
        model = unwrap(wrapped)
        layer = getattr(model, "output_layer", None)
        if layer is None:
            raise EngineError(
                "the model on this rank has no output_layer",
                where="--pipeline-model-parallel-size",
                fix="Use 1; split the model with tensor and context parallelism instead.",
            )
        if hasattr(model.config, OPTIONS):
            make_strict(model)
        if getattr(layer, _MARK, False) or not hasattr(layer, "output_size_per_partition"):
            continue  # already attached, or a critic's scalar head
        _wrap(model, layer, global_vocab_size)
        changed += 1
    return changed


def _wrap(model: torch.nn.Module, layer: Any, global_vocab_size: int) -> None:
    from megatron.core import tensor_parallel

    def forward(
        input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        global _current
        if layer.sequence_parallel:
            # linear_logp returns the whole dH on every rank, so the backward of this gather only takes its slice.
            input_ = tensor_parallel.gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False)
        _current = lm_head_of(model, global_vocab_size=global_vocab_size)
        return input_, None

    layer.forward = forward
    setattr(layer, _MARK, True)


def current() -> LMHead:
    """The LM head of the model whose forward ran last.

    Raises:
        EngineError: no attached model has run, so what vime calls logits really are logits.
    """
    if _current is None:
        raise EngineError(
            "no hidden states were captured",
            where="recipes.vime.head",
            fix="Pass --custom-megatron-before-log-prob-hook-path recipes.vime.init.before_log_prob and "
            "--custom-megatron-before-train-step-hook-path recipes.vime.init.before_train_step to vime.",
        )
    return _current
