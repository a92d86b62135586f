"""The report: right numbers, one self-contained file, any run that has a row."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from recipes.metrics import plots, report  # noqa: E402
from recipes.metrics.logging import JsonlWriter  # noqa: E402
from recipes.metrics.manifest import Manifest  # noqa: E402
from recipes.metrics.mismatch import MismatchStats  # noqa: E402

STEPS = 50


def make_run(folder: Path, mode: str, *, noise: float = 0.0, steps: int = STEPS, algorithm: str = "grpo") -> Path:
    rng = np.random.default_rng(1)
    config = {
        "model": {"name": "qwen3_tiny", "dtype": "bfloat16"},
        "algorithm": {"name": algorithm},
        "consistency": {"mode": mode},
        "trainer": {"seed": 7, "note": "<script>alert(1)</script>"},
    }
    manifest = Manifest(folder, config, command=["python", "-m", "recipes.main", f"consistency={mode}"])
    side = [{"contract": "0123456789abcdef", "backends": {"linear_logp": "native"}}]
    manifest.engines(side, side)
    writer = JsonlWriter(folder / "metrics.jsonl")
    for step in range(steps):
        q = -rng.exponential(2.0, 20).astype(np.float32)
        p = (q + noise * rng.standard_normal(20)).astype(np.float32)
        row = {
            "step": step,
            "reward/mean": step / 100,
            "loss/policy": 0.1,
            "loss/entropy": 2.0,
            "time/rollout": 0.5,
            "time/update": 0.25,
            "time/step": 1.0,
            "kernel/fallback_count": 0,
            **MismatchStats.from_batch(p, q, np.ones(20), (20,)).metrics(),
        }
        if algorithm == "ppo":
            row["loss/value"] = 1 / (step + 1)
        writer.write(row)
    writer.close()
    manifest.finish("completed", last_step=steps)
    return folder


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> tuple[Page, str]:
    text = path.read_text()
    page = Page()
    page.feed(text)
    return page, text


def test_strict_against_native(tmp_path: Path) -> None:
    strict, native = make_run(tmp_path / "a", "strict"), make_run(tmp_path / "b", "native", noise=1e-2)
    page, text = read(report.write_report(strict, compare=native))
    assert f"0 of {20 * STEPS:,} log-probabilities differ" in page.text
    for wanted in ("agree in every bit", "0123456789abcdef", "consistency=strict", "linear_logp", "0.095", "0.395"):
        assert wanted in page.text, wanted
    assert page.tags.count("svg") == len(report.build_figures(report.load_run(strict), report.load_run(native))) >= 5
    assert "script" not in page.tags and "<script>alert" not in text
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"#0102[0-9a-f]{2}", text), "a placeholder colour was not resolved"
    page, _ = read(report.write_report(native))
    assert "1,000 of 1,000 log-probabilities differ" in page.text and "the control" in page.text


def test_ppo_shows_the_value_loss(tmp_path: Path) -> None:
    titles = {f.title for f in report.build_figures(report.load_run(make_run(tmp_path, "strict", algorithm="ppo")))}
    assert {"Value loss", "Reward", "Mismatching tokens", "Time of a step", "Entropy"} <= titles
    assert "Value loss" not in {
        f.title for f in report.build_figures(report.load_run(make_run(tmp_path / "g", "strict")))
    }


def test_totals(tmp_path: Path) -> None:
    got = report.totals(report.load_run(make_run(tmp_path, "audit", noise=1e-2)))
    assert (got["steps"], got["active_tokens"]) == (STEPS, 20 * STEPS)
    assert 0.9 * 20 * STEPS < got["mismatch_count"] <= 20 * STEPS
    assert got["reward_first"] == pytest.approx(0.095) and got["reward_last"] == pytest.approx(0.395)
    assert got["first_mismatching_step"] == 0 and got["max_abs_diff"] > 1e-3


def test_one_row_and_no_manifest(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 0, "reward/mean": float("nan")})
    page, _ = read(report.write_report(tmp_path, output=tmp_path / "x" / "r.html"))
    assert "Nothing was compared" in page.text


def test_figures_are_deterministic(tmp_path: Path) -> None:
    run = report.load_run(make_run(tmp_path, "strict"))
    a, b = ([plots.to_svg(f) for f in report.build_figures(run)[:2]] for _ in range(2))
    assert a == b


def test_long_runs_are_binned() -> None:
    rows = [{"step": i, "x": float(i == 1234)} for i in range(5000)]
    steps, values = plots.column(rows, "x", reduce="max")
    assert steps.size == plots.MAX_POINTS and values.max() == 1.0, "one bad step must stay visible"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "r", "strict", steps=3)
    assert report.main([str(run), "--png", str(tmp_path / "p.png"), "--dark"]) == 0
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG" and (run / "report.html").is_file()
    assert report.main([str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err
