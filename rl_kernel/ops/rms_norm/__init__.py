"""RMSNorm over the last dimension, with an optional residual sum before it."""

from rl_kernel.ops.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
