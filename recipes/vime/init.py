"""Entry points for vime's Megatron hooks.

``--custom-megatron-init-path recipes.vime.init.init`` runs in every training process after the process groups exist
and before a model is built; the two ``before_*`` hooks run before each pass and see the model.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

import rl_kernel
from recipes.engines.mode import prepare_process
from recipes.errors import ConfigError
from recipes.vime import compat, head, logp

logger = logging.getLogger(__name__)


def _mode() -> str:
    return os.environ.get("RL_KERNEL_MODE", "strict")


def init(args: Namespace) -> None:
    """Check vime and its arguments, set up the process and the operator mode, rebind the log-probability function.

    Raises:
        ConfigError: an argument contradicts strict consistency; the message names the vime flag and the fix.
    """
    mode = _mode()
    if mode == "native":
        logger.info("rl_kernel: native, vime's own operators stay in place")
        return
    compat.check()
    wrong = {
        "--rollout-top-p": getattr(args, "rollout_top_p", 1.0) != 1.0,
        "--rollout-top-k": getattr(args, "rollout_top_k", -1) not in (-1, 0),
        "--allgather-cp": bool(getattr(args, "allgather_cp", False)),
        "--pipeline-model-parallel-size": getattr(args, "pipeline_model_parallel_size", 1) != 1,
        "--recompute-loss-function": bool(getattr(args, "recompute_loss_function", False)),
    }
    named = [flag for flag, bad in wrong.items() if bad]
    if named:
        raise ConfigError(
            "not usable with strict log-probabilities",
            where=", ".join(named),
            fix="top-p must be 1, top-k off, pipeline size 1, context parallelism zig-zag; or use consistency=native.",
        )
    rl_kernel.set_mode(mode)
    if torch.cuda.is_available():
        prepare_process(mode, os.environ.get("RLK_SM90_ATTENTION"))
    for module in compat.holders():
        module.get_log_probs_and_entropy = logp.get_log_probs_and_entropy  # type: ignore[attr-defined]
    logger.info("rl_kernel: %s, vime commit %s, log-probabilities from linear_logp", mode, compat.vime_commit())


def before_log_prob(args: Namespace, model: Sequence[torch.nn.Module], store_prefix: str) -> None:
    """``--custom-megatron-before-log-prob-hook-path``: policy, reference, old-policy and critic forward passes."""
    if _mode() != "native":
        head.attach(model, args.vocab_size)


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any
) -> None:
    """``--custom-megatron-before-train-step-hook-path``: a run may train before it ever computed log-probabilities."""
    if _mode() != "native":
        head.attach(model, args.vocab_size)
