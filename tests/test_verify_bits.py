"""The table of byte comparisons: parts of an operator add up, and what is missing or differs is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import verify_bits  # noqa: E402


def record(folder, op, cases, differing=0, kind="rows", **extra):
    failures = ["rows: 1 of 8 elements, (3, 5)"] if differing else []
    body = {"op": op, "cases": cases, "elements": 8 * cases, "cases_differing": differing, "kinds": {kind: cases}}
    (folder / f"bits_{op}.json").write_text(
        json.dumps({**body, "failures": failures, "finished": True, **extra}), encoding="utf-8"
    )


def test_parts_add_up_and_gaps_are_named(tmp_path):
    record(tmp_path, "attention_0", 60)
    record(tmp_path, "attention_1", 50, kind="pages")
    record(tmp_path, "attention_backward_0", 200, differing=1)
    record(tmp_path, "attention_fa3_2", 30)
    record(tmp_path, "swiglu", 150, finished=False)
    record(tmp_path, "linear", 100, probe={"replaced": {"class": "1 differs"}})
    rows = {row["op"]: row for row in verify_bits.collect(tmp_path, 100)}
    assert list(rows) == list(verify_bits.OPERATORS)
    assert (rows["attention"]["cases"], rows["attention"]["status"]) == (110, "pass")
    assert rows["attention"]["kinds"] == {"rows": 60, "pages": 50}
    assert rows["attention_backward"]["status"] == "failure" and "(3, 5)" in rows["attention_backward"]["failures"][0]
    assert rows["attention_fa3"]["status"] == "too few cases"
    assert rows["linear"]["probe_replaced"] == 1
    assert rows["swiglu"]["status"] == "ended early"
    assert rows["rope"]["status"] == "missing"
    about = dict.fromkeys(("command", "commit", "gpu", "torch", "triton", "date", "seconds", "tests"), "-")
    page = verify_bits.page(
        {
            **about,
            "failed": ["test_a: 'no'"],
            "operators": list(rows.values()),
            "negative_controls": {"sdpa": {"100": 396}},
        }
    )
    assert "**1 of 590 cases differ**" in page
    assert "- test_a: 'no'" in page
    assert "by position: 100: 396" in page and "against the batch: missing" in page


def test_every_record_of_the_tests_is_an_operator_of_the_table():
    import re

    names = {
        name
        for path in ROOT.glob("tests/ops/test_gpu_*.py")
        for name in re.findall(r"Tally\(f?\"([a-z_0-9]+?)_?(?:\{.*)?\"\)", path.read_text(encoding="utf-8"))
    }
    assert len(names) > 12
    assert {verify_bits.operator_of(name) for name in names} | {"attention", "attention_fa3"} == set(
        verify_bits.OPERATORS
    )
    parts = {"batch", "graph", "kept", "random", "tokens"}
    assert {name.removeprefix(verify_bits.operator_of(name)).strip("_") for name in names} <= parts | {""}
