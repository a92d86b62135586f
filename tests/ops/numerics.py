"""Inputs and assertions shared by the operator tests."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_kernel.ops._primitives import count_different, same_bits
from rl_kernel.registry import Request

DTYPES = (torch.float32, torch.bfloat16)


def backend(op: str, name: str) -> ModuleType:
    """A backend module; skips the test with the reason when this machine cannot use it."""
    try:
        module = importlib.import_module(f"rl_kernel.ops.{op}.{name}")
    except ImportError as error:
        pytest.skip(f"{op}.{name}: {error}")
    reason = module.supports(Request(op, "cpu", torch.float32))
    if reason is not None:
        pytest.skip(f"{op}.{name}: {reason}")
    return module


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def heavy(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Heavy tails, exact zeros of both signs, and magnitudes over several decades."""
    generator = torch.Generator().manual_seed(2000 + seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(2).exp() * scale
    x = torch.where(torch.rand(shape, generator=generator) < 0.03, torch.zeros(()), x)
    return torch.where(torch.rand(shape, generator=generator) < 0.03, -torch.zeros(()), x).to(dtype)


def assert_same(a: Any, b: Any, what: str = "") -> None:
    """Byte equality (all NaN equal) of tensors, or of tuples of tensors and None."""
    if isinstance(a, tuple):
        assert len(a) == len(b)
        for index, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{what}[{index}]")
    elif a is None:
        assert b is None, what
    else:
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} and {b.shape} {b.dtype}"
        assert same_bits(a, b), f"{what}: {count_different(a, b)} of {a.numel()} elements differ"


def assert_differ(a: torch.Tensor, b: torch.Tensor) -> None:
    """Negative control: a comparison that finds nothing here would find nothing anywhere."""
    assert a.shape == b.shape and count_different(a, b) > 0


def assert_as_good_as_eager(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> None:
    """Root mean square error against float64 at most ``factor`` times that of stock torch."""

    def error(x: torch.Tensor) -> float:
        return float((x.double() - exact).pow(2).mean().sqrt())

    assert exact.dtype == torch.float64 and bool(exact.abs().max() > 0)
    assert error(ours) <= factor * error(eager) + 1e-12 * float(exact.abs().max()), (error(ours), error(eager))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Balanced tree over a power-of-two list, as the collectives do it over ranks."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]
