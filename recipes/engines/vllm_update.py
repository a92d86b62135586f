"""Weight updates of a rollout engine: all tensors at once, or in the rounds of :mod:`recipes.engines.weight_transfer`.

Either way the engine refuses to generate from the first change until every tensor is loaded, proved on every rank and
every cached prefix is forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from recipes.engines.device_memory import Handle, WeightLinkError
from recipes.engines.mode import in_own_mode
from recipes.engines.weight_transfer import Described, Entry
from recipes.engines.weights import EMBEDDING, TIED_HEAD, combined_hash, content_hash, dtype_name
from recipes.errors import EngineError, WeightSyncError


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class WeightUpdates(ABC):
    """The part of :class:`recipes.engines.vllm.VllmEngine` that takes weights."""

    tensors: dict[str, tuple[tuple[int, ...], str]]  # what the workers need: shape and dtype by name
    mode: str
    tied: bool
    active: bool
    weight_version: int
    weight_hash: str | None
    _llm: Any
    _usable: bool
    _broken: str | None
    _places: list[str]
    _incoming: tuple[dict[str, tuple[tuple[int, ...], str]], int] | None = None
    _digests: dict[str, bytes]

    @abstractmethod
    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""

    @abstractmethod
    def _check_ready(self, weight_version: int | None) -> None:
        """Raise unless the engine runs, with these weights where a version is given."""

    @in_own_mode
    def update_weights(self, named: Mapping[str, torch.Tensor], version: int, expected_hash: str | None = None) -> str:
        """Load full Hugging Face tensors into every rank, prove it, and forget every cached prefix.

        After loading, each rank compares its parameters byte by byte with ``named``. Until that succeeded the engine
        refuses to generate.

        Args:
            named: all tensors of the model, in the model's dtype. ``lm_head.weight`` of a tied model may be left out.
            version: not below the version of the last update.
            expected_hash: ``content_hash`` on the training side; another content is an error.

        Returns:
            ``content_hash`` of ``named`` (without a tied LM head).

        Raises:
            WeightSyncError: a tensor is missing, unknown, of another shape or dtype, not finite, or not what a rank
                holds afterwards; or the version is stale. The message names the tensor.
        """
        if self._llm is None or self._broken is not None:
            self._check_ready(None)
        where = f"update_weights, version {version}"
        tensors = {name: tensor.detach() for name, tensor in named.items()}
        if self.tied and TIED_HEAD in tensors:
            from recipes.engines.vllm_weights import same_bytes

            head = tensors.pop(TIED_HEAD)
            if EMBEDDING in tensors and not same_bytes(head, tensors[EMBEDDING]):
                raise WeightSyncError(
                    f"{TIED_HEAD} differs from {EMBEDDING}, and the model ties them",
                    where=where,
                    fix="Leave it out, or use model.tie_word_embeddings=false.",
                )
        self._check_described({k: (tuple(t.shape), dtype_name(t.dtype)) for k, t in tensors.items()}, version)
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in tensors.values()])
        if not bool(finite.all()):
            self._refuse_non_finite([name for name, good in zip(tensors, finite.tolist()) if not good], where)
        found = content_hash(tensors)
        if expected_hash is not None and found != expected_hash:
            raise WeightSyncError(
                f"the tensors hash to {found[:16]}, the trainer's weights of version {version} to {expected_hash[:16]}",
                where="update_weights",
                fix="Export the weights again after the optimizer step.",
            )
        self._usable = False
        self._open(None)
        self._load(version, named=tensors)
        return self._complete(version, found)

    # In rounds

    def places(self) -> list[str]:
        """The physical device of every worker, rank by rank."""
        return list(self._places)

    @in_own_mode
    def begin_update(self, tensors: Described, version: int, handles: Mapping[str, Handle]) -> None:
        """Start an update in rounds: check what was announced, and open the buffers.

        Args:
            tensors: shape and dtype of every tensor that will come.
            version: not below the version of the last update.
            handles: the buffer to read from, by place of the worker.

        Raises:
            WeightSyncError: a tensor is missing, unknown, of another shape or dtype, or the version is stale. The
                engine still holds the weights it had.
            WeightLinkError: a worker cannot open its buffer.
        """
        if self._llm is None or self._broken is not None:
            self._check_ready(None)
        self._check_described(tensors, version)
        self._incoming, self._digests = (dict(tensors), version), {}
        self._usable = False
        self._open(dict(handles))

    @in_own_mode
    def load_bucket(self, entries: Sequence[Entry]) -> None:
        """Load the tensors that the buffers hold now. Returns when no worker reads the buffer any more.

        Raises:
            WeightSyncError: a tensor is not finite, or not what a rank holds afterwards; the message names it.
        """
        if self._incoming is None:
            raise EngineError("no weight update has begun", where="rollout", fix="Call begin_update first.")
        self._digests |= self._load(self._incoming[1], entries=list(entries))

    @in_own_mode
    def finish_update(self) -> str:
        """Make the engine usable again; returns the content hash of what its ranks were given and hold.

        Raises:
            WeightSyncError: a tensor that was announced did not come.
        """
        if self._incoming is None:
            raise EngineError("no weight update has begun", where="rollout", fix="Call begin_update first.")
        (tensors, version), self._incoming = self._incoming, None
        missing = tensors.keys() - self._digests.keys()
        if missing:
            raise WeightSyncError(
                f"{len(missing)} tensors did not come: {_listed(missing)}", where=f"weight update, version {version}"
            )
        return self._complete(version, combined_hash(tensors, self._digests))

    def abort_update(self) -> None:
        """Close the buffers. The engine stays unusable until a whole update."""
        self._incoming = None
        if self._llm is not None:
            self._rpc("rl_kernel_update_abort")

    # Parts

    def _check_described(self, tensors: Described, version: int) -> None:
        where = f"update_weights, version {version}"
        if version < 0 or version < self.weight_version:
            raise WeightSyncError(
                f"version {version} is older than {self.weight_version}, which the engine holds", where=where
            )
        expected = {k: v for k, v in self.tensors.items() if not (self.tied and k == TIED_HEAD)}
        for what, names in (("missing", expected.keys() - tensors.keys()), ("unknown", tensors.keys() - expected)):
            if names:
                raise WeightSyncError(f"{len(names)} tensors are {what}: {_listed(names)}", where=where)
        for name, (shape, dtype) in expected.items():
            given_shape, given_dtype = tensors[name]
            if tuple(given_shape) != tuple(shape):
                raise WeightSyncError(
                    f"{name} has shape {list(given_shape)}, {list(shape)} is needed",
                    where=where,
                    fix="Give full tensors, gathered over the ranks and without vocabulary padding.",
                )
            if given_dtype != dtype:
                raise WeightSyncError(
                    f"{name} is {given_dtype}, the engine holds {dtype}",
                    where=where,
                    fix="Round on the training side, so that both sides hold the same bytes.",
                )

    @staticmethod
    def _refuse_non_finite(names: Sequence[str], where: str) -> None:
        more = f" and {len(names) - 1} more tensors hold" if len(names) > 1 else " holds"
        raise WeightSyncError(
            f"{names[0]}{more} NaN or infinity",
            where=where,
            fix="Check the learning rate and the gradient norm of the last step.",
        )

    def _open(self, handles: dict[str, Handle] | None) -> None:
        # vLLM keeps a second copy of a tied head.
        copies = {TIED_HEAD: EMBEDDING} if self.tied and TIED_HEAD in self.tensors else {}
        for rank, problem in enumerate(self._rpc("rl_kernel_update_begin", handles, self.active, copies)):
            if problem:
                raise WeightLinkError(f"rank {rank}: {problem}", where="rollout")

    def _load(self, version: int, **what: Any) -> dict[str, bytes]:
        where = f"update_weights, version {version}"
        results = self._rpc("rl_kernel_update_load", what.get("entries"), what.get("named"))
        for rank, result in enumerate(results):
            if result["not_finite"]:
                self._refuse_non_finite(result["not_finite"], where)
            self._refuse_wrong(rank, result["wrong"], where)
            if result["digests"] != results[0]["digests"]:
                raise WeightSyncError(f"rank {rank} was given other bytes than rank 0", where=where)
        return results[0]["digests"]

    @staticmethod
    def _refuse_wrong(rank: int, wrong: Sequence[str], where: str) -> None:
        if wrong:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise WeightSyncError(
                f"rank {rank} does not hold the given weights: {'; '.join(wrong[:4])}{more}",
                where=where,
                fix="Start a new engine; the weights of this one are undefined.",
            )

    def _complete(self, version: int, found: str) -> str:
        where = f"update_weights, version {version}"
        for rank, wrong in enumerate(self._rpc("rl_kernel_update_end")):
            self._refuse_wrong(rank, wrong, where)
        if not self._llm.reset_prefix_cache():
            raise EngineError(
                "the prefix cache cannot be reset, so answers could mix two versions of the weights",
                where=where,
                fix="Update the weights when no request is running.",
            )
        self.weight_version, self.weight_hash, self._usable = version, found, True
        return found
