"""Configuration: every group composes, every name that others build on exists, bad input fails by key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from recipes.config import RunConfig, build_config
from recipes.errors import ConfigError
from recipes.main import CONFIGS, check_overrides

ROOT = Path(__file__).resolve().parents[2]


def composed(*overrides: str) -> RunConfig:
    check_overrides(list(overrides))
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        return build_config(compose("train", overrides=list(overrides)))


def choices(group: str) -> list[str]:
    return sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


def test_groups_and_choices_exist():
    for group, names in {
        "model": ["qwen3_tiny", "qwen3_0_6b", "qwen3_8b", "qwen3_30b_a3b"],
        "hardware": ["cpu", "h100", "h200", "mi300x"],
        "algorithm": ["grpo", "ppo"],
        "consistency": ["strict", "audit", "fast", "native"],
        "orchestrator": ["local", "vime"],
        "logger": [],
        "experiment": [],
    }.items():
        assert set(names) <= set(choices(group)), group


def test_documented_overrides():
    config = composed(
        "trainer.steps=7",
        "trainer.seed=3",
        "trainer.resume=never",
        "model=qwen3_tiny",
        "model.dtype=float32",
        "algorithm=ppo",
        "consistency=audit",
        "hardware=cpu",
        "orchestrator=local",
        "train.tensor_parallel_size=2",
        "train.data_parallel_size=2",
        "train.context_parallel_size=2",
        "rollout.tensor_parallel_size=1",
        "rollout.num_engines=2",
        "rollout.n_samples_per_prompt=4",
        "rollout.batch_size=3",
        "rollout.max_response_len=9",
        "rollout.temperature=0.7",
        "rollout.top_p=1.0",
    )
    assert config.trainer.steps == 7 and config.model.dtype == "float32" and config.algorithm.name == "ppo"
    assert config.consistency.mode == "audit" and config.consistency.segments == 2
    assert config.train.world_size == 8 and config.train.temperature == config.temperature == 0.7


@pytest.mark.parametrize("name", choices("experiment"))
def test_experiments_compose(name):
    config = composed(f"experiment={name}")
    assert config.experiment == name
    if name.endswith("gpu"):
        devices = int(name[-4])
        assert config.hardware.devices == config.train.world_size == config.rollout.tensor_parallel_size == devices
        assert config.model.path is None and config.orchestrator.name == "local" and config.logger.wandb == "off"
        assert config.data.path == config.reward.name == "synthetic" and config.train.optimizer == "sgd"
        assert config.train.lr == 0.1  # the hardware's, not the model's
        mean = config.data.mean_response_len
        assert config.trainer.steps * config.samples_per_step * mean > 300_000
    elif "8b" in name:
        train, rollout = config.train, config.rollout
        assert (train.tensor_parallel_size, train.context_parallel_size) == (4, 2)
        assert (rollout.tensor_parallel_size, rollout.num_engines) == (4, 2)
        samples = (1, 8) if name.endswith("1x8") else (8, 16)
        assert (rollout.batch_size, rollout.n_samples_per_prompt, rollout.max_response_len) == (*samples, 7168)
        assert config.orchestrator.name == "vime" and config.data.path.endswith("DAPO-Math-17k")


def test_command_line_wins_over_an_experiment():
    config = composed("experiment=qwen3_8b_grpo_h100", "rollout.batch_size=4", "data=arithmetic", "consistency=native")
    assert config.rollout.batch_size == 4 and config.data.path == "arithmetic" and config.consistency.mode == "native"


@pytest.mark.parametrize("hardware", ["h100", "h200", "mi300x"])
def test_gpu_hardware_brings_its_data_and_layout(hardware):
    config = composed("model=qwen3_8b", f"hardware={hardware}", "orchestrator=vime")
    assert config.data.path == "BytedTsinghua-SIA/DAPO-Math-17k" and config.reward.name == "math"
    assert config.hardware.family == ("gfx942" if hardware == "mi300x" else "sm90") and config.consistency.segments == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("train", "rollout"), [(1, 1), (2, 1), (1, 2)])
def test_virtual_tp_is_the_larger_side(dtype, train, rollout):
    config = composed(
        f"model.dtype={dtype}", f"train.tensor_parallel_size={train}", f"rollout.tensor_parallel_size={rollout}"
    )
    assert config.consistency.segments == max(train, rollout)
    assert config.model.padded_vocab_size(config.consistency.segments) == 256


BAD = [
    ("rollout.top_p=0.9", "rollout.top_p", "Use rollout.top_p=1"),
    ("rollout.top_k=20", "rollout.top_k", "consistency=native"),
    ("rollout.top_p=0.0", "rollout.top_p", "(0, 1]"),
    ("rollout.temperature=0", "rollout.temperature", "(1e-06, 1e+06]"),
    ("rollout.temperature=nan", "rollout.temperature", "out of range"),
    ("train.temperature=0.7", "train.temperature", "rollout.temperature=1.0"),
    ("train.tensor_parallel_size=4", "train.tensor_parallel_size", "num_key_value_heads=2"),
    ("train.tensor_parallel_size=3", "train.tensor_parallel_size", "does not divide"),
    ("rollout.tensor_parallel_size=8", "rollout.tensor_parallel_size", "does not divide"),
    ("train.tensor_parallel_size=2 consistency.virtual_tp=1", "consistency.virtual_tp", "not a multiple of train"),
    ("consistency.virtual_tp=3", "consistency.virtual_tp", "1, 2, 4 or 8"),
    ("consistency.virtual_tp=8", "consistency.virtual_tp", "does not divide"),
    ("rollout.max_response_len=600", "rollout.max_response_len", "model.max_position_embeddings=512"),
    ("rollout.max_num_batched_tokens=40", "rollout.max_num_batched_tokens", "max_num_seqs=128"),
    ("rollout.max_model_len=20", "rollout.max_response_len", "rollout.max_model_len=20"),
    ("rollout.max_model_len=4096", "rollout.max_model_len", "max_position_embeddings"),
    ("orchestrator=vime", "orchestrator", "orchestrator=local"),
    ("model=qwen3_8b hardware=h100 orchestrator=vime consistency=fast", "consistency.mode", "strict, audit or native"),
    ("model=qwen3_30b_a3b", "model.num_experts", "model=qwen3_8b"),
    ("model=qwen3_8b", "model", "GiB"),
    ("model=qwen3_8b hardware=h100 orchestrator=vime model.dtype=float32", "model.dtype", "bfloat16"),
    (
        "model=qwen3_8b hardware=h100 orchestrator=vime train.data_parallel_size=2",
        "train.tensor_parallel_size",
        "has 8",
    ),
    ("model=qwen3_8b hardware=h100 orchestrator=vime hardware.colocate=false", "hardware.colocate", "8 + 8 devices"),
    ("hardware.family=sm90", "hardware.family", "not a family of device cpu"),
    ("rollout.n_samples_per_prompt=1", "rollout.n_samples_per_prompt", "algorithm=ppo"),
    ("algorithm.num_minibatches=1000", "algorithm.num_minibatches", "Lower it"),
    ("algorithm.dual_clip=0.5", "algorithm.dual_clip", "above 1"),
    ("algorithm.kl_estimator=k4", "algorithm.kl_estimator", "k1, k2, k3"),
    ("algorithm.gae_lambda=1.5", "algorithm.gae_lambda", "[0, 1]"),
    ("train.micro_batch_tokens=10", "train.micro_batch_tokens", "less than one sequence"),
    ("train.sequence_parallel=true", "train.sequence_parallel", "tensor_parallel_size above 1"),
    ("train.context_parallel_size=2 consistency=native", "train.context_parallel_size", "another consistency mode"),
    (
        "train.context_parallel_size=8 model.max_position_embeddings=90 rollout.max_model_len=90",
        "model.max_position_embeddings",
        "at least 96",
    ),
    (
        "train.context_parallel_size=8 train.micro_batch_tokens=90 rollout.max_model_len=90",
        "train.micro_batch_tokens",
        "at least 96",
    ),
    ("trainer.steps=0", "trainer.steps", "at least 1"),
    ("trainer.resume=maybe", "trainer.resume", "auto, never"),
    ("model.dtype=float16", "model.dtype", "float32, bfloat16"),
    ("rolout.temperature=1", "rolout.temperature", "rollout.temperature"),
    ("rollout.foo=1", "rollout.foo", "not a configuration key"),
    ("+trainer.extra=1", "trainer.extra", "not a configuration key"),
    ("hardware=h300", "hardware", "cpu, h100, h200, h200_1gpu"),
    ("consistency=bitwise", "consistency", "audit, fast, native, strict"),
    ("trainer.steps", "command line", "key=value"),
    ("model=null", "model", "qwen3_tiny"),
    ("experiment=null", "experiment", "qwen3_tiny_grpo_cpu"),
    ("algorithm=[grpo,ppo]", "algorithm", "grpo, ppo"),
    ("~rollout", "rollout", "Leave the override out"),
    ("trainer.output_dir=/tmp/x", "trainer.output_dir", "hydra.run.dir"),
    ("trainer.seed=9223372036854775808", "trainer.seed", "below 2**63"),
    ("train.lr=inf", "train.lr", "finite"),
    ("algorithm.value_clip=nan", "algorithm.value_clip", "finite"),
    ("train.adam_beta1=1.5", "train.adam_beta1", "[0, 1)"),
    ("train.adam_eps=0", "train.adam_eps", "(0, 1]"),
    ("model.rope_theta=0", "model.rope_theta", "(0, 1e+30]"),
    ("rollout.temperature=1e-46", "rollout.temperature", "(1e-06, 1e+06]"),
    ("rollout.max_model_len=0", "rollout.max_model_len", "at least 1"),
    ("data.limit=0", "data.limit", "at least 1"),
    ("data.path=", "data.path", "arithmetic"),
    ("orchestrator.object_store_bytes=1", "orchestrator.object_store_bytes", "at least"),
]


@pytest.mark.parametrize(("overrides", "key", "fix"), BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_named(overrides, key, fix):
    with pytest.raises(ConfigError) as error:
        composed(*overrides.split())
    assert error.value.where == key and fix in str(error.value), str(error.value)


def test_native_may_truncate_the_distribution():
    assert composed("consistency=native", "rollout.top_p=0.9").rollout.top_p == 0.9


def test_defaults_without_hydra():
    assert build_config().consistency.segments == 1
    with pytest.raises(ConfigError, match="rollout.foo"):
        build_config({"rollout": {"foo": 1}})
    with pytest.raises(ConfigError, match="rollout.batch_size"):
        build_config({"rollout": {"batch_size": "many"}})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p"),
        (["rolout.top_p=0.9"], "Did you mean rollout.top_p"),
        (["rollout.temperature=hot"], "rollout.temperature=hot"),
    ],
)
def test_command_line_exits_with_2_and_one_line(tmp_path, overrides, expected):
    done = subprocess.run(
        [sys.executable, "-m", "recipes.main", *overrides, f"hydra.run.dir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert expected in done.stderr.strip().splitlines()[-1]


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "recipes.main", f"hydra.run.dir={tmp_path}/file/x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"hydra.run.dir: {tmp_path}/file/x: Not a directory" in done.stderr


def test_what_does_not_fit_one_device_is_refused():
    base = ["experiment=qwen3_8b_grpo_h200_1gpu"]
    with pytest.raises(ConfigError, match="train.optimizer: .* take 137 GiB of a device and the rollout engine 31"):
        composed(*base, "train.optimizer=adam")
    composed("experiment=qwen3_8b_grpo_h200_2gpu", "train.optimizer=adam")
    with pytest.raises(ConfigError, match="train.optimizer: sgd under train.distributed_optimizer"):
        composed(*base, "train.distributed_optimizer=true")
    composed("experiment=qwen3_8b_grpo_h200_2gpu", "train.tensor_parallel_size=1", "train.data_parallel_size=2")
    composed("experiment=qwen3_8b_grpo_h200_2gpu", "rollout.tensor_parallel_size=1", "rollout.num_engines=2")
    composed("experiment=qwen3_8b_grpo_h200_2gpu", "train.tensor_parallel_size=1", "train.context_parallel_size=2")
    composed("hardware=h200", "model=qwen3_8b", "data=synthetic", "orchestrator=local")  # the layout of eight stays


def test_synthetic_data_and_reward_belong_together():
    synthetic = ("data=synthetic", "data.mean_response_len=32")
    config = composed(*synthetic, "data.min_len=4")
    assert config.data.path == config.reward.name == "synthetic"
    for overrides in (["reward.name=synthetic"], ["data=synthetic", "reward.name=arithmetic"]):
        with pytest.raises(ConfigError, match="reward.name"):
            composed(*overrides)
    with pytest.raises(ConfigError, match="data.min_len: 99 exceeds"):
        composed(*synthetic, "data.min_len=99")
    with pytest.raises(ConfigError, match="data.mean_response_len: 512 exceeds model.vocab_size=139"):
        composed("data=synthetic")
    with pytest.raises(ConfigError, match="data.path: vime"):
        composed("hardware=h200", "orchestrator=vime", "model=qwen3_8b", "data=synthetic")
