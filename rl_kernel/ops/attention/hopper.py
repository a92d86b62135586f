"""Which kernels serve a packed call: on Hopper those laid out in Gluon where they can, else Triton's; both counted.

The two make the same bytes, so the choice is a matter of speed; :func:`summary` tells a run's manifest what it took.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from types import ModuleType

import torch
import triton

from rl_kernel.triton_utils import is_hip

_log = logging.getLogger(__name__)
_calls: Counter[tuple[str, str]] = Counter()  # (direction, Gluon or the reason for Triton)
_TAKEN = "Gluon"


def summary() -> str | None:
    """Which kernels computed packed attention in this process, and why not faster ones; ``None`` before the first."""
    return "; ".join(f"{direction}: {n} x {what}" for (direction, what), n in sorted(_calls.items())) or None


@functools.cache
def module(device: torch.device, direction: str) -> ModuleType | str:
    """``sm90_forward`` or ``sm90_backward``, or why ``device`` or the installed Triton cannot run it."""
    if device.type != "cuda" or is_hip() or torch.cuda.get_device_capability(device) != (9, 0):
        return f"{device} is not a Hopper GPU"
    try:
        return importlib.import_module(f"rl_kernel.ops.attention.sm90_{direction}")
    except (ImportError, AttributeError) as error:  # Gluon is young: its names move between versions
        reason = f"Triton {triton.__version__} has another Gluon ({error})"
        _log.warning("attention %s runs its slower kernels: %s", direction, reason)
        return reason


def choose(
    direction: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> ModuleType | None:
    """The module that serves these tensors, ``None`` for Triton's kernels; the choice is counted."""
    found = module(q.device, direction)
    reason = found if isinstance(found, str) else found.unusable(q, k, v, cu_q, cu_k)
    _calls[direction, _TAKEN if reason is None else f"Triton ({reason})"] += 1
    return None if reason is not None or isinstance(found, str) else found
