"""``orchestrator=vime``: checks, preparation and submission of vime's own training job.

Every step can be repeated: prepared data and converted checkpoints are kept, and vime resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from recipes.checkpoint import run_lock
from recipes.config import RunConfig
from recipes.errors import ConfigError, DataError, EngineError
from recipes.vime import arguments

logger = logging.getLogger(__name__)


def _devices(config: RunConfig) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU, hardware={config.hardware.name} has {config.hardware.devices}"
    from rl_kernel import platform

    if torch.cuda.device_count() < config.hardware.devices:
        return f"{torch.cuda.device_count()} GPUs visible, hardware.devices={config.hardware.devices}"
    found = platform.describe("cuda:0")
    if found.family != config.hardware.family:
        return f"{found.name} is {found.family or found.reason}, hardware.family={config.hardware.family}"
    return None


def _folders(config: RunConfig) -> str | None:
    for key, path, member in (
        ("orchestrator.vime_root", config.orchestrator.vime_root, "train.py"),
        ("orchestrator.megatron_root", config.orchestrator.megatron_root, "megatron/core"),
    ):
        if not (Path(path) / member).exists():
            return f"{key}={path} holds no {member}; run inside the image of Dockerfile.{config.hardware.device}"
    return None


def _model(config: RunConfig) -> str | None:
    hf = arguments.checkpoint_paths(config)["hf"]
    if not (hf / "config.json").is_file():
        return f"model.path={hf} holds no config.json; download the model, then model.path=FOLDER"
    found = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    different = [
        f"{n} {found[n]} != {getattr(config.model, n)}" for n in names if found.get(n) != getattr(config.model, n)
    ]
    return f"model.path={hf} is not {config.model.name}: {', '.join(different)}" if different else None


def _disk(config: RunConfig) -> str | None:
    folder = Path(config.trainer.output_dir)
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 2**30
    need = config.orchestrator.min_disk_gib
    return f"{free:.0f} GiB free in {folder}, orchestrator.min_disk_gib={need:g}" if free < need else None


def _ray(config: RunConfig) -> str | None:
    return None if shutil.which("ray") else "the ray command is not on PATH; run inside the vendor image"


CHECKS: dict[str, Callable[[RunConfig], str | None]] = {
    "GPUs": _devices,
    "vime and Megatron-LM": _folders,
    "model": _model,
    "disk": _disk,
    "ray": _ray,
}


def preflight(config: RunConfig) -> dict[str, str | None]:
    """Run every check; ``None`` means passed, a string says what is wrong and how to mend it."""
    return {name: check(config) for name, check in CHECKS.items()}


def prepare_prompts(config: RunConfig) -> Path:
    """Write the prompts as the jsonl file vime reads: ``{"prompt": [messages], "label": answer}`` a line.

    A file of the same ``data.*`` settings is reused.

    Raises:
        DataError: a record lacks one of the configured fields.
    """
    from datasets import load_dataset

    target = arguments.prompts_path(config)
    if target.exists():
        return target
    path = config.data.path
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    data = load_dataset(kind, data_files=path, split="train") if kind else load_dataset(path, split=config.data.split)
    if config.data.limit is not None:
        data = data.select(range(min(config.data.limit, len(data))))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for number, record in enumerate(data):
            prompt, label = record, record
            try:
                for key in config.data.prompt_key.split("."):
                    prompt = prompt[key]
                for key in config.data.label_key.split("."):
                    label = label[key]
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"record {number} has no field {error}; it has {', '.join(record)}",
                    where=path,
                    fix="Set data.prompt_key and data.label_key.",
                ) from error
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            file.write(json.dumps({"prompt": prompt, "label": str(label)}, ensure_ascii=False) + "\n")
    partial.replace(target)
    return target


def prepare_roles(config: RunConfig) -> None:
    """Write the critic's own settings where vime reads them."""
    overrides = arguments.role_overrides(config)
    if overrides is not None:
        OmegaConf.save(OmegaConf.create(overrides), arguments.roles_path(config))


def _run(command: list[str], environment: dict[str, str], what: str) -> None:
    logger.info("%s: %s", what, shlex.join(command))
    result = subprocess.run(command, env={**os.environ, **environment}, check=False)
    if result.returncode:
        raise EngineError(f"exit code {result.returncode}", where=what, fix=f"The command was: {shlex.join(command)}")


def prepare_checkpoint(config: RunConfig, environment: dict[str, str]) -> None:
    """Convert the Hugging Face model to Megatron's torch_dist format, once."""
    paths = arguments.checkpoint_paths(config)
    if (paths["torch_dist"] / "latest_checkpointed_iteration.txt").exists():
        return
    command = [
        *("torchrun", "--standalone", f"--nproc-per-node={config.hardware.devices}"),
        str(Path(config.orchestrator.vime_root) / "tools/convert_hf_to_torch_dist.py"),
        *arguments.model_arguments(config),
        *("--hf-checkpoint", str(paths["hf"]), "--save", str(paths["torch_dist"])),
    ]
    _run(command, environment, "converting the checkpoint")


def launch(config: RunConfig) -> int:
    """Check, prepare and submit; returns the job's exit code.

    With ``orchestrator.dry_run=true`` the checks and the argument list are printed and nothing is started.

    Raises:
        ConfigError: a check failed; the message lists all that did.
        CheckpointError: another run holds the run directory.
    """
    environment = arguments.environment(config)
    results = preflight(config)
    for name, problem in results.items():
        print(
            f"{'ok  ' if problem is None else 'FAIL'} {name}{'' if problem is None else ': ' + problem}",
            file=sys.stderr,
        )
    train = str(Path(config.orchestrator.vime_root) / "train.py")
    command = ["python3", train, *arguments.build(config, arguments.prompts_path(config))]
    if config.orchestrator.dry_run:
        print("\n".join(f"{key}={value}" for key, value in environment.items()))
        print(shlex.join(command))
        return 0
    failed = [f"{name}: {problem}" for name, problem in results.items() if problem is not None]
    if failed:
        raise ConfigError(
            "; ".join(failed), where="orchestrator=vime", fix="orchestrator.dry_run=true prints the command."
        )
    with run_lock(config.trainer.output_dir):
        return _submit(config, command, environment)


def _submit(config: RunConfig, command: list[str], environment: dict[str, str]) -> int:
    prepare_prompts(config)
    prepare_roles(config)
    prepare_checkpoint(config, environment)
    address = config.orchestrator.ray_address
    if address is None:
        address = "http://127.0.0.1:8265"
        head = ["ray", "start", "--head", f"--num-gpus={config.hardware.devices}", "--disable-usage-stats"]
        _run(head, environment, "starting Ray")
    submit = ["ray", "job", "submit", f"--address={address}", "--runtime-env-json"]
    _run([*submit, json.dumps({"env_vars": environment}), "--", *command], environment, "training")
    return 0
