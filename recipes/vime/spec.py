"""``--spec recipes.vime.spec NAME``: layer modules for the models vime builds.

``strict_layer_spec`` is the strict arm's. ``local_layer_spec``, with ``--transformer-impl local``, is for the control
(``consistency=native``) on a machine without Transformer Engine, whose layers vime would use otherwise.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any


def strict_layer_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """The layer spec of :mod:`recipes.engines.megatron` under the parameter names that vime's weight conversion knows,
    with the run's virtual tensor-parallel size. vime's checkpoint converter may build its model with it too."""
    from recipes.engines.megatron import layer_spec
    from recipes.vime.layers import fuse_norms

    # vime sets max_position_embeddings to --seq-length, which variable-length batches may exceed.
    names = ("seq_length", "rollout_max_context_len", "rollout_max_response_len")
    block = layer_spec(
        config,
        virtual_tp=int(os.environ.get("RL_KERNEL_VIRTUAL_TP", args.tensor_model_parallel_size)),
        rope_theta=args.rotary_base,
        max_positions=max(getattr(args, name, None) or 0 for name in names)
        + getattr(args, "data_pad_size_multiplier", 0),
    )
    return fuse_norms(block)


def local_layer_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's local layers with torch's FlashAttention on the pack, under the parameter names that vime converts."""
    from recipes.engines.megatron_native import native_spec
    from recipes.vime.layers import fuse_local_norms

    return fuse_local_norms(native_spec(on_cpu=False))
