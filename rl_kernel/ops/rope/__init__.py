"""Rotary position embedding, NeoX halves, with one fp32 table for every engine."""

from rl_kernel.ops.rope.op import build_cos_sin_cache, qk_norm_rope, rope

__all__ = ["build_cos_sin_cache", "qk_norm_rope", "rope"]
