"""Shared parts of the GPU byte tests: counting, random shapes, a report a test may leave behind."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch

CASES = int(os.environ.get("RLK_CASES", "2000"))
BF16 = torch.bfloat16


def where(left: torch.Tensor, right: torch.Tensor) -> str:
    """Which rows and columns differ, and the first two values."""
    view = {4: torch.int32, 2: torch.int16, 8: torch.int64}[left.element_size()]
    left, right = torch.atleast_1d(left), torch.atleast_1d(right)
    at = (left.contiguous().view(view) != right.contiguous().view(view)).reshape(left.shape[0], -1).nonzero()
    rows, columns = at[:, 0].unique(), at[:, 1].unique()
    i, j = at[0].tolist()
    values = [x.reshape(x.shape[0], -1)[i, j].item() for x in (left, right)]
    return (
        f"{len(rows)} rows {rows[0].item()}..{rows[-1].item()}, {len(columns)} columns {columns[0].item()}.."
        f"{columns[-1].item()}, at {i}, {j}: {values[0]!r} and {values[1]!r}"
    )


def differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Elements whose bytes differ."""
    assert left.shape == right.shape and left.dtype == right.dtype, (left.shape, right.shape, left.dtype, right.dtype)
    view = {4: torch.int32, 2: torch.int16, 8: torch.int64}[left.element_size()]
    return int((left.contiguous().view(view) != right.contiguous().view(view)).sum())


class Tally:
    """Cases and differing elements of one operator; written to RLK_REPORT_DIR when that is set, now and then."""

    def __init__(self, op: str) -> None:
        self.op, self.cases, self.elements, self.wrong = op, 0, 0, 0
        self.kinds: dict[str, int] = {}
        self.failures: list[str] = []  # the first ones

    def equal(self, left: torch.Tensor, right: torch.Tensor, kind: str, what: object = "") -> None:
        bad = differing(left, right)
        self.cases += 1
        self.elements += left.numel()
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if bad:
            self.wrong += 1
            if len(self.failures) < 8:
                self.failures.append(f"{kind}: {bad} of {left.numel()} elements, {what}; {where(left, right)}")
        if bad or self.cases % 50 == 0:  # a run that is ended early keeps what it has seen
            self.save(finished=False)

    def save(self, **extra: object) -> None:
        folder = os.environ.get("RLK_REPORT_DIR")
        if folder:
            record = {
                "op": self.op, "cases": self.cases, "elements": self.elements, "cases_differing": self.wrong,
                "kinds": self.kinds, "failures": self.failures, **extra,
            }  # fmt: skip
            path = Path(folder, f"bits_{self.op}.json")
            path.with_suffix(".new").write_text(json.dumps(record, indent=1), encoding="utf-8")
            path.with_suffix(".new").replace(path)

    def done(self, **extra: object) -> None:
        self.save(finished=True, **extra)
        assert self.wrong == 0, self.failures


def rng(seed: int) -> random.Random:
    """Shapes come from here; data from :func:`data`."""
    return random.Random(seed)


def rows(random_source: random.Random, most: int) -> int:
    """A row count, log-uniform from 1 to ``most``."""
    return max(1, min(most, int(2 ** random_source.uniform(0, most.bit_length()))))


def data(*shape: int, seed: int = 0, heavy: bool = True, scale: float = 1.0) -> torch.Tensor:
    """bf16 normal data, with heavy tails by default."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator)
    if heavy:
        x *= torch.randn(shape, device="cuda", generator=generator).exp_()
    return (x * scale).to(BF16)


def fresh_launch(op: str, base: dict[str, int], **changes: int) -> dict[str, int]:
    """A launch row that differs from the table's."""
    return {**base, **changes}
