"""Is this a working ROCm environment for MI300A, MI300X or MI325X? Standard library and torch only.

python scripts/check_rocm_env.py
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable


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
    "torch is a ROCm build": torch_is_rocm,
    "GPUs are visible": devices_are_visible,
    "GPUs are gfx942": devices_are_gfx942,
    "hipcc": compiler_is_there,
    "triton": triton_works,
}


def main() -> int:
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
