"""linear_logp with our own matrix products: the portable GPU backend (bits as in ``library.py``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from rl_kernel.ops.linear import triton as linear
from rl_kernel.ops.linear_logp import schedule, tiles
from rl_kernel.registry import Request


def supports(request: Request) -> str | None:
    """``None`` when this backend can serve ``request``, else the reason why not."""
    return linear.supports(request)


def leaf_stats(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor | None, targets: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rl_kernel.ops.linear_logp.tiles.leaf_stats`."""
    return tiles.leaf_stats(linear, hidden, weight, temperature, targets, columns)


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor | None,
    targets: torch.Tensor,
    state: torch.Tensor,
    grads: torch.Tensor,
    segments: list[tuple[int, int]],
    need_hidden: bool = True,
    need_weight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See :func:`rl_kernel.ops.linear_logp.tiles.backward`."""
    return tiles.backward(
        linear, hidden, weight, temperature, targets, state, grads, segments, need_hidden, need_weight
    )


def operator() -> Callable[..., Any]:
    """The whole operator with autograd, when nothing traces: it keeps what fits its workspace for backward."""
    return functools.partial(schedule.run, linear)
