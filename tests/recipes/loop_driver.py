"""``python -m tests.recipes.loop_driver DIR key=value ...``: a run over fake engines on real Ray, in its process."""

from __future__ import annotations

import sys

from recipes.cluster import Cluster
from recipes.config import build_config
from recipes.errors import RecipeError
from recipes.run import Run
from tests.recipes.fakes import FakeTask


def main() -> int:
    """Exit code of the run; 1 with the message on standard error when it fails."""
    from omegaconf import OmegaConf

    defaults = [
        "model.dtype=float32",
        "model.vocab_size=16",
        "rollout.batch_size=4",
        "rollout.n_samples_per_prompt=4",
        "rollout.max_prompt_len=4",
        "rollout.max_response_len=6",
        "train.lr=40.0",
        "train.critic_lr=2.0",
        "logger.wandb=off",
        "logger.progress=false",
        "logger.report=false",
        "trainer.steps=6",
        "trainer.save_interval=2",
        "orchestrator.object_store_bytes=100000000",
    ]
    config = build_config(OmegaConf.from_dotlist([*defaults, *sys.argv[2:]]))
    config.trainer.output_dir = sys.argv[1]
    cluster = Cluster(
        config, rollout_engine="tests.recipes.fakes:FakeRollout", train_engine="tests.recipes.fakes:FakeTrain"
    )
    try:
        return Run(config, cluster, FakeTask(), "python -m recipes.main the-same-overrides").execute()
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
