"""Configurations of the published topologies, shared by the vime tests."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

import recipes.main  # noqa: F401 - registers the configuration schema
from recipes.config import RunConfig, build_config

ROOT = Path(__file__).resolve().parents[2]
ARMS = [(a, h, m) for a in ("grpo", "ppo") for h in ("h100", "mi300x") for m in ("native", "strict")]


def run_config(
    algorithm: str, hardware: str, mode: str, model: str = "/models/Qwen3-8B", output: str = "/runs/r"
) -> RunConfig:
    overrides = [
        f"experiment=qwen3_8b_{algorithm}_{hardware}",
        f"consistency={mode}",
        f"model.path={model}",
        f"trainer.output_dir={output}",
        "logger.wandb=online",
    ]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return build_config(compose("train", overrides=overrides))
