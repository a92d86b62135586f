"""scripts/bench_ops.py without a GPU: rows, limits and tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_ops  # noqa: E402
import bench_ops_table as table  # noqa: E402
import bench_ops_timer as timer  # noqa: E402


@pytest.fixture
def rows() -> list[dict[str, object]]:
    timer.rows.clear()
    return timer.rows


def test_rows_are_judged_by_their_limits(rows: list[dict[str, object]]) -> None:
    contenders = {"a": lambda: 105.0, "b": lambda: 120.0, "c": lambda: 300.0}
    timer.compare("linear", "o M=1", "cuBLAS", lambda: 100.0, contenders, {"a": 1.05, "b": 1.1})
    assert [(row["backend"], row["status"], row.get("ratio")) for row in rows] == [
        ("a", "pass", 1.05), ("b", "failure", 1.2), ("c", "measured", 3.0),
    ]  # fmt: skip


def test_a_contender_that_cannot_run_is_a_row(rows: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    def replays(calls: list[object]) -> None:
        raise torch.cuda.OutOfMemoryError("no memory") if calls else ValueError("no such tile\nand more")

    monkeypatch.setattr(timer, "replays", replays)
    timer.compare("linear", "o", "cuBLAS", 100.0, {"a": [], "b": [print], "c": lambda: 90.0}, {})
    assert [(row["status"], row.get("reason")) for row in rows] == [
        ("blocked", "ValueError: no such tile"), ("oom", "no memory"), ("measured", None),
    ]  # fmt: skip


def part(tmp_path: Path, name: str, commit: str = "abc") -> str:
    row = {"op": name, "shape": "o", "backend": "x", "reference": "y", "limit": 1.05, "status": "failure"}
    row |= {"us": 2.0, "reference_us": 1.0, "ratio": 2.0, "section": name}
    report = {"command": f"python {name}", "commit": commit, "seconds": {name: 1.0}, "rows": [row], "cublaslt": {}}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(report))
    return str(path)


def test_parts_join_in_the_order_of_the_sections(tmp_path: Path) -> None:
    files = [part(tmp_path, name) for name in ("sampling", "linear")]
    table.join(str(tmp_path / "all"), files, list(bench_ops.SECTIONS), bench_ops.METHOD)
    text = (tmp_path / "all.md").read_text()
    assert text.index("| linear |") < text.index("| sampling |")
    assert "- linear, o, x: 2.0 of y, limit 1.05" in text
    assert "Times are the smaller of the medians" in text
    assert set(json.loads((tmp_path / "all.json").read_text())["seconds"]) == {"linear", "sampling"}


def test_parts_of_different_commits_do_not_join(tmp_path: Path) -> None:
    files = [part(tmp_path, "linear"), part(tmp_path, "sampling", "def")]
    with pytest.raises(SystemExit, match="different commits: abc, def"):
        table.join(str(tmp_path / "all"), files, list(bench_ops.SECTIONS), bench_ops.METHOD)
