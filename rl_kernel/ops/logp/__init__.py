"""Log-probability, log-sum-exp and entropy of logits: see :mod:`rl_kernel.ops.logp.reference`."""

from rl_kernel.ops.logp.op import LinearLogpOutput, log_softmax, logp

__all__ = ["LinearLogpOutput", "log_softmax", "logp"]
