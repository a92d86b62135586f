"""What the vLLM tests share: tiny models, random weights, and Qwen3 written with rl_kernel's public operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import rl_kernel
from recipes.config import ConsistencyConfig, ModelConfig, RolloutConfig
from recipes.engines.types import PackedBatch, Sample
from recipes.engines.vllm import VllmEngine

VOCAB = 200  # not a multiple of 64 or 128: both sides pad it
SEGMENTS = 2


def tiny_model(dtype: str, tied: bool) -> ModelConfig:
    return ModelConfig(
        dtype=dtype,
        tie_word_embeddings=tied,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )


def start(model: ModelConfig, mode: str = "strict", **rollout: object) -> VllmEngine:
    sizes = {"max_prompt_len": 160, "max_response_len": 64, "kv_cache_bytes": 8 << 20, "max_num_seqs": 16}
    return VllmEngine(
        model, RolloutConfig(**{**sizes, **rollout}), ConsistencyConfig(mode=mode, virtual_tp=SEGMENTS), seed=0
    )


def random_weights(tensors: dict[str, tuple[tuple[int, ...], str]], seed: int) -> dict[str, torch.Tensor]:
    """N(0, 0.02), with norms around 1 and a head that spreads the distribution a little."""
    generator = torch.Generator().manual_seed(seed)
    scale = {"embed_tokens": 0.05, "lm_head": 0.1}
    weights = {}
    for name in sorted(tensors):
        shape, dtype = tensors[name]
        value = torch.randn(shape, generator=generator)
        value = 1 + 0.2 * value if "norm" in name else value * scale.get(name.split(".")[-2], 0.02)
        weights[name] = value.to(getattr(torch, dtype))
    return weights


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def forward_logp(
    model: ModelConfig, weights: dict[str, torch.Tensor], samples: Sequence[Sample], temperature: float
) -> list[np.ndarray]:
    """Log-probabilities of the sampled tokens: one packed pass over all samples, as a trainer would make it."""
    from rl_kernel.ops.rope import build_cos_sin_cache

    batch = PackedBatch.from_samples(samples)
    heads, kv_heads, dim, eps = model.num_attention_heads, model.num_key_value_heads, model.head_dim, model.rms_norm_eps
    cache = build_cos_sin_cache(model.max_position_embeddings, dim, model.rope_theta)
    count = batch.num_tokens

    def column(x: torch.Tensor, layer: str, *names: str) -> torch.Tensor:
        return rl_kernel.linear(x, torch.cat([weights[f"{layer}.{name}.weight"] for name in names]))

    def row(x: torch.Tensor, name: str) -> torch.Tensor:
        return rl_kernel.linear(x, weights[f"{name}.weight"], segments=SEGMENTS)

    hidden = rl_kernel.embedding(batch.tokens, weights["model.embed_tokens.weight"])
    residual = None
    for index in range(model.num_hidden_layers):
        layer = f"model.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        if residual is None:
            residual = hidden
            x = rl_kernel.rms_norm(hidden, weights[f"{layer}.input_layernorm.weight"], eps)
        else:
            x, residual = rl_kernel.rms_norm(hidden, weights[f"{layer}.input_layernorm.weight"], eps, residual)
        qkv = column(x, attention, "q_proj", "k_proj", "v_proj")
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        q = rl_kernel.rms_norm(q.reshape(count, heads, dim), weights[f"{attention}.q_norm.weight"], eps)
        k = rl_kernel.rms_norm(k.reshape(count, kv_heads, dim), weights[f"{attention}.k_norm.weight"], eps)
        q = rl_kernel.rope(q, batch.position_ids, cache)
        k = rl_kernel.rope(k, batch.position_ids, cache)
        out = rl_kernel.attention_varlen(q, k, v.reshape(count, kv_heads, dim), batch.cu_seqlens)
        hidden = row(out.reshape(count, heads * dim), f"{attention}.o_proj")
        x, residual = rl_kernel.rms_norm(hidden, weights[f"{layer}.post_attention_layernorm.weight"], eps, residual)
        hidden = row(rl_kernel.swiglu(column(x, mlp, "gate_proj", "up_proj")), f"{mlp}.down_proj")
    hidden, _ = rl_kernel.rms_norm(hidden, weights["model.norm.weight"], eps, residual)
    head = weights["model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"]
    logits = rl_kernel.lm_head(hidden, head)
    logp = rl_kernel.logp(logits, batch.target_ids, temperature=temperature).logp.numpy()
    starts = batch.cu_seqlens.tolist()
    return [logp[starts[i] + len(s.prompt_ids) - 1 : starts[i] + s.num_tokens - 1] for i, s in enumerate(samples)]


def mismatches(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> int:
    """Number of float32 values whose bit patterns differ."""
    assert [x.shape for x in a] == [x.shape for x in b]
    return sum(int((x.view(np.int32) != y.view(np.int32)).sum()) for x, y in zip(a, b, strict=True))


def different(a: Sequence[Sample], b: Sequence[Sample]) -> int:
    """Samples whose tokens or log-probability bits differ."""
    return sum(
        x.response_ids != y.response_ids or x.rollout_logp.tobytes() != y.rollout_logp.tobytes()
        for x, y in zip(a, b, strict=True)
    )
