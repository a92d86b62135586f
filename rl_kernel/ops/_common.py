"""Checks and helpers shared by the operators."""

from __future__ import annotations

import re

import torch

from rl_kernel.errors import ContractError
from rl_kernel.registry import Request

_PLACE = re.compile(r"^[^\s,]+, [^,]*:\d+, ")  # "function, file:line, " in front of what a compiled check says
CPU_DTYPES = (torch.float32, torch.bfloat16)


def supports_cpu(request: Request) -> str | None:
    """Reason why the cpu family's arithmetic cannot serve ``request``; ``None`` when it can."""
    if request.family != "cpu":
        return f"computes the arithmetic of the cpu family, not of {request.family}"
    if request.dtype not in CPU_DTYPES:
        return f"dtype must be float32 or bfloat16, got {request.dtype}"
    return None


class as_contract_errors:  # noqa: N801 - reads as a function in a with statement
    """Turn a failed check of a compiled kernel (a RuntimeError) into :class:`ContractError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, ContractError):
            raise ContractError(_PLACE.sub("", str(error).split("\n", 1)[0])) from error


def group_size(group: object | None) -> int:
    """Number of ranks of a process group; ``None`` is a group of one."""
    if group is None:
        return 1
    import torch.distributed as dist

    return dist.get_world_size(group)  # type: ignore[arg-type]


def local_segments(name: str, segments: int, ranks: int) -> int:
    """Leaves of the segment tree that one of ``ranks`` ranks owns.

    Raises:
        ContractError: ``segments`` is not 1, 2, 4 or 8, or not a multiple of ``ranks``.
    """
    if segments not in (1, 2, 4, 8):
        raise ContractError(f"{name}={segments} must be 1, 2, 4 or 8")
    if segments % ranks:
        raise ContractError(
            f"{name}={segments} must be a multiple of the tensor-parallel size {ranks}: a rank owns whole leaves. "
            f"Raise consistency.virtual_tp to at least {ranks}"
        )
    return segments // ranks
