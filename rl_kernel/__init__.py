"""Operators whose bits are fixed by a contract, for RL post-training.

The same call returns the same bits in a rollout engine and in a training engine: see :mod:`rl_kernel.contract`.
"""

from __future__ import annotations

from rl_kernel.contract import contract_for, fingerprint, padded_vocab_size, require_equal
from rl_kernel.errors import ContractError, RLKernelError, UnsupportedError
from rl_kernel.ops.attention import attention_paged, attention_varlen
from rl_kernel.ops.collectives import all_gather, all_reduce, copy_to_group, reduce_scatter
from rl_kernel.ops.embedding import embedding
from rl_kernel.ops.linear import column_parallel_linear, linear
from rl_kernel.ops.linear_logp import linear_logp, lm_head
from rl_kernel.ops.logp import LinearLogpOutput, log_softmax, logp
from rl_kernel.ops.rms_norm import rms_norm
from rl_kernel.ops.rope import build_cos_sin_cache, qk_norm_rope, rope
from rl_kernel.ops.sampling import SampleOutput, draw, sample, uniforms
from rl_kernel.ops.swiglu import swiglu
from rl_kernel.registry import explain, get_mode, set_mode

__all__ = [
    "ContractError",
    "LinearLogpOutput",
    "RLKernelError",
    "SampleOutput",
    "UnsupportedError",
    "all_gather",
    "all_reduce",
    "attention_paged",
    "attention_varlen",
    "build_cos_sin_cache",
    "column_parallel_linear",
    "contract_for",
    "copy_to_group",
    "draw",
    "embedding",
    "explain",
    "fingerprint",
    "get_mode",
    "linear",
    "linear_logp",
    "lm_head",
    "log_softmax",
    "logp",
    "padded_vocab_size",
    "qk_norm_rope",
    "reduce_scatter",
    "require_equal",
    "rms_norm",
    "rope",
    "sample",
    "set_mode",
    "swiglu",
    "uniforms",
]
__version__ = "0.1.0"
