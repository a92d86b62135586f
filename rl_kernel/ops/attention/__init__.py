"""Causal attention whose rows have the same bits packed, paged, chunked, alone or in a batch."""

from rl_kernel.ops.attention.op import attention_paged, attention_varlen

__all__ = ["attention_paged", "attention_varlen"]
