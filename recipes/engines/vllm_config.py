"""What the vLLM engine knows before vLLM is imported: the model's configuration, and which sampling is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.errors import ConfigError

if TYPE_CHECKING:
    from recipes.config import ModelConfig

BITWISE_MODES = ("strict", "audit")


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
