"""vLLM's numeric layers, computed by rl_kernel.

Each class registers itself as vLLM's out-of-tree replacement of the stock class of the same role. A replacement looks
at the engine's settings when it is built: without a strict, audit or fast mode it turns into the stock class before
anything else happens, so one process can hold a strict and a stock engine one after the other.

Tensor parallelism: column-parallel layers and the LM head need no reduction; row-parallel layers hand rl_kernel their
share of the S segments of the contract and the process group, and it continues the same tree over the ranks.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

import rl_kernel
from recipes.engines.mode import prepare_process
from recipes.errors import ConfigError, EngineError
from rl_kernel import cublaslt, registry
from rl_kernel.ops import collectives

CONFIG_KEY = "rl_kernel"  # in vLLM's additional_config
ACTIVE_MODES = ("strict", "audit", "fast")
MODES = (*ACTIVE_MODES, "native")

_STOCK = {
    "RMSNorm": "vllm.model_executor.layers.layernorm",
    "SiluAndMul": "vllm.model_executor.layers.activation",
    "RotaryEmbedding": "vllm.model_executor.layers.rotary_embedding.base",
    "QKVParallelLinear": "vllm.model_executor.layers.linear",
    "MergedColumnParallelLinear": "vllm.model_executor.layers.linear",
    "ColumnParallelLinear": "vllm.model_executor.layers.linear",
    "RowParallelLinear": "vllm.model_executor.layers.linear",
    "VocabParallelEmbedding": "vllm.model_executor.layers.vocab_parallel_embedding",
    "ParallelLMHead": "vllm.model_executor.layers.vocab_parallel_embedding",
    "LogitsProcessor": "vllm.model_executor.layers.logits_processor",
}


@dataclass(frozen=True)
class Settings:
    """What the plugin was asked to do: the mode, the number S of segments of row-parallel reductions, and the attention
    arithmetic on sm90 (``None``: as RLK_SM90_ATTENTION says)."""

    mode: str
    virtual_tp: int
    attention: str | None = None


def _read_settings(source: dict[str, Any], where: str) -> Settings | None:
    mode = source.get("mode") or "native"
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r} is unknown", where=where, fix=f"Use one of {', '.join(MODES)}.")
    virtual_tp = source.get("virtual_tp") or 1
    if str(virtual_tp) not in ("1", "2", "4", "8"):
        raise ConfigError(f"virtual_tp={virtual_tp!r} must be 1, 2, 4 or 8", where=where)
    attention = source.get("attention")
    if attention not in (None, "blocks", "fa3"):
        raise ConfigError(f"attention={attention!r} must be blocks or fa3", where=where)
    return None if mode == "native" else Settings(mode, int(virtual_tp), attention)


def active_settings() -> Settings | None:
    """Settings of the engine being built, or ``None`` for a stock engine.

    ``additional_config["rl_kernel"]`` of the current vLLM configuration wins; without it the variables
    ``RL_KERNEL_MODE`` and ``RL_KERNEL_VIRTUAL_TP`` decide, so that any vLLM command line can be made strict.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    extra = getattr(config, "additional_config", None)
    if isinstance(extra, dict) and CONFIG_KEY in extra:
        return _read_settings(extra[CONFIG_KEY], f"additional_config.{CONFIG_KEY}")
    environment: dict[str, Any] = {
        "mode": os.environ.get("RL_KERNEL_MODE"),
        "virtual_tp": os.environ.get("RL_KERNEL_VIRTUAL_TP"),
    }
    return _read_settings(environment, "RL_KERNEL_MODE")


def asked_for() -> bool:
    """Whether the engine being built was started by ours or with RL_KERNEL_MODE, in whatever mode."""
    from vllm.config import get_current_vllm_config_or_none

    extra = getattr(get_current_vllm_config_or_none(), "additional_config", None)
    return (isinstance(extra, dict) and CONFIG_KEY in extra) or active_settings() is not None


def require(module: str, name: str, *attributes: str) -> Any:
    """``module.name``, which must have ``attributes``.

    Raises:
        EngineError: this vLLM lacks the extension point; the message names it.
    """
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _missing(f"{module}.{name}", str(error)) from error
    for attribute in attributes:
        if not hasattr(found, attribute):
            raise _missing(f"{module}.{name}.{attribute}", "the attribute does not exist")
    return found


def _missing(point: str, reason: str) -> EngineError:
    import vllm

    return EngineError(
        f"vLLM {getattr(vllm, '__version__', '?')} has no {point} ({reason}), where rl_kernel plugs in",
        where="recipes.engines.vllm",
        fix="Install a vLLM from 0.26 to 0.32, or run with consistency=native.",
    )


def refuse(layer: str, what: str) -> ConfigError:
    return ConfigError(
        f"{what} has no contract", where=layer, fix="Use a dense Qwen3-style model, or consistency=native."
    )


def _tp_group(tp_size: int) -> Any:
    if tp_size == 1:
        return None
    from vllm.distributed import get_tp_group

    return get_tp_group().device_group


def _prepare(layer: torch.nn.Module, settings: Settings) -> None:
    """Common part of every replaced layer's constructor."""
    prepare_process(settings.mode, settings.attention)
    rl_kernel.set_mode(settings.mode)
    layer.rl_kernel = settings  # type: ignore[assignment]


def _probe_products(
    layer: Any, *, segments: int = 1, out_dtype: torch.dtype | None = None, sampled_rows: bool = False
) -> None:
    """Let cuBLASLt's probe see, before any CUDA graph is captured, every size of batch that ``layer`` can meet."""
    weight = layer.weight.data
    if not weight.is_cuda or not getattr(
        registry.resolve("linear", weight.device, weight.dtype).module, "uses_library", False
    ):
        return
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:  # vLLM's layerwise reload processes layers again, long after the start that probed them
        return
    scheduler = config.scheduler_config
    limit = scheduler.max_num_seqs if sampled_rows else scheduler.max_num_batched_tokens
    graphs = [size for size in config.compilation_config.cudagraph_capture_sizes or [] if size <= limit]
    cublaslt.probe([weight], cublaslt.classes_up_to(limit), exact=graphs, segments=segments, out_dtype=out_dtype)


def _replaces(stock: type) -> Callable[[type], type]:
    """Class decorator: build the replacement under active settings, otherwise become ``stock``."""

    def decorate(cls: type) -> type:
        build = cls.__init__  # type: ignore[misc]

        @functools.wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            settings = active_settings()
            if settings is None:
                object.__setattr__(self, "__class__", stock)
                stock.__init__(self, *args, **kwargs)  # type: ignore[misc]
                return
            build(self, *args, **kwargs)
            _prepare(self, settings)
            if hasattr(self, "after_init"):
                self.after_init()

        cls.__init__ = init  # type: ignore[misc]
        cls.stock = stock  # type: ignore[attr-defined]
        return cls

    return decorate


@functools.cache
def replacements() -> dict[str, type]:
    """Replacement classes by the name of the stock class. Imports vLLM.

    Raises:
        EngineError: an extension point is missing.
    """
    stock: Any = SimpleNamespace(
        **{name: require(module, name, "register_oot") for name, module in _STOCK.items()},
        LinearMethod=require(_STOCK["RowParallelLinear"], "UnquantizedLinearMethod", "create_weights", "apply"),
        EmbeddingMethod=require(_STOCK["ParallelLMHead"], "UnquantizedEmbeddingMethod", "embedding"),
    )

    class StrictLinearMethod(stock.LinearMethod):
        """Plain weights, left as they are after loading; the product is rl_kernel's."""

        def process_weights_after_loading(self, layer: Any) -> None:
            """The weight stays: stock code would repack it for its own kernels."""
            segments, out_dtype = 1, None
            if isinstance(layer, stock.RowParallelLinear):
                segments = layer.rl_kernel.virtual_tp // layer.tp_size
                out_dtype = torch.float32 if layer.tp_size > 1 else None
            _probe_products(layer, segments=segments, out_dtype=out_dtype)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return rl_kernel.linear(x, layer.weight.data)

    class StrictEmbeddingMethod(stock.EmbeddingMethod):
        """Plain weights, left as they are after loading."""

        def process_weights_after_loading(self, layer: Any) -> None:
            """The weight stays: stock code would repack it for its own kernels."""
            from vllm.config import get_current_vllm_config_or_none

            config = get_current_vllm_config_or_none()
            tied = config is not None and getattr(config.model_config.hf_config, "tie_word_embeddings", False)
            if tied or isinstance(layer, stock.ParallelLMHead):
                _probe_products(layer, out_dtype=torch.float32, sampled_rows=True)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return rl_kernel.lm_head(x, layer.weight.data)

    def use_plain_weights(layer: Any, method: type) -> None:
        name = getattr(layer, "prefix", "") or type(layer).__name__
        if getattr(layer, "quant_config", None) is not None:
            raise refuse(name, "quantization")
        if getattr(layer, "bias", None) is not None:
            raise refuse(name, "a bias")
        if layer.rl_kernel.virtual_tp % layer.tp_size:
            raise ConfigError(
                f"{layer.rl_kernel.virtual_tp} is not a multiple of the tensor-parallel size {layer.tp_size}",
                where="consistency.virtual_tp",
                fix="Use the larger tensor-parallel size of rollout and training, or leave it out.",
            )
        layer.quant_method = method()

    class _Column:
        def after_init(self) -> None:
            use_plain_weights(self, StrictLinearMethod)

    @_replaces(stock.ColumnParallelLinear)
    class StrictColumnParallelLinear(_Column, stock.ColumnParallelLinear):
        pass

    @_replaces(stock.QKVParallelLinear)
    class StrictQKVParallelLinear(_Column, stock.QKVParallelLinear):
        pass

    @_replaces(stock.MergedColumnParallelLinear)
    class StrictMergedColumnParallelLinear(_Column, stock.MergedColumnParallelLinear):
        pass

    @_replaces(stock.RowParallelLinear)
    class StrictRowParallelLinear(stock.RowParallelLinear):
        def after_init(self) -> None:
            use_plain_weights(self, StrictLinearMethod)
            if self.tp_size > 1 and not (self.reduce_results and self.input_is_parallel):
                raise refuse(self.prefix, "a row-parallel layer that does not reduce its own result")
            collectives.prepare(_tp_group(self.tp_size))  # once for the group, before any graph is captured

        def forward(self, input_: torch.Tensor) -> Any:
            y = rl_kernel.linear(
                input_,
                self.weight.data,
                segments=self.rl_kernel.virtual_tp,
                tp_group=_tp_group(self.tp_size),
            )
            return (y, None) if self.return_bias else y

    @_replaces(stock.VocabParallelEmbedding)
    class StrictVocabParallelEmbedding(stock.VocabParallelEmbedding):
        def after_init(self) -> None:
            use_plain_weights(self, StrictEmbeddingMethod)

        def forward(self, input_: torch.Tensor) -> torch.Tensor:
            return rl_kernel.embedding(
                input_,
                self.weight.data,
                tp_group=_tp_group(self.tp_size),
                vocab_start_index=self.shard_indices.padded_org_vocab_start_index,
            )

    @_replaces(stock.ParallelLMHead)
    class StrictParallelLMHead(stock.ParallelLMHead):
        def after_init(self) -> None:
            use_plain_weights(self, StrictEmbeddingMethod)

    @_replaces(stock.LogitsProcessor)
    class StrictLogitsProcessor(stock.LogitsProcessor):
        """fp32 logits of the true vocabulary, never rounded, gathered over the ranks."""

        def after_init(self) -> None:
            from vllm.config import get_current_vllm_config

            config = get_current_vllm_config()
            for name, bad in (
                ("a logit scale", self.scale != 1.0),
                ("a logit soft cap", self.soft_cap is not None),
                ("speculative decoding", config.speculative_config is not None),
                ("LoRA", config.lora_config is not None),
                ("pipeline parallelism", config.parallel_config.pipeline_parallel_size != 1),
            ):
                if bad:
                    raise refuse("LogitsProcessor", name)
            if getattr(config, "use_v2_model_runner", False):
                raise EngineError(
                    "the V2 model runner samples outside the replaced sampler",
                    where="VLLM_USE_V2_MODEL_RUNNER",
                    fix="Set VLLM_USE_V2_MODEL_RUNNER=0.",
                )

        def _get_logits(
            self, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: Any = None, skip_gather: bool = False
        ) -> torch.Tensor | None:
            if embedding_bias is not None:
                raise refuse("lm_head", "a bias")
            logits = rl_kernel.lm_head(hidden_states, lm_head.weight.data)
            if skip_gather:
                return logits
            if lm_head.tp_size > 1:
                logits = self._gather_logits(logits)
            return None if logits is None else logits[..., : self.org_vocab_size]

    @_replaces(stock.RMSNorm)
    class StrictRMSNorm(stock.RMSNorm):
        def after_init(self) -> None:
            if self.variance_size_override is not None or not getattr(self, "has_weight", True):
                raise refuse("RMSNorm", "a norm over a part of the row, or without a weight,")

        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            return rl_kernel.rms_norm(x, self.weight.data, self.variance_epsilon, residual)

    @_replaces(stock.SiluAndMul)
    class StrictSiluAndMul(stock.SiluAndMul):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rl_kernel.swiglu(x)

    @_replaces(stock.RotaryEmbedding)
    class StrictRotaryEmbedding(stock.RotaryEmbedding):
        def after_init(self) -> None:
            from rl_kernel.ops.rope import build_cos_sin_cache

            if not self.is_neox_style or self.rotary_dim != self.head_size:
                raise refuse("RotaryEmbedding", "a partial or interleaved rotary embedding")
            table = build_cos_sin_cache(self.max_position_embeddings, self.rotary_dim, self.base)
            self.register_buffer("cos_sin_cache", table.to(self.cos_sin_cache.device), persistent=False)

        def forward(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            positions = positions.flatten()
            return self._rotate(positions, query), None if key is None else self._rotate(positions, key)

        def _rotate(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            heads = x.reshape(positions.shape[0], -1, self.head_size)  # [T, h, D]
            return rl_kernel.rope(heads, positions, self.cos_sin_cache).reshape(x.shape)

    return {
        "ColumnParallelLinear": StrictColumnParallelLinear,
        "QKVParallelLinear": StrictQKVParallelLinear,
        "MergedColumnParallelLinear": StrictMergedColumnParallelLinear,
        "RowParallelLinear": StrictRowParallelLinear,
        "VocabParallelEmbedding": StrictVocabParallelEmbedding,
        "ParallelLMHead": StrictParallelLMHead,
        "LogitsProcessor": StrictLogitsProcessor,
        "RMSNorm": StrictRMSNorm,
        "SiluAndMul": StrictSiluAndMul,
        "RotaryEmbedding": StrictRotaryEmbedding,
    }


@functools.cache
def strict_model() -> type:
    """vLLM's Qwen3 with the norms of q and k and their rotation in one operator. Imports vLLM."""
    attention: Any = require("vllm.model_executor.models.qwen3", "Qwen3Attention", "forward")
    model: Any = require("vllm.model_executor.models.qwen3", "Qwen3ForCausalLM", "load_weights")

    class StrictQwen3Attention(attention):
        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
            qkv, _ = self.qkv_proj(hidden_states)
            q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
            q, k = rl_kernel.qk_norm_rope(
                q.unflatten(-1, (self.num_heads, self.head_dim)),
                k.unflatten(-1, (self.num_kv_heads, self.head_dim)),
                self.q_norm.weight.data,
                self.k_norm.weight.data,
                self.q_norm.variance_epsilon,
                positions.flatten(),
                self.rotary_emb.cos_sin_cache,
            )
            output, _ = self.o_proj(self.attn(q, k, v))
            return output

    class StrictQwen3ForCausalLM(model):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            if active_settings() is None:
                self.__class__ = model
                model.__init__(self, vllm_config=vllm_config, prefix=prefix)
                return
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            # Also where vLLM was started to compile: every numeric layer is an operator of ours, there is nothing to
            # fuse. Decode steps still run as whole graphs.
            self.model.do_not_compile = True
            for module in self.modules():
                if type(module) is attention:
                    module.__class__ = StrictQwen3Attention

    return StrictQwen3ForCausalLM


@functools.cache
def install() -> None:
    """Register every replacement with vLLM, once per process.

    Raises:
        EngineError: an extension point is missing.
    """
    registry = require("vllm.model_executor.custom_op", "op_registry_oot")
    for name, replacement in replacements().items():
        if name in registry:
            raise EngineError(
                f"another plugin already replaces vLLM's {name} with {registry[name].__qualname__}",
                where="vllm.general_plugins",
                fix="Name the plugins to load in VLLM_PLUGINS.",
            )
        replacement.stock.register_oot(replacement)  # type: ignore[attr-defined]
    require("vllm.model_executor.models", "ModelRegistry").register_model("Qwen3ForCausalLM", strict_model())


def clear_shared_layers() -> None:
    """Forget rotary embeddings that vLLM shares between the models of one process: a strict and a stock engine that
    follow each other must not share them."""
    module = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
    getattr(module, "_ROPE_DICT", {}).clear()


def audit_model(model: torch.nn.Module) -> tuple[dict[str, int], list[str]]:
    """Which numeric layers of ``model`` are replaced.

    Returns:
        Counts of replaced layers by stock class name, and the paths of numeric layers that are still stock.
    """
    op = require("vllm.model_executor.custom_op", "CustomOp")
    pluggable = require("vllm.model_executor.custom_op", "PluggableLayer")
    by_class = {cls: name for name, cls in replacements().items()}
    counts: dict[str, int] = {}
    stock: list[str] = []
    inside: set[int] = set()  # children of a replaced layer: its forward does not reach them
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        impl = getattr(module, "impl", None)
        if type(module) in by_class:
            name = by_class[type(module)]
            inside.update(id(child) for child in module.modules() if child is not module)
        elif impl is not None and hasattr(impl, "is_rl_kernel"):
            name = "Attention"
        elif impl is not None or isinstance(module, (op, pluggable)) or list(module.parameters(recurse=False)):
            stock.append(f"{path} ({type(module).__name__})")
            continue
        else:
            continue
        counts[name] = counts.get(name, 0) + 1
    return counts, stock
