"""metrics.jsonl, W&B that is missing or hangs, and the manifest."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.errors import ConfigError, DataError
from recipes.metrics import wandb_logger
from recipes.metrics.logging import (
    JsonlWriter,
    MetricLogger,
    MetricsError,
    differing_keys,
    encode_row,
    read_metrics,
    strip_time,
)
from recipes.metrics.manifest import Manifest, read_manifest, write_json_atomic
from recipes.metrics.wandb_logger import WandbLogger


def test_encoding_is_strict_and_stable() -> None:
    row = {"b": 0.1, "a": np.float32(0.1), "step": np.int64(3), "n": torch.tensor(7), "t": True, "s": "native",
           "nan": NAN_, "inf": math.inf, "low": -math.inf, "zero": -0.0}  # fmt: skip
    text = encode_row(row)
    assert text.startswith('{"step":3,"a":0.10000000149011612,"b":0.1,')
    parsed = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (parsed["nan"], parsed["inf"], parsed["low"]) == ("NaN", "Infinity", "-Infinity")
    assert parsed["n"] == 7 and parsed["t"] is True and '"zero":-0.0' in text
    assert encode_row(dict(reversed(row.items()))) == text
    with pytest.raises(MetricsError, match="metric 'x'.*shape"):
        encode_row({"step": 0, "x": np.zeros(3)})
    with pytest.raises(MetricsError, match="step is None"):
        encode_row({"x": 1})


NAN_ = float("nan")


def test_round_trip_and_torn_line(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 0, "x": NAN_, "y": 1e-320})
    writer.write({"step": 1, "x": math.pi, "y": -math.inf})
    with pytest.raises(MetricsError, match="step 1 does not follow step 1"):
        writer.write({"step": 1})
    writer.close()
    with open(writer.path, "ab") as file:
        file.write(b'{"step":2,"x":0.')
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == [0, 1] and math.isnan(rows[0]["x"]) and rows[1]["x"] == math.pi
    assert rows[0]["y"] == 1e-320 and rows[1]["y"] == -math.inf
    writer.path.write_bytes(b"nonsense\n" + writer.path.read_bytes())
    with pytest.raises(DataError, match=r"metrics.jsonl:1: not a metrics row"):
        read_metrics(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path / "elsewhere")


def test_resume_ends_with_the_bytes_of_an_unbroken_run(tmp_path: Path) -> None:
    def run(path: Path, steps: range, first: int) -> None:
        writer = JsonlWriter(path, first_step=first)
        for step in steps:
            writer.write({"step": step, "x": step / 3})
        writer.close()

    run(tmp_path / "whole", range(10), 0)
    run(tmp_path / "broken", range(7), 0)
    with open(tmp_path / "broken", "ab") as file:
        file.write(b'{"step":7,')
    run(tmp_path / "broken", range(4, 10), 4)  # the checkpoint was at step 4
    assert (tmp_path / "broken").read_bytes() == (tmp_path / "whole").read_bytes()
    run(tmp_path / "broken", range(3), 0)  # a fresh start removes everything
    assert len(read_metrics(tmp_path / "broken")) == 3


def test_comparison_of_two_runs_ignores_times() -> None:
    a = [{"step": 0, "x": NAN_, "time/step": 1.0, "perf/tokens_per_s": 3}, {"step": 1, "x": 1}]
    b = [{"step": 0, "x": NAN_, "time/step": 2.0}, {"step": 1, "x": 1}]
    assert differing_keys(a, b) == []
    assert strip_time(a[0]).keys() == {"step", "x"}
    b[1]["x"] = 1.0000000000000002
    assert differing_keys(a, b) == [(1, "x")]
    assert differing_keys(a, b[:1]) == [(1, "step")]


def test_full_disk_is_a_clear_error_and_loses_no_row(tmp_path: Path) -> None:
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from recipes.metrics.logging import JsonlWriter, MetricsError
w = JsonlWriter({str(tmp_path / "m.jsonl")!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    for s in range(100):
        w.write({{"step": s, "text": "x" * 50}})
except MetricsError as e:
    print(e)
"""
    assert resource.RLIMIT_FSIZE is not None
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30).stdout
    assert "m.jsonl: cannot write" in out and "Free disk space" in out
    data = (tmp_path / "m.jsonl").read_bytes()
    assert data.endswith(b"\n") and len(read_metrics(tmp_path / "m.jsonl")) == data.count(b"\n") > 1


# ---------------------------------------------------------------------- W&B


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def hanging_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that is healthy and then never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if b"healthz" in client.recv(4096):
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                client.close()
            else:
                held.append(client)

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield url
    listener.close()
    for client in held:
        client.close()


def _children() -> set[int]:
    return {
        int(p.parent.name)
        for p in Path("/proc").glob("[0-9]*/stat")
        if p.exists() and p.read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())
    }


def test_unknown_mode_and_netrc(no_key: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="logger.wandb"):
        WandbLogger(tmp_path, mode="sometimes")
    assert not wandb_logger.has_credentials()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert wandb_logger.has_credentials()


def test_unreachable_server_is_found_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        mode, reason = wandb_logger.resolve_mode("auto")
        assert mode == "offline" and "unreachable" in reason
        assert time.monotonic() - start < wandb_logger.PROBE_SECONDS + 1


def test_offline_has_the_same_keys(no_key: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb")
    before = _children()
    with caplog.at_level(logging.WARNING), MetricLogger(tmp_path, wandb="auto", config={"a": {"b": 1}}) as logger:
        assert logger.wandb.mode == "offline"
        logger.log({"step": 0, "reward/mean": 0.25, "x": NAN_, "kernel/backend": "native"})
        logger.log({"step": 1, "reward/mean": 0.5, "x": 1.0, "kernel/backend": "native"})
    assert not caplog.records
    assert _children() <= before
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    stored = file.read_bytes()
    assert all(key in stored for key in (b"reward/mean", b"kernel/backend"))
    assert [r["reward/mean"] for r in read_metrics(tmp_path)] == [0.25, 0.5]
    assert (tmp_path / "wandb-run-id").read_text().strip() in file.name


def test_hanging_server_costs_seconds_and_leaves_no_process(
    hanging_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr(wandb_logger, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(wandb_logger, "START_SECONDS", 2.5)
    before, start = _children(), time.monotonic()
    with caplog.at_level(logging.WARNING), MetricLogger(tmp_path, wandb="online") as logger:
        for step in range(3):
            logger.log({"step": step, "reward/mean": 0.5})
    assert time.monotonic() - start < 16
    assert len(read_metrics(tmp_path)) == 3
    assert len(caplog.records) == 1 and "wandb sync" in caplog.text
    assert _children() <= before


@pytest.mark.parametrize(("mode", "limit"), [("online", 0.4), ("offline", 0.1)])
def test_the_end_waits_longer_for_an_upload(
    mode: str, limit: float, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wandb_logger.UPLOAD_SECONDS >= 30 and wandb_logger.CLOSE_SECONDS <= 5
    monkeypatch.setattr(wandb_logger, "UPLOAD_SECONDS", 0.4)
    monkeypatch.setattr(wandb_logger, "CLOSE_SECONDS", 0.1)
    logger = WandbLogger(tmp_path, mode="off")
    logger.mode, logger._process = mode, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = logger._process
    with caplog.at_level(logging.INFO):
        logger.close()
    assert process.poll() is not None
    assert f"did not finish within {limit:g} s" in caplog.text
    assert caplog.text.count("uploading the rest") == (mode == "online")


def test_ctrl_c_ends_the_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = WandbLogger(tmp_path, mode="off")
    logger.mode, logger._process = "online", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process, wait = logger._process, subprocess.Popen.wait

    def interrupted(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logger.close()
    assert process.poll() is not None


def test_a_dead_wandb_process_does_not_matter(no_key: None, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = MetricLogger(tmp_path, wandb="offline")
    process = logger.wandb._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    for step in range(3):
        logger.log({"step": step})
    logger.close()
    logger.close()
    assert len(read_metrics(tmp_path)) == 3


# ---------------------------------------------------------------------- manifest


def test_manifest_is_continued_by_a_resumed_run(tmp_path: Path) -> None:
    config = {"trainer": {"seed": 5}}
    first = Manifest(tmp_path, config, command=["python", "-m", "recipes.main", "a b"])
    first.engines([{"contract": "f00", "backends": {"logp": "native"}}], [{"contract": "f00"}])
    for version in range(4):
        first.weights(version, f"hash{version}")
    first.flush()  # and killed
    second = Manifest(tmp_path, config, first_step=2)
    second.weights(3, "hash3")
    second.finish("completed", last_step=9)
    found = read_manifest(tmp_path)
    assert found["seed"] == 5 and found["state"] == "completed"
    assert found["weight_hashes"] == {"0": "hash0", "1": "hash1", "2": "hash2", "3": "hash3"}
    assert [s["state"] for s in found["sessions"]] == ["killed", "completed"]
    assert found["versions"]["torch"] == torch.__version__
    assert not list(tmp_path.glob(".*tmp"))
    Manifest(tmp_path, config, first_step=0).finish("failed", error=ValueError("broken"))
    found = read_manifest(tmp_path)
    assert len(found["sessions"]) == 1 and found["sessions"][0]["error"] == "ValueError: broken"
    assert found["weight_hashes"] == {}


def test_atomic_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "manifest.json"
    write_json_atomic(target, {"a": 1})

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(MetricsError, match="No space left on device"):
        write_json_atomic(target, {"a": 2})
    assert read_manifest(tmp_path) == {"a": 1} and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(DataError, match="Give the run directory"):
        read_manifest(tmp_path / "none")
