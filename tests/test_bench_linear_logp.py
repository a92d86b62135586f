"""scripts/bench_linear_logp.py without a GPU: its arguments, processes, statuses and tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_linear_logp as bench  # noqa: E402
import bench_linear_logp_table as table  # noqa: E402
import bench_linear_logp_worker as work  # noqa: E402
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


def test_a_stretch_has_as_many_calls_as_fit_and_one() -> None:
    assert [work.counts(ms) for ms in (0.4, 2.4, 8.7, 12.4, 25.0, 45.0)] == [
        (3, 12), (1, 10), (1, 2), (1, 2), (1, 2), (1, 2),
    ]  # fmt: skip


class Cold(work.Card):
    """A card on which calls take 15 % longer from some time after a rest on."""

    def __init__(self, ms: float, step: float) -> None:
        super().__init__("cpu")
        self.ms, self.step, self.now, self.began, self.rests = ms, step, 0.0, 0.0, 0

    def rest(self, seconds: float) -> None:
        self.began, self.rests = self.now, self.rests + 1

    def mark(self) -> object:
        return types.SimpleNamespace(at=self.now, elapsed_time=lambda end, at=self.now: end.at - at)

    def call(self) -> None:
        self.now += self.ms * (1.15 if self.now - self.began >= self.step else 1)


@pytest.mark.parametrize("ms, count, rests", [(0.5, 12, 1), (2.4, 9, 1), (7.9, 6, 3), (8.7, 3, 3), (12.4, 3, 3)])
def test_queued_calls_end_before_the_step(ms: float, count: int, rests: int) -> None:
    card = Cold(ms, work.STRETCH)
    assert card.queued(card.call, 0.3, 3) == ([ms] * count, True, [])
    assert card.rests == rests


def test_a_hot_card_does_not_hide_that_two_calls_fit() -> None:
    card = Cold(12.0, work.STRETCH)
    card.now = 100.0  # its estimate is 13.8
    assert card.queued(card.call, 0.3, 3) == ([12.0] * 3, True, [])


def test_calls_too_long_for_the_stretch_are_said_to_be() -> None:
    card = Cold(20.0, work.STRETCH)
    times, cold, _ = card.queued(card.call, 0.3, 3)
    assert (times, cold, card.rests) == ([20.0, 23.0], False, 1)


def test_sustained_calls_are_timed_after_the_step() -> None:
    for ms, groups in ((0.5, 20), (2.0, 25), (8.7, 12), (45.0, 3)):
        card = Cold(ms, work.STRETCH)
        times, _ = card.sustained(card.call, ms, (0.15, 0.1))
        assert times == pytest.approx([1.15 * ms] * groups, rel=1e-3)
        assert card.now >= 250


def test_readings_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work.Card("cpu").reading() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert work.sensor("cuda") is None

    def broken(card: object) -> int:
        raise RuntimeError("not supported")

    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda card, kind: {"GPU-7": 1500}[card],
        nvmlDeviceGetPowerUsage=broken,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 4,
        NVML_CLOCK_SM=1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: types.SimpleNamespace(uuid=7))
    read = work.sensor("cuda")
    assert read is not None and read() == {"mhz": 1500, "reasons": "0x4"}


def answer(**more: object) -> dict[str, object]:
    times = {f"{part}_{method}": [1.0, 2.0, 4.0] for part in ("both", "forward") for method in bench.METHODS}
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
    library = {"both_queued": 0.75, "forward_queued": 0.25, "both_sustained": 1.5}
    found = row.finish(work=10.0, burst=100.0, library=library)
    assert found["status"] == "pass" and found["later"] == "failure: no answer"
    assert found["both_queued_ms"] == 4.5 and found["both_queued_turns_ms"] == [2.0, 6.0]
    assert found["both_queued_of_burst"] == 7.5  # 4.5 ms where 60 at 100 TFLOP/s take 0.6
    assert found["both_queued_of_library"] == 6.0  # three products of 0.75 ms
    assert found["forward_queued_of_library"] == 8.0
    assert found["both_queued_calls_ms"] == [[1.0, 2.0, 4.0], [5.0, 6.0, 7.0]]
    assert found["both_latency_of_library"] == 2.667  # at the queued rate
    assert found["both_sustained_of_library"] == 1.333 and "both_sustained_of_burst" not in found
    assert "forward_sustained_of_library" not in found  # its rate is not known
    assert found["library_ms"] == 0.75 and found["library_sustained_ms"] == 1.5


def test_readings_and_clocks_of_all_turns() -> None:
    row = bench.Row("T1", "ours", "kept")
    card = [{"mhz": 1600, "watts": 500.0, "reasons": "0x0"}, {"mhz": 1700, "reasons": "0x4"}]
    row.take(answer(both_queued_cold=True, both_queued_card=card), REFERENCE)
    found = row.times.fields()
    assert found["both_queued_mhz"] == 1650 and found["both_queued_watts"] == 500.0
    assert found["both_queued_reasons"] == ["0x0", "0x4"] and found["both_queued_cold"] is True
    assert found["both_sustained_mhz"] is None and "both_latency_mhz" not in found
    row.take(answer(both_queued_cold=False), REFERENCE)
    assert row.times.fields()["both_queued_cold"] is False


def test_what_is_near_is_measured_in_full() -> None:
    run = object.__new__(bench.Run)
    run.args = bench.arguments(["--out", "x"])
    plans = [run.plan(near, sweep) for near, sweep in ((True, 0), (True, 1), (False, 0), (False, 1))]
    assert [plan["methods"] for plan in plans] == [
        ["queued", "latency", "sustained"], ["queued", "sustained"], ["queued"], ["queued", "latency"],
    ]  # fmt: skip
    assert [len(plan["parts"]) for plan in plans] == [2, 2, 1, 2]
    assert run.plan(True, 1, sustained=False)["methods"] == ["queued"]


def report() -> dict[str, object]:
    rows = []
    for key, variant, times in (("ours", "kept", (9.0, 9.2)), ("compile", "torch.compile", (10.0, 10.1))):
        row = bench.Row("T3", key, variant)
        for ms in times:
            turn = {f"{part}_{method}": [ms] for part in ("both", "forward") for method in ("queued", "sustained")}
            row.take(answer(forward_queued_cold=key == "ours", **turn), REFERENCE)
        rows.append(row)
    rows.append(bench.Row("T3", "quack", "QuACK, full logits"))
    rows[-1].take(answer(finite=False), REFERENCE)
    rows.append(bench.Row("T3", "verl", "verl, Triton"))
    rows[-1].stop("blocked", "verl is not installed")
    rows.append(bench.Row("T3", "cce", "cut-cross-entropy"))
    library = {"both_queued": 8.0, "forward_queued": 2.5, "both_sustained": 9.0, "forward_sustained": 3.0}
    finished = [row.finish(1000.0, 700.0, library) for row in rows]
    return {
        "command": "python x", "commit": "abc", "card": "H200", "date": "today", "torch": "2", "seconds": 1.0,
        "versions": {"torch": "2"}, "rest_s": 0.3, "stretch_ms": 25.0, "sustained_s": [0.15, 0.1],
        "cublas_tflops": 700.0, "shapes": {"T3": [6827, 2048, 75968]},
        "rows": finished,
    }  # fmt: skip


def test_tables_tell_who_is_faster_and_why_others_are_missing(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    table.write(out, report())
    text = (tmp_path / "run.md").read_text()
    for part in ("both, queued", "both, sustained"):
        assert f"| T3 | {part} | kept | 9.10 | 0.905 (0.900 to 0.911): faster | torch.compile, 10.1 ms |" in text
    assert "| T3 | forward, queued | kept | 9.10 | 0.905, clocks mixed | torch.compile, 10.1* ms |" in text
    assert "queued: logits 2.50 ms, all three 8.00 ms, sustained: logits 3.00 ms, all three 9.00 ms." in text
    assert "| kept | 1.15 | sustained | library | T3 1.011 | none |" in text and table.REGIMES[:20] in text
    assert "failure: not finite" in text and "blocked: verl is not installed" in text and "blocked: not reached" in text
    assert "T3: 6827 x 2048 x 75968" in text
    again = json.loads((tmp_path / "run.json").read_text())
    assert table.markdown(again) == text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ") and "±" in line}
    assert widths == {12}


def test_reports_without_sustained_times_still_make_a_page() -> None:
    old = report()
    del old["stretch_ms"], old["sustained_s"]
    rows = old["rows"]
    assert isinstance(rows, list)
    new = ("sustained", "calls", "cold", "mhz", "watts", "reasons")
    old["rows"] = [{key: row[key] for key in row if not any(word in key for word in new)} for row in rows]
    text = table.markdown(old)
    assert "queued: logits 2.50 ms, all three 8.00 ms." in text and "| sustained |" not in text.split("## Figures")[0]
    assert table.REGIMES[:20] not in text and "*" not in text.replace("**", "")
    assert "| T3 | both, queued | kept | 9.10 |" in text


def test_lists_of_numbers_are_on_one_line(tmp_path: Path) -> None:
    table.write(str(tmp_path / "run"), report())
    assert '"both_queued_turns_ms": [9.0, 9.2],' in (tmp_path / "run.json").read_text()


def test_ratios_around_one_call_no_one_faster() -> None:
    ours = {"both_queued_ms": 10.0, "both_queued_turns_ms": [9.9, 10.1]}
    other = {"both_queued_ms": 10.0, "both_queued_turns_ms": [10.0, 10.0]}
    assert table.verdict(ours, other, "both_queued") == "1.000 (0.990 to 1.010): within the spread"


def test_figures_of_mixed_clocks_are_not_judged() -> None:
    mixed = report()
    rows = mixed["rows"]
    assert isinstance(rows, list)
    for row in rows:
        row["both_queued_cold"] = False  # of both sides, so that their ratio alone looks fair
    text = table.markdown(mixed)
    assert "| T3 | both, queued | kept | 9.10* | 0.905, clocks mixed | torch.compile, 10.1* ms |" in text
    assert "| T3 | both, sustained | kept | 9.10 | 0.905 (0.900 to 0.911): faster |" in text
    judged = "| kept | 1.15 | queued |"
    assert judged not in text and judged in table.markdown(report())


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
    kept = rows["kept"]
    assert len(kept["both_queued_calls_ms"]) == 2 and kept["both_queued_mhz"] is None
    assert kept["forward_sustained_of_library"] > 0 and len(kept["both_latency_turns_ms"]) == 1
    assert len(rows["torch eager"]["forward_queued_turns_ms"]) == 1
    assert rows["QuACK, chunked"]["status"] == "blocked"
    assert rows["kept"]["loss"] == pytest.approx(rows["torch eager"]["loss"], rel=0.01)
    assert (tmp_path / "run.md").read_text().startswith(table.TITLE)
