"""One weight update, in rounds: the trainer fills a bounded buffer, every engine copies it out and loads it.

    trainer ranks                                engines
    export_begin: the plan, a buffer's handle -> begin_update: names, shapes and dtypes are checked, the buffer opened
    export_bucket(i): gather, pack, digest    -> load_bucket(i): copy out, check, load, prove, digest    (for every i)
    export_end: content hash                  == finish_update: content hash; the buffer is closed
    export_close: the buffer is freed

:meth:`recipes.cluster.Cluster.sync` drives it. A side answers only when its device is done, so no buffer is written
while somebody reads it, or the reverse. Memory in transit is one bucket on either side of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from recipes.engines import weights
from recipes.engines.device_memory import Buffer, Handle, allocate, open_view
from recipes.errors import EngineError

Described = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype
_ALIGN = 256


@dataclass(frozen=True)
class Entry:
    """A tensor's place in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Offer:
    """What a training rank says before the first bucket. ``handle`` is None where nobody reads from this rank."""

    buckets: list[list[Entry]]
    handle: Handle | None

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of everything that will come."""
        return {e.name: (e.shape, e.dtype) for bucket in self.buckets for e in bucket}


def plan(tensors: Described, bucket_bytes: int) -> list[list[Entry]]:
    """Tensors in the given order, packed into buckets of at most ``bucket_bytes``; a larger tensor has its own."""
    buckets: list[list[Entry]] = []
    end = 0
    for name, (shape, dtype) in tensors.items():
        start = -(-end // _ALIGN) * _ALIGN
        entry = Entry(name, tuple(shape), dtype, start)
        if not buckets or start + entry.nbytes > bucket_bytes:
            entry = Entry(name, tuple(shape), dtype, 0)
            buckets.append([])
        buckets[-1].append(entry)
        end = entry.offset + entry.nbytes
    return buckets


def used_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of a bucket."""
    return max((e.offset + e.nbytes for e in entries), default=0)


class WeightExporter:
    """The trainer's side, on one rank.

    Args:
        tensors: what ``stream`` will yield, in that order.
        stream: full tensors on ``device``; collective, so every rank runs through it, whether it shares or not.
        kind: of the buffer: ``device`` or ``host``.
        shares: whether an engine reads from this rank.
    """

    def __init__(
        self,
        tensors: Described,
        stream: Iterator[tuple[str, torch.Tensor]],
        *,
        device: torch.device,
        kind: str,
        shares: bool,
        bucket_bytes: int,
    ) -> None:
        self._stream, self._device, self._next = stream, device, 0
        self._digests: dict[str, bytes] = {}
        self._buffer: Buffer | None = None
        buckets = plan(tensors, bucket_bytes)
        if device.type != "cpu":
            torch.cuda.synchronize(device)  # whatever stream wrote the weights
        if shares:
            size = max(1, *(used_bytes(bucket) for bucket in buckets)) if buckets else 1
            self._buffer = allocate(kind, size, device)
        self.offer = Offer(buckets, self._buffer.handle if self._buffer else None)

    @torch.no_grad()
    def fill(self, index: int) -> None:
        """Put bucket ``index`` into the buffer; buckets come in order. Returns when the device is done.

        Raises:
            EngineError: the stream yields something else than was announced.
        """
        if index != self._next:
            raise EngineError(f"bucket {index} was asked for, {self._next} is next", where="weight export")
        self._next += 1
        found: dict[str, torch.Tensor] = {}
        for entry in self.offer.buckets[index]:
            name, tensor = next(self._stream)
            given = (name, tuple(tensor.shape), weights.dtype_name(tensor.dtype))
            if given != (entry.name, entry.shape, entry.dtype):
                raise EngineError(f"{given} came where {entry} was announced", where="weight export")
            if self._buffer is not None:
                tensor = tensor.detach().contiguous()
                self._buffer.write(entry.offset, tensor)
                found[name] = weights.sums(tensor)
        self._digests |= weights.digests_of_sums(found)  # waits for the stream
        if self._device.type != "cpu":
            torch.cuda.current_stream(self._device).synchronize()

    def finish(self) -> str | None:
        """Content hash of what was sent; None on a rank that sent nothing."""
        if self._next != len(self.offer.buckets) or next(self._stream, None) is not None:
            raise EngineError(f"{self._next} of {len(self.offer.buckets)} buckets were sent", where="weight export")
        return None if self._buffer is None else weights.combined_hash(self.offer.tensors, self._digests)

    def close(self) -> None:
        """Free the buffer, which no engine may hold open any more."""
        self._stream.close() if hasattr(self._stream, "close") else None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class WeightReader:
    """The engine's side, in each process that holds weights: buckets as named tensors.

    Args:
        handle: the buffer of a training rank.
        device: where the tensors shall be.

    Raises:
        WeightLinkError: the buffer cannot be reached from this process.
    """

    def __init__(self, handle: Handle, device: torch.device) -> None:
        self._device = device
        self._staging: torch.Tensor | None = torch.empty(handle.size, dtype=torch.uint8, device=device)
        self._view = open_view(handle, device)

    def read(self, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """The tensors of one bucket, valid until the next one is read."""
        assert self._staging is not None
        self._view.read(used_bytes(entries), self._staging)
        return {
            e.name: self._staging[e.offset : e.offset + e.nbytes].view(getattr(torch, e.dtype)).view(e.shape)
            for e in entries
        }

    def close(self) -> None:
        """Let go of the buffer and of the staging memory."""
        self._view.close()
        self._staging = None
        if self._device.type != "cpu":
            torch.cuda.empty_cache()  # the trainer may want it: both sides take turns on the device
