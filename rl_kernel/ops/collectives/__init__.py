"""Sums over ranks with one fixed tree: see :mod:`rl_kernel.ops.collectives.reference`."""

from rl_kernel.ops.collectives.op import all_gather, all_reduce, copy_to_group, reduce_scatter

__all__ = ["all_gather", "all_reduce", "copy_to_group", "reduce_scatter"]
