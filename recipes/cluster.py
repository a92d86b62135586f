"""The processes of a run: starts them as actors, calls them, watches and stops them.

What carries the calls is a :class:`recipes.transport.Transport`: Ray, or plain processes. An error of an actor carries
the tail of its log. Actors die with the driver.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recipes.actors import ROLLOUT_ENGINE, TRAIN_ENGINE, RolloutActor, TrainActor
from recipes.batching import MicroBatch, join
from recipes.config import RunConfig
from recipes.engines import replicas
from recipes.engines.device_memory import WeightLinkError
from recipes.engines.types import Sample, SamplingParams
from recipes.engines.weights import HASH_KIND
from recipes.errors import ConfigError, EngineError, RecipeError, WeightSyncError
from recipes.transport import ActorDiedError, ActorFailedError, Transport, choose
from rl_kernel import registry

log = logging.getLogger(__name__)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def visible_devices(device: str, indices: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows a process the devices ``indices`` of those that this process sees.

    A training rank sees the devices of its group and takes the one of its rank: torch's symmetric memory wants another
    index on every rank. An engine sees its own, numbered from 0. Memory of a device that this variable hides stays
    reachable: CUDA and HIP open an IPC handle of it, and NCCL and RCCL rely on that.

    Raises:
        ConfigError: this process sees fewer.
    """
    variable = "CUDA_VISIBLE_DEVICES" if device == "cuda" else "HIP_VISIBLE_DEVICES"
    if variable not in environ:
        return {variable: ",".join(map(str, indices))}
    seen = [part.strip() for part in environ[variable].split(",") if part.strip()]
    if max(indices) >= len(seen):
        raise ConfigError(
            f"the run wants device {max(indices)}, {variable}={environ[variable]!r} shows {len(seen)}",
            where="hardware.devices",
            fix=f"Show more devices in {variable}, unset it, or lower the parallel sizes.",
        )
    return {variable: ",".join(seen[i] for i in indices)}


class Cluster:
    """All processes of a run.

    Args:
        config: the run.
        rollout_engine, train_engine: import paths of the engine classes.

    Raises:
        EngineError: a process does not start, dies or does not answer in time; the message holds its log's tail.
    """

    def __init__(
        self, config: RunConfig, *, rollout_engine: str = ROLLOUT_ENGINE, train_engine: str = TRAIN_ENGINE
    ) -> None:
        self.config = config
        self.logs = Path(config.trainer.output_dir) / "logs"
        self._names: dict[Any, str] = {}
        self.rollout: list[Any] = []
        self.train: list[Any] = []
        self._closed = False
        self._engines = (rollout_engine, train_engine)
        self.transport: Transport = choose(config.orchestrator)
        self.link, self.link_reason = "", ""  # how weights travel: device | host, and why not device
        self._places: tuple[list[str], list[str]] = ([], [])

    # ------------------------------------------------------------------ life

    def start(self, started: Callable[[], None] = lambda: None) -> None:
        """Start every actor and wait for each. ``started`` is called once the transport runs: Ray has replaced the
        signal handlers then."""
        self.transport.require_space()
        config, train = self.config, self.config.train
        self.logs.mkdir(parents=True, exist_ok=True)
        self.transport.start()
        started()
        port = _free_port()
        group = list(range(train.world_size))
        for rank in group:
            self.train.append(
                self._spawn(TrainActor, f"train-{rank}", group, self._engines[1], config, rank, "127.0.0.1", port)
            )
        tp = config.rollout.tensor_parallel_size
        for index in range(config.rollout.num_engines):
            devices = list(range(index * tp, (index + 1) * tp))
            self.rollout.append(self._spawn(RolloutActor, f"rollout-{index}", devices, self._engines[0], config))
        actors = [*self.train, *self.rollout]
        self._gather([(a, "start", ()) for a in actors], self.config.orchestrator.start_timeout_s)
        self.infos = self.describe()

    def _spawn(self, cls: type, name: str, devices: list[int], *args: Any) -> Any:
        config = self.config
        side = config.train if cls is TrainActor else config.rollout
        env = {"OMP_NUM_THREADS": str(side.num_threads), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        if cls is TrainActor:
            env["RLK_WORKSPACE_MIB"] = str(config.train.logp_workspace_mib)
        if config.hardware.device != "cpu":
            offset = 0 if config.hardware.colocate or cls is TrainActor else config.train.world_size
            env |= visible_devices(config.hardware.device, [d + offset for d in devices], os.environ)
        path = self.logs / f"{name}.log"
        actor = self.transport.spawn(cls, (*args, str(path)), env=env, log=path)
        self._names[actor] = name
        return actor

    def shutdown(self) -> None:
        """End every process. Idempotent, never raises, takes a few seconds at most."""
        if self._closed:
            return
        self._closed = True
        self.transport.shutdown(list(self._names))

    # ------------------------------------------------------------------ calls

    def _tail(self, name: str, lines: int = 15) -> str:
        path = self.logs / f"{name}.log"
        if not path.is_file():
            return f"(no log: {path})"
        text = path.read_text(errors="replace").splitlines()[-lines:]
        return f"Last lines of {path}:\n" + "\n".join(f"    {line}" for line in text)

    def _gather(self, calls: Sequence[tuple[Any, str, tuple]], timeout: float | None = None) -> list[Any]:
        """Results in the order of ``calls``. The first failure is raised at once, not after the slowest call."""
        limit = self.config.orchestrator.step_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + limit
        refs = [self.transport.call(actor, method, args) for actor, method, args in calls]
        names = [f"{self._names[actor]}" for actor, _, _ in calls]
        pending, results = list(refs), dict.fromkeys(refs)
        while pending:
            done = self.transport.wait(pending, max(deadline - time.monotonic(), 0.0))
            pending = [ref for ref in pending if ref not in done]
            if not done:
                late = [names[refs.index(r)] for r in pending]
                raise EngineError(
                    f"no answer from {', '.join(late)} to {calls[refs.index(pending[0])][1]} within {limit:g} s",
                    where=late[0],
                    fix=f"Raise orchestrator.step_timeout_s if the work is that long. {self._tail(late[0])}",
                )
            for ref in done:
                index = refs.index(ref)
                results[ref] = self._result(ref, names[index], calls[index][1])
        return [results[ref] for ref in refs]

    def _result(self, ref: Any, name: str, method: str) -> Any:
        try:
            return self.transport.result(ref)
        except ActorFailedError as error:
            if isinstance(error.cause, RecipeError):
                raise error.cause from None
            raise EngineError(f"{method} failed: {error.cause}", where=name, fix=f"{self._tail(name)}") from None
        except ActorDiedError as error:
            raise EngineError(
                f"the process died during {method}: {error}",
                where=name,
                fix=f"Checkpoints are intact; resume after removing the cause. {self._tail(name)}",
            ) from None

    def _put(self, value: Any) -> Any:
        return self.transport.put(value)

    def _ranks(self, method: str, shares: list[list[MicroBatch]], *args: Any) -> list[Any]:
        """Call ``method`` on every training rank with the micro-batches of its data-parallel rank: ranks count tensor
        parallel first, then context, then data, and the first two work on the same sequences."""
        refs = [self._put(share) for share in shares]
        per_share = len(self.train) // len(shares)
        return self._gather(
            [(actor, method, (refs[rank // per_share], *args)) for rank, actor in enumerate(self.train)]
        )

    # ------------------------------------------------------------------ what the loop uses

    def describe(self, timeout: float | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What every training and rollout process says about itself."""
        infos = self._gather([(a, "info", ()) for a in [*self.train, *self.rollout]], timeout)
        return infos[: len(self.train)], infos[len(self.train) :]

    def kernel(self) -> dict[str, Any]:
        """``kernel/*`` of the step row: backends in use on both sides, fallbacks so far, contract."""
        train, rollout = self.describe()
        infos = [*train, *rollout]
        used = {b for i in infos for op, b in (i.get("backends") or {}).items() if op not in registry.REMARKS}
        # The count belongs to a process; several actors of one process (tests) report the same one.
        counts: dict[Any, int] = {}
        for info in infos:
            pid = info.get("pid")
            counts[pid] = max(counts.get(pid, 0), int(info.get("fallback_count", 0)))
        return {
            "kernel/backend": ",".join(sorted(used)) or "stock",
            "kernel/fallback_count": sum(counts.values()),
            "kernel/contract": infos[0].get("contract") or "none",
        }

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, seeds: list[int], version: int
    ) -> list[Sample]:
        """Responses in the order of ``prompts``; prompts are dealt to the engines round-robin.

        Args:
            prompts: token ids.
            params: the same for all.
            seeds: one per response, prompt by prompt.
            version: of the weights that every engine must hold.
        """
        engines = len(self.rollout)
        rows = [seeds[i * params.n : (i + 1) * params.n] for i in range(len(prompts))]
        calls = [
            (actor, "generate", (prompts[e::engines], params, [s for row in rows[e::engines] for s in row], version))
            for e, actor in enumerate(self.rollout)
            if prompts[e::engines]
        ]
        samples = [
            replace(s, prompt_index=s.prompt_index * engines + e)
            for e, part in enumerate(self._gather(calls))
            for s in part
        ]
        return sorted(samples, key=lambda s: (s.prompt_index, s.sample_index))

    def per_sample(self, method: str, shares: list[list[MicroBatch]], count: int, *args: Any) -> list[np.ndarray]:
        """``logp`` or ``values`` of samples 0..count-1, put together from the context-parallel ranks' tokens."""
        return join(self._ranks(method, shares, *args), count, method)

    def update(self, shares: list[list[MicroBatch]], role: str) -> dict[str, float]:
        """One optimizer step. Weighted sums are added over data- and context-parallel ranks, in rank order;
        ``<role>/*`` (gradient norm, learning rate) is the same on every rank."""
        totals: dict[str, float] = {}
        for part in self._ranks("update", shares, role):
            for key, value in part.items():
                totals[key] = value if key.startswith(role) else totals.get(key, 0.0) + value
        return totals

    def sync(self, version: int) -> str:
        """Send the policy to every rollout engine; returns the content hash that both sides agree on.

        Weights go through GPU memory where trainer and engines reach each other's, else through host memory: see
        ``orchestrator.weight_link`` and :mod:`recipes.engines.weight_transfer`.

        Raises:
            WeightSyncError: training ranks hold different copies of a parameter, before anything is sent; an engine
                holds other bytes than the trainer afterwards, or two ranks that sent differ.
            WeightLinkError: ``orchestrator.weight_link=device``, and that does not work here.
        """
        if not self.link:
            wanted = self.config.orchestrator.weight_link
            on_gpu = self.config.hardware.device != "cpu"
            self.link = "device" if on_gpu and wanted != "host" else "host"
            trainers, engines = [(a, "place", ()) for a in self.train], [(a, "places", ()) for a in self.rollout]
            places = self._gather([*trainers, *engines])
            self._places = places[: len(trainers)], [place for found in places[len(trainers) :] for place in found]
        self._require_one_policy(version)
        try:
            return self._sync(version)
        except WeightLinkError as error:
            if self.link == "host" or self.config.orchestrator.weight_link == "device":
                raise
            self.link, self.link_reason = "host", str(error)
            log.warning("weights go through host memory, which is slow: %s", error)
        self._gather([(a, "abort_update", ()) for a in self.rollout])
        self._gather([(a, "export_close", ()) for a in self.train])
        return self._sync(version)

    def _require_one_policy(self, version: int) -> None:
        """Every copy of a trained parameter has the same bits. Ranks read their own memory; there is no collective."""
        if len(self.train) == 1:
            return
        found = self._gather([(a, "replica_digests", ()) for a in self.train])
        names = [self._names[actor] for actor in self.train]
        for role in found[0]:
            copies = [of_rank[role] for of_rank in found]
            told = replicas.difference(copies, names, self.config.train.tensor_parallel_size)
            if told:
                raise WeightSyncError(
                    f"the training ranks hold different {role} weights at version {version}: {told}",
                    where="train",
                    fix="A rank drifted apart; resume from the last checkpoint. If it happens again on the same rank, "
                    "check its device.",
                )

    def sync_facts(self) -> dict[str, Any]:
        """For the manifest: which way weights go, why not the other one, which hash."""
        return {"transport": self.link, "reason": self.link_reason, "hash": HASH_KIND, "backend": self.transport.name}

    def _sync(self, version: int) -> str:
        trainers, places = self._places
        # An engine's worker reads from the rank on its own device, or else from rank 0.
        sources = {p: trainers.index(p) if self.link == "device" and p in trainers else 0 for p in places}
        offers = self._gather(
            [(a, "export_begin", (self.link, rank in sources.values())) for rank, a in enumerate(self.train)]
        )
        buckets, tensors = offers[0].buckets, offers[0].tensors
        handles = {place: offers[rank].handle for place, rank in sources.items()}
        self._gather([(a, "begin_update", (tensors, version, handles)) for a in self.rollout])
        for index, entries in enumerate(buckets):
            self._gather([(a, "export_bucket", (index,)) for a in self.train])
            self._gather([(a, "load_bucket", (entries,)) for a in self.rollout])
        sent = self._gather([(a, "export_end", ()) for a in self.train])
        held = self._gather([(a, "finish_update", ()) for a in self.rollout])
        self._gather([(a, "export_close", ()) for a in self.train])
        wanted = next(digest for digest in sent if digest)
        for actor, digest in zip(self.train, sent):
            if digest and digest != wanted:
                raise WeightSyncError(
                    f"sent weights {digest[:16]}, another training rank {wanted[:16]} (version {version})",
                    where=self._names[actor],
                    fix="The ranks drifted apart; resume from the last checkpoint.",
                )
        for actor, digest in zip(self.rollout, held):
            if digest != wanted:
                raise WeightSyncError(
                    f"holds weights {digest[:16]} after the update, the trainer sent {wanted[:16]} (version {version})",
                    where=self._names[actor],
                    fix="The rollout would be stale; this is a bug in the engine's update of its weights.",
                )
        return wanted

    def save(self, folder: str) -> None:
        """Every training rank writes its state under ``folder``."""
        self._gather([(a, "save", (folder,)) for a in self.train])

    def restore(self, folder: str) -> None:
        """Every training rank reads its state from ``folder``."""
        self._gather([(a, "restore", (folder,)) for a in self.train])
