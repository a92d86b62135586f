"""scripts/bench_linear_logp.py without a GPU: its arguments, processes, statuses and tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_linear_logp as bench  # noqa: E402
import bench_linear_logp_table as table  # noqa: E402
from peers import PEERS, Peer  # noqa: E402

# Answers what it is told to, never, or ends.
FAKE = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "hang":
        time.sleep(60)
    if request["do"] == "die":
        print("what it died of", file=sys.stderr)
        sys.exit(3)
    print(json.dumps(request["answer"]), flush=True)
"""


def test_arguments_name_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, text in (("--peers=quack,nccl", "--peers names nccl"), ("--shapes=T1,T9", "--shapes names T9")):
        with pytest.raises(SystemExit):
            bench.arguments(["--out", "x", wrong])
        assert text in capsys.readouterr().err


def test_arguments_take_sizes_and_keep_the_order_of_measurement() -> None:
    args = bench.arguments(["--out", "a/b.json", "--peers", "verl,quack,compile", "--shapes", "T3,16x64x256"])
    assert (args.out, args.peers, args.shapes) == ("a/b", ["compile", "quack", "verl"], ["T3", "16x64x256"])
    assert bench.arguments(["--out", "x", "--no-compile"]).peers == [key for key in PEERS if key != "compile"]
    assert bench.arguments(["--out", "x", "--peers", "none"]).peers == []


def test_a_peer_that_is_not_installed_says_so() -> None:
    assert "is not installed" in str(Peer("x", "no-such-distribution-here", lambda: None, 6).missing())  # type: ignore[arg-type, return-value]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bench.Worker]:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(bench, "__file__", str(fake))
    made = bench.Worker("fake", "cpu", 30, tmp_path)
    yield made
    made.end(True)


def test_a_worker_answers_and_starts_again_after_it_ended(worker: bench.Worker) -> None:
    assert worker.ask(20, do="x", answer={"a": 1}) == {"a": 1}
    assert worker.ask(20, do="die") == {"status": "failure", "reason": "its process ended: what it died of"}
    assert worker.ask(20, do="x", answer={"a": 2}) == {"a": 2}


def test_a_worker_that_hangs_is_ended(worker: bench.Worker) -> None:
    assert worker.ask(20, do="x", answer={}) == {}
    process, began = worker.process, time.monotonic()
    assert worker.ask(0.5, do="hang") == {"status": "failure", "reason": "no answer within 0 s"}
    assert time.monotonic() - began < 10
    assert process is not None and process.poll() is not None
    worker.left = 0.0
    assert "used up" in worker.ask(20, do="x", answer={})["reason"]


def answer(**more: object) -> dict[str, object]:
    times = {f"{part}_{method}": [1.0, 2.0, 4.0] for part in ("both", "forward") for method in ("queued", "latency")}
    return {"finite": True, "loss": 1.0, "norms": [2.0, 3.0], "operations": 6, "peak_mib": 5.0, **times, **more}


REFERENCE = {"token": {"loss": 1.0, "norms": [2.0, 3.0]}, "mean": {"loss": 1.0, "norms": [0.2, 0.3]}}


@pytest.mark.parametrize(
    "found, status, reason",
    [
        (answer(), "pass", ""),
        (answer(finite=False), "failure", "not finite"),
        (answer(loss=1.02), "failure", "mean loss 1.02, torch eager's 1"),
        (answer(norms=[2.0, 3.2]), "failure", "norm of dW 3.2"),
        ({"status": "oom", "reason": "OutOfMemoryError: x"}, "oom", "OutOfMemoryError"),
    ],
)
def test_status_of_a_row(found: dict[str, object], status: str, reason: str) -> None:
    row = bench.Row("T1", "quack", "QuACK, full logits")
    row.take(found, REFERENCE)
    assert row.row["status"] == status and reason in row.row.get("reason", "")
    assert row.over == (status != "pass")


def test_mean_losses_are_compared_with_gradients_of_the_mean() -> None:
    row = bench.Row("T1", "quack-chunked", "QuACK, chunked")
    row.take(answer(norms=[0.2, 0.3]), REFERENCE)
    assert row.row["status"] == "pass" and row.row["gradient"] == "mean loss only"


def test_figures_are_medians_over_turns_and_survive_a_later_failure() -> None:
    row = bench.Row("T1", "ours", "kept")
    row.take(answer(), REFERENCE)
    row.take({"both_queued": [5.0, 6.0, 7.0]}, REFERENCE)
    row.take({"status": "failure", "reason": "no answer"}, REFERENCE)
    found = row.finish(work=10.0, burst=100.0, library={"both": 0.75, "forward": 0.25})
    assert found["status"] == "pass" and found["later"] == "failure: no answer"
    assert found["both_queued_ms"] == 4.5 and found["both_queued_turns_ms"] == [2.0, 6.0]
    assert found["both_queued_of_burst"] == 7.5  # 4.5 ms where 60 at 100 TFLOP/s take 0.6
    assert found["both_queued_of_library"] == 6.0  # three products of 0.75 ms
    assert found["forward_queued_of_library"] == 8.0


def report() -> dict[str, object]:
    rows = []
    for key, variant, times in (("ours", "kept", (9.0, 9.2)), ("compile", "torch.compile", (10.0, 10.1))):
        row = bench.Row("T3", key, variant)
        for ms in times:
            row.take(answer(**{f"{part}_queued": [ms] for part in ("both", "forward")}), REFERENCE)
        rows.append(row)
    rows.append(bench.Row("T3", "quack", "QuACK, full logits"))
    rows[-1].take(answer(finite=False), REFERENCE)
    rows.append(bench.Row("T3", "verl", "verl, Triton"))
    rows[-1].stop("blocked", "verl is not installed")
    rows.append(bench.Row("T3", "cce", "cut-cross-entropy"))
    finished = [row.finish(1000.0, 700.0, {"both": 8.0, "forward": 2.5}) for row in rows]
    return {
        "command": "python x", "commit": "abc", "card": "H200", "date": "today", "torch": "2", "seconds": 1.0,
        "versions": {"torch": "2"}, "rest_s": 0.2, "cublas_tflops": 700.0, "shapes": {"T3": [6827, 2048, 75968]},
        "rows": finished,
    }  # fmt: skip


def test_tables_tell_who_is_faster_and_why_others_are_missing(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    table.write(out, report())
    text = (tmp_path / "run.md").read_text()
    assert "| T3 | both | kept | 9.10 | 0.905 (0.900 to 0.911): faster | torch.compile, 10.1 ms |" in text
    assert "failure: not finite" in text and "blocked: verl is not installed" in text and "blocked: not reached" in text
    assert "T3: 6827 x 2048 x 75968" in text
    again = json.loads((tmp_path / "run.json").read_text())
    assert table.markdown(again) == text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ") and "±" in line}
    assert widths == {10}


def test_ratios_around_one_call_no_one_faster() -> None:
    ours = {"both_queued_ms": 10.0, "both_queued_turns_ms": [9.9, 10.1]}
    other = {"both_queued_ms": 10.0, "both_queued_turns_ms": [10.0, 10.0]}
    assert table.verdict(ours, other, "both_queued") == "1.000 (0.990 to 1.010): within the spread"


def test_a_page_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n")
    with pytest.raises(SystemExit, match="no report of this script"):
        table.write(str(tmp_path / "notes"), report())
    assert (tmp_path / "notes.md").read_text() == "# Notes\n" and not (tmp_path / "notes.json").exists()


@pytest.mark.slow
def test_a_run_on_the_cpu_ends_with_a_report(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/bench_linear_logp.py"), "--device", "cpu", "--out", "run"]
    command += ["--shapes", "16x64x256", "--turns", "2", "--rest", "0", "--peers", "eager,quack-chunked"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["variant"]: row for row in json.loads((tmp_path / "run.json").read_text())["rows"]}
    for name in ("kept", "recompute", "fused policy loss, 512 MiB", "torch eager"):
        assert rows[name]["status"] == "pass" and rows[name]["turns"] == 2, rows[name]
    assert rows["QuACK, chunked"]["status"] == "blocked"
    assert rows["kept"]["loss"] == pytest.approx(rows["torch eager"]["loss"], rel=0.01)
    assert (tmp_path / "run.md").read_text().startswith(table.TITLE)
