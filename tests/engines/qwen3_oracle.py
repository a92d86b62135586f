"""Qwen3 written out in rl_kernel operators: what both engines must return, byte for byte.

No engine, no parallelism, no packing of weights: Hugging Face tensors in, log-probabilities out.
"""

from __future__ import annotations

from typing import Any

import torch

import rl_kernel
from recipes.engines.types import IGNORE_INDEX, PackedBatch


def hidden_states(config: Any, weights: dict[str, torch.Tensor], batch: PackedBatch, segments: int) -> torch.Tensor:
    """Final hidden states [T, H]."""
    eps, dim, tokens = config.rms_norm_eps, config.head_dim, batch.num_tokens
    table = rl_kernel.build_cos_sin_cache(config.max_position_embeddings, dim, config.rope_theta)

    def project(x: torch.Tensor, name: str, parts: int = 1) -> torch.Tensor:
        return rl_kernel.column_parallel_linear(x, weights[name], grad_segments=segments, parts=parts)

    hidden = rl_kernel.embedding(batch.tokens, weights["model.embed_tokens.weight"])
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        x = rl_kernel.rms_norm(hidden, weights[layer + "input_layernorm.weight"], eps)
        q, k, v = (project(x, f"{attn}{n}_proj.weight").view(tokens, -1, dim) for n in "qkv")
        q = rl_kernel.rope(rl_kernel.rms_norm(q, weights[attn + "q_norm.weight"], eps), batch.position_ids, table)
        k = rl_kernel.rope(rl_kernel.rms_norm(k, weights[attn + "k_norm.weight"], eps), batch.position_ids, table)
        out = rl_kernel.attention_varlen(q, k, v, batch.cu_seqlens).reshape(tokens, -1)
        x = rl_kernel.linear(out, weights[attn + "o_proj.weight"], segments=segments)
        x, hidden = rl_kernel.rms_norm(x, weights[layer + "post_attention_layernorm.weight"], eps, residual=hidden)
        gate_up = torch.cat([project(x, f"{mlp}{n}_proj.weight") for n in ("gate", "up")], dim=-1)
        down = rl_kernel.linear(rl_kernel.swiglu(gate_up), weights[mlp + "down_proj.weight"], segments=segments)
        hidden = hidden + down
    return rl_kernel.rms_norm(hidden, weights["model.norm.weight"], eps)


def logp(
    config: Any, weights: dict[str, torch.Tensor], batch: PackedBatch, *, segments: int = 1, temperature: float = 1.0
) -> rl_kernel.LinearLogpOutput:
    """logp, lse and entropy of ``batch.target_ids``, fp32 [T]; 0 where the target is ignored."""
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    rows = rl_kernel.padded_vocab_size(config.vocab_size, segments)
    padded = torch.cat([head, head.new_zeros(rows - head.shape[0], head.shape[1])])
    return rl_kernel.linear_logp(
        hidden_states(config, weights, batch, segments),
        padded,
        batch.target_ids,
        global_vocab_size=config.vocab_size,
        temperature=temperature,
        ignore_index=IGNORE_INDEX,
    )
