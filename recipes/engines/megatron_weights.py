"""Qwen3 weights between Hugging Face names (full tensors) and Megatron names (this rank's shard).

Shapes: H hidden, V vocabulary, P padded vocabulary, F intermediate, D head_dim, G key/value heads, Q query heads.
Megatron keeps q, k and v in one matrix, one group of ``Q / G`` query heads, one key head and one value head after the
other, and gate and up in one matrix, this rank's gate rows first. Rows V..P of the embedding and the LM head are zero
and stay zero.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from recipes.engines.weights import EMBEDDING, TIED_HEAD
from recipes.errors import ConfigError, EngineError, WeightSyncError

VALUE_HEAD = "value_head.weight"  # the critic's own tensor; no Hugging Face model has it
_HEAD = "output_layer.weight"
_CHUNK = 1 << 28  # elements looked at together
Read = Callable[[str], torch.Tensor]


def hf_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Qwen3 ``config`` (``recipes.config.ModelConfig``), in model order."""
    hidden, dim = config.hidden_size, config.head_dim
    q, kv, ffn = config.num_attention_heads * dim, config.num_key_value_heads * dim, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[TIED_HEAD] = (config.vocab_size, hidden)
    return shapes


def init_tensor(
    name: str,
    shape: tuple[int, ...],
    std: float,
    dtype: torch.dtype,
    seed: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """N(0, std) from a generator of ``device`` seeded by ``seed`` and ``name`` (norm weights: ones).

    No other tensor matters, so every parallel layout starts from the same bits. The CPU's generator and a GPU's are
    different ones: the bits belong to the kind of device."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).mul_(std).to(dtype)


def init_hf_weights(config: Any, seed: int) -> dict[str, torch.Tensor]:
    """Random weights of the whole model under Hugging Face names, a function of ``config`` and ``seed`` alone."""
    dtype = getattr(torch, config.dtype)
    return {name: init_tensor(name, shape, config.init_std, dtype, seed) for name, shape in hf_shapes(config).items()}


def initial_reader(config: Any, seed: int, device: torch.device | str = "cpu") -> Read:
    """Reads the starting weights by name onto ``device``: from the safetensors folder ``config.path``, or random ones.

    One full tensor at a time, so beside the model itself at most the largest one (in fp32 while it is drawn) is there.
    """
    if config.path:
        return open_safetensors(config.path, getattr(torch, config.dtype), device)
    shapes, dtype = hf_shapes(config), getattr(torch, config.dtype)
    return lambda name: init_tensor(name, shapes[name], config.init_std, dtype, seed, device)


def open_safetensors(path: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Read:
    """A reader of one tensor at a time from a Hugging Face folder or hub name, onto ``device`` and converted to
    ``dtype`` there.

    Raises:
        ConfigError: the folder holds no safetensors files, or lacks a tensor.
    """
    from safetensors import safe_open

    folder = path
    if not os.path.isdir(folder):
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(path, allow_patterns=["*.safetensors", "*.json"])
        except Exception as error:
            raise ConfigError(
                f"{path!r} is no folder, and the hub did not give it: {error}",
                where="model.path",
                fix="Give a Hugging Face folder with safetensors files, or null for random weights.",
            ) from error
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            files: dict[str, str] = json.load(file)["weight_map"]
    else:
        files = {}
        for entry in sorted(os.listdir(folder)):
            if entry.endswith(".safetensors"):
                with safe_open(os.path.join(folder, entry), framework="pt") as tensors:
                    files |= dict.fromkeys(tensors.keys(), entry)
    if not files:
        raise ConfigError(f"{folder} has no safetensors file", where="model.path", fix="Convert the checkpoint first.")

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise ConfigError(
                f"{name} is not in {folder}", where="model.path", fix="Use a Qwen3 checkpoint that matches model.*."
            )
        with safe_open(os.path.join(folder, files[name]), framework="pt", device=str(device)) as tensors:
            return tensors.get_tensor(name).to(dtype)

    return read


def mapping_reader(weights: Mapping[str, torch.Tensor]) -> Read:
    """A reader over a dictionary; a missing name is a :class:`WeightSyncError`."""

    def read(name: str) -> torch.Tensor:
        if name not in weights:
            raise WeightSyncError(f"{name} is missing", where="weights", fix="Send every tensor of the model.")
        return weights[name]

    return read


class Checked:
    """``read`` with the shape of every tensor verified at once, and its finiteness by :meth:`finish`.

    Raises:
        WeightSyncError: a shape is not the model's.
    """

    def __init__(self, read: Read, config: Any) -> None:
        self.read = read
        self.shapes = {**hf_shapes(config), VALUE_HEAD: (1, config.hidden_size)}
        self.finite: dict[str, torch.Tensor] = {}  # flags stay on the device: no wait between two tensors

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self.read(name)
        if tuple(tensor.shape) != self.shapes[name]:
            raise WeightSyncError(
                f"{name} is {list(tensor.shape)}, the model has {list(self.shapes[name])}",
                where="weights",
                fix="Compare model.* with the checkpoint's config.json.",
            )
        self.finite[name] = all_finite(tensor)
        return tensor

    def finish(self) -> None:
        """One look at all tensors read so far.

        Raises:
            EngineError: a weight is NaN or infinite; the message names the tensor and the element.
        """
        if not self.finite:
            return
        device = next(iter(self.finite.values())).device
        flags = torch.stack([flag.to(device) for flag in self.finite.values()]).tolist()
        for name, flag in zip(self.finite, flags):
            if not flag:
                require_finite(self.read(name), f"weight {name}")


def all_finite(x: torch.Tensor) -> torch.Tensor:
    """Bool [] on the device of ``x``: no element is NaN or infinite. One pass, no temporary, no wait for the device."""
    parts = [torch.stack(part.aminmax()) for part in x.detach().reshape(-1).split(_CHUNK) if part.numel()]
    return torch.isfinite(torch.stack(parts)).all() if parts else torch.ones((), dtype=torch.bool, device=x.device)


def require_finite(tensor: torch.Tensor, where: str) -> None:
    """Raise :class:`EngineError` naming ``where`` and the first element that is NaN or infinite."""
    if bool(all_finite(tensor)):
        return
    bad = (~torch.isfinite(tensor)).nonzero()
    first = bad[0].tolist()
    raise EngineError(
        f"{len(bad)} of {tensor.numel()} elements are not finite, the first is {tensor[tuple(first)].item()} "
        f"at {first}",
        where=where,
        fix="Lower the learning rate or clip_grad, and resume from the last checkpoint; check the data of this step.",
    )


def _rows(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim=0)[rank]


def _merge_qkv(config: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[Q D, H], [G D, H], [G D, H] -> [G, (Q / G + 2) D, H]."""
    groups = config.num_key_value_heads
    return torch.cat([part.view(groups, -1, part.shape[-1]) for part in (q, k, v)], dim=1)


def _split_qkv(config: Any, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    groups, dim = config.num_key_value_heads, config.head_dim
    grouped = qkv.view(groups, -1, qkv.shape[-1])
    parts = grouped.split([grouped.shape[1] - 2 * dim, dim, dim], dim=1)
    return tuple(part.reshape(-1, qkv.shape[-1]) for part in parts)


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], tensor.shape[1])])


def shards(config: Any, read: Read, *, padded_vocab: int, rank: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's Megatron tensors, one at a time, from full Hugging Face tensors."""
    yield "embedding.word_embeddings.weight", _rows(_pad_rows(read(EMBEDDING), padded_vocab), rank, size)
    for i in range(config.num_hidden_layers):
        hf, mc = f"model.layers.{i}.", f"decoder.layers.{i}."
        attn, mlp = hf + "self_attn.", hf + "mlp."
        yield mc + "input_layernorm.weight", read(hf + "input_layernorm.weight")
        qkv = _merge_qkv(config, *(read(f"{attn}{n}_proj.weight") for n in "qkv"))
        yield mc + "self_attention.linear_qkv.weight", _rows(qkv, rank, size).reshape(-1, config.hidden_size)
        yield mc + "self_attention.linear_proj.weight", read(attn + "o_proj.weight").chunk(size, dim=1)[rank]
        for n in "qk":
            yield f"{mc}self_attention.{n}_layernorm.weight", read(f"{attn}{n}_norm.weight")
        yield mc + "pre_mlp_layernorm.weight", read(hf + "post_attention_layernorm.weight")
        gate_up = [_rows(read(f"{mlp}{n}_proj.weight"), rank, size) for n in ("gate", "up")]
        yield mc + "mlp.linear_fc1.weight", torch.cat(gate_up)
        yield mc + "mlp.linear_fc2.weight", read(mlp + "down_proj.weight").chunk(size, dim=1)[rank]
    yield "decoder.final_layernorm.weight", read("model.norm.weight")
    if not config.tie_word_embeddings:
        yield "output_layer.weight", _rows(_pad_rows(read(TIED_HEAD), padded_vocab), rank, size)


def load(model: torch.nn.Module, config: Any, read: Read, *, padded_vocab: int, rank: int, size: int) -> None:
    """Copy full Hugging Face tensors into the parameters of a ``GPTModel``; every parameter of the trunk is written.

    A critic has no LM head; its value head is read under :data:`VALUE_HEAD` by the caller.

    Raises:
        EngineError: the model has a parameter that no tensor maps to, or a shard has another shape.
    """
    params = dict(model.named_parameters())
    left = set(params)
    if _is_critic(params):
        left.discard(_HEAD)
    for name, shard in shards(config, read, padded_vocab=padded_vocab, rank=rank, size=size):
        if name == _HEAD and _is_critic(params):
            continue  # the policy's LM head has no place in a critic
        param = params.get(name)
        if param is None or param.shape != shard.shape:
            have = "nothing of that name" if param is None else list(param.shape)
            raise EngineError(f"{name}: the shard is {list(shard.shape)}, the model has {have}", where="GPTModel")
        with torch.no_grad():
            param.copy_(shard)
        left.discard(name)
    if left:
        raise EngineError(f"no tensor maps to {', '.join(sorted(left))}", where="GPTModel")


def _is_critic(params: Mapping[str, torch.Tensor]) -> bool:
    head = params.get(_HEAD)
    return head is not None and head.shape[0] == 1


def _gather(shard: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Shards of all tensor-parallel ranks, in rank order, moved as bytes."""
    if group is None or group.size() == 1:
        return [shard]
    flat = shard.contiguous().view(-1).view(torch.uint8)
    out = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(out, flat, group=group)
    return [part.view(shard.dtype).view(shard.shape) for part in out]


def export(params: Mapping[str, torch.Tensor], config: Any, group: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors under Hugging Face names, one at a time, on every rank of the tensor-parallel ``group``.

    The inverse of :func:`shards`: bytes survive the round trip. ``params`` are this rank's tensors under Megatron names
    (weights, or gradients)."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield EMBEDDING, torch.cat(_gather(params["embedding.word_embeddings.weight"], group))[:vocab]
    for i in range(config.num_hidden_layers):
        hf, mc = f"model.layers.{i}.", f"decoder.layers.{i}."
        attn, mlp = hf + "self_attn.", hf + "mlp."
        yield hf + "input_layernorm.weight", params[mc + "input_layernorm.weight"]
        qkv = torch.cat(_gather(params[mc + "self_attention.linear_qkv.weight"], group))
        for n, part in zip("qkv", _split_qkv(config, qkv)):
            yield f"{attn}{n}_proj.weight", part
        yield attn + "o_proj.weight", torch.cat(_gather(params[mc + "self_attention.linear_proj.weight"], group), 1)
        for n in "qk":
            yield f"{attn}{n}_norm.weight", params[f"{mc}self_attention.{n}_layernorm.weight"]
        yield hf + "post_attention_layernorm.weight", params[mc + "pre_mlp_layernorm.weight"]
        halves = [part.chunk(2) for part in _gather(params[mc + "mlp.linear_fc1.weight"], group)]
        yield mlp + "gate_proj.weight", torch.cat([gate for gate, _ in halves])
        yield mlp + "up_proj.weight", torch.cat([up for _, up in halves])
        yield mlp + "down_proj.weight", torch.cat(_gather(params[mc + "mlp.linear_fc2.weight"], group), 1)
    yield "model.norm.weight", params["decoder.final_layernorm.weight"]
    if _is_critic(params):
        yield VALUE_HEAD, params[_HEAD].view(1, hidden)
    elif not config.tie_word_embeddings:
        yield TIED_HEAD, torch.cat(_gather(params["output_layer.weight"], group))[:vocab]
