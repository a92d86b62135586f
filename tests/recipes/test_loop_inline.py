"""The loop over fake engines in this process: no Ray, milliseconds a step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import pytest

from recipes.actors import RolloutActor, TrainActor
from recipes.checkpoint import run_lock
from recipes.cluster import Cluster
from recipes.config import RunConfig, build_config
from recipes.errors import CheckpointError, ConfigError, EngineError, WeightSyncError
from recipes.metrics.logging import differing_keys, read_metrics
from recipes.reward import summarize
from recipes.run import Run, Signals, Stop
from tests.recipes import fakes
from tests.recipes.fakes import FakeTask


class InlineCluster(Cluster):
    """Runs every actor's methods in this process (training world of 1)."""

    def start(self, ray_started=None) -> None:
        config = self.config
        self.train = [_actor(TrainActor, "tests.recipes.fakes:FakeTrain", config, 0, "127.0.0.1", 0)]
        self.rollout = [
            _actor(RolloutActor, "tests.recipes.fakes:FakeRollout", config) for _ in range(config.rollout.num_engines)
        ]
        self._names = {a: f"a-{i}" for i, a in enumerate([*self.train, *self.rollout])}
        self.infos = self.describe()

    def _gather(self, calls, timeout=None):
        return [getattr(actor, method)(*args) for actor, method, args in calls]

    def _put(self, value):
        return value

    def shutdown(self) -> None:
        pass


def _actor(cls, *args):
    actor = cls(*args, "")
    actor.start()
    return actor


def make(tmp_path, overrides=None, task=None) -> Run:
    tree = {
        "model": {"dtype": "float32", "vocab_size": 16},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 4, "max_prompt_len": 4, "max_response_len": 6},
        "train": {"lr": 40.0, "critic_lr": 2.0},
        "logger": {"wandb": "off", "progress": False, "report": False},
        "trainer": {"steps": 6, "save_interval": 2},
    }
    for key, value in (overrides or {}).items():
        group, name = key.split(".")
        tree.setdefault(group, {})[name] = value
    config: RunConfig = build_config(tree)
    config.trainer.output_dir = str(tmp_path)
    return Run(config, InlineCluster(config), task or FakeTask(), "python -m recipes.main")


def test_learns_and_never_mismatches(tmp_path):
    run = make(tmp_path, {"trainer.steps": 30})
    assert run.execute() == 0
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == list(range(30))
    assert all(r["consistency/mismatch_count"] == 0 and r["consistency/active_tokens"] > 0 for r in rows)
    first, last = (sum(r["reward/mean"] for r in part) for part in (rows[:5], rows[-5:]))
    assert last > first + 1.0
    for key in (
        "loss/policy",
        "loss/total",
        "train/policy_grad_norm",
        "time/rollout",
        "time/step",
        "perf/tokens_per_s",
    ):
        assert key in rows[0]
    # One optimizer step a rollout: the policy that trains is the one that sampled (weights are fp32, so nearly 1).
    assert rows[0]["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_two_runs_write_the_same_bytes_and_a_resumed_one_too(tmp_path):
    overrides = {"algorithm.name": "ppo", "algorithm.num_minibatches": 2, "algorithm.ppo_epochs": 2}
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    make(tmp_path / "a", overrides).execute()
    make(tmp_path / "b", overrides).execute()
    a = read_metrics(tmp_path / "a")
    assert differing_keys(a, read_metrics(tmp_path / "b")) == []
    # Killed in step 5: checkpoint of 4, metrics up to 4, a torn line.
    make(tmp_path / "c", {**overrides, "trainer.steps": 5}).execute()
    shutil.rmtree(tmp_path / "c/checkpoints/step_000005")
    (tmp_path / "c/checkpoints/latest").write_text("step_000004\n")
    with open(tmp_path / "c/metrics.jsonl", "a") as file:
        file.write('{"step":5,"torn')
    run = make(tmp_path / "c", overrides)
    assert run.execute() == 0
    assert differing_keys(a, read_metrics(tmp_path / "c")) == []
    assert len(a) == 6


def test_another_seed_gives_other_bytes(tmp_path):
    make(tmp_path / "a", {"trainer.steps": 1}).execute()
    make(tmp_path / "b", {"trainer.steps": 1, "trainer.seed": 1}).execute()
    assert differing_keys(read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b"))


def test_engine_count_changes_nothing(tmp_path):
    make(tmp_path / "a").execute()
    make(tmp_path / "b", {"rollout.num_engines": 3}).execute()
    assert differing_keys(read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b")) == []


def test_ppo_value_loss_falls(tmp_path):
    make(tmp_path, {"algorithm.name": "ppo", "trainer.steps": 20}).execute()
    rows = read_metrics(tmp_path)
    assert rows[-1]["loss/value"] < 0.5 * rows[0]["loss/value"]


def test_critic_warmup_leaves_the_policy_alone(tmp_path):
    make(tmp_path, {"algorithm.name": "ppo", "algorithm.critic_warmup_steps": 2, "trainer.steps": 3}).execute()
    rows = read_metrics(tmp_path)
    assert rows[0]["train/weight_hash"] == rows[1]["train/weight_hash"] == rows[2]["train/weight_hash"]
    assert "loss/policy" not in rows[1] and "loss/policy" in rows[2] and "loss/value" in rows[0]


def test_kl_to_the_reference(tmp_path):
    make(tmp_path, {"algorithm.kl_coef": 0.1, "trainer.steps": 3}).execute()
    rows = read_metrics(tmp_path)
    assert rows[0]["loss/kl_ref"] == 0.0 and rows[2]["loss/kl_ref"] > 0.0


def test_dynamic_sampling_replaces_equal_groups(tmp_path):
    class Half(FakeTask):
        def score(self, prompts, samples):
            values = super().score(prompts, samples).rewards
            return summarize([0.5 if p.index % 2 else v for p, v in zip(prompts, values)], 0)

    make(tmp_path, {"algorithm.dynamic_sampling": True, "trainer.steps": 3}, Half()).execute()
    rows = read_metrics(tmp_path)
    assert all(r["rollout/rounds"] >= 2 and r["rollout/groups_dropped"] >= 2 for r in rows)
    # The groups that were trained on replaced those that reward/* and rollout/* describe.
    assert any(r["consistency/active_tokens"] != r["rollout/response_tokens"] for r in rows)


def test_constant_reward_changes_no_weight(tmp_path):
    make(tmp_path, {"trainer.steps": 3, "algorithm.dynamic_sampling": True}, FakeTask(constant=True)).execute()
    rows = read_metrics(tmp_path)
    assert len({r["train/weight_hash"] for r in rows}) == 1
    assert rows[0]["rollout/rounds"] == 4 and rows[0]["train/policy_grad_norm"] == 0.0


def test_all_masked_batch_is_said_and_skipped(tmp_path, caplog):
    overrides = {"algorithm.mask_truncated": True, "rollout.max_response_len": 1, "trainer.steps": 1}
    monkey_seed = {"trainer.seed": 3}
    run = make(tmp_path, {**overrides, **monkey_seed})
    assert run.execute() == 0
    row = read_metrics(tmp_path)[0]
    if row["rollout/truncated_fraction"] == 1.0:
        assert row["train/optimizer_steps"] == 0 and "masked" in caplog.text


def test_strict_mismatch_stops_with_evidence(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_BITS", "3")
    with pytest.raises(EngineError, match=r"1 of \d+ log-probabilities differ .* at step 3") as error:
        make(tmp_path).execute()
    assert "mismatch.jsonl" in str(error.value) and "audit" in str(error.value)
    rows = read_metrics(tmp_path)
    assert rows[-1]["step"] == 3 and rows[-1]["consistency/mismatch_count"] == 1
    evidence = [json.loads(line) for line in (tmp_path / "mismatch.jsonl").read_text().splitlines()]
    assert len(evidence) == 1 and evidence[0]["rollout_logp"] != evidence[0]["train_logp"]
    # After the cause is gone the run continues from the checkpoint of step 2 and equals one that never failed.
    monkeypatch.delenv("FAKE_BITS")
    assert make(tmp_path).execute() == 0
    make(tmp_path / "clean").execute()
    assert differing_keys(read_metrics(tmp_path), read_metrics(tmp_path / "clean")) == []


def test_audit_reports_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_BITS", "3")
    assert make(tmp_path, {"consistency.mode": "audit"}).execute() == 0
    assert [r["consistency/mismatch_count"] for r in read_metrics(tmp_path)] == [0, 0, 0, 1, 0, 0]


def test_fast_runs_to_the_end_and_reports(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_BITS", "3")
    monkeypatch.setenv("FAKE_CONTRACT", "0")  # fast promises no bits: differing contracts are no reason to stop
    assert make(tmp_path, {"consistency.mode": "fast", "rollout.top_p": 0.9}).execute() == 0
    rows = read_metrics(tmp_path)
    assert [r["consistency/mismatch_count"] for r in rows] == [0, 0, 0, 1, 0, 0]
    assert json.loads((tmp_path / "manifest.json").read_text())["state"] == "completed"


@pytest.mark.parametrize("mode", ["audit", "fast", "native"])
def test_nan_stops_in_every_mode(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("FAKE_NAN", "1")
    with pytest.raises(EngineError, match="1 are not finite"):
        make(tmp_path, {"consistency.mode": mode}).execute()


def test_stale_and_half_loaded_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_STALE", "2")
    with pytest.raises(WeightSyncError, match="version 1, the trainer is at 2"):
        make(tmp_path / "a").execute()
    monkeypatch.delenv("FAKE_STALE")
    monkeypatch.setenv("FAKE_HALF", "2")
    with pytest.raises(WeightSyncError, match="after the update, the trainer sent"):
        make(tmp_path / "b").execute()


def test_contracts_must_agree_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CONTRACT", "0")
    with pytest.raises(Exception, match="fingerprints differ"):
        make(tmp_path).execute()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_resume_never_sets_the_old_run_aside(tmp_path):
    make(tmp_path, {"trainer.steps": 2}).execute()
    old = (tmp_path / "metrics.jsonl").read_bytes()
    make(tmp_path, {"trainer.steps": 1, "trainer.resume": "never"}).execute()
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == old
    assert (tmp_path / "checkpoints.1/step_000002").is_dir()
    assert len(read_metrics(tmp_path)) == 1


def test_metrics_without_a_checkpoint_are_kept(tmp_path):
    make(tmp_path, {"trainer.steps": 2, "trainer.seed": 1}).execute()
    old = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    assert make(tmp_path, {"trainer.steps": 1}).execute() == 0
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == old
    assert len(read_metrics(tmp_path)) == 1


def test_resume_refuses_another_configuration(tmp_path, monkeypatch):
    make(tmp_path, {"trainer.steps": 2}).execute()
    monkeypatch.setattr(InlineCluster, "start", lambda *_: pytest.fail("processes were started first"))
    with pytest.raises(ConfigError, match=r"train.lr: 40.0 in the checkpoint, 1.0 now"):
        make(tmp_path, {"train.lr": 1.0}).execute()


def test_a_removed_checkpoint_is_passed_over_whatever_latest_says(tmp_path):
    make(tmp_path / "a").execute()
    make(tmp_path / "b", {"trainer.steps": 4}).execute()
    shutil.rmtree(tmp_path / "b/checkpoints/step_000004")
    assert (tmp_path / "b/checkpoints/latest").read_text() == "step_000004\n"
    assert make(tmp_path / "b").execute() == 0
    sessions = json.loads((tmp_path / "b/manifest.json").read_text())["sessions"]
    assert [s["first_step"] for s in sessions] == [0, 2]
    assert differing_keys(read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b")) == []


def test_resume_refuses_another_contract(tmp_path, monkeypatch):
    make(tmp_path, {"trainer.steps": 2}).execute()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(fakes, "CONTRACT", "anotheranother00")  # on both sides: they agree with each other
    with pytest.raises(CheckpointError, match="under contract fakefakefakefake, this machine .* anotheranother00"):
        make(tmp_path).execute()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


class Data(FakeTask):
    def __init__(self, sha256):
        super().__init__()
        self.sha256 = sha256

    def info(self):
        return {"path": "fake", "sha256": self.sha256}


def test_resume_refuses_other_data_under_the_same_path(tmp_path):
    make(tmp_path, {"trainer.steps": 2}, Data("aa")).execute()
    assert json.loads((tmp_path / "manifest.json").read_text())["data"]["sha256"] == "aa"
    with pytest.raises(ConfigError, match=r"data.sha256: 'aa' in the checkpoint, 'bb' now"):
        make(tmp_path, {"trainer.steps": 3}, Data("bb")).execute()
    assert make(tmp_path, {"trainer.steps": 3}, Data("aa")).execute() == 0


def test_a_second_start_in_the_folder_touches_nothing(tmp_path):
    make(tmp_path, {"trainer.steps": 2}).execute()
    (tmp_path / "checkpoints/.tmp-step_000004").mkdir()  # the first run is writing it
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with run_lock(tmp_path), pytest.raises(CheckpointError, match="another run"):
        make(tmp_path, {"trainer.resume": "never"}).execute()
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_manifest(tmp_path):
    make(tmp_path, {"trainer.steps": 1}).execute()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["contract"]["train"] == manifest["contract"]["rollout"] == "fakefakefakefake"
    assert manifest["config"]["trainer"]["steps"] == 1 and manifest["versions"]["torch"] and manifest["seed"] == 0


def test_weights_fall_back_to_host_memory_and_say_so(tmp_path, monkeypatch, caplog):
    """No GPU here, so a device buffer cannot be made: the same as a machine that refuses IPC."""
    from recipes.engines import weight_transfer
    from recipes.engines.device_memory import WeightLinkError

    def allocate(kind, size, device):
        if kind == "device":
            raise WeightLinkError("cudaIpcGetMemHandle: operation not supported (801)", where="GPU memory")
        return real(kind, size, device)

    real = weight_transfer.allocate
    monkeypatch.setattr(weight_transfer, "allocate", allocate)
    make(tmp_path / "plain", {"trainer.steps": 2}).execute()
    run = make(tmp_path / "fallen", {"trainer.steps": 2})
    run.config.hardware.device = "cuda"  # after the checks: only the choice of the way looks at it
    monkeypatch.setattr(InlineCluster, "start", _started_as_cpu(InlineCluster.start))
    assert run.execute() == 0
    assert "weights go through host memory, which is slow" in caplog.text and "operation not supported" in caplog.text
    facts = json.loads((tmp_path / "fallen/manifest.json").read_text())["weight_sync"]
    assert facts["transport"] == "host" and "operation not supported" in facts["reason"]
    assert differing_keys(read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "fallen")) == []
    strict = make(tmp_path / "strict", {"trainer.steps": 1, "orchestrator.weight_link": "device"})
    strict.config.hardware.device = "cuda"
    with pytest.raises(WeightLinkError, match="operation not supported"):
        strict.execute()


def _started_as_cpu(start):
    def call(self, started=None):
        device, self.config.hardware.device = self.config.hardware.device, "cpu"
        start(self, started)
        self.config.hardware.device = device

    return call


def test_small_buckets_change_nothing(tmp_path):
    make(tmp_path / "a", {"trainer.steps": 3}).execute()
    run = make(tmp_path / "b", {"trainer.steps": 3, "rollout.num_engines": 2})
    run.config.orchestrator.weight_bucket_bytes = 100  # less than any tensor but the smallest
    assert run.execute() == 0
    assert differing_keys(read_metrics(tmp_path / "a"), read_metrics(tmp_path / "b")) == []
    assert json.loads((tmp_path / "b/manifest.json").read_text())["weight_sync"]["transport"] == "host"


def test_training_ranks_that_drift_apart_are_found(tmp_path):
    run = make(tmp_path, {"trainer.steps": 1})
    cluster = run.cluster
    cluster.start()
    cluster.sync(0)
    gather = cluster._gather
    cluster.train = cluster.train * 2

    def two_ranks(calls, timeout=None):
        if calls[0][0] is not cluster.train[0]:
            return gather(calls)
        (answer,) = gather(calls[:1])
        return [answer, "f" * 64 if calls[0][1] == "export_end" else answer]

    cluster._gather = two_ranks
    with pytest.raises(WeightSyncError, match=r"sent weights ffffffffffffffff, another training rank .* drifted apart"):
        cluster.sync(1)


def test_a_signal_that_python_swallowed_still_ends_the_run(monkeypatch):
    """What a handler raises inside of a finalizer goes nowhere; Ray's start runs many."""
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: swallowed.append(found.exc_type))

    class Last:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(1000))

    with Signals() as signals:
        signals.install()
        last = Last()
        del last
        assert swallowed == [Stop] and signals.at_once
        with pytest.raises(Stop):
            signals.check()
