"""Linear layers: one ascending segment, or S segments in a tree, whatever the tile and the tensor-parallel size."""

from rl_kernel.ops.linear.op import column_parallel_linear, linear

__all__ = ["column_parallel_linear", "linear"]
