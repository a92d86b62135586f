"""Weights of a vLLM worker: which Hugging Face tensors it needs, loading them, and proof that it holds them.

Runs inside vLLM's worker processes. vLLM fuses q, k, v and gate, up into one parameter and shards it by tensor-parallel
rank, pads the vocabulary, and for some stock layers replaces the parameter by a packed copy; a name that is missing or
a copy that was not refreshed goes unnoticed there. So after loading, every parameter is unfused again and compared
byte by byte with the slice of the given tensor it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import rl_kernel
from recipes.engines import vllm as plugin
from recipes.engines.device_memory import Handle, place_of
from recipes.engines.vllm_layers import audit_model, require
from recipes.engines.weight_transfer import Entry, WeightReader
from recipes.engines.weights import digests

# A worker process imports this module before it builds the model.
plugin.register()
if require("vllm.platforms", "current_platform", "is_cpu").is_cpu():
    plugin.share_cores()


@dataclass(frozen=True)
class Piece:
    """A Hugging Face tensor and the part of a local parameter it fills.

    ``local`` picks the part out of the parameter, ``shard`` picks the same elements out of the full tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    local: Callable[[torch.Tensor], torch.Tensor]
    shard: Callable[[torch.Tensor], torch.Tensor]


def _rows(start: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[start : start + count]


def _columns(start: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[:, start : start + count]


def _all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _fused(path: str, packed: Mapping[str, list[str]]) -> list[str]:
    parent, _, leaf = path.rpartition(".")
    return [f"{parent}.{name}.weight" for name in packed.get(leaf, [leaf])]


def _pieces_of(path: str, module: Any, packed: Mapping[str, list[str]]) -> Iterator[Piece] | None:
    """Pieces of one module that owns parameters; ``None`` when its class is not understood."""
    linear = "vllm.model_executor.layers.linear"
    qkv = require(linear, "QKVParallelLinear")
    column = require(linear, "ColumnParallelLinear")
    row = require(linear, "RowParallelLinear")
    embedding = require("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding")
    norm = require("vllm.model_executor.layers.layernorm", "RMSNorm")
    own = dict(module.named_parameters(recurse=False))
    if set(own) - {"weight"}:
        return None
    if isinstance(module, qkv):
        return _qkv(path, module, packed)
    if isinstance(module, column):
        return _column(path, module, packed)
    if isinstance(module, row):
        k = module.input_size_per_partition
        shape = (module.output_size, module.input_size)
        cut = _columns(module.tp_rank * k, k)
        return iter([Piece(f"{path}.weight", shape, module.params_dtype, path, _all, cut)])
    if isinstance(module, embedding):
        index = module.shard_indices
        start, count = index.org_vocab_start_index, index.num_org_elements
        shape = (module.org_vocab_size, module.embedding_dim)
        cut = _rows(start, count)
        return iter([Piece(f"{path}.weight", shape, module.weight.dtype, path, _rows(0, count), cut)])
    if isinstance(module, norm):
        return iter([Piece(f"{path}.weight", tuple(module.weight.shape), module.weight.dtype, path, _all, _all)])
    return None


def _qkv(path: str, module: Any, packed: Mapping[str, list[str]]) -> Iterator[Piece]:
    size = module.head_size
    offset = 0
    for index, name in enumerate(_fused(path, packed)):
        heads = module.num_heads if index == 0 else module.num_kv_heads
        total = module.total_num_heads if index == 0 else module.total_num_kv_heads
        rank = module.tp_rank if index == 0 else module.tp_rank // module.num_kv_head_replicas
        rows = heads * size
        shape = (total * size, module.input_size)
        yield Piece(name, shape, module.params_dtype, path, _rows(offset, rows), _rows(rank * rows, rows))
        offset += rows


def _column(path: str, module: Any, packed: Mapping[str, list[str]]) -> Iterator[Piece]:
    names = _fused(path, packed)
    sizes = getattr(module, "output_sizes", [module.output_size])
    offset = 0
    for name, size in zip(names, sizes, strict=True):
        rows = size // module.tp_size
        cut = _rows(module.tp_rank * rows, rows)
        yield Piece(name, (size, module.input_size), module.params_dtype, path, _rows(offset, rows), cut)
        offset += rows


def pieces(model: torch.nn.Module) -> tuple[list[Piece], list[str]]:
    """Every Hugging Face tensor that ``model`` holds a part of, and the modules whose parameters are not understood.

    A tied LM head is the embedding and appears once, under the embedding's name.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    embedding = require("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding")
    head = require("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead")
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, embedding) and not isinstance(module, head)
    }
    found: list[Piece] = []
    unknown: list[str] = []
    for path, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        if isinstance(module, head) and id(module.weight) in tables:
            continue
        of_module = _pieces_of(path, module, packed)
        if of_module is None:
            unknown.append(f"{path} ({type(module).__name__})")
        else:
            found.extend(of_module)
    return found, unknown


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 26  # elements compared at a time: the comparison needs a byte for each


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Whether bit patterns differ, on the device; None where dtype or shape do."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return None
    view = _BITS[a.element_size()]
    a, b = a.view(view), b.view(view)
    if a.numel() <= _CHUNK or a.dim() == 0:
        return torch.ne(a, b).any()
    rows = max(1, _CHUNK // (a.numel() // a.shape[0]))
    return torch.stack([torch.ne(x, y).any() for x, y in zip(a.split(rows), b.split(rows))]).any()


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether a contiguous tensor holds NaN or infinity, on the device and with small temporaries."""
    return ~torch.stack([torch.isfinite(part).all() for part in tensor.reshape(-1).split(_CHUNK)]).all()


def _true(flags: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Names whose flag is True or None; the device is waited for once."""
    known = {name: flag for name, flag in flags.items() if flag is not None}
    values = dict(zip(known, torch.stack(list(known.values())).tolist())) if known else {}
    return [name for name in flags if values.get(name, True)]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bit patterns (-0.0 is not 0.0, NaN equals itself)."""
    return not _true({"": _differ(a, b)})


def differences(
    model: torch.nn.Module, named: Mapping[str, torch.Tensor], *, stock: bool = False, of: list[Piece] | None = None
) -> list[str]:
    """Names of tensors of ``named`` that ``model`` does not hold byte for byte after loading them.

    Args:
        stock: skip parameters that a stock layer has repacked and emptied (``stale_products`` looks at those).
        of: :func:`pieces` of the model, where the caller has them.
    """
    flags: dict[str, torch.Tensor | None] = {}
    modules = dict(model.named_modules())
    for piece in pieces(model)[0] if of is None else of:
        weight = modules[piece.module].weight.data
        if piece.name not in named or (stock and weight.numel() == 0):
            continue
        flags[piece.name] = _differ(piece.local(weight), piece.shard(named[piece.name]).to(weight.device))
    return _true(flags)


def filled_padding(model: torch.nn.Module) -> list[str]:
    """Tables whose vocabulary padding is not zero."""
    flags: dict[str, torch.Tensor | None] = {}
    for path, module in model.named_modules():
        index = getattr(module, "shard_indices", None)
        if index is not None:
            name = f"{path}.weight (vocabulary padding is not zero)"
            flags[name] = module.weight.data[index.num_org_elements :].count_nonzero() > 0
    return _true(flags)


def stale_products(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that stock layers do not multiply by after loading ``named``.

    Stock layers may keep a repacked copy only, so the product with one random row stands in for the bytes.
    """
    embedding = require("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding")
    linear = require("vllm.model_executor.layers.linear", "LinearBase")
    wrong: list[str] = []
    parts: dict[str, list[Piece]] = {}
    for piece in pieces(model)[0]:
        parts.setdefault(piece.module, []).append(piece)
    tables = {
        id(module.weight): path for path, module in model.named_modules() if path in parts and hasattr(module, "weight")
    }
    for path, module in model.named_modules():
        if not isinstance(module, (linear, embedding)):
            continue
        of_module = parts.get(path) or parts.get(tables.get(id(module.weight), ""), [])  # a tied head is the embedding
        if not of_module:
            continue
        full = torch.cat([piece.shard(named[piece.name]) for piece in of_module])
        device = next(model.parameters()).device
        x = torch.randn(1, full.shape[1], generator=torch.Generator().manual_seed(0)).to(device, full.dtype)
        found = module.quant_method.apply(module, x)[:, : full.shape[0]].float()
        expected = x.float() @ full.to(device).float().T
        if not torch.allclose(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())):
            wrong.append(
                of_module[0].name if len(of_module) == 1 else f"{path} ({', '.join(p.name for p in of_module)})"
            )
    return wrong


def _load_stock(model: Any, runner: Any, named: dict[str, torch.Tensor]) -> None:
    """Stock layers repack their weights, so vLLM's reload path has to run, and once more for a tied head: it shares the
    embedding's parameter, and the reload repacks a shared parameter for its first owner only."""
    embedding = require("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding")
    head = require("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead")
    tables = [m for m in model.modules() if isinstance(m, embedding) and not isinstance(m, head)]
    tied = [(h, t) for h in model.modules() if isinstance(h, head) for t in tables if h.weight is t.weight]
    runner.reload_weights(weights_iterator=iter(named.items()))
    for module, table in tied:
        module.weight = table.weight
        module.quant_method.process_weights_after_loading(module)


def _contract(model: torch.nn.Module) -> str | None:
    """Fingerprint of what the layers of this worker compute; None unless all were built for one bitwise contract."""
    settings: set[Any] = {module.rl_kernel for module in model.modules() if hasattr(module, "rl_kernel")}
    dtypes = {param.dtype for param in model.parameters()}
    if len(settings) != 1 or len(dtypes) != 1 or next(iter(settings)).mode not in plugin.BITWISE_MODES:
        return None
    family = rl_kernel.platform.family_of(next(model.parameters()).device)
    dtype = str(next(iter(dtypes))).removeprefix("torch.")
    return rl_kernel.fingerprint(family, virtual_tp=next(iter(settings)).virtual_tp, model_dtype=dtype)


@dataclass
class _Update:
    """An update that has begun."""

    model: Any
    reader: WeightReader | None
    pieces: list[Piece]
    copies: dict[str, str]
    collected: dict[str, torch.Tensor] | None  # all tensors, where they are loaded at the end
    seen: set[str] = field(default_factory=set)

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.model.parameters()).device


class WorkerExtension:
    """Methods that vLLM adds to its worker class; the engine calls them on every rank."""

    model_runner: Any
    vllm_config: Any
    _rl_kernel_update: _Update | None = None

    def rl_kernel_describe(self) -> dict[str, Any]:
        """The tensors this worker needs, and who computes its numeric layers."""
        model = self.model_runner.get_model()
        found, unknown = pieces(model)
        replaced, stock = audit_model(model)
        sampler = getattr(self.model_runner, "sampler", None)
        return {
            "tensors": {piece.name: (piece.shape, str(piece.dtype).removeprefix("torch.")) for piece in found},
            "unknown": unknown,
            "replaced": replaced,
            "stock": stock,
            "sampler": getattr(sampler, "rl_kernel", None) is not None,
            "device": str(next(model.parameters()).device),
            "place": place_of(next(model.parameters()).device),
            "contract": _contract(model),
        }

    def rl_kernel_backends(self) -> tuple[dict[str, str], int]:
        """Backends that rl_kernel resolved in this worker, and how many choices passed over a preferred one."""
        from rl_kernel import registry

        return registry.resolved(), registry.fallback_count()

    # A weight update: begin, load any number of times, end. Errors travel as text: an exception would end the worker.

    def rl_kernel_update_begin(
        self, handles: Mapping[str, Handle] | None, strict: bool, copies: Mapping[str, str]
    ) -> str:
        """Open the buffer for this worker's device (None: tensors come with the calls); returns what is wrong.

        Args:
            strict: layers are rl_kernel's, which keep plain parameters.
            copies: name of a tensor this worker keeps besides the one it equals.
        """
        self.rl_kernel_update_abort()
        model = self.model_runner.get_model()
        device = next(model.parameters()).device
        reader = None
        if handles is not None:
            try:
                reader = WeightReader(handles[place_of(device)], device)
            except Exception as error:  # noqa: BLE001 - reported to the engine, which raises
                return str(error)
        # Stock layers on the CPU repack their weights, and vLLM's way to do that again wants all tensors at once.
        collect = not strict and device.type == "cpu"
        self._rl_kernel_update = _Update(model, reader, pieces(model)[0], dict(copies), {} if collect else None)
        return ""

    def rl_kernel_update_load(
        self, entries: Sequence[Entry] | None, named: dict[str, torch.Tensor] | None
    ) -> dict[str, Any]:
        """Load full tensors under Hugging Face names, given or read from the buffer.

        Returns names of tensors that are ``wrong`` afterwards or ``not_finite``, and ``digests`` of what was read.
        """
        result: dict[str, Any] = {"wrong": [], "not_finite": [], "digests": {}}
        try:
            update = self._rl_kernel_update
            if update is None:
                raise RuntimeError("no update has begun")
            with torch.no_grad():
                if entries is not None:
                    assert update.reader is not None
                    named = update.reader.read(entries)
                    result["not_finite"] = _true({k: _not_finite(t) for k, t in named.items()})
                    result["digests"] = digests(named)
                    if result["not_finite"]:
                        return result
                assert named is not None
                named = {**named, **{k: named[source] for k, source in update.copies.items() if source in named}}
                if update.collected is None:
                    result["wrong"] = self._rl_kernel_load(update, named)
                else:
                    update.collected |= {k: t.clone() for k, t in named.items()} if entries is not None else named
                if update.device.type != "cpu":
                    torch.cuda.synchronize(update.device)
        except Exception as error:  # noqa: BLE001
            result["wrong"] = [f"{type(error).__name__}: {error}"]
        return result

    def _rl_kernel_load(self, update: _Update, named: dict[str, torch.Tensor]) -> list[str]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            # Plain parameters: the loader writes where the operators read.
            update.model.load_weights(iter(named.items()))
            update.seen |= named.keys()
            return differences(update.model, named, of=update.pieces)

    def rl_kernel_update_end(self) -> list[str]:
        """Close the buffer; returns what is wrong with the whole, empty when nothing is."""
        from vllm.config import set_current_vllm_config

        try:
            update = self._rl_kernel_update
            if update is None:
                return ["no update has begun"]
            self.rl_kernel_update_abort()
            with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                if update.collected is not None:
                    named = update.collected
                    _load_stock(update.model, self.model_runner, named)
                    found = differences(update.model, named, stock=True) or stale_products(update.model, named)
                    update.seen |= named.keys()
                    if found:
                        return found
                missing = {piece.name for piece in update.pieces} - update.seen
                return [f"{name} (was not loaded)" for name in sorted(missing)] or filled_padding(update.model)
        except Exception as error:  # noqa: BLE001
            return [f"{type(error).__name__}: {error}"]

    def rl_kernel_update_abort(self) -> None:
        """Close the buffer, if one is open."""
        update, self._rl_kernel_update = self._rl_kernel_update, None
        if update is not None and update.reader is not None:
            update.reader.close()
