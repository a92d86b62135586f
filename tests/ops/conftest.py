"""Fixtures of the operator tests."""

from __future__ import annotations

import faulthandler
import os
import subprocess

import pytest

from tests.ops.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Real gloo processes, started once: ``ranks.run(size, function, *args)``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_gpus():
    """One NCCL process a GPU, started once: ``two_gpus.run(function, *args)``."""
    import torch

    from tests.ops.gpu_ranks import GpuRanks

    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = GpuRanks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_gpu():
    """A process of its own on one GPU, in which several ranks can be emulated on streams."""
    import torch

    from tests.ops.gpu_ranks import GpuRanks

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pool = GpuRanks(1)
    yield pool
    pool.close()


def _all_gpus() -> str:
    """Numbers of the GPUs as the driver counts them, without starting CUDA in this process."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return ",".join(str(i) for i in range(len(listed.stdout.splitlines())))


def pytest_configure(config):
    """The real stderr, for what is said about a test that hangs. RLK_SPREAD_WORKERS: a GPU for each worker, in turn."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if os.environ.get("RLK_SPREAD_WORKERS") and worker.startswith("gw"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or _all_gpus()
        if visible:
            gpus = visible.split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[2:]) % len(gpus)]
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        config.gpu_stderr = os.fdopen(os.dup(2), "w")
        return
    with capture.global_and_fixture_disabled():
        config.gpu_stderr = os.fdopen(os.dup(2), "w")


def pytest_runtest_logreport(report):
    """Failed tests in RLK_REPORT_DIR/failed.txt at once: a run that is ended early still says which they were."""
    folder = os.environ.get("RLK_REPORT_DIR")
    if folder and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        with open(os.path.join(folder, "failed.txt"), "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}: {getattr(crash, 'message', report.when)[:300]!r}\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """A kernel that hangs ends the run after RLK_TEST_SECONDS (default 300) with the stacks, on the GPU only.

    Nothing in Python can stop a wait for the GPU, so the process ends; its context, and with it the kernel, goes too.
    """
    if item.get_closest_marker("gpu") is None:
        yield
        return
    seconds = float(os.environ.get("RLK_TEST_SECONDS", "300"))
    stream = item.config.gpu_stderr
    faulthandler.dump_traceback_later(seconds, exit=True, file=stream)
    note = os.environ.get("RLK_TEST_RUNNING")
    if note:
        with open(note, "w", encoding="utf-8") as file:  # who hung, where the output does not say
            file.write(item.nodeid)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
