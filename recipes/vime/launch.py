"""``orchestrator=vime``: checks, preparation and submission of vime's own training job.

Every step can be repeated: prepared data and converted checkpoints are kept, and vime resumes from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from recipes.checkpoint import run_lock
from recipes.config import RunConfig
from recipes.errors import ConfigError, DataError, EngineError
from recipes.vime import arguments

logger = logging.getLogger(__name__)

RAY_PORTS = {"GCS": 6379, "dashboard and jobs": 8265}  # of the head node that the launcher starts
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # data files, as load_dataset calls them
OLDEST_DRIVER = {"12": 525, "13": 580}  # NVIDIA, by CUDA release


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


def _driver(config: RunConfig) -> str | None:
    import torch

    if torch.cuda.is_available():  # also an older driver under the forward-compatibility libraries of the image
        return None
    if config.hardware.device == "rocm":
        if not os.path.exists("/dev/kfd"):
            return "there is no /dev/kfd: load amdgpu, and give docker --device=/dev/kfd --device=/dev/dri"
        if not os.access("/dev/kfd", os.R_OK | os.W_OK):
            return "/dev/kfd may not be opened: give docker --group-add video (or render, whichever owns it)"
        return None
    from recipes.doctor import tool

    found = tool(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if found is None or not found[:1].isdigit():
        return f"nvidia-smi {'is not there' if found is None else 'says ' + found}: give docker --gpus all"
    oldest = OLDEST_DRIVER.get((torch.version.cuda or "").split(".")[0])
    if oldest is not None and int(found.split(".")[0]) < oldest:
        return f"NVIDIA driver {found} is older than {oldest}, which CUDA {torch.version.cuda} of this torch needs"
    return None


def _image(config: RunConfig) -> str | None:
    from recipes import doctor

    problems = [problem for check in (doctor.check_engines, doctor.check_plugin) if (problem := check())]
    return f"{'; '.join(problems)}; run inside the image of Dockerfile.{config.hardware.device}" if problems else None


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


def _dataset(config: RunConfig) -> str | None:
    path = config.data.path
    if os.path.exists(path) or (Path(path).suffix not in FILES and re.fullmatch(r"[\w.-]+/[\w.-]+", path)):
        return None
    return f"data.path={path} is neither a file, a folder nor the name of a data set (owner/name)"


def _disk(config: RunConfig) -> str | None:
    folder = Path(config.trainer.output_dir)
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 2**30
    need = config.orchestrator.min_disk_gib
    return f"{free:.0f} GiB free in {folder}, orchestrator.min_disk_gib={need:g}" if free < need else None


def _ray(config: RunConfig) -> str | None:
    return None if shutil.which("ray") else "the ray command is not on PATH; run inside the vendor image"


def _ports(config: RunConfig) -> str | None:
    address = config.orchestrator.ray_address
    if address is not None:
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:  # a port that is no number
            return f"orchestrator.ray_address={address}: {error}; it looks like http://127.0.0.1:8265"
        if host is None:
            return f"orchestrator.ray_address={address} names no host; it looks like http://127.0.0.1:8265"
        if not _listens(host, port):
            return f"nothing listens on orchestrator.ray_address={address}; start Ray there, or leave it null"
        return None
    taken = [f"{port} ({what})" for what, port in RAY_PORTS.items() if _listens("127.0.0.1", port)]
    if taken:
        fix = "orchestrator.ray_address=http://127.0.0.1:8265 uses the Ray that runs there, `ray stop` ends it"
        return f"port {', '.join(taken)} is taken; {fix}"
    return None


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=3):
            return True
    except OSError:
        return False


CHECKS: dict[str, Callable[[RunConfig], str | None]] = {
    "driver": _driver,
    "GPUs": _devices,
    "image": _image,
    "vime and Megatron-LM": _folders,
    "model": _model,
    "data set": _dataset,
    "disk": _disk,
    "ray": _ray,
    "ports": _ports,
}


def preflight(config: RunConfig) -> dict[str, str | None]:
    """Run every check; ``None`` means passed, a string says what is wrong and how to mend it."""
    return {name: check(config) for name, check in CHECKS.items()}


def _digest(files: Iterable[Path]) -> str:
    """SHA-256 of the bytes of ``files``, in this order."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def prepare_prompts(config: RunConfig) -> Path:
    """Write the prompts as the jsonl file vime reads: ``{"prompt": [messages], "label": answer}`` a line.

    The file's name holds a digest of the ``data.*`` settings and of the data set's own bytes: a file is reused only
    while both are what they were.

    Raises:
        DataError: a record lacks one of the configured fields.
    """
    from datasets import load_dataset

    path = config.data.path
    kind = FILES.get(Path(path).suffix)
    if kind:
        target = arguments.prompts_path(config, _digest([Path(path)]))
        if target.exists():
            return target
        data = load_dataset(kind, data_files=path, split="train")
    else:  # a new revision on the hub, or other files in a folder, are other bytes in the cache
        data = load_dataset(path, split=config.data.split, keep_in_memory=False)
        target = arguments.prompts_path(config, _digest(Path(entry["filename"]) for entry in data.cache_files))
        if target.exists():
            return target
    if config.data.limit is not None:
        data = data.select(range(min(config.data.limit, len(data))))
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in target.parent.glob("prompts-*.jsonl"):
        logger.warning("data set or data.* differ from those of %s; a resumed run goes on in the new file", other)
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
    if config.orchestrator.dry_run:
        print("\n".join(f"{key}={value}" for key, value in environment.items()))
        print(shlex.join(_command(config, Path(config.trainer.output_dir) / "prompts-DIGEST.jsonl")))
        return 0
    failed = [f"{name}: {problem}" for name, problem in results.items() if problem is not None]
    if failed:
        raise ConfigError(
            "; ".join(failed), where="orchestrator=vime", fix="orchestrator.dry_run=true prints the command."
        )
    with run_lock(config.trainer.output_dir):
        return _submit(config, environment)


def _command(config: RunConfig, prompts: Path) -> list[str]:
    train = str(Path(config.orchestrator.vime_root) / "train.py")
    return ["python3", train, *arguments.build(config, prompts)]


def _submit(config: RunConfig, environment: dict[str, str]) -> int:
    command = _command(config, prepare_prompts(config))
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
