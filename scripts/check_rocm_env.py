"""Is this a working ROCm environment for MI300A, MI300X or MI325X? Standard library and torch only.

python scripts/check_rocm_env.py

Prints the facts that a bug report needs, then the checks; exit code 0 when all pass. ``python -m recipes.doctor`` asks
the rest: engines, operators, plugin.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable


def facts() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    try:
        import torch
    except ImportError as error:
        return {**found, "torch": f"cannot be imported ({error})"}
    found |= {"torch": torch.__version__, "torch cuda": str(torch.version.cuda), "torch hip": str(torch.version.hip)}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
        found[f"device {index}"] = f"{properties.name}, {arch}, {properties.total_memory / 2**30:.0f} GiB"
    found |= {name: "installed" if importlib.util.find_spec(name) else "not installed" for name in ("triton", "vllm")}
    for command in (["hipcc", "--version"], ["rocminfo"]):
        found[command[0]] = _first_line(command)
    return found


def _first_line(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return "not found"
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return next((line for line in result.stdout.splitlines() if line.strip()), f"exit code {result.returncode}")


def driver_is_loaded() -> str | None:
    if not os.path.exists("/dev/kfd"):
        return "there is no /dev/kfd: load the amdgpu driver, and give docker --device=/dev/kfd --device=/dev/dri"
    if not os.access("/dev/kfd", os.R_OK | os.W_OK):
        return "/dev/kfd may not be opened: docker --group-add video (or render, whichever group owns it)"
    return None


def torch_is_rocm() -> str | None:
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}); use the image of Dockerfile.rocm"
    if torch.version.hip is None:
        return f"torch {torch.__version__} is no ROCm build (torch.version.hip is None); extras cannot change that"
    return None


def devices_are_visible() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU: give docker --device=/dev/kfd --device=/dev/dri --group-add video"
    return None


def devices_are_gfx942() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "no device to look at"
    names = {i: torch.cuda.get_device_properties(i).gcnArchName.split(":")[0] for i in range(torch.cuda.device_count())}
    other = {i: name for i, name in names.items() if name != "gfx942"}
    return f"devices {other} are not gfx942; hide them with HIP_VISIBLE_DEVICES" if other else None


def compiler_is_there() -> str | None:
    return None if shutil.which("hipcc") else "hipcc is not on PATH: add /opt/rocm/bin (needed to build, not to run)"


def triton_works() -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error}); the ROCm wheel of torch brings it"
    return None if hasattr(triton, "compile") else "this triton has no compiler"


CHECKS: dict[str, Callable[[], str | None]] = {
    "driver": driver_is_loaded,
    "torch is a ROCm build": torch_is_rocm,
    "GPUs are visible": devices_are_visible,
    "GPUs are gfx942": devices_are_gfx942,
    "hipcc": compiler_is_there,
    "triton": triton_works,
}


def main() -> int:
    for name, fact in facts().items():
        print(f"{name:12} {fact}")
    failed = False
    for name, check in CHECKS.items():
        try:
            problem = check()
        except Exception as error:  # noqa: BLE001 - later checks need what an earlier one found missing
            problem = f"{type(error).__name__}: {error}"
        failed |= problem is not None
        print(f"ok   {name}" if problem is None else f"FAIL {name}: {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
