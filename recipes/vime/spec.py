"""``--spec recipes.vime.spec strict_layer_spec``: the strict layer modules for the models vime builds."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any


def strict_layer_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """The layer spec of :mod:`recipes.engines.megatron`, with the run's virtual tensor-parallel size."""
    from recipes.engines.megatron import layer_spec

    # vime sets max_position_embeddings to --seq-length, which variable-length batches may exceed.
    lengths = (args.seq_length, args.rollout_max_context_len, args.rollout_max_response_len)
    return layer_spec(
        config,
        virtual_tp=int(os.environ.get("RL_KERNEL_VIRTUAL_TP", args.tensor_model_parallel_size)),
        rope_theta=args.rotary_base,
        max_positions=max(length or 0 for length in lengths) + args.data_pad_size_multiplier,
    )
