"""A buffer of one process that other processes of the machine read: in GPU memory, or in host memory.

GPU memory travels as a CUDA or HIP IPC handle of an allocation of its own, made by the driver's allocator: torch's
caching allocator cannot export blocks of ``expandable_segments``, and would share whatever lies in the same block. A
reader opens the handle on *its* device and copies out of it. Neither side needs to see the other's device: the handle
names the memory, not an index, and CUDA (since 10.1) and HIP map memory of a device that ``CUDA_VISIBLE_DEVICES`` or
``HIP_VISIBLE_DEVICES`` hides; where the two devices differ, peer access is switched on by opening.

Host memory is an anonymous file (memfd) that a reader opens through ``/proc``: it needs no room in ``/dev/shm`` and is
gone with the last process that holds it, however that ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from recipes.errors import EngineError

_MIB = 1 << 20


class WeightLinkError(EngineError):
    """Memory of the trainer cannot be reached from an engine's process."""


@dataclass(frozen=True)
class Handle:
    """What another process needs to open a buffer."""

    kind: str  # "device" | "host"
    size: int
    key: bytes  # the IPC handle, or the path of the file
    place: str  # the device it lies on


class Buffer(Protocol):
    """What the owner writes to."""

    handle: Handle

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor to ``offset``, in the order of the current stream."""
        ...

    def close(self) -> None:
        """Free it. Every reader must have closed it before."""
        ...


class View(Protocol):
    """What a reader reads from."""

    def read(self, count: int, out: torch.Tensor) -> None:
        """Copy the first ``count`` bytes to the uint8 tensor ``out``, in the order of the current stream."""
        ...

    def close(self) -> None:
        """Unmap it; waits for the copies."""
        ...


def place_of(device: torch.device) -> str:
    """A name of the physical device, the same in every process of the machine."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    found = getattr(properties, "uuid", None)
    if found is not None:
        return str(found)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts:
        raise WeightLinkError("torch reports neither UUID nor PCI address of the device", where=str(device))
    return "pci-" + "-".join(map(str, parts))


# ---------------------------------------------------------------------------------------------------------------- GPU


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]  # cudaIpcMemHandle_t and hipIpcMemHandle_t


def _loaded_library(name: str) -> str:
    """Path of the library ``name`` that torch has loaded: another copy would have a current device of its own."""
    with contextlib.suppress(OSError):
        paths = [line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()]
        found = dict.fromkeys(path for path in paths if os.path.basename(path).startswith(name))
        beside_torch = [path for path in found if "nvidia" in path or "torch" in path]
        for path in [*beside_torch, *found]:
            return path
    return name


@functools.cache
def _runtime() -> _Runtime:
    return _Runtime()


class _Runtime:
    """The calls of the CUDA or HIP runtime that torch does not offer."""

    def __init__(self) -> None:
        torch.cuda.init()
        hip = torch.version.hip is not None
        self.prefix = "hip" if hip else "cuda"
        path = _loaded_library("libamdhip64.so" if hip else "libcudart.so")
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise WeightLinkError(f"the GPU runtime cannot be loaded: {error}", where=path) from error
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        out = ctypes.POINTER(ctypes.c_void_p)
        arguments: dict[str, list[object]] = {
            "Malloc": [out, size],
            "Free": [pointer],
            "SetDevice": [ctypes.c_int],
            "IpcGetMemHandle": [ctypes.POINTER(_IpcHandle), pointer],
            "IpcOpenMemHandle": [out, _IpcHandle, ctypes.c_uint],
            "IpcCloseMemHandle": [pointer],
            "MemcpyAsync": [pointer, pointer, size, ctypes.c_int, pointer],
            "GetLastError": [],
        }
        for name, types in arguments.items():
            function = getattr(self.library, self.prefix + name)
            function.argtypes, function.restype = types, ctypes.c_int
        self.text = getattr(self.library, self.prefix + "GetErrorString")
        self.text.argtypes, self.text.restype = [ctypes.c_int], ctypes.c_char_p

    def call(self, name: str, *args: object) -> None:
        """One call.

        Raises:
            WeightLinkError: it failed; the runtime's sticky "last error" is taken back, or torch would raise it later.
        """
        code = getattr(self.library, self.prefix + name)(*args)
        if code:
            getattr(self.library, self.prefix + "GetLastError")()
            raise WeightLinkError(
                f"{self.prefix}{name}: {self.text(code).decode(errors='replace')} ({code})", where="GPU memory"
            )

    def copy(self, to: int, source: int, count: int, device: torch.device) -> None:
        """Asynchronous copy between any two devices, on torch's current stream of ``device``."""
        stream = torch.cuda.current_stream(device).cuda_stream
        self.call("MemcpyAsync", to, source, count, 4, stream)  # 4: the direction follows from the addresses


class DeviceBuffer:
    """:class:`Buffer` in the memory of ``device``."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device, self._runtime = device, _runtime()
        size = -(-size // (2 * _MIB)) * 2 * _MIB  # smaller allocations may share one block, and so one handle
        pointer, handle = ctypes.c_void_p(), _IpcHandle()
        with torch.cuda.device(device):
            self._runtime.call("SetDevice", device.index)
            try:
                self._runtime.call("Malloc", ctypes.byref(pointer), size)
            except WeightLinkError:
                torch.cuda.empty_cache()  # torch keeps freed blocks to itself
                self._runtime.call("Malloc", ctypes.byref(pointer), size)
            self._pointer: int | None = pointer.value
            try:
                self._runtime.call("IpcGetMemHandle", ctypes.byref(handle), pointer)
            except WeightLinkError:
                self.close()
                raise
        self.handle = Handle("device", size, bytes(handle), place_of(device))

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """See :class:`Buffer`."""
        assert self._pointer is not None and tensor.is_contiguous() and tensor.device == self._device
        with torch.cuda.device(self._device):
            self._runtime.copy(self._pointer + offset, tensor.data_ptr(), tensor.nbytes, self._device)

    def close(self) -> None:
        """See :class:`Buffer`."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize(self._device)
                self._runtime.call("Free", pointer)


class DeviceView:
    """:class:`View` of a :class:`DeviceBuffer` of another process, mapped into ``device``'s address space."""

    def __init__(self, handle: Handle, device: torch.device) -> None:
        self._device, self._runtime, self._size = device, _runtime(), handle.size
        opened, pointer = _IpcHandle.from_buffer_copy(handle.key), ctypes.c_void_p()
        with torch.cuda.device(device):
            self._runtime.call("SetDevice", device.index)
            try:
                self._runtime.call("IpcOpenMemHandle", ctypes.byref(pointer), opened, 1)  # 1: peer access as needed
            except WeightLinkError as error:
                raise WeightLinkError(
                    f"the trainer's memory on {handle.place} cannot be opened on {place_of(device)}: {error.what}",
                    where="weight sync",
                    fix="Both processes must run on one machine, in one container and with peer access between the two "
                    "GPUs; orchestrator.weight_link=host goes through host memory.",
                ) from None
        self._pointer: int | None = pointer.value

    def read(self, count: int, out: torch.Tensor) -> None:
        """See :class:`View`."""
        assert self._pointer is not None and count <= min(self._size, out.nbytes) and out.device == self._device
        with torch.cuda.device(self._device):
            self._runtime.copy(out.data_ptr(), self._pointer, count, self._device)

    def close(self) -> None:
        """See :class:`View`."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize(self._device)
                self._runtime.call("IpcCloseMemHandle", pointer)


# --------------------------------------------------------------------------------------------------------------- host


class HostBuffer:
    """:class:`Buffer` in host memory."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("rl_kernel_weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, size)
            self._memory: torch.Tensor | None = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        except OSError as error:
            os.close(self._file)
            raise WeightLinkError(
                f"no {size >> 20} MiB of shared memory: {error}",
                where="weight sync",
                fix="Lower orchestrator.weight_bucket_bytes.",
            ) from error
        self.handle = Handle("host", size, f"/proc/{os.getpid()}/fd/{self._file}".encode(), "cpu")

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """See :class:`Buffer`; waits for the copy."""
        assert self._memory is not None
        data = tensor.reshape(-1).view(torch.uint8)
        self._memory[offset : offset + data.numel()].copy_(data)

    def close(self) -> None:
        """See :class:`Buffer`."""
        if self._memory is not None:
            self._memory = None
            os.close(self._file)


class HostView:
    """:class:`View` of a :class:`HostBuffer`."""

    def __init__(self, handle: Handle) -> None:
        path = handle.key.decode()
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._memory: torch.Tensor | None = torch.frombuffer(mmap.mmap(file, handle.size), dtype=torch.uint8)
            finally:
                os.close(file)
        except OSError as error:
            raise WeightLinkError(
                f"the trainer's buffer cannot be opened: {error}",
                where=path,
                fix="Trainer and engines must run as one user in one container.",
            ) from error

    def read(self, count: int, out: torch.Tensor) -> None:
        """See :class:`View`; waits for the copy."""
        assert self._memory is not None
        out[:count].copy_(self._memory[:count])

    def close(self) -> None:
        """See :class:`View`."""
        self._memory = None


def allocate(kind: str, size: int, device: torch.device) -> Buffer:
    """A buffer of ``kind`` for a process whose weights are on ``device``."""
    return DeviceBuffer(size, device) if kind == "device" else HostBuffer(size)


def open_view(handle: Handle, device: torch.device) -> View:
    """The buffer behind ``handle``, to be copied to ``device``.

    Raises:
        WeightLinkError: it cannot be reached from this process.
    """
    return DeviceView(handle, device) if handle.kind == "device" else HostView(handle)
