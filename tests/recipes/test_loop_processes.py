"""The loop in real processes, on Ray and without: faults, signals, kills. Each ends soon and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipes.metrics.logging import differing_keys, read_metrics
from recipes.transport import has_ray

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


BACKENDS = ("process", "ray")
# Two engines, two data-parallel ranks, a critic beside the policy.
COMMON = ("rollout.num_engines=2", "train.data_parallel_size=2", "algorithm.name=ppo")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    """``orchestrator.backend``."""
    if request.param == "ray" and not has_ray():
        pytest.skip("Ray is not installed")
    return f"orchestrator.backend={request.param}"


class Driver:
    """A running driver and everything it started."""

    def __init__(self, folder: Path, *overrides: str, **env: str) -> None:
        self.folder = folder
        self.mark = f"RLK_TEST_{os.getpid()}_{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.recipes.loop_driver", str(folder), *overrides],
            cwd=ROOT,
            env={**os.environ, "RLK_TEST_MARK": self.mark, **env},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def members(self) -> list[psutil.Process]:
        """Live processes that inherited this driver's environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RLK_TEST_MARK") == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait_for_rows(self, count: int, timeout: float = 300.0) -> None:
        """Until metrics.jsonl has ``count`` lines."""
        path, deadline = self.folder / "metrics.jsonl", time.monotonic() + timeout
        while not path.exists() or path.read_text().count("\n") < count:
            assert time.monotonic() < deadline and self.process.poll() is None, "the driver made no progress"
            time.sleep(0.1)

    def finish(self, timeout: float = 300.0) -> tuple[int, str]:
        """Exit code and standard error; afterwards no process may be left."""
        try:
            _, text = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for process in self.members():
                process.kill()
            raise
        deadline = time.monotonic() + 60  # Ray's agents look for their raylet now and then only
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.2)
        left = self.members()
        names = [" ".join(p.cmdline()[:3]) for p in left]
        for process in left:
            process.kill()
        assert not names, f"orphans: {names}"
        return self.process.returncode, text


@pytest.fixture(scope="module")
def cleans() -> dict[str, Path]:
    """The folders of :func:`clean`, by backend."""
    return {}


@pytest.fixture(scope="module")
def clean(tmp_path_factory, backend, cleans) -> Path:
    """A run that nothing interrupts."""
    if backend not in cleans:
        folder = tmp_path_factory.mktemp("clean")
        code, text = Driver(folder, backend, *COMMON).finish()
        assert code == 0, text
        cleans[backend] = folder
    return cleans[backend]


def test_finishes_with_zero_mismatches(clean):
    rows = read_metrics(clean)
    assert len(rows) == 6 and all(r["consistency/mismatch_count"] == 0 for r in rows)
    assert rows[0]["kernel/backend"] == "fake"
    assert (clean / "logs/train-1.log").exists()
    for name in ("policy_rank1.pt", "critic_rank1.pt"):
        assert (clean / "checkpoints/step_000006" / name).exists()


def test_backends_write_the_same_bytes(clean, cleans):
    """Whichever backend comes second is compared with the first."""
    if len(cleans) < 2:
        pytest.skip("the other backend has not run yet")
    first, second = cleans.values()
    assert clean in (first, second)
    assert differing_keys(read_metrics(first), read_metrics(second)) == []


def test_context_parallel_ranks_share_the_work(tmp_path):
    """Each of two groups of two ranks holds half of every sequence: no mismatch, and nothing lost or counted twice."""
    common = ("orchestrator.backend=process", "algorithm.name=ppo", "algorithm.kl_coef=0.1", "trainer.steps=3")
    found = []
    for sizes in (("train.data_parallel_size=2", "train.context_parallel_size=2"), ("train.data_parallel_size=1",)):
        folder = tmp_path / str(len(sizes))
        folder.mkdir()
        code, text = Driver(folder, *common, *sizes).finish()
        assert code == 0, text
        found.append(read_metrics(folder))
    for step, (split, whole) in enumerate(zip(*found, strict=True)):
        assert split["consistency/mismatch_count"] == 0
        if step == 0:  # the same weights and tokens: the same bits
            assert split["consistency/digest"] == whole["consistency/digest"]
        names = [name for name in whole if name.startswith(("loss/", "reward/", "consistency/", "train/policy"))]
        numbers = [name for name in names if not isinstance(whole[name], str)]
        assert len(numbers) > 20
        for name in numbers:
            assert split[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_ctrl_c_saves_and_resumes_with_the_same_bytes(clean, tmp_path, backend):
    common = (backend, *COMMON)
    run = Driver(tmp_path, *common, FAKE_SLOW="1")
    run.wait_for_rows(1)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: the whole group, actors included
    code, text = run.finish()
    assert code == 130 and "to resume: python -m recipes.main the-same-overrides" in text, text
    assert 1 <= len(read_metrics(tmp_path)) < 6
    assert (tmp_path / "checkpoints/latest").read_text().strip() == f"step_{len(read_metrics(tmp_path)):06d}"
    assert Driver(tmp_path, *common).finish()[0] == 0
    assert differing_keys(read_metrics(clean), read_metrics(tmp_path)) == []


def test_sigkill_mid_step_leaves_nothing_behind_and_resumes(clean, tmp_path, backend):
    common = (backend, *COMMON)
    run = Driver(tmp_path, *common, FAKE_SLOW="1")
    run.wait_for_rows(3)
    run.process.kill()
    assert run.finish()[0] == -signal.SIGKILL
    code, text = Driver(tmp_path, *common).finish()
    assert code == 0, text
    assert differing_keys(read_metrics(clean), read_metrics(tmp_path)) == []


@pytest.mark.parametrize("seconds", [4, 9])
def test_sigterm_while_starting(tmp_path, backend, seconds):
    run = Driver(tmp_path, backend, "trainer.steps=2000", FAKE_SLOW="1", FAKE_SLOW_START="1")  # never done by then
    time.sleep(seconds)
    run.process.terminate()
    # 130 from our handler; before it stands, or while Ray starts, the signal's own end. Never a process left behind.
    assert run.finish()[0] != 0


@pytest.mark.parametrize(
    ("overrides", "env", "expected"),
    [
        ((), {"FAKE_DIE": "1"}, ["rollout-0: the process died during generate", "fatal: out of luck", "resume"]),
        (("train.data_parallel_size=2",), {"FAKE_TRAIN_DIE": "1"}, ["train-", "the process died during update"]),
        (
            ("orchestrator.step_timeout_s=4",),
            {"FAKE_HANG": "1"},
            ["no answer from rollout-0 to generate within 4 s", "orchestrator.step_timeout_s"],
        ),
        ((), {"FAKE_BROKEN_START": "1"}, ["rollout-0", "something went wrong while loading"]),
    ],
)
def test_faults_end_with_a_reason(tmp_path, backend, overrides, env, expected):
    code, text = Driver(tmp_path, backend, *overrides, **env).finish()
    assert code == 1
    for part in expected:
        assert part in text, text


def test_training_ranks_that_drift_apart_stop_the_run(tmp_path):
    """One bit of one weight, on one rank, after two steps; the clean runs are those without it."""
    code, text = Driver(tmp_path, "orchestrator.backend=process", *COMMON, FAKE_DRIFT="2").finish()
    assert code == 1 and len(read_metrics(tmp_path)) == 1
    for part in ("different policy weights at version 2: table (", " on train-0, ", " on train-1)", "resume"):
        assert part in text, text
