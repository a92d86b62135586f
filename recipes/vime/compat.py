"""What this package uses of vime, checked at start-up.

Nothing of vime is patched on disk. Two functions are rebound at run time and four private helpers are called, so their
signatures are compared with the ones this code was written for, and a vime that differs is refused.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
from pathlib import Path
from types import ModuleType

from recipes.errors import ConfigError

TESTED_COMMITS = ("c0ed6d83",)

LOSS = "vime.backends.megatron_utils.loss"
# Modules that hold their own reference to get_log_probs_and_entropy: each one is rebound.
HOLDERS = (LOSS, "vime.backends.megatron_utils.actor", "vime.backends.megatron_utils.server.logprob_utils")
OPTIONAL_HOLDERS = {"vime.backends.megatron_utils.server.logprob_utils"}

SIGNATURES: dict[str, tuple[str, ...]] = {
    "get_log_probs_and_entropy": (
        "logits",
        "args",
        "unconcat_tokens",
        "total_lengths",
        "response_lengths",
        "with_entropy",
        "non_loss_data",
        "top_p_token_ids",
        "top_p_token_offsets",
    ),
    "_build_shifted_tokens": (
        "T",
        "device",
        "unconcat_tokens",
        "total_lengths",
        "response_lengths",
        "allgather_cp",
    ),
    "_extract_per_sample": (
        "log_prob_full",
        "entropy_full",
        "total_lengths",
        "response_lengths",
        "allgather_cp",
    ),
}


def vime_commit() -> str:
    """Commit of the imported vime checkout, or ``unknown`` when it is not a git checkout."""
    vime = importlib.import_module("vime")
    root = Path(str(vime.__file__)).resolve().parent.parent
    result = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def holders() -> list[ModuleType]:
    """The vime modules whose ``get_log_probs_and_entropy`` must be rebound."""
    found = []
    for name in HOLDERS:
        try:
            module = importlib.import_module(name)
        except ImportError:
            if name in OPTIONAL_HOLDERS:
                continue  # the log-prob server is not part of every vime build
            raise
        if hasattr(module, "get_log_probs_and_entropy"):
            found.append(module)
    return found


def check() -> ModuleType:
    """Compare vime with what this code was written for, and return its loss module.

    Raises:
        ConfigError: vime cannot be imported, or a signature differs; the message names the function, both parameter
            lists, the commit found and the commits tested.
    """
    try:
        loss = importlib.import_module(LOSS)
    except ImportError as error:
        raise ConfigError(
            f"{LOSS} cannot be imported ({error})",
            where="orchestrator=vime",
            fix="Run inside the image of Dockerfile.cuda or Dockerfile.rocm, or put a vime checkout on PYTHONPATH.",
        ) from error
    problems = []
    for name, wanted in SIGNATURES.items():
        function = getattr(loss, name, None)
        if function is None:
            problems.append(f"{name} is missing")
            continue
        have = tuple(inspect.signature(function).parameters)
        if have != wanted:
            problems.append(f"{name}({', '.join(have)}) was ({', '.join(wanted)})")
    if problems:
        raise ConfigError(
            "; ".join(problems),
            where=f"vime at commit {vime_commit()}, tested commits: {', '.join(TESTED_COMMITS)}",
            fix="Check out a tested commit, or run with consistency=native.",
        )
    return loss
