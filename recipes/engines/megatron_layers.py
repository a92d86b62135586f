"""Megatron-Core modules that compute with ``rl_kernel`` operators, and the layer spec that puts them in place.

Every class keeps the constructor, the parameters, the sharding attributes and the initialisation of the Megatron class
it replaces; only the arithmetic changes. Nothing of Megatron is edited: :func:`strict_block_spec` fills Megatron's own
local layer spec, and :func:`make_strict` exchanges the one module that has no slot in it, the embedding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import rl_kernel
from recipes.engines import megatron_cp
from recipes.errors import ConfigError, EngineError

OPTIONS = "rl_kernel_options"  # attribute of TransformerConfig that carries StrictOptions to the modules


@dataclass(frozen=True)
class StrictOptions:
    """What the strict modules need beyond Megatron's ``TransformerConfig``.

    Attributes:
        segments: virtual tensor-parallel size S of the contract.
        rope_theta: base of the rotary embedding.
        max_positions: rows of the cos/sin table.
        reduce_norm_grads: sum the partial gradients of norm weights over the tensor-parallel group in backward, with
            the fixed tree. False leaves that to Megatron's ``finalize_model_grads``, for loops that call it.
    """

    segments: int
    rope_theta: float
    max_positions: int
    reduce_norm_grads: bool = True


def options_of(config: Any) -> StrictOptions:
    """The options a model was built with.

    Raises:
        EngineError: the configuration carries none.
    """
    found = getattr(config, OPTIONS, None)
    if found is None:
        raise EngineError(
            f"TransformerConfig has no {OPTIONS}",
            where="recipes.engines.megatron_layers",
            fix="Set it to StrictOptions(...) before the model is built.",
        )
    return found


@functools.lru_cache(maxsize=4)
def cos_sin_cache(max_positions: int, dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """The rotary table of the contract, one per process."""
    from rl_kernel.ops.rope import build_cos_sin_cache

    return build_cos_sin_cache(max_positions, dim, theta).to(device)


def position_ids_of(packed: PackedSeqParams, tokens: int) -> torch.Tensor:
    """int64 [tokens]: logical position of every token, computed once per micro-batch and kept on ``packed``."""
    found = getattr(packed, "position_ids", None)
    if found is None:
        cu = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
        starts = torch.repeat_interleave(cu[:-1].long(), (cu[1:] - cu[:-1]).long())
        if starts.numel() != tokens:
            raise EngineError(
                f"cu_seqlens covers {starts.numel()} tokens, the batch has {tokens}", where="packed_seq_params"
            )
        found = torch.arange(tokens, device=cu.device) - starts
        packed.position_ids = found  # type: ignore[attr-defined]
    return found


class _SharedWeight(torch.autograd.Function):
    """A norm weight seen by several independent uses, its gradients merged in the contract's tree.

    Forward: ``count`` copies. Backward: fp32 tree over the copies, then over the ranks of ``group``, one rounding: the
    bits of the gradient depend neither on the tensor-parallel size nor on the run.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, count: int, group: Any) -> tuple[torch.Tensor, ...]:
        ctx.dtype, ctx.group = weight.dtype, group
        return tuple(weight.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = [grad.float() for grad in grads]
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
        return rl_kernel.all_reduce(parts[0], ctx.group, out_dtype=ctx.dtype), None, None


class StrictRMSNorm(torch.nn.Module):
    """``rl_kernel.rms_norm`` with the weight in ``params_dtype``.

    Megatron's torch norm keeps fp32 weights under a bf16 model; that alone changes the bits of every log-probability.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ConfigError(
                f"normalization={config.normalization}, zero-centred gamma={config.layernorm_zero_centered_gamma}",
                where="TransformerConfig",
                fix="The contract has RMSNorm with plain gamma only.",
            )
        self.config, self.eps = config, eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> [..., H]."""
        weight = self.weight
        if self.config.sequence_parallel and options_of(self.config).reduce_norm_grads and torch.is_grad_enabled():
            # Each rank saw its own slice of the tokens.
            (weight,) = _SharedWeight.apply(weight, 1, _tp_group())
        return self._norm(x, weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = rl_kernel.rms_norm(x, weight, self.eps)
        assert isinstance(out, torch.Tensor)  # a pair only with a residual
        return out


class StrictHeadNorm(StrictRMSNorm):
    """The weight of the RMSNorm over head_dim of q or k. :class:`StrictCoreAttention` applies it, in one operator with
    the rotary embedding; a call returns its input. A rank sees its own heads, so the gradient is a partial sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, heads of this rank, head_dim] -> x."""
        return x

    def per_leaf(self) -> tuple[torch.Tensor, ...]:
        """The weight for each of the contract's segments on this rank; one for all of them where that is the same."""
        options = options_of(self.config)
        if not torch.is_grad_enabled() or not options.reduce_norm_grads or options.segments == 1:
            return (self.weight,)
        group = _tp_group()
        return _SharedWeight.apply(self.weight, options.segments // group.size(), group)


def _tp_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _no_bias(layer: torch.nn.Module, **unsupported: bool) -> None:
    named = [name for name, value in {**unsupported, "bias": layer.bias is not None}.items() if value]
    if named:
        raise ConfigError(
            f"{type(layer).__name__} was built with {', '.join(named)}",
            where="layer spec",
            fix="Qwen3 has no linear bias; gathered outputs and experts are not part of the contract.",
        )


class StrictColumnParallelLinear(ColumnParallelLinear):
    """``rl_kernel.column_parallel_linear`` on Megatron's parameter. x [s, b, K] -> [s, b, N / t]."""

    parts = 1  # slices of the output that are sharded separately

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _no_bias(self, gather_output=self.gather_output, is_expert=self.is_expert)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        out = rl_kernel.column_parallel_linear(
            input_,
            self.weight if weight is None else weight,
            grad_segments=options_of(self.config).segments,
            parts=self.parts,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
        )
        return out, None


class StrictFC1(StrictColumnParallelLinear):
    """Gate and up projection: a rank holds ``[gate slice; up slice]``."""

    parts = 2


class StrictRowParallelLinear(RowParallelLinear):
    """``rl_kernel.linear`` in S segments on Megatron's parameter. x [s, b, K / t] -> [s, b, N], whole on every rank, or
    [s / t, b, N] under sequence parallelism."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _no_bias(self, scattered_input=not self.input_is_parallel, is_expert=self.is_expert)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = rl_kernel.linear(
            input_,
            self.weight,
            segments=options_of(self.config).segments,
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
        )
        return out, None


class StrictVocabParallelEmbedding(VocabParallelEmbedding):
    """``rl_kernel.embedding`` on Megatron's parameter. ids [b, s] -> [b, s, H], or [s / t, b, H] when scattered."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        scatter = self.reduce_scatter_embeddings
        return rl_kernel.embedding(
            input_.transpose(0, 1) if scatter else input_,
            self.weight,
            tp_group=self.tp_group,
            vocab_start_index=self.vocab_start_index,
            sequence_parallel=scatter,
        )


class StrictMLP(MLP):
    """Megatron's MLP with ``rl_kernel.swiglu`` between the two projections."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        gate_up, _bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(rl_kernel.swiglu(gate_up))


class StrictSelfAttention(SelfAttention):
    """Megatron's self-attention; the norms of q and k and the rotary embedding belong to
    :class:`StrictCoreAttention`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A tuple, not a submodule: the parameters keep their names.
        self.core_attention.head_norms = (self.q_layernorm, self.k_layernorm)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        kwargs["rotary_pos_emb"] = None
        return super().forward(hidden_states, attention_mask, **kwargs)


class StrictCoreAttention(MegatronModule):
    """Norms of q and k, RoPE by logical position, then causal attention over packed sequences (``thd``).

    query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq * D]. Under context parallelism T counts this rank's tokens,
    and the result has the bits of the run without it (see :mod:`recipes.engines.megatron_cp`).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or (attention_dropout or config.attention_dropout):
            raise ConfigError(
                f"attention_type={attention_type}, dropout={attention_dropout or config.attention_dropout}",
                where="core_attention",
                fix="The contract has causal self-attention without dropout.",
            )
        self.softmax_scale = softmax_scale
        self.head_norms: tuple[StrictHeadNorm, StrictHeadNorm] | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise EngineError(
                "core_attention got an unpacked batch",
                where="StrictCoreAttention",
                fix="Pass packed_seq_params with qkv_format='thd' and cu_seqlens.",
            )
        options = options_of(self.config)
        cp_group = megatron_cp.group_of(packed_seq_params)
        tokens, _heads, dim = query.shape
        table = cos_sin_cache(options.max_positions, dim, options.rope_theta, query.device)
        if cp_group is None:
            positions = position_ids_of(packed_seq_params, tokens)
        else:
            positions = megatron_cp.layout_of(packed_seq_params, cp_group, tokens).positions
        query, key = self._norm_and_turn(query, key, positions, table)
        if cp_group is None:
            padded = packed_seq_params.cu_seqlens_q_padded
            cu = packed_seq_params.cu_seqlens_q if padded is None else padded
            out = rl_kernel.attention_varlen(query, key, value, cu, softmax_scale=self.softmax_scale)
            assert isinstance(out, torch.Tensor)  # a pair only with return_lse
        else:
            out = megatron_cp.attention(query, key, value.contiguous(), packed_seq_params, cp_group, self.softmax_scale)
        return out.reshape(tokens, -1)

    def _norm_and_turn(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.head_norms is None:
            raise EngineError("has no head norms", where="StrictCoreAttention", fix="Build it in StrictSelfAttention.")
        q_norm, k_norm = self.head_norms
        q_weights, k_weights = q_norm.per_leaf(), k_norm.per_leaf()
        count = len(q_weights)
        parts = [
            rl_kernel.qk_norm_rope(q, k, q_weight, k_weight, q_norm.eps, positions, table)
            for q, k, q_weight, k_weight in zip(query.chunk(count, 1), key.chunk(count, 1), q_weights, k_weights)
        ]
        if count == 1:
            return parts[0]
        return torch.cat([q for q, _ in parts], 1), torch.cat([k for _, k in parts], 1)


class ValueHead(torch.nn.Module):
    """Scalar head of a critic: fp32 values [T] from hidden states [T, H]; replicated over the tensor-parallel group."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> fp32 [T]."""
        return rl_kernel.linear(hidden, self.weight, out_dtype=torch.float32).squeeze(-1)


def _layer_spec(config: Any) -> ModuleSpec:
    """Megatron's own local layer spec with the strict modules in its slots."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = StrictRMSNorm
    attention = layer.self_attention
    attention.module = StrictSelfAttention
    attention.submodules.linear_qkv = StrictColumnParallelLinear
    attention.submodules.linear_proj = StrictRowParallelLinear
    attention.submodules.core_attention = StrictCoreAttention
    attention.submodules.q_layernorm = attention.submodules.k_layernorm = StrictHeadNorm
    parts = MLPSubmodules(linear_fc1=StrictFC1, linear_fc2=StrictRowParallelLinear)
    if hasattr(StrictMLP, "as_mlp_submodule"):  # builders replaced ModuleSpec in newer releases
        layer.mlp = functools.partial(StrictMLP.as_mlp_submodule, submodules=parts)
    else:
        layer.mlp = ModuleSpec(module=StrictMLP, submodules=parts)
    return spec


def strict_block_spec(config: Any) -> TransformerBlockSubmodules:
    """Spec of the whole decoder for ``GPTModel``; ``config`` carries :class:`StrictOptions`.

    Raises:
        ConfigError: the model has a part that the contract does not define.
    """
    options = options_of(config)
    tp = config.tensor_model_parallel_size
    problems = {
        "num_moe_experts": config.num_moe_experts is not None,
        "multi_latent_attention": config.multi_latent_attention,
        "add_bias_linear": config.add_bias_linear,
        "add_qkv_bias": config.add_qkv_bias,
        "fp32_residual_connection": config.fp32_residual_connection,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size > 1,
        "hidden_dropout": config.hidden_dropout != 0.0,
        "qk_layernorm=False": not config.qk_layernorm,
        f"num_query_groups={config.num_query_groups} (not a multiple of virtual_tp)": bool(
            config.num_query_groups % options.segments
        ),
        f"virtual_tp={options.segments} (not a multiple of the tensor-parallel size {tp})": bool(options.segments % tp),
    }
    named = [name for name, bad in problems.items() if bad]
    if named:
        raise ConfigError(
            f"not part of the contract: {', '.join(named)}",
            where="TransformerConfig",
            fix="Use a dense Qwen3 model, or consistency=native.",
        )
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config) for _ in range(config.num_layers)], layer_norm=StrictRMSNorm
    )


def layer_spec(config: Any, *, virtual_tp: int, rope_theta: float, max_positions: int) -> TransformerBlockSubmodules:
    """Strict decoder spec for a model that another training loop builds and trains.

    Such a loop calls Megatron's ``finalize_model_grads``, which sums the gradients of norm weights over the
    tensor-parallel group, so the modules leave that to it. Call :func:`make_strict` on the built model.
    """
    setattr(config, OPTIONS, StrictOptions(virtual_tp, float(rope_theta), max_positions, reduce_norm_grads=False))
    return strict_block_spec(config)


def make_strict(model: Any) -> Any:
    """Exchange the embedding of a ``GPTModel`` (it has no slot in the spec) for the strict one; idempotent.

    Raises:
        EngineError: Megatron built something else than ``VocabParallelEmbedding``.
    """
    embedding = model.embedding.word_embeddings
    if type(embedding) is VocabParallelEmbedding:
        embedding.__class__ = StrictVocabParallelEmbedding  # same parameters and attributes, another forward
    elif type(embedding) is not StrictVocabParallelEmbedding:
        raise EngineError(
            f"word_embeddings is a {type(embedding).__name__}",
            where="GPTModel.embedding",
            fix="Build a plain GPTModel.",
        )
    return model
