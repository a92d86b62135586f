"""A Qwen3 ``GPTModel``, strict or stock, and what a log-probability needs out of it.

Strict: the decoder's hidden states and the LM head's weight go into ``rl_kernel.linear_logp``; logits never exist.
Stock (``consistency=native``): :mod:`recipes.engines.megatron_native`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import rl_kernel
from recipes.engines import megatron_cpu
from recipes.engines.types import IGNORE_INDEX, PackedBatch
from recipes.errors import ConfigError, EngineError
from rl_kernel.contract import padded_vocab_size

ROLES = ("policy", "reference", "critic")


@dataclass(frozen=True)
class LMHead:
    """The output projection of a ``GPTModel`` on this rank.

    Attributes:
        weight: [padded_vocab_size / t, H], tied or not.
        tp_group: tensor-parallel group.
        vocab_start_index: global column of the first row.
        global_vocab_size: columns that exist; the rest is padding and never enters a log-probability.
        padded_vocab_size: columns over all ranks.
        grad_segments: virtual tensor-parallel size S of a strict model; None for a stock one.
    """

    weight: torch.Tensor
    tp_group: Any
    vocab_start_index: int
    global_vocab_size: int
    padded_vocab_size: int
    grad_segments: int | None = None


def unwrap(model: Any) -> Any:
    """The ``GPTModel`` inside DDP and mixed-precision wrappers."""
    while hasattr(model, "module") and not hasattr(model, "output_layer"):
        model = model.module
    return model


def lm_head_of(model: Any, *, global_vocab_size: int | None = None) -> LMHead:
    """The LM head of ``model`` (wrapped or not).

    Args:
        global_vocab_size: the vocabulary without padding; ``model.global_vocab_size`` when absent.

    Raises:
        EngineError: this rank holds no LM head (a critic, or another pipeline stage), or the size is not known.
    """
    model = unwrap(model)
    layer = getattr(model, "output_layer", None)
    if layer is None or not hasattr(layer, "output_size_per_partition"):
        raise EngineError(
            f"the output layer is {type(layer).__name__}, not an LM head",
            where="lm_head_of",
            fix="Use the policy or reference model of the last pipeline stage.",
        )
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else layer.weight
    group, rows = layer.tp_group, layer.output_size_per_partition
    vocab = global_vocab_size or getattr(model, "global_vocab_size", None)
    padded = rows * group.size()
    if vocab is None or vocab > padded or weight.shape[0] != rows:
        raise EngineError(
            f"global_vocab_size={vocab}, padded {padded}, weight {list(weight.shape)}",
            where="lm_head_of",
            fix="Pass the vocabulary size of the model's config.json.",
        )
    from recipes.engines.megatron_layers import OPTIONS

    options = getattr(model.config, OPTIONS, None)
    return LMHead(weight, group, rows * group.rank(), vocab, padded, options.segments if options else None)


def transformer_config(model: Any, train: Any, *, segments: int, strict: bool, on_cpu: bool) -> Any:
    """Megatron's ``TransformerConfig`` of a Qwen3 ``model`` (``recipes.config.ModelConfig``).

    Raises:
        ConfigError: a setting that this device or the strict path cannot serve.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    if train.recompute and on_cpu:
        raise ConfigError(
            "activation recomputation saves CUDA generator states", where="train.recompute", fix="Turn it off."
        )
    dtype, layers = getattr(torch, model.dtype), model.num_hidden_layers
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=train.tensor_parallel_size,
        context_parallel_size=train.context_parallel_size,
        sequence_parallel=train.sequence_parallel and train.tensor_parallel_size > 1,
        use_cpu_initialization=on_cpu,
        # The loss is divided by the token count of the whole step, so data-parallel ranks add their gradients.
        calculate_per_token_loss=True,
        # What needs extensions (Apex, Transformer Engine) is off. Stock SwiGLU is compiled by torch on GPUs, as in a
        # user's run; the strict modules bring their own.
        bias_activation_fusion=not strict and not on_cpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=False,  # its assertions concern Transformer Engine, which is not used here
        recompute_granularity="full" if train.recompute else None,
        recompute_method="block" if train.recompute else None,  # layer by layer, the first so many layers
        recompute_num_layers=min(train.recompute_layers or layers, layers) if train.recompute else None,
    )
    if strict:
        from recipes.engines.megatron_layers import OPTIONS, StrictOptions

        options = StrictOptions(segments, float(model.rope_theta), model.max_position_embeddings)
        setattr(config, OPTIONS, options)
    elif config.sequence_parallel or config.context_parallel_size > 1:
        raise ConfigError(
            "Megatron's local modules have neither sequence nor context parallelism",
            where="consistency.mode",
            fix="Use train.sequence_parallel=false and train.context_parallel_size=1 with consistency=native.",
        )
    return config


def build(model_config: Any, train: Any, *, segments: int, strict: bool, role: str, device: torch.device) -> Any:
    """A ``GPTModel`` on ``device`` with unspecified weights (load some before use).

    ``role`` critic: the output layer is a scalar head, ``model.output_layer`` a :class:`ValueHead`.

    Raises:
        ConfigError: see :func:`transformer_config` and ``strict_block_spec``.
    """
    from megatron.core.models.gpt import GPTModel

    if role not in ROLES:
        raise ConfigError(f"{role!r} is not a role", where="role", fix=f"Use one of {', '.join(ROLES)}.")
    on_cpu = device.type == "cpu"
    config = transformer_config(model_config, train, segments=segments, strict=strict, on_cpu=on_cpu)
    if strict:
        from recipes.engines.megatron_layers import make_strict, strict_block_spec

        spec: Any = strict_block_spec(config)
    else:
        from recipes.engines.megatron_native import native_spec

        spec = native_spec(on_cpu)
    critic = role == "critic"
    with megatron_cpu.scope():
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocab_size(model_config.vocab_size, segments),
            max_sequence_length=model_config.max_position_embeddings,
            # The strict core attention applies RoPE itself, from the contract's table.
            position_embedding_type="none" if strict else "rope",
            rotary_base=int(model_config.rope_theta),
            # A critic needs no LM head; "shared" is Megatron's way of not allocating one.
            share_embeddings_and_output_weights=critic or model_config.tie_word_embeddings,
            parallel_output=True,
        )
    model.global_vocab_size = model_config.vocab_size
    if strict:
        make_strict(model)
    elif not on_cpu:
        from recipes.engines.megatron_native import PackedRotary

        model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb)
    if critic:
        from recipes.engines.megatron_layers import ValueHead

        model.share_embeddings_and_output_weights = False
        model.output_layer = ValueHead(config)
    # Stock norms are created in fp32; Megatron's mixed-precision wrapper casts them just so.
    model.to(device=device, dtype=config.params_dtype)
    return model


def hidden_states(model: Any, packed: PackedBatch) -> torch.Tensor:
    """Final hidden states [T, H] of a strict model, whole on every rank of the tensor-parallel group.

    T counts this rank's tokens: all of the batch, or its context-parallel share.
    """
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    longest = packed.max_seqlen
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    ids, positions = packed.tokens, packed.position_ids
    if model.config.context_parallel_size > 1:
        from recipes.engines import megatron_cp

        group = megatron_cp.group_of(params)
        local = megatron_cp.layout_of(params, group, ids.numel() // group.size()).tokens
        ids, positions = ids[local], positions[local]
    params.position_ids = positions  # type: ignore[attr-defined]
    hidden = decoder_output(model, ids[None], positions[None], params)
    if model.config.sequence_parallel:
        # linear_logp returns the whole gradient on every rank, so the backward of this gather takes a slice of it.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden.reshape(-1, hidden.shape[-1])


def decoder_output(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, params: Any, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """What the output layer of ``model`` would receive, [S, B, H], for ``ids`` and ``positions`` [B, S]."""
    if "output_processor" in inspect.signature(type(model).forward).parameters:
        return model(ids, positions, mask, packed_seq_params=params, output_processor=_take_hidden)
    model.post_process = False  # older releases: the model then returns what the output layer would have received
    try:
        return model(ids, positions, mask, packed_seq_params=params)
    finally:
        model.post_process = True


def _take_hidden(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    return hidden_states


def strict_logp(model: Any, packed: PackedBatch, temperature: float) -> rl_kernel.LinearLogpOutput:
    """logp, lse and entropy, fp32 [T]; 0 where the target is ignored."""
    hidden, head = hidden_states(model, packed), lm_head_of(model)
    return rl_kernel.linear_logp(
        hidden,
        head.weight,
        local_rows(model, packed, packed.target_ids),
        tp_group=head.tp_group,
        vocab_start_index=head.vocab_start_index,
        global_vocab_size=head.global_vocab_size,
        temperature=temperature,
        ignore_index=IGNORE_INDEX,
        grad_segments=head.grad_segments,
    )


def local_rows(model: Any, packed: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """The elements of ``values`` [T] that this context-parallel rank holds, in its order."""
    if model.config.context_parallel_size == 1:
        return values
    from megatron.core import parallel_state

    from recipes.engines import megatron_cp

    group = parallel_state.get_context_parallel_group()
    return values[megatron_cp.build_layout(packed.cu_seqlens, group.rank(), group.size()).tokens]


def strict_values(model: Any, packed: PackedBatch) -> torch.Tensor:
    """Values of a critic, fp32 [T]."""
    return model.output_layer(hidden_states(model, packed))
