"""Training engine: a real Megatron-Core ``GPTModel`` of Qwen3 on CUDA (nccl) or on the CPU (gloo).

One :class:`MegatronEngine` lives in each training process. It computes log-probabilities with the operators of the
contract, so they have the bits that the rollout engine recorded, and trains with Megatron's DDP and optimizer.

Reading order: :mod:`megatron_model` (the model, hidden states, the LM head), :mod:`megatron_layers` (strict modules and
the layer spec), :mod:`megatron_weights` (Hugging Face names), :mod:`megatron_optim`, :mod:`megatron_cp`,
:mod:`megatron_native` (the stock control), and :mod:`megatron_cpu` for what a machine without an accelerator needs.
"""

from __future__ import annotations

import datetime
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import rl_kernel
from recipes.engines import megatron_cpu, replicas
from recipes.engines import megatron_weights as weights
from recipes.engines.megatron_model import ROLES, LMHead, lm_head_of
from recipes.engines.mode import in_own_mode, prepare_process
from recipes.engines.types import PackedBatch
from recipes.engines.weights import content_hash
from recipes.errors import CheckpointError, ConfigError, DataError, EngineError, WeightSyncError
from rl_kernel import cublaslt
from rl_kernel.ops import collectives

__all__ = ["ROLES", "LMHead", "MegatronEngine", "layer_spec", "lm_head_of"]

# Policy: loss_fn(logp [T], entropy [T], batch) -> (scalar, metrics). Critic: loss_fn(values [T], batch) -> the same.
# The scalar is already divided by the token (or sequence) count of the whole step over all data-parallel ranks.
LossFn = Callable[..., tuple[torch.Tensor, dict[str, Any]]]
_FORMAT = 1


def layer_spec(config: Any, *, virtual_tp: int, rope_theta: float, max_positions: int) -> Any:
    """See :func:`recipes.engines.megatron_layers.layer_spec`."""
    from recipes.engines import megatron_layers

    return megatron_layers.layer_spec(config, virtual_tp=virtual_tp, rope_theta=rope_theta, max_positions=max_positions)


def init_distributed(
    train: Any, *, rank: int, world_size: int, master_addr: str, master_port: int, timeout_s: float = 300.0
) -> torch.device:
    """Process groups of one training process; a second call in the same process (another role) reuses them.

    Returns the device of this rank.

    Raises:
        ConfigError: the world size is not tensor x context x data parallel, or groups of another layout exist.
    """
    from megatron.core import parallel_state

    sizes = (train.tensor_parallel_size, train.context_parallel_size, train.data_parallel_size)
    if world_size != sizes[0] * sizes[1] * sizes[2]:
        raise ConfigError(
            f"{world_size} processes for tensor {sizes[0]} x context {sizes[1]} x data {sizes[2]} parallel",
            where="train",
            fix="Start train.world_size processes.",
        )
    on_cpu = megatron_cpu.needed()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank % torch.cuda.device_count())
    if not on_cpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if on_cpu else "nccl",
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            # No device_id: it would create a communicator at once for each of Megatron's two dozen groups.
        )
    if not parallel_state.model_parallel_is_initialized():
        with megatron_cpu.scope():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes[0],
                context_parallel_size=sizes[1],
                create_gloo_process_groups=False,
            )
    have = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    if have != sizes:
        raise ConfigError(
            f"this process already has tensor x context x data groups of {have}, not {sizes}",
            where="train",
            fix="Start the engine in a process of its own.",
        )
    return device


class MegatronEngine:
    """One training process of one model.

    Args:
        model: ``recipes.config.ModelConfig``.
        train: ``recipes.config.TrainConfig``.
        consistency: ``recipes.config.ConsistencyConfig``, validated (``segments`` resolved).
        role: ``policy`` trains; ``reference`` only computes log-probabilities; ``critic`` has a scalar head.
        rank, world_size, master_addr, master_port: of the training group.
        seed: of the random starting weights, the same on every rank; a critic shares the policy's trunk and draws its
            head from the same seed.
        timeout_s: a collective that waits longer raises instead of hanging.

    Raises:
        ConfigError: a setting contradicts another, the device or the contract; before any weight is allocated.
    """

    def __init__(
        self,
        model: Any,
        train: Any,
        consistency: Any,
        *,
        role: str = "policy",
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 29500,
        seed: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        _quiet()
        from megatron.core import parallel_state

        from recipes.engines import megatron_model as mm

        self.config, self.train_config, self.role, self.rank = model, train, role, rank
        self.mode, self.segments = consistency.mode, consistency.segments
        self.strict = self.mode != "native"
        rl_kernel.set_mode(self.mode)
        if not megatron_cpu.needed():
            _before_first_product(consistency)
        self.device = init_distributed(
            train,
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
            timeout_s=timeout_s,
        )
        if self.device.type == "cpu":
            torch.set_num_threads(train.num_threads)
        torch.manual_seed(seed)
        with megatron_cpu.scope():
            megatron_cpu.seed_rng_tracker(seed)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        if self.strict:
            collectives.prepare(self.tp_group)
        self.model = mm.build(model, train, segments=self.segments, strict=self.strict, role=role, device=self.device)
        self.weight_version = 0
        self._load(weights.initial_reader(model, seed, self.device))
        if role == "critic":
            dtype = getattr(torch, model.dtype)
            head = weights.init_tensor(
                weights.VALUE_HEAD, (1, model.hidden_size), model.init_std, dtype, seed, self.device
            )
            with torch.no_grad():
                self.model.output_layer.weight.copy_(head)
        self.optimizer = None
        if role == "reference":
            self.model.requires_grad_(False)
            self.model.eval()
        else:
            from recipes.engines.megatron_optim import Optimizer

            self.model.train()
            lr = train.critic_lr if role == "critic" else train.lr
            self.optimizer = Optimizer(
                self.model, train, lr=lr, segments=self.segments, norm_grads_complete=self.strict
            )

    # Forward ---------------------------------------------------------------------------------------------------------

    @in_own_mode
    @torch.no_grad()
    def forward_logp(self, batch: PackedBatch, temperature: float = 1.0) -> rl_kernel.LinearLogpOutput:
        """Log-probability, log-sum-exp and entropy of every target of ``batch``, fp32 [T] on the CPU.

        Position t holds ``log softmax(logits[t] / temperature)[target_ids[t]]``; 0 where the target is ignored. Under
        context parallelism: of the positions that :meth:`local_rows` gives this rank.

        Guarantee (strict): bits depend on the weights and on the tokens of the same sequence up to t alone, not on the
        other sequences, the packing, the tensor- or context-parallel size or the number of threads.

        Raises:
            DataError: a token is outside the vocabulary or a position outside the table.
            EngineError: a log-probability is not finite.
        """
        self._require("policy", "reference")
        batch = self._checked(batch)
        out = self._logp(batch, temperature)
        self._require_finite_rows(out.logp + out.lse, batch, "logits")
        return rl_kernel.LinearLogpOutput(*(part.cpu() for part in out))

    @in_own_mode
    @torch.no_grad()
    def forward_values(self, batch: PackedBatch) -> torch.Tensor:
        """Critic's value of every position of ``batch``, fp32 [T] on the CPU; under context parallelism of
        :meth:`local_rows`. Raises as :meth:`forward_logp`."""
        self._require("critic")
        batch = self._checked(batch)
        values = self._values(batch)
        self._require_finite_rows(values, batch, "values")
        return values.cpu()

    def local_rows(self, batch: PackedBatch) -> torch.Tensor | None:
        """int64 [T_local] on the device of ``batch``: its positions that this context-parallel rank computes, in the
        order of its results. None without context parallelism: all of them. The ranks of a group partition the batch.
        """
        if self.train_config.context_parallel_size == 1:
            return None
        from recipes.engines.megatron_model import local_rows

        return local_rows(self.model, batch, torch.arange(batch.num_tokens, device=batch.tokens.device))

    @in_own_mode
    def forward_backward(
        self, batches: Sequence[PackedBatch], loss_fn: LossFn, temperature: float = 1.0
    ) -> list[dict[str, Any]]:
        """Accumulate the gradient of the summed loss of ``batches``, one micro-batch at a time.

        Args:
            batches: micro-batches of this data-parallel rank; may be empty, ranks need not have the same number.
            loss_fn: policy ``(logp, entropy, batch)``, critic ``(values, batch)`` -> ``(loss, metrics)``; ``loss`` is a
                scalar divided by the count of the whole step, so gradients simply add up.
            temperature: as in :meth:`forward_logp`; a critic ignores it.

        Returns the metrics of every micro-batch. Raises as :meth:`forward_logp`, and when a loss is not finite.
        """
        self._require("policy", "critic")
        metrics = []
        for index, batch in enumerate(batches):
            batch = self._checked(batch)
            with megatron_cpu.scope():
                if self.role == "critic":
                    rows = self._values(batch)
                    loss, measured = loss_fn(rows, batch)
                    where = "values"
                else:
                    out = self._logp(batch, temperature)
                    loss, measured = loss_fn(out.logp, out.entropy, batch)
                    rows, where = out.logp.detach() + out.lse.detach(), "logits"
                finite = torch.isfinite(rows.detach()).all() & torch.isfinite(loss.detach())
                if loss.requires_grad:
                    loss.backward()
                if not finite:  # the host waits for the device here, after all work is queued
                    assert self.optimizer is not None
                    self.optimizer.zero_grad()
                    self._require_finite_rows(rows.detach(), batch, where)
                    weights.require_finite(loss.detach(), f"loss of micro-batch {index}")
            metrics.append(measured)
        return metrics

    @in_own_mode
    def optimizer_step(self) -> dict[str, float]:
        """Sum gradients over data-parallel ranks, clip, update. Returns ``grad_norm`` and ``lr``.

        Collective over the whole training group. Raises :class:`EngineError` for a gradient that is not finite.
        """
        self._require("policy", "critic")
        assert self.optimizer is not None
        result = self.optimizer.step()
        self.weight_version += 1
        return result

    def _logp(self, batch: PackedBatch, temperature: float) -> rl_kernel.LinearLogpOutput:
        from recipes.engines import megatron_model as mm

        if not self.strict:
            from recipes.engines.megatron_native import native_logp as logp
        else:
            logp = mm.strict_logp
        with megatron_cpu.scope():
            return logp(self.model, batch, temperature)

    def _values(self, batch: PackedBatch) -> torch.Tensor:
        from recipes.engines import megatron_model as mm

        if not self.strict:
            from recipes.engines.megatron_native import native_values as values
        else:
            values = mm.strict_values
        with megatron_cpu.scope():
            return values(self.model, batch)

    def _checked(self, batch: PackedBatch) -> PackedBatch:
        vocab = self.config.vocab_size
        for name, tensor in (("tokens", batch.tokens), ("target_ids", batch.target_ids[batch.active])):
            if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < vocab:
                bad = tensor[(tensor < 0) | (tensor >= vocab)][0]
                raise DataError(
                    f"token id {int(bad)} is outside the vocabulary of {vocab}",
                    where=name,
                    fix="Use the tokenizer of this model.",
                )
        if batch.max_seqlen > self.config.max_position_embeddings:
            raise DataError(
                f"a sequence of {batch.max_seqlen} tokens exceeds model.max_position_embeddings="
                f"{self.config.max_position_embeddings}",
                where="batch",
                fix="Lower rollout.max_prompt_len or rollout.max_response_len.",
            )
        config = self.model.config
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        if config.sequence_parallel and batch.num_tokens % ranks:
            raise ConfigError(
                f"{batch.num_tokens} tokens are not a multiple of {ranks} (tensor- times context-parallel size)",
                where="train.sequence_parallel",
                fix="Pack with PackedBatch.from_samples(pad_to_multiple=...).",
            )
        return batch.to(self.device)

    def _require_finite_rows(self, rows: torch.Tensor, batch: PackedBatch, where: str) -> None:
        if bool(torch.isfinite(rows).all()):
            return
        for name, param in self.model.named_parameters():  # a broken weight is the usual cause: name it
            weights.require_finite(param.detach(), f"weight {name}")
        from recipes.engines.megatron_model import local_rows

        index = local_rows(self.model, batch, torch.arange(batch.num_tokens, device=rows.device))
        row = int(index[~torch.isfinite(rows)][0])
        sequence = int(torch.searchsorted(batch.cu_seqlens.long(), row, right=True)) - 1
        raise EngineError(
            f"not finite, first at position {row - int(batch.cu_seqlens[sequence])} of sample "
            f"{int(batch.sample_index[sequence])}, although every weight is finite",
            where=where,
            fix="Activations overflowed. Lower the learning rate and resume from the last checkpoint.",
        )

    def _require(self, *roles: str) -> None:
        if self.role not in roles:
            raise EngineError(f"a {self.role} engine cannot do this", where="role", fix=f"Use a {' or '.join(roles)}.")

    # Weights ---------------------------------------------------------------------------------------------------------

    def _load(self, read: weights.Read) -> None:
        lm_head_rows = rl_kernel.padded_vocab_size(self.config.vocab_size, self.segments)
        checked = weights.Checked(read, self.config)
        weights.load(
            self.model,
            self.config,
            checked,
            padded_vocab=lm_head_rows,
            rank=self.tp_group.rank(),
            size=self.tp_group.size(),
        )
        checked.finish()

    def load_hf_weights(self, named: Mapping[str, torch.Tensor], version: int = 0) -> None:
        """Replace all weights by full tensors under Hugging Face names (a critic also takes ``value_head.weight``).

        The optimizer's fp32 masters start from them; its moments are left alone.

        Raises:
            WeightSyncError: a tensor is missing, superfluous or of another shape. EngineError: one is not finite.
        """
        expected = set(weights.hf_shapes(self.config))
        extra = set(named) - expected - {weights.VALUE_HEAD, weights.TIED_HEAD}
        if extra:
            raise WeightSyncError(
                f"unknown tensors {', '.join(sorted(extra)[:3])}", where="weights", fix="Send this model's tensors."
            )
        read = weights.mapping_reader(named)
        self._load(read)
        if self.role == "critic" and weights.VALUE_HEAD in named:
            checked = weights.Checked(read, self.config)
            head = checked(weights.VALUE_HEAD)
            checked.finish()
            with torch.no_grad():
                self.model.output_layer.weight.copy_(head)
        if self.optimizer is not None:
            self.optimizer.masters_from_model()
        self.weight_version = version

    def export_hf_weights(self) -> dict[str, torch.Tensor]:
        """Full tensors under Hugging Face names, on the CPU, on every rank; collective over the TP group."""
        return {name: tensor.cpu().clone() for name, tensor in self.stream_hf_weights()}

    def hf_tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of everything that :meth:`stream_hf_weights` yields, in its order (not for a critic)."""
        return {name: (shape, self.config.dtype) for name, shape in weights.hf_shapes(self.config).items()}

    def stream_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under Hugging Face names, one at a time, on this rank's device; collective over the TP group, so
        every rank must take every one. A tensor may be the parameter itself: do not write to it."""
        params = {name: param.detach() for name, param in self.model.named_parameters()}
        return weights.export(params, self.config, self.tp_group)

    def weight_hash(self) -> str:
        """Content hash of :meth:`export_hf_weights`; equal to the rollout engine's if it holds the same bytes."""
        return content_hash(self.export_hf_weights())

    def replica_digests(self) -> replicas.Digests:
        """Digests of this rank's parameters, to be compared with those of the ranks that hold copies of them.

        Where the contract holds, tensor-parallel ranks have the same norm weights and value head. Stock kernels may
        add the gradients of those in another order on every rank, so nothing is said about them there.
        """
        promised = self.mode in ("strict", "audit")
        return replicas.digest(
            (name, param.detach(), promised and not getattr(param, "tensor_model_parallel", False))
            for name, param in self.model.named_parameters()
        )

    # State -----------------------------------------------------------------------------------------------------------

    def _state_file(self, directory: str) -> str:
        return os.path.join(directory, f"{self.role}_rank{self.rank}.pt")

    def _layout(self) -> dict[str, Any]:
        train = self.train_config
        return {
            "format": _FORMAT,
            "role": self.role,
            "tensor_parallel_size": train.tensor_parallel_size,
            "context_parallel_size": train.context_parallel_size,
            "data_parallel_size": train.data_parallel_size,
            "optimizer": train.optimizer,
            "distributed_optimizer": train.distributed_optimizer,
            "dtype": self.config.dtype,
            "virtual_tp": self.segments,
        }

    def save_state(self, directory: str) -> None:
        """Write everything this rank needs to go on with the same bits: weights, fp32 masters, moments, learning rate,
        generators. The file appears whole or not at all.

        Raises:
            CheckpointError: it cannot be written (disk full, no permission); an older checkpoint stays as it was.
        """
        state: dict[str, Any] = {
            "layout": self._layout(),
            "weight_version": self.weight_version,
            "model": {name: param.detach() for name, param in self.model.named_parameters()},
            "optimizer": self.optimizer.state() if self.optimizer is not None else None,
            "rng": _rng_state(),
        }
        path = self._state_file(directory)
        partial = path + ".partial"
        try:
            os.makedirs(directory, exist_ok=True)
            with open(partial, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            if os.path.exists(partial):
                os.unlink(partial)
            raise CheckpointError(str(error), where=path, fix="Free disk space or choose another directory.") from error

    def load_state(self, directory: str) -> None:
        """Restore :meth:`save_state`, byte for byte.

        Raises:
            CheckpointError: the file is missing, damaged, or of another model or parallel layout.
        """
        path = self._state_file(directory)
        try:
            # On a GPU: read from the file tensor by tensor into what is there, never a second copy on the device.
            # On the CPU: no map, the optimizer keeps the tensors, and the file may be replaced.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=self.device.type != "cpu")
        except Exception as error:
            raise CheckpointError(
                f"cannot be read: {error}", where=path, fix="Resume from an older checkpoint, or trainer.resume=never."
            ) from error
        layout = self._layout()
        differing = [k for k in layout if state["layout"].get(k) != layout[k]]
        if differing:
            named = ", ".join(f"{k}={state['layout'].get(k)!r} (now {layout[k]!r})" for k in differing)
            raise CheckpointError(
                f"written with {named}", where=path, fix="Resume with the same settings, or trainer.resume=never."
            )
        params = dict(self.model.named_parameters())
        if {n: p.shape for n, p in params.items()} != {n: t.shape for n, t in state["model"].items()}:
            raise CheckpointError("holds another model", where=path, fix="Resume with the same model=.")
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(state["model"][name])
        if self.optimizer is not None:
            self.optimizer.load(state["optimizer"])
        _set_rng_state(state["rng"])
        self.weight_version = state["weight_version"]

    # Other -----------------------------------------------------------------------------------------------------------

    def _contract(self) -> str | None:
        """Fingerprint of what the modules compute; None where nothing promises its bits (``fast``, ``native``)."""
        if self.mode not in ("strict", "audit"):
            return None
        from recipes.engines.megatron_layers import options_of

        dtypes = {param.dtype for param in self.model.parameters()}
        if len(dtypes) != 1:
            raise EngineError(f"parameters of {', '.join(map(str, dtypes))}", where="model", fix="Use one dtype.")
        return rl_kernel.fingerprint(
            rl_kernel.platform.family_of(self.device),
            virtual_tp=options_of(self.model.config).segments,
            model_dtype=str(dtypes.pop()).removeprefix("torch."),
        )

    def info(self) -> dict[str, Any]:
        """Versions, layout, contract and resolved backends, for the manifest."""
        import megatron.core

        library: dict[str, Any] = {}
        if self.strict and self.device.type == "cuda" and torch.version.cuda is not None:
            library = cublaslt.report()
        return {
            "engine": "megatron-core",
            "version": megatron.core.__version__,
            "torch": torch.__version__,
            "role": self.role,
            "rank": self.rank,
            "device": str(self.device),
            "mode": self.mode,
            "layout": self._layout(),
            "contract": self._contract(),
            "backends": rl_kernel.registry.resolved(),
            "cublaslt": library,
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)
            if torch.cuda.is_available()
            else None,
            "fallback_count": rl_kernel.registry.fallback_count(),  # classes that cuBLASLt lost are among them
        }

    def shutdown(self) -> None:
        """Leave the process groups; safe to call twice."""
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _before_first_product(consistency: Any) -> None:
    """What a process with a GPU decides before its CUDA context and its first matrix product exist."""
    prepare_process(consistency.mode, consistency.attention_on("sm90"))
    if consistency.mode == "native":  # what Megatron asks of a tensor-parallel run: its all-reduce is queued before the
        # next product
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _quiet() -> None:
    """Keep Megatron's notices (absent Apex, deprecated names) out of the log of a process that this engine owns."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")


def _rng_state() -> dict[str, Any]:
    _, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "python": (version, list(internal), gauss),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())
