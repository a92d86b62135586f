"""Log-probability of targets straight from hidden states: see :mod:`rl_kernel.ops.linear_logp.reference`."""

from rl_kernel.ops.linear_logp.op import LinearLogpOutput, linear_logp, lm_head

__all__ = ["LinearLogpOutput", "linear_logp", "lm_head"]
