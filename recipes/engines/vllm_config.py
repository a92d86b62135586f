"""What the vLLM engine knows before vLLM is imported: the model's configuration, and which sampling is refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.errors import ConfigError

if TYPE_CHECKING:
    from recipes.config import ModelConfig, RolloutConfig

BITWISE_MODES = ("strict", "audit")
GRAPHS = "FULL_DECODE_ONLY"  # vLLM's cudagraph_mode of engines that are not native


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """Hugging Face configuration of ``model``: its own when it has a path, otherwise built from the fields."""
    if model.path is not None:
        local = Path(model.path) / "config.json"
        if local.is_file():
            return json.loads(local.read_text(encoding="utf-8"))
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(model.path).to_dict()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{model.path!r} has no readable config.json ({error})",
                where="model.path",
                fix="Give a Hugging Face folder or hub name, or null for random weights.",
            ) from error
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": model.dtype,
    }


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decode graphs: vLLM's own steps, and ``max_num_seqs`` itself, so that every pure decode step of
    an engine runs as a graph."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16)]
    return sorted({size for size in steps if size <= max_num_seqs} | {max_num_seqs})


def gpu_options(mode: str, rollout: RolloutConfig, backend: str) -> dict[str, Any]:
    """vLLM's options on a GPU that follow from the mode. Native keeps vLLM's own: compiled, its own graphs.

    Strict graphs hold whole decode steps. Nothing is compiled: every numeric layer is one of our operators, and
    Inductor would find nothing to fuse. Steps with a prefill run eagerly.

    Args:
        mode: ``consistency.mode``.
        rollout: sizes of the engine.
        backend: vLLM's attention backend whose metadata and cache are used.

    Raises:
        ConfigError: the environment replaces torch's operators.
    """
    if mode == "native":
        return {}
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise ConfigError(
            "it replaces torch's matrix products in this process, also under rl_kernel",
            where="VLLM_BATCH_INVARIANT",
            fix=f"Unset it: consistency={mode} does not depend on the batch.",
        )
    options: dict[str, Any] = {
        "attention_backend": backend,
        "disable_cascade_attn": True,
        "disable_custom_all_reduce": True,  # the contract's sum over ranks is rl_kernel's
    }
    if not rollout.enforce_eager:
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": GRAPHS,
            "cudagraph_capture_sizes": capture_sizes(rollout.max_num_seqs),
        }
    return options


def check_sampling(mode: str, *, temperature: float, top_p: float, top_k: int) -> None:
    """Refuse parameters under which rollout and training log-probabilities differ by definition.

    Raises:
        ConfigError: names the parameter.
    """
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise ConfigError(f"{temperature!r} must be a finite number above 0", where="rollout.temperature")
    if mode not in BITWISE_MODES:
        return
    for name, value, off in (("top_p", top_p, 1.0), ("top_k", top_k, 0)):
        if value != off:
            raise ConfigError(
                f"{value!r} truncates and renormalises the distribution that tokens are drawn from, the trainer's "
                f"log-probability does not, and consistency={mode} compares them bit for bit",
                where=f"rollout.{name}",
                fix=f"Use rollout.{name}={off:g}, or consistency=native.",
            )
