"""What runs inside a process of its own: actors around the engines. :mod:`recipes.cluster` starts and calls them.

Engines are named by import path (``"module:class"``) and imported inside the actor: neither this file nor the loop
imports a backend. Every actor writes its output to ``<run_dir>/logs/<name>.log``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from recipes.batching import MicroBatch, Part, gather
from recipes.config import RunConfig
from recipes.engines.device_memory import Handle, place_of
from recipes.engines.replicas import Digests
from recipes.engines.types import Sample, SamplingParams
from recipes.engines.weight_transfer import Described, Entry, Offer, WeightExporter
from recipes.losses import make_loss
from rl_kernel.registry import fallback_count

ROLLOUT_ENGINE = "recipes.engines.vllm:VllmEngine"
TRAIN_ENGINE = "recipes.engines.megatron:MegatronEngine"


def load(path: str) -> Callable[..., Any]:
    """The object that ``module:name`` names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _own_log(path: str) -> None:
    """Send this process's output to ``path``; leave Ctrl-C to the driver, which ends actors in order."""
    if not path:  # the caller shares its process with the actor
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """``info`` as JSON types (a backend's own types would make the driver import it), with facts of this process."""
    facts = {"pid": os.getpid(), "fallback_count": fallback_count()}
    return json.loads(json.dumps({**facts, **info}, default=str))  # an engine with worker processes knows better


class RolloutActor:
    """One rollout engine."""

    def __init__(self, engine: str, config: RunConfig, log: str) -> None:
        _own_log(log)
        self._build = lambda: load(engine)(config.model, config.rollout, config.consistency, seed=config.trainer.seed)

    def start(self) -> None:
        """Build the engine. Not in the constructor: an error raised there loses its type on the way to the driver."""
        self.engine = self._build()

    def info(self) -> dict[str, Any]:
        """What the engine says about itself, plus the process id."""
        return _plain(self.engine.info())

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int], version: int
    ) -> list[Sample]:
        """Responses to ``prompts``, ``params.n`` each; one seed per response, prompt by prompt."""
        return self.engine.generate(prompts, params, seeds, weight_version=version)

    def places(self) -> list[str]:
        """The physical devices of the engine's workers, see :mod:`recipes.engines.device_memory`."""
        return self.engine.places()

    def begin_update(self, tensors: Described, version: int, handles: dict[str, Handle]) -> None:
        """Check the announced tensors and open the buffers; see :mod:`recipes.engines.weight_transfer`."""
        self.engine.begin_update(tensors, version, handles)

    def load_bucket(self, entries: list[Entry]) -> None:
        """Load what the buffers hold now."""
        self.engine.load_bucket(entries)

    def finish_update(self) -> str:
        """Reset the prefix cache, close the buffers, return the content hash of what the engine holds."""
        return self.engine.finish_update()

    def abort_update(self) -> None:
        """Close the buffers; the engine stays unusable until a whole update."""
        self.engine.abort_update()

    def shutdown(self) -> None:
        """Stop the engine and its worker processes."""
        self.engine.shutdown()


class TrainActor:
    """One rank of the training group: the policy, and where the algorithm needs them a reference and a critic."""

    def __init__(self, engine: str, config: RunConfig, rank: int, address: str, port: int, log: str) -> None:
        _own_log(log)
        torch.set_num_threads(config.train.num_threads)
        self.config = config
        self.rank = rank
        # Megatron counts ranks tensor parallel first, then context, then data. Tensor-parallel ranks hold the same
        # results, so one of them speaks; context-parallel ranks hold different tokens, so each of those does.
        self.speaks = rank % config.train.tensor_parallel_size == 0
        self._place = {
            "rank": rank,
            "world_size": config.train.world_size,
            "master_addr": address,
            "master_port": port,
            "seed": config.trainer.seed,
        }
        self._engine = engine
        self.engines: dict[str, Any] = {}
        self._export: WeightExporter | None = None

    def start(self) -> None:
        """Build the engines of this rank."""
        config = self.config
        roles = ["policy"]
        roles += ["reference"] if config.algorithm.kl_coef > 0 else []
        roles += ["critic"] if config.algorithm.name == "ppo" else []
        for role in roles:
            build = load(self._engine)
            self.engines[role] = build(config.model, config.train, config.consistency, role=role, **self._place)

    def info(self) -> dict[str, Any]:
        """What the policy engine says about itself, plus the process id."""
        return _plain({**self.engines["policy"].info(), "roles": list(self.engines)})

    def logp(self, batches: list[MicroBatch], role: str) -> dict[int, Part]:
        """Log-probabilities of the sampled tokens that this rank holds under ``role``, by sample index; {} on silent
        ranks."""
        engine = self.engines[role]
        found: dict[int, Part] = {}
        for batch in batches:
            out = engine.forward_logp(batch.packed, self.config.temperature)
            found |= gather(batch.packed, out.logp, engine.local_rows(batch.packed))
        return found if self.speaks else {}

    def values(self, batches: list[MicroBatch]) -> dict[int, Part]:
        """The critic's values of the states in which the sampled tokens that this rank holds were chosen."""
        engine = self.engines["critic"]
        found: dict[int, Part] = {}
        for batch in batches:
            found |= gather(batch.packed, engine.forward_values(batch.packed), engine.local_rows(batch.packed))
        return found if self.speaks else {}

    def update(self, batches: list[MicroBatch], role: str) -> dict[str, float]:
        """One optimizer step of ``role``: gradients of every micro-batch are added, ranks are added by the engine."""
        engine = self.engines[role]
        totals: dict[str, float] = {}
        for batch in batches:
            loss = make_loss(role, batch, self.config, engine.local_rows(batch.packed))
            for metrics in engine.forward_backward([batch.packed], loss, self.config.temperature):
                for key, value in metrics.items():
                    totals[key] = totals.get(key, 0.0) + float(value)
        step = engine.optimizer_step()
        return {**(totals if self.speaks else {}), **{f"{role}/{key}": float(value) for key, value in step.items()}}

    def place(self) -> str:
        """The physical device of this rank."""
        return place_of(self.engines["policy"].device)

    def replica_digests(self) -> dict[str, Digests]:
        """Digests of the parameters of every trained model, by role; see :mod:`recipes.engines.replicas`."""
        return {role: engine.replica_digests() for role, engine in self.engines.items() if role != "reference"}

    def export_begin(self, kind: str, shares: bool) -> Offer:
        """Plan the export of the policy; every rank takes part in every round. See :mod:`weight_transfer`."""
        engine = self.engines["policy"]
        self._export = WeightExporter(
            engine.hf_tensors(),
            engine.stream_hf_weights(),
            device=engine.device,
            kind=kind,
            shares=shares,
            bucket_bytes=self.config.orchestrator.weight_bucket_bytes,
        )
        return self._export.offer

    def export_bucket(self, index: int) -> None:
        """Fill the buffer with bucket ``index``."""
        assert self._export is not None
        self._export.fill(index)

    def export_end(self) -> str | None:
        """Content hash of what this rank sent."""
        assert self._export is not None
        return self._export.finish()

    def export_close(self) -> None:
        """Free the buffer."""
        export, self._export = self._export, None
        if export is not None:
            export.close()

    def save(self, folder: str) -> None:
        """Write the state of every trained model."""
        for role, engine in self.engines.items():
            if role != "reference":
                engine.save_state(folder)

    def restore(self, folder: str) -> None:
        """Read what :meth:`save` wrote."""
        for role, engine in self.engines.items():
            if role != "reference":
                engine.load_state(folder)

    def shutdown(self) -> None:
        """Leave the process group."""
        for engine in self.engines.values():
            close = getattr(engine, "shutdown", None)
            if close is not None:
                close()
