"""Which arithmetic family a device belongs to.

Bits are promised inside one family: ``cpu`` (any x86-64 with FMA), ``sm90`` (H100, H200, GH200) and ``gfx942``
(MI300A, MI300X, MI325X). Every other device is named, with the reason why no contract exists for it.
"""

from __future__ import annotations

import functools
import platform as _platform
from dataclasses import dataclass

import torch

from rl_kernel.errors import UnsupportedError

FAMILIES = ("cpu", "sm90", "gfx942")


@dataclass(frozen=True)
class Device:
    """A device as the registry sees it: ``family`` is ``None`` when no contract exists, and ``reason`` says why."""

    kind: str  # "cpu" | "cuda" | "rocm" | other torch device types
    name: str
    family: str | None
    reason: str | None = None


def _cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="ignore") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def _cpu() -> Device:
    machine = _platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return Device("cpu", machine, None, f"the cpu family is defined on x86-64 with FMA, this machine is {machine}")
    flags = _cpu_flags()
    if flags and not {"fma", "avx2"} <= flags:
        return Device("cpu", machine, None, "the cpu family needs the FMA and AVX2 instructions, /proc/cpuinfo has not")
    return Device("cpu", machine, "cpu")


@functools.cache
def _describe(kind: str, index: int) -> Device:
    if kind == "cpu":
        return _cpu()
    if kind != "cuda":
        return Device(
            kind, kind, None, f"torch device type {kind!r} has no contract; use cpu, CUDA sm90 or ROCm gfx942"
        )
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        if arch == "gfx942":
            return Device("rocm", properties.name, "gfx942")
        return Device("rocm", properties.name, None, f"{arch} has no contract yet; supported: gfx942")
    capability = f"sm{properties.major}{properties.minor}"
    if capability == "sm90":
        return Device("cuda", properties.name, "sm90")
    return Device("cuda", properties.name, None, f"{capability} has no contract; supported: sm90 (H100, H200)")


def describe(device: torch.device | str) -> Device:
    """Describe ``device``; never raises for an unsupported one."""
    device = torch.device(device)
    index = 0
    if device.type == "cuda":
        if not torch.cuda.is_available():  # without a GPU, torch answers with an assertion of its own
            return Device("cuda", "none", None, "torch sees no CUDA or ROCm device on this machine")
        index = device.index if device.index is not None else torch.cuda.current_device()
    return _describe(device.type, index)


def family_of(device: torch.device | str) -> str:
    """The arithmetic family of ``device``.

    Raises:
        UnsupportedError: no contract exists for the device; the message names the device and the reason.
    """
    found = describe(device)
    if found.family is None:
        raise UnsupportedError(f"device {device} ({found.name}): {found.reason}")
    return found.family
