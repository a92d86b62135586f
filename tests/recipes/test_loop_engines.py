"""The whole thing: Hydra, Ray or plain processes, real vLLM, real Megatron-Core, the tiny model, the arithmetic set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.metrics.logging import differing_keys, read_metrics
from tests.recipes.warm import Driver, Server

pytest.importorskip("vllm")
pytest.importorskip("megatron.core")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engines, pytest.mark.slow]
SMALL = ("rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "logger=jsonl", "logger.progress=false")
RAY, PROCESS = "orchestrator.backend=ray", "orchestrator.backend=process"  # each starts interpreters, as users do


@pytest.fixture(scope="module")
def warm() -> Iterator[Server]:
    """Starts runs whose processes find vLLM and Megatron-Core imported."""
    server = Server()
    yield server
    server.close()


def start(warm: Server, folder: Path, *overrides: str) -> subprocess.Popen | Driver:
    """A run; in interpreters of its own where a backend is named, else warm."""
    arguments = [f"hydra.run.dir={folder}", *SMALL, *overrides]
    if not {RAY, PROCESS} & set(overrides):
        folder.parent.mkdir(parents=True, exist_ok=True)
        return warm.start([*arguments, PROCESS, "logger.report=false"], folder.with_name(f"{folder.name}.stderr"))
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.main", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(warm: Server, folder: Path, *overrides: str, steps: int = 3) -> list[dict]:
    process = start(warm, folder, f"trainer.steps={steps}", *overrides)
    _, text = process.communicate(timeout=600)
    assert process.returncode == 0, text
    return read_metrics(folder)


@pytest.mark.parametrize(
    "overrides",
    [
        # Two whole starts: the README's command, and the same without Ray.
        (RAY, "model.dtype=bfloat16"),
        (PROCESS, "model.dtype=float32", "rollout.temperature=0.7"),
        ("train.tensor_parallel_size=2", "rollout.temperature=1.3"),
        ("rollout.tensor_parallel_size=2",),
        # 40 tokens a pass and a small cache: requests are chunked, wait, and are preempted.
        (
            "rollout.num_engines=2",
            "rollout.kv_cache_bytes=200000",
            "rollout.max_num_batched_tokens=40",
            "rollout.max_num_seqs=8",
        ),
        ("train.data_parallel_size=2", "algorithm.num_minibatches=2", "algorithm.kl_coef=0.01"),
        ("algorithm=ppo", "algorithm.ppo_epochs=2"),
        # The published layout in small: tensor, context and sequence parallel, optimizer state spread over the ranks.
        (
            "train.tensor_parallel_size=2",
            "train.context_parallel_size=2",
            "train.sequence_parallel=true",
            "train.distributed_optimizer=true",
        ),
        ("train.context_parallel_size=4", "algorithm=ppo", "algorithm.kl_coef=0.01"),
    ],
    ids=lambda o: ",".join(o),
)
def test_strict_runs_have_no_mismatch(warm, tmp_path, overrides):
    folder = tmp_path / "run"
    rows = run(warm, folder, *overrides)
    assert [r["consistency/mismatch_count"] for r in rows] == [0, 0, 0]
    assert all(r["consistency/active_tokens"] > 16 for r in rows)
    assert len({r["train/weight_hash"] for r in rows}) == 3  # the weights moved, and the engines followed
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["contract"]["train"] == manifest["contract"]["rollout"] and manifest["state"] == "completed"
    if overrides[0] in (RAY, PROCESS):
        assert (folder / "report.html").stat().st_size > 1000


def test_stock_operators_differ(warm, tmp_path):
    rows = run(warm, tmp_path / "run", "consistency=native")
    assert all(r["consistency/mismatch_count"] > 0.5 * r["consistency/active_tokens"] for r in rows)


def test_context_parallel_resumes_with_the_same_bytes(warm, tmp_path):
    """Every rank saves and reads its own state; a run that stops half-way ends like one that does not."""
    layout = ("train.context_parallel_size=2", "train.distributed_optimizer=true", "trainer.save_interval=2")
    whole = run(warm, tmp_path / "whole", *layout, steps=4)
    run(warm, tmp_path / "parts", *layout, steps=2)
    assert differing_keys(whole, run(warm, tmp_path / "parts", *layout, steps=4)) == []


def test_sigkill_and_resume_write_the_bytes_of_an_unbroken_run(warm, tmp_path):
    """The broken run is one on Ray; the backend changes no byte of the others either."""
    whole = run(warm, tmp_path / "whole", "trainer.save_interval=2", steps=6)
    process = start(warm, tmp_path / "broken", "trainer.steps=6", "trainer.save_interval=2", RAY)
    metrics = tmp_path / "broken/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    resumed = run(warm, tmp_path / "broken", "trainer.save_interval=2", steps=6)
    assert differing_keys(whole, resumed) == []
