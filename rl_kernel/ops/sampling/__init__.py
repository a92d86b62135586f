"""Temperature sampling with the log-probability of the sampled token: see :mod:`rl_kernel.ops.sampling.reference`."""

from rl_kernel.ops.sampling.op import SampleOutput, draw, sample, uniforms

__all__ = ["SampleOutput", "draw", "sample", "uniforms"]
