"""The argument lists vime receives. ``RLK_UPDATE_SNAPSHOTS=1`` rewrites the pinned ones after a deliberate change."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from recipes.errors import ConfigError
from recipes.vime import arguments, launch
from recipes.vime.launch import CHECKS, prepare_prompts
from tests.vime.helpers import ARMS, run_config

SNAPSHOTS = Path(__file__).parent / "snapshots"
PROMPTS = Path("/runs/r/prompts.jsonl")


def as_text(argv: list[str]) -> str:
    """One flag with its values a line."""
    lines: list[list[str]] = []
    for item in argv:
        if item.startswith("--"):
            lines.append([item])
        else:
            lines[-1].append(item)
    return "".join(shlex.join(line) + "\n" for line in lines)


@pytest.mark.parametrize(("algorithm", "hardware", "mode"), ARMS)
def test_argument_list_is_the_pinned_one(algorithm: str, hardware: str, mode: str) -> None:
    text = as_text(arguments.build(run_config(algorithm, hardware, mode), PROMPTS))
    snapshot = SNAPSHOTS / f"{algorithm}_{hardware}_{mode}.txt"
    if os.environ.get("RLK_UPDATE_SNAPSHOTS"):
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")


@pytest.mark.parametrize("hardware", ["h100", "mi300x"])
def test_arms_differ_only_in_operators(hardware: str) -> None:
    native, strict = (
        set(as_text(arguments.build(run_config("grpo", hardware, mode), PROMPTS)).splitlines())
        for mode in ("native", "strict")
    )
    names = {line.split()[0] for line in native ^ strict}
    assert names == {
        "--wandb-group",
        "--attention-backend",
        "--transformer-impl",
        "--cp-comm-type",
        "--spec",
        "--custom-megatron-init-path",
        "--custom-megatron-before-log-prob-hook-path",
        "--custom-megatron-before-train-step-hook-path",
    }


def test_no_flag_is_given_twice() -> None:
    for arm in ARMS:
        flags = [item for item in arguments.build(run_config(*arm), PROMPTS) if item.startswith("--")]
        assert len(flags) == len(set(flags)), arm


def test_vocabulary_padding_nests_for_every_tensor_parallel_size() -> None:
    for tp, virtual in ((1, 8), (2, 8), (4, 8), (8, 8), (4, 4)):
        config = run_config("grpo", "h100", "strict")
        config.train.tensor_parallel_size, config.consistency.virtual_tp = tp, virtual
        argv = arguments.build(config, PROMPTS)
        step = int(argv[argv.index("--make-vocab-size-divisible-by") + 1]) * tp
        assert -(-151936 // step) * step == config.model.padded_vocab_size(virtual)


@pytest.mark.parametrize(
    ("wandb", "key", "mode"), [("auto", "k", "online"), ("auto", "", "offline"), ("off", "k", None)]
)
def test_wandb_is_online_with_a_key(wandb: str, key: str, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", "/no/such/file")
    config = run_config("grpo", "h100", "strict")
    config.logger.wandb = wandb
    argv = arguments.build(config, PROMPTS)
    assert ("--use-wandb" in argv) == (mode is not None)
    assert mode is None or argv[argv.index("--wandb-mode") + 1] == mode


def test_model_path_is_required() -> None:
    config = run_config("grpo", "h100", "strict")
    config.model.path = None
    with pytest.raises(ConfigError, match="model.path"):
        arguments.build(config, PROMPTS)


def test_prompts_are_written_again_when_data_or_settings_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config("grpo", "h100", "strict", output=str(tmp_path))
    source = tmp_path / "a.jsonl"
    source.write_text('{"q": "one", "a": 1}\n{"q": "two", "a": 2}\n', encoding="utf-8")
    config.data.path, config.data.prompt_key, config.data.label_key = str(source), "q", "a"
    first = prepare_prompts(config)
    assert first.parent == tmp_path and first.read_text(encoding="utf-8").count("\n") == 2
    stamp = first.stat().st_mtime_ns
    assert prepare_prompts(config) == first and first.stat().st_mtime_ns == stamp
    config.data.limit = 1
    second = prepare_prompts(config)
    assert second != first and second.read_text(encoding="utf-8").count("\n") == 1
    assert str(second) in arguments.build(config, second)
    source.write_text('{"q": "three", "a": 3}\n', encoding="utf-8")  # the same settings, another data set
    third = prepare_prompts(config)
    assert third not in (first, second) and "three" in third.read_text(encoding="utf-8")
    assert "goes on in the new file" in caplog.text


def test_prompts_of_a_folder_follow_its_files(tmp_path: Path) -> None:
    config = run_config("grpo", "h100", "strict", output=str(tmp_path / "run"))
    folder = tmp_path / "data"
    folder.mkdir()
    config.data.path, config.data.prompt_key, config.data.label_key = str(folder), "q", "a"
    found = []
    for answer in (1, 1, 2):
        (folder / "train.jsonl").write_text(f'{{"q": "one", "a": "{answer}"}}\n', encoding="utf-8")
        found.append(prepare_prompts(config))
    assert found[0] == found[1] != found[2] and '"2"' in found[2].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        ({"data.path": "/no/such/file.jsonl"}, "data set", "neither a file"),
        ({"data.path": "owner/name.jsonl"}, "data set", "neither a file"),
        ({"orchestrator.ray_address": "127.0.0.1"}, "ports", "names no host"),
        ({"orchestrator.ray_address": "http://127.0.0.1:9"}, "ports", "nothing listens"),
        ({}, "driver", "docker"),
        ({}, "GPUs", "sees no GPU"),
    ],
)
@pytest.mark.parametrize("hardware", ["h100", "mi300x"])
def test_preflight_says_how_to_mend_it(hardware: str, change: dict[str, str], check: str, says: str) -> None:
    config = run_config("grpo", hardware, "strict")
    for key, value in change.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    problem = CHECKS[check](config)
    assert problem is not None and says in problem


def test_preflight_names_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config("grpo", "h100", "strict")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setattr(sys.modules["recipes.vime.launch"], "RAY_PORTS", {"GCS": port})
        assert f"port {port} (GCS) is taken" in str(CHECKS["ports"](config))
        config.orchestrator.ray_address = f"http://127.0.0.1:{port}"
        assert CHECKS["ports"](config) is None
    for wrong in ("127.0.0.1:8265", "http://127.0.0.1:jobs"):
        config.orchestrator.ray_address = wrong
        assert "it looks like http://127.0.0.1:8265" in str(CHECKS["ports"](config))
    assert CHECKS["data set"](config) is None  # DAPO-Math-17k, by its name on the hub


def test_launch_refuses_a_machine_without_gpus(tmp_path: Path) -> None:
    config = run_config("grpo", "h100", "strict", output=str(tmp_path))
    with pytest.raises(ConfigError, match="sees no GPU") as caught:
        launch(config)
    assert "orchestrator.vime_root" in str(caught.value)


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config("grpo", "mi300x", "strict", output=str(tmp_path))
    config.orchestrator.dry_run = True
    assert launch(config) == 0
    printed = capsys.readouterr().out
    assert "RL_KERNEL_MODE=strict" in printed and "train.py --swiglu" in printed
    assert not list(tmp_path.iterdir())
