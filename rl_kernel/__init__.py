"""Operators whose bits are fixed by a contract, for RL post-training.

The same call returns the same bits in a rollout engine and in a training engine: see :mod:`rl_kernel.contract`.
"""

from __future__ import annotations

from rl_kernel.contract import contract_for, fingerprint, padded_vocab_size, require_equal
from rl_kernel.errors import ContractError, RLKernelError, UnsupportedError
from rl_kernel.ops.collectives import all_gather, all_reduce, copy_to_group, reduce_scatter
from rl_kernel.ops.logp import LinearLogpOutput, log_softmax, logp
from rl_kernel.registry import explain, get_mode, set_mode

__all__ = [
    "LinearLogpOutput",
    "ContractError",
    "RLKernelError",
    "UnsupportedError",
    "all_gather",
    "all_reduce",
    "contract_for",
    "copy_to_group",
    "explain",
    "fingerprint",
    "get_mode",
    "log_softmax",
    "logp",
    "padded_vocab_size",
    "reduce_scatter",
    "require_equal",
    "set_mode",
]
__version__ = "0.1.0"
