"""Strict layers, and Megatron's local ones, under the parameter names of Transformer Engine's fused norm + linear.

vime converts weights, in both directions, by the names that its default layers have: the norm in front of a projection
is a parameter of that projection, ``linear_qkv.layer_norm_weight`` and ``linear_fc1.layer_norm_weight``. The arithmetic
is that of :mod:`recipes.engines.megatron_layers`: first ``rl_kernel.rms_norm``, then the projection. The local layers
serve the control on machines without Transformer Engine: torch's RMSNorm, then Megatron's own projection.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import rl_kernel
from recipes.engines.megatron_layers import StrictColumnParallelLinear, StrictFC1


class _NormFirst:
    """RMSNorm of the input [s, b, H] under ``layer_norm_weight``, then the projection of the next class."""

    def __init__(self, input_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, **kwargs)  # type: ignore[call-arg]
        config: Any = self.config  # type: ignore[attr-defined]
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype, device=device))
        weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_weight = weight

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return super().forward(self.norm(input_), *args, **kwargs)  # type: ignore[misc]

    def norm(self, input_: torch.Tensor) -> torch.Tensor:
        epsilon = self.config.layernorm_epsilon  # type: ignore[attr-defined]
        out = rl_kernel.rms_norm(input_, self.layer_norm_weight, epsilon)
        assert isinstance(out, torch.Tensor)
        return out


class StrictNormColumnParallelLinear(_NormFirst, StrictColumnParallelLinear):
    """Input norm and the projection to q, k and v."""


class StrictNormFC1(_NormFirst, StrictFC1):
    """Norm before the MLP, and its gate and up projections."""


class LocalNormColumnParallelLinear(_NormFirst, ColumnParallelLinear):
    """The same pair without a contract: torch's RMSNorm and Megatron's projection."""

    def norm(self, input_: torch.Tensor) -> torch.Tensor:
        weight = self.layer_norm_weight
        return torch.nn.functional.rms_norm(input_, weight.shape, weight, self.config.layernorm_epsilon)


def fused_name(name: str) -> str:
    """vime's name of a parameter that :mod:`recipes.engines.megatron_weights` names after Megatron's local layers."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")


def fuse_norms(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Move the two norms of every layer of a strict block spec into the projections behind them; returns ``block``."""
    for spec in block.layer_specs or []:
        _fuse(spec, StrictNormColumnParallelLinear, StrictNormFC1)
    return block


def fuse_local_norms(spec: ModuleSpec) -> ModuleSpec:
    """The same for the one layer spec of Megatron's local modules."""
    _fuse(spec, LocalNormColumnParallelLinear, LocalNormColumnParallelLinear)
    return spec


def _fuse(spec: ModuleSpec, linear_qkv: type, linear_fc1: type) -> None:
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = linear_qkv
    # Newer releases hold a builder where older ones hold a ModuleSpec.
    mlp = layer.mlp.submodules if hasattr(layer.mlp, "submodules") else layer.mlp.keywords["submodules"]
    mlp.linear_fc1 = linear_fc1
