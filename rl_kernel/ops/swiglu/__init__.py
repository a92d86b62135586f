"""SwiGLU activation: silu(gate) * up."""

from rl_kernel.ops.swiglu.op import swiglu

__all__ = ["swiglu"]
