"""Sums over ranks with one fixed tree: see :mod:`rl_kernel.ops.collectives.reference`.

Over which memory the payloads travel: :mod:`rl_kernel.ops.collectives.peer`, :func:`prepare` and :func:`report`.
"""

from rl_kernel.ops.collectives.op import all_gather, all_reduce, copy_to_group, reduce_scatter
from rl_kernel.ops.collectives.peer import prepare, report

__all__ = ["all_gather", "all_reduce", "copy_to_group", "prepare", "reduce_scatter", "report"]
