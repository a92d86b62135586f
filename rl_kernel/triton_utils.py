"""Device functions and launch helpers shared by the Triton backends.

Two rules keep the bits of a Triton kernel independent of its launch:

* sums over elements go through :func:`tree_sum`, an explicit binary tree, because the order inside ``tl.sum`` follows
  the register layout and changes with ``num_warps``;
* every kernel is launched with ``enable_fp_fusion=False``, so that a product and a sum round separately.

A third keeps compilations out of a run. Triton makes a kernel for every class of an integer (1, a multiple of 16, any
other), every alignment of a pointer and every constant, so arguments that follow the number of tokens, sequences or
keys are ``do_not_specialize``, and no constant depends on them but through the size classes of the launch tables.
Extents and strides of a model stay specialised: wide loads need to know that they are multiples of 16.
"""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))

# gfx942: the MFMA shape decides which products share an instruction, so it is pinned for every kernel with a dot.
_HIP_OPTIONS = {"matrix_instr_nonkdim": 16, "kpack": 1}


@triton.constexpr_function
def log2_exact(n: int) -> int:
    """Exponent of the power of two ``n``."""
    n = int(n)
    assert n > 0 and n & (n - 1) == 0, "the extent of a tree must be a power of two"
    return n.bit_length() - 1


@triton.jit
def tree_sum(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] -> [M]: balanced binary tree over adjacent pairs, ((x0+x1)+(x2+x3))+...

    Every level is a reduction of two elements: one addition, which no layout can reorder.
    """
    for level in tl.static_range(log2_exact(N)):
        x = tl.sum(tl.reshape(x, [M, N >> (level + 1), 2]), 2)
    return tl.reshape(x, [M])


@triton.jit
def tree_rows(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] -> [N]: balanced binary tree over adjacent rows."""
    for level in tl.static_range(log2_exact(M)):
        x = tl.sum(tl.reshape(x, [M >> (level + 1), 2, N]), 1)
    return tl.reshape(x, [N])


@triton.jit
def divide(a, b):
    """IEEE division (plain ``/`` is an approximation that differs between compiler versions)."""
    return tl.div_rn(a, b)


@triton.jit
def exp_(x):
    """``exp2(x * log2 e)``, the product rounded: ex2.approx.ftz.f32 on sm90, v_exp_f32 on gfx942."""
    return tl.exp2(x * LOG2E)


@functools.cache
def is_hip() -> bool:
    """Whether this torch drives AMD GPUs."""
    return torch.version.hip is not None


def early(launch: dict[str, int]) -> int:
    """How a launch row starts its kernel early ("pdl"; always 0 on AMD GPUs and in the interpreter).

    0: not before the kernel in front of it has ended. 1 and 2: as soon as that kernel allows it (a programmatic
    dependent launch). The kernel then waits for the end of that one ahead of its first access to memory, and allows
    the next to start 1: at once, or 2: when its own loads are under way. The next one waits likewise, or is an
    ordinary launch, so no kernel sees memory before the writes in front of it.
    """
    return 0 if is_hip() or triton.knobs.runtime.interpret else launch.get("pdl", 0)


def options(num_warps: int, num_stages: int = 1, *, dot: bool = False, pdl: int = 0) -> dict[str, Any]:
    """Compile options of a launch: never contraction, and on AMD the pinned MFMA shape for kernels with a dot.

    ``pdl``: :func:`early` of the row, which the kernel must know as well.
    """
    chosen: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    if pdl:
        chosen["launch_pdl"] = True
    if dot and is_hip():
        chosen.update(_HIP_OPTIONS)
    return chosen


def gpu_only(family: str, op: str) -> str | None:
    """The common part of ``supports``: Triton kernels serve the GPU families."""
    if family == "cpu":
        return f"{op}: the Triton backend serves sm90 and gfx942, not cpu"
    return None


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the device of ``tensor`` current for a launch (nothing to do for the interpreter's CPU tensors)."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n`` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def launch_table(family: str) -> dict[str, list[dict[str, int]]]:
    """Launch parameters by operator: data, so that no autotuner can change them between processes.

    A row applies to every size up to its ``upto``; a different table changes speed, never bits.
    """
    path = Path(__file__).with_name("launch_tables") / f"{family}.json"
    return json.loads(path.read_text(encoding="utf-8"))


_override: dict[str, list[dict[str, int]]] = {}


@contextlib.contextmanager
def override_launch(op: str, row: dict[str, int]):
    """Force one launch row for ``op`` (tests and the table generator)."""
    previous = _override.get(op)
    _override[op] = [{**row, "upto": 1 << 62}]
    try:
        yield
    finally:
        if previous is None:
            _override.pop(op, None)
        else:
            _override[op] = previous


def has_launch_rows(op: str) -> bool:
    """Whether the family's table, or an override, has rows for ``op``."""
    return op in _override or op in launch_table("gfx942" if is_hip() else "sm90")


def launch_row(op: str, size: int) -> dict[str, int]:
    """The row of the family's table that serves ``size``."""
    rows = _override.get(op) or launch_table("gfx942" if is_hip() else "sm90")[op]
    for row in rows:
        if size <= row["upto"]:
            return row
    return rows[-1]
