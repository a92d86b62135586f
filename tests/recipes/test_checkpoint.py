"""Checkpoints: whole or absent, verified when read, refused when they belong to another run."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from recipes import checkpoint
from recipes.checkpoint import Checkpointer, require_same_run, run_identity, run_lock, set_aside
from recipes.cluster import Cluster
from recipes.config import build_config
from recipes.errors import CheckpointError, ConfigError, EngineError


def writer(text: str):
    def write(folder: str) -> None:
        (Path(folder) / "policy_rank0.pt").write_text(text)
        (Path(folder) / "sub").mkdir()
        (Path(folder) / "sub/more.pt").write_text(text * 2)

    return write


def test_round_trip_and_pruning(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    assert saver.latest() is None
    for step in (1, 2, 3):
        saver.save(step, {"cursor": step * 8}, writer(f"weights {step}"))
    found = Checkpointer(tmp_path).latest()
    assert found.step == 3 and found.state == {"cursor": 24}
    assert (found.path / "sub/more.pt").read_text() == "weights 3weights 3"
    assert sorted(p.name for p in saver.folder.iterdir()) == ["latest", "step_000002", "step_000003"]
    assert (saver.folder / "latest").read_text() == "step_000003\n"


@pytest.mark.parametrize("moment", ["in the writer", "before the rename", "after the rename"])
def test_a_crash_leaves_the_previous_checkpoint_or_the_whole_new_one(tmp_path, monkeypatch, moment):
    saver = Checkpointer(tmp_path)
    saver.save(1, {}, writer("one"))

    class Crash(BaseException):
        pass

    def crash(*args):
        raise Crash

    write = writer("two")
    if moment == "in the writer":
        write = crash
    elif moment == "before the rename":
        monkeypatch.setattr(checkpoint.os, "rename", crash)
    else:
        monkeypatch.setattr(Checkpointer, "_point_to", crash)
    with pytest.raises(Crash):
        saver.save(2, {}, write)
    found = Checkpointer(tmp_path).latest()
    assert found.step == (2 if moment == "after the rename" else 1)
    assert not list(saver.folder.glob(".tmp-*"))


def test_left_overs_of_a_kill_are_removed(tmp_path):
    (tmp_path / "checkpoints/.tmp-step_000004").mkdir(parents=True)
    saver = Checkpointer(tmp_path)
    saver.remove_left_overs()
    assert saver.latest() is None and not list(saver.folder.iterdir())


def test_one_run_at_a_time(tmp_path):
    with run_lock(tmp_path / "run"):
        message = rf"process {os.getpid()}\) is writing.*new hydra.run.dir"
        with pytest.raises(CheckpointError, match=message) as error, run_lock(tmp_path / "run"):
            pass
        assert error.value.where == str(tmp_path / "run")
    with run_lock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("damage", ["content", "size", "missing", "state"])
def test_damage_is_named(tmp_path, damage):
    saver = Checkpointer(tmp_path)
    path = saver.save(5, {}, writer("weights"))
    file = path / "policy_rank0.pt"
    if damage == "content":
        file.write_text("weighTs")
    elif damage == "size":
        file.write_text("weights and more")
    elif damage == "missing":
        file.unlink()
    else:
        file = path / "state.json"
        file.write_text("{")
    with pytest.raises(CheckpointError) as error:
        saver.latest()
    assert str(file) in str(error.value) and f"Remove {path}" in str(error.value)


def test_no_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 70 << 20)
    )
    saver = Checkpointer(tmp_path, expected_bytes=10 << 20)
    with pytest.raises(CheckpointError, match=r"needs about 74 MiB, 70 MiB are free.*Free disk space"):
        saver.save(1, {}, writer("x"))
    assert not saver.folder.exists()


def test_no_space_for_ray_is_said_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    pytest.importorskip("ray")
    cluster = Cluster(build_config({"orchestrator": {"backend": "ray", "object_store_bytes": 100 << 20}}))
    monkeypatch.setitem(sys.modules, "ray", None)  # an import would fail
    usage = shutil._ntuple_diskusage(1 << 40, 1 << 40, 70 << 20)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(EngineError, match=r"needs about 164 MiB.* 70 MiB are free.*RAY_TMPDIR") as error:
        cluster.start()
    assert error.value.where == str(tmp_path / "ray")


def test_disk_full_while_writing_keeps_the_previous_one(tmp_path):
    saver = Checkpointer(tmp_path)
    saver.save(1, {}, writer("one"))

    def full(folder: str) -> None:
        (Path(folder) / "half.pt").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="No space left on device.*previous checkpoint is intact"):
        saver.save(2, {}, full)
    assert saver.latest().step == 1 and not list(saver.folder.glob(".tmp-*"))


def test_resuming_from_an_older_step_drops_the_abandoned_future(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    for step in (2, 4):
        saver.save(step, {}, writer(str(step)))
    shutil.rmtree(saver.folder / "step_000004")
    saver.save(3, {}, writer("3"))
    (saver.folder / "step_000009").mkdir()
    saver.save(4, {}, writer("4b"))
    assert sorted(p.name for p in saver.folder.glob("step_*")) == ["step_000003", "step_000004"]


def test_set_aside(tmp_path):
    for _ in range(2):
        (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
        (tmp_path / "metrics.jsonl").write_text("{}")
        set_aside(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    set_aside(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoints.1",
        "checkpoints.2",
        "metrics.jsonl",
        "metrics.jsonl.1",
        "metrics.jsonl.2",
    ]


def test_identity_ignores_what_cannot_change_bits():
    one = build_config({"trainer": {"steps": 5}, "logger": {"project": "a"}})
    two = build_config({"trainer": {"steps": 9, "save_interval": 1}, "logger": {"project": "b"}})
    require_same_run(run_identity(one.to_dict()), two.to_dict())
    other = build_config({"trainer": {"seed": 1}})
    with pytest.raises(ConfigError, match=r"trainer.seed: .*trainer.seed: 0 in the checkpoint, 1 now"):
        require_same_run(run_identity(one.to_dict()), other.to_dict())
