"""vLLM's paged attention, computed by rl_kernel.attention_paged.

The backend keeps vLLM's metadata and its cache allocation and changes two things: how keys and values are written into
a page (token by token, no packing for a particular instruction set) and who computes the attention. One call serves a
step's decodes, prefill chunks and prefix hits together: the contract walks the keys of each sequence in blocks from
absolute position 0, so none of these changes a bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import rl_kernel
from recipes.engines.vllm_layers import active_settings, refuse, require
from recipes.errors import EngineError


def split_cache(kv_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value views ``[num_blocks, block_size, num_kv_heads, head_size]`` of vLLM's cache of one layer.

    Known layouts (n blocks, b tokens a block, h heads, d head size): ``[n, h, b, 2d]``, ``[n, b, h, 2d]``,
    ``[2, n, b, h, d]``, ``[2, n, h, b, d]``, ``[n, 2, b, h, d]``.

    Raises:
        EngineError: another layout.
    """
    shape, h, d = tuple(kv_cache.shape), num_kv_heads, head_size
    if len(shape) == 4 and shape[3] == 2 * d:
        if shape[1] == h:
            kv_cache = kv_cache.transpose(1, 2)
        if kv_cache.shape[2] == h:
            return kv_cache[..., :d], kv_cache[..., d:]
    elif len(shape) == 5 and shape[4] == d:
        if shape[0] == 2:
            key, value = kv_cache[0], kv_cache[1]
        elif shape[1] == 2:
            key, value = kv_cache[:, 0], kv_cache[:, 1]
        else:
            raise _unknown_layout(shape, h, d)
        if key.shape[2] == h:
            return key, value
        if key.shape[1] == h:
            return key.transpose(1, 2), value.transpose(1, 2)
    raise _unknown_layout(shape, h, d)


def _unknown_layout(shape: tuple[int, ...], heads: int, head_size: int) -> EngineError:
    return EngineError(
        f"KV cache of shape {list(shape)} with {heads} heads of size {head_size} has an unknown layout",
        where="recipes.engines.vllm_attention",
        fix="Use the default kv_cache_dtype and cache layout.",
    )


@functools.cache
def strict_impl() -> type:
    """The attention implementation class. Imports vLLM."""
    base: Any = require("vllm.v1.attention.backend", "AttentionImpl")
    attention_type = require("vllm.v1.attention.backend", "AttentionType", "DECODER")

    class StrictAttentionImpl(base):
        is_rl_kernel = True
        # Set by install: whether vLLM leaves the cache update to forward, and the stock kernel that moves the bytes.
        writes_cache = False
        stock_update: Any = None
        _is_per_token_head_quant = False  # read by the stock kernel of ROCm

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int | None = None,
            alibi_slopes: Any = None,
            sliding_window: Any = None,
            kv_cache_dtype: str = "auto",
            logits_soft_cap: float | None = None,
            attn_type: str = attention_type.DECODER,
            kv_sharing_target_layer_name: str | None = None,
            **extra: Any,
        ) -> None:
            for what, bad in (
                ("ALiBi", alibi_slopes is not None),
                ("a sliding window", sliding_window is not None),
                ("a logit soft cap", bool(logits_soft_cap)),
                ("attention that is not causal", attn_type != attention_type.DECODER),
                ("a cache shared between layers", kv_sharing_target_layer_name is not None),
                (f"kv_cache_dtype={kv_cache_dtype}", "fp8" in kv_cache_dtype or "fp4" in kv_cache_dtype),
                (f"{next(iter(extra), '')}", any(value is not None for value in extra.values())),
            ):
                if bad:
                    raise refuse("Attention", what)
            self.num_heads = num_heads
            self.head_size = head_size
            self.scale = float(scale)
            self.num_kv_heads = num_kv_heads or num_heads
            self.num_queries_per_kv = self.num_heads // self.num_kv_heads
            self.kv_cache_dtype = kv_cache_dtype
            self.sliding_window = -1
            self.alibi_slopes = None
            self.attn_type = attn_type
            self.kv_sharing_target_layer_name = None

        def do_kv_cache_update(
            self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            """Write ``key``/``value`` [T, h, d] of this step to their slots (block * block_size + offset)."""
            if kv_cache.numel() == 0:  # profiling run, no cache yet
                return
            if self.stock_update is not None:  # one kernel; skips the slots -1 of padded rows
                self.stock_update(layer, key, value, kv_cache, slots)
                return
            k_cache, v_cache = split_cache(kv_cache, self.num_kv_heads, self.head_size)
            count = slots.shape[0]
            block = torch.div(slots, k_cache.shape[1], rounding_mode="floor")
            offset = slots - block * k_cache.shape[1]
            k_cache[block, offset] = key[:count]
            v_cache[block, offset] = value[:count]

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor | None = None,
            output_scale: torch.Tensor | None = None,
            output_block_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """Attention of ``query`` [T, H, d] over the cache, written into ``output``."""
            if output_scale is not None or output_block_scale is not None:
                raise refuse("Attention", "a quantized output")
            if output is None:
                output = torch.empty_like(query, memory_format=torch.contiguous_format)
            if attn_metadata is None:  # profiling run, no cache yet
                return output.zero_()
            if getattr(attn_metadata, "causal", True) is not True:
                raise refuse("Attention", "attention that is not causal")
            if getattr(attn_metadata, "use_cascade", False):
                raise refuse("Attention", "cascade attention (disable_cascade_attn=False)")
            if self.writes_cache:
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            k_cache, v_cache = split_cache(kv_cache, self.num_kv_heads, self.head_size)
            count = attn_metadata.num_actual_tokens
            rl_kernel.attention_paged(
                query[:count],
                k_cache,
                v_cache,
                attn_metadata.block_table,
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                softmax_scale=self.scale,
                # While a graph is captured vLLM gives bounds that hold for every replay: the query length of the
                # batches that the graph serves, and max_model_len.
                max_query_len=getattr(attn_metadata, "max_query_len", None),
                max_seq_len=getattr(attn_metadata, "max_seq_len", None),
                out=output.view(query.shape)[:count],
            )
            return output

    return StrictAttentionImpl


def backend_name(platform: Any) -> str:
    """vLLM's attention backend whose metadata and cache the strict implementation uses."""
    return "CPU_ATTN" if platform.is_cpu() else "TRITON_ATTN" if platform.is_rocm() else "FLASH_ATTN"


@functools.cache
def _without_schedule(builder: Any) -> type:
    """The stock metadata builder; nobody reads the launch schedule that FlashAttention's would compute each step."""

    class Builder(builder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.aot_schedule = False

    return Builder


@functools.cache
def install() -> None:
    """Make vLLM's platform backend hand out the strict implementation under active settings, once per process.

    The stock backend stays what it is for a stock engine: only ``get_impl_cls`` looks at the settings.

    Raises:
        EngineError: an extension point is missing.
    """
    from vllm.platforms import current_platform

    registry = "vllm.v1.attention.backends.registry"
    backends = require(registry, "AttentionBackendEnum")
    register_backend = require(registry, "register_backend")
    name = backend_name(current_platform)
    member = require(registry, "AttentionBackendEnum", name) and getattr(backends, name)
    stock: Any = member.get_class()
    require(stock.__module__, stock.__name__, "get_impl_cls")
    impl: Any = strict_impl()
    impl.writes_cache = getattr(stock, "forward_includes_kv_cache_update", True)
    if current_platform.is_cuda_alike():
        impl.stock_update = require(
            stock.__module__, stock.get_impl_cls().__name__, "do_kv_cache_update"
        ).do_kv_cache_update

    class Backend(stock):
        @staticmethod
        def get_impl_cls() -> type:
            return stock.get_impl_cls() if active_settings() is None else strict_impl()

        @staticmethod
        def get_builder_cls() -> type:
            builder = stock.get_builder_cls()
            strict = current_platform.is_cuda() and active_settings() is not None
            return _without_schedule(builder) if strict else builder

    Backend.__qualname__ = "Backend"
    globals()["Backend"] = Backend  # vLLM finds the class by module and name
    register_backend(member, f"{__name__}.Backend")
