"""The control: stock Megatron-Core modules and logits (``consistency=native``), which a strict run must differ from.

On GPUs sequences stay packed. Megatron's local attention takes no packed batch (its packed attention is Transformer
Engine's), so two things are added to its stock local spec and nothing else: :class:`VarlenCoreAttention` calls torch's
FlashAttention, and :class:`PackedRotary` lays Megatron's own rotary frequencies out along the pack, which spares it a
loop over the sequences in every layer. On the CPU sequences are padded side by side for Megatron's local attention.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

import rl_kernel
from recipes.engines.types import IGNORE_INDEX, PackedBatch
from recipes.errors import ConfigError, EngineError

# Logits of a pack are made in one go up to this many bytes (bf16), then in chunks of rows.
_LOGITS_BYTES = 4 << 30
_ROWS = 1024  # rows whose fp32 copies exist at the same time


class VarlenCoreAttention(MegatronModule):
    """Causal attention of packed sequences by ``torch.nn.attention.varlen`` (FlashAttention, forward and backward).

    query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq * D].
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        from torch.nn.attention.varlen import varlen_attn

        if attention_dropout or config.attention_dropout:
            raise ConfigError("attention dropout", where="TransformerConfig", fix="Set it to 0.")
        scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        known = inspect.signature(varlen_attn).parameters
        options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "scale" in known:
            options["scale"] = scale
        elif scale != config.kv_channels**-0.5:
            raise ConfigError(f"softmax_scale={scale}", where="varlen_attn", fix="This torch has the default only.")
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        self.attention: Any = varlen_attn
        self.options = options

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """See the class."""
        if packed_seq_params is None:
            raise EngineError("got an unpacked batch", where="VarlenCoreAttention", fix="Pass packed_seq_params.")
        cu, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        out = self.attention(query, key, value, cu, cu, longest, longest, **self.options)
        return out.reshape(query.shape[0], -1)


class PackedRotary(torch.nn.Module):
    """Megatron's rotary embedding with the frequency of every token of a pack, [T, 1, 1, D], instead of the first ones
    [longest, 1, 1, D]; Megatron then applies it to the whole pack at once. The numbers are the same."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Megatron asks first for the length, with the packed parameters as the last argument."""
        self.positions = getattr(args[-1], "position_ids", None)
        return int(self.rotary.get_rotary_seq_len(*args))  # type: ignore[operator]

    def forward(self, length: int, **kwargs: Any) -> torch.Tensor:
        """See the class."""
        table = self.rotary(length, **kwargs)
        return table if self.positions is None else table.index_select(0, self.positions)


def native_spec(on_cpu: bool) -> Any:
    """Megatron's local layer spec of Qwen3, packed attention in it where there is a GPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if not on_cpu:
        spec.submodules.self_attention.submodules.core_attention = VarlenCoreAttention
    return spec


class _Statistics(torch.autograd.Function):
    """fp32 log_softmax of ``logits / temperature`` at the targets, log-sum-exp and entropy, [3, R].

    The formulas of torch, in blocks of rows so that the fp32 copies of the logits do not all exist at once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        parts = []
        for z, t in zip(logits.split(_ROWS), targets.split(_ROWS)):
            z = _scaled(z, temperature)
            log_p = torch.log_softmax(z, dim=-1)
            chosen = log_p.gather(1, t[:, None]).squeeze(1)
            lse = torch.logsumexp(z, dim=-1)
            parts.append(torch.stack([chosen, lse, -(log_p * log_p.exp()).sum(-1)]))
        out = torch.cat(parts, dim=1) if parts else logits.new_zeros(3, 0, dtype=torch.float32)
        ctx.save_for_backward(logits, targets, out)
        ctx.temperature = temperature
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, out = ctx.saved_tensors
        result = torch.empty_like(logits)
        for begin in range(0, logits.shape[0], _ROWS):
            rows = slice(begin, begin + _ROWS)
            g_logp, g_lse, g_entropy = grad[:, rows, None]
            lse, entropy = out[1, rows, None], out[2, rows, None]
            log_p = _scaled(logits[rows], ctx.temperature).sub_(lse)
            p = log_p.exp()
            # d logp = 1 - p, d lse = p, d entropy = -p (log p + entropy)
            p *= (g_lse - g_logp - g_entropy * entropy) - g_entropy * log_p
            p.scatter_add_(1, targets[rows, None], g_logp)
            result[rows] = p.div_(ctx.temperature)
        return result, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    z = logits.float()
    if z is logits:  # fp32 already: leave the saved tensor alone
        z = z.clone()
    return z if temperature == 1.0 else z.div_(temperature)


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def _logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[R, H] -> [R, vocabulary] by Megatron's output layer, gathered over the tensor-parallel group."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(hidden.unsqueeze(1), weight=weight)
    return gather_from_tensor_model_parallel_region(logits).squeeze(1)[:, : model.global_vocab_size]


def _packed_hidden(model: Any, packed: PackedBatch) -> torch.Tensor:
    """Final hidden states [T, H] of a packed batch."""
    from recipes.engines.megatron_model import decoder_output

    longest = packed.max_seqlen
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    # Only Megatron's rotary embedding reads the padded offsets, and it reads them on the host, in every layer.
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = packed.cu_seqlens.cpu()
    params.position_ids = packed.position_ids  # type: ignore[attr-defined]
    hidden = decoder_output(model, packed.tokens[None], packed.position_ids[None], params)
    return hidden.reshape(-1, hidden.shape[-1])


def _padded_hidden(model: Any, packed: PackedBatch) -> torch.Tensor:
    """The same of sequences padded side by side."""
    from recipes.engines.megatron_model import decoder_output

    lengths = (packed.cu_seqlens[1:] - packed.cu_seqlens[:-1]).long()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    columns = packed.position_ids
    # Few distinct shapes: torch's CPU matrix products keep a compiled kernel, and memory, for each one.
    width, height = _round_up(int(lengths.max()), 32), _round_up(len(lengths), 16)
    ids = packed.tokens.new_zeros(height, width)
    ids[rows, columns] = packed.tokens
    positions = torch.arange(width, device=ids.device).expand_as(ids)
    mask = torch.ones(width, width, dtype=torch.bool, device=ids.device).triu(1)[None, None]  # True hides
    return decoder_output(model, ids, positions, None, mask)[columns, rows]  # [S, B, H] -> [T, H]


def _hidden(model: Any, packed: PackedBatch) -> torch.Tensor:
    return (_packed_hidden if packed.tokens.is_cuda else _padded_hidden)(model, packed)


def native_logp(model: Any, packed: PackedBatch, temperature: float) -> rl_kernel.LinearLogpOutput:
    """logp, lse and entropy, fp32 [T], from stock logits of the positions with a target; 0 where it is ignored."""
    targets = packed.target_ids
    rows = (targets != IGNORE_INDEX).nonzero().squeeze(-1)
    hidden, chosen = _hidden(model, packed).index_select(0, rows), targets[rows]
    step = max(_ROWS, _LOGITS_BYTES // (hidden.element_size() * model.global_vocab_size))
    parts = []
    for h, t in zip(hidden.split(step), chosen.split(step)):
        if len(chosen) <= step or not torch.is_grad_enabled():
            parts.append(_statistics(model, h, t, temperature))
        else:  # logits of one chunk at a time, made again in backward
            parts.append(torch.utils.checkpoint.checkpoint(_statistics, model, h, t, temperature, use_reentrant=False))
    out = torch.cat(parts, dim=1)
    whole = torch.zeros(3, targets.numel(), device=out.device).index_copy(1, rows, out)
    return rl_kernel.LinearLogpOutput(*whole)


def _statistics(model: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    return _Statistics.apply(_logits_of(model, hidden), targets, temperature)


def native_values(model: Any, packed: PackedBatch) -> torch.Tensor:
    """Values of a stock critic, fp32 [T]."""
    return F.linear(_hidden(model, packed), model.output_layer.weight).float().squeeze(-1)
