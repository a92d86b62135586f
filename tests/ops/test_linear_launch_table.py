"""Rows of the launch table for products on Hopper, and what happens without a named algorithm (no GPU needed)."""

from __future__ import annotations

import re

import pytest
import torch

from rl_kernel import cublaslt
from rl_kernel.triton_utils import launch_table

pytest.importorskip("triton")
from rl_kernel.ops.linear import sm90

TABLE = launch_table("sm90")


def test_rows_of_few_rows():
    names = [name for name in TABLE if name.startswith("linear_few_")]
    assert "linear_few_sm90" in names
    for name in names:
        several = name == "linear_few_sm90"
        assert several or re.fullmatch(r"linear_few_\d+x\d+_sm90", name)
        for row in TABLE[name]:
            assert set(row) == {"upto", "rows", "per_processor", "dependent"}
            assert row["rows"] in ((32,) if several else (0, 32, 64))
            assert row["per_processor"] in (1, 2) and row["dependent"] in (0, 1)


def test_rows_of_named_algorithms():
    names = [name for name in TABLE if name.startswith("linear_library_")]
    assert names
    for name in names:
        n, k = map(int, re.fullmatch(r"linear_library_(\d+)x(\d+)_sm90", name).groups())
        assert n % 8 == 0 and k % 8 == 0  # rows of 16 bytes: the library's aligned kernels
        previous = {"upto": 0}
        for row in TABLE[name]:
            assert set(row) == {"upto", *sm90.ALGORITHM}
            assert all(0 <= row[attribute] < 1 << 16 for attribute in sm90.ALGORITHM)
            if row["id"]:
                # One value of M, which is where a class of the start-up probe ends.
                assert row["upto"] == previous["upto"] + 1 == cublaslt.bucket(row["upto"])
                assert row["tile"] and row["stages"]
            previous = row
        assert TABLE[name][-1]["id"] == 0


def test_rows_of_segments(monkeypatch):
    """One launch for segments up to the longest of the row, in slices of whole tiles of k."""
    assert all(set(row) == {"upto", "longest"} and row["longest"] % 64 == 0 for row in TABLE["linear_segments_sm90"])
    differs: set[str] = set()
    monkeypatch.setattr(sm90, "_probe", lambda: frozenset(differs))

    def served(size, segments, parts=1, longest=512):
        monkeypatch.setattr(sm90, "launch_row", lambda *_: {"longest": longest})
        a = torch.empty(200, size * segments, dtype=torch.bfloat16)
        return sm90._one_launch(a, torch.empty(64, size * segments, dtype=torch.bfloat16), 64, segments, parts)

    for segments in (2, 4, 8):
        assert served(64, segments) and served(512, segments) and not served(576, segments) and not served(96, segments)
        assert served(576, segments, longest=1 << 60)
        assert served(1024, segments, parts=2)  # of several parts the library has no product
    assert served(128, 8, 2) and not served(128, 8, 4)  # slices of 64, of 32
    assert not served(512, 3) and not served(512, 1)
    differs.add("segments")
    assert not served(64, 4)


@pytest.mark.parametrize("fault", ["missing", "differs", None])
def test_algorithm_that_is_missing_or_differs_is_named(monkeypatch, fault):
    monkeypatch.setattr(cublaslt, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, w = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    calls = []

    def library(a, b, _):
        calls.append(a.shape)
        if fault == "missing":
            raise cublaslt.MissingAlgorithmError("no such algorithm: here")
        return a @ b + (1 if fault == "differs" else 0)

    def ask():
        return cublaslt.trusted(x, w.t(), x.dtype, library, lambda a, b, _: a @ b, algorithm="id 66 tile 124")

    if fault is None:
        assert ask() and ask()
        assert cublaslt.replaced() == len(cublaslt._unprobed_in_capture)
    else:
        with pytest.warns(UserWarning, match="id 66 tile 124.*cuBLASLt chooses"):
            assert not ask()
        assert not ask()
        ((name, reason),) = cublaslt.report()["replaced"].items()
        assert "id 66 tile 124" in name and ("no such algorithm" if fault == "missing" else "elements differ") in reason
    assert len(calls) == 1  # probed once
    own = cublaslt.shape_class(x, w.t(), x.dtype, False)
    assert own not in cublaslt._verdicts  # the library's own choice has its own verdict
