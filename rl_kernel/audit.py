"""Instruction audit: what a kernel variant compiles to, checked without a GPU.

:func:`record` runs an operator on CPU tensors and captures its kernel launches instead of making them;
:func:`compile_launch` compiles a captured launch for sm_90 or gfx942; :func:`findings` reads the intermediate code and
the assembly and returns what could change bits or speed:

* one family of matrix instructions for all variants (bf16 inputs, fp32 accumulators, 16 products deep; on gfx942 one
  MFMA shape);
* every accumulator is one chain: a product feeds the next in the order of an ascending loop, and no sum of two
  accumulators exists that the contract does not name;
* no float atomics, no layout-ordered float sum (``tl.sum``), no contraction of product and sum;
* no register spills.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rl_kernel import triton_utils

TARGETS = {"sm90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass
class Launch:
    """A captured launch: the kernel, its arguments by name, and the compile options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        module = self.kernel.fn.__module__.removeprefix("rl_kernel.ops.")
        return f"{module}.{self.kernel.fn.__name__}"


@dataclass
class Report:
    """What one variant compiled to."""

    name: str
    family: str
    constants: dict[str, Any]
    mma: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    spills: int = 0


@contextlib.contextmanager
def record(family: str):
    """Capture launches as a list instead of making them, with the launch tables and options of ``family``."""
    launches: list[Launch] = []

    def run(self, *args, grid=None, warmup=False, **kwargs):  # type: ignore[no-untyped-def]
        names = list(inspect.signature(self.fn).parameters)
        bound = dict(zip(names, args))
        bound.update({key: value for key, value in kwargs.items() if key in names})
        launches.append(Launch(self, bound, {key: value for key, value in kwargs.items() if key not in names}))

    original, hip = JITFunction.run, triton_utils.is_hip
    JITFunction.run = run  # type: ignore[method-assign]
    triton_utils.is_hip = lambda: family == "gfx942"  # type: ignore[assignment]
    patched = []
    import sys

    for name, module in list(sys.modules.items()):
        if name.startswith("rl_kernel.ops.") and getattr(module, "is_hip", None) is hip:
            module.is_hip = triton_utils.is_hip
            patched.append(module)
    try:
        yield launches
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
        triton_utils.is_hip = hip  # type: ignore[assignment]
        for module in patched:
            module.is_hip = hip


def compile_launch(launch: Launch, family: str) -> triton.compiler.CompiledKernel:
    """Compile a captured launch with the specialisation that a real launch would get."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name)
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int):
            if value == 1:
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = 1
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[family], options=launch.options)


def _nvidia_tool(name: str) -> str | None:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(path) if path.exists() else None


def _sm90_spills(cubin: bytes) -> int:
    tool = _nvidia_tool("cuobjdump")
    if tool is None:
        return 0
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    finally:
        os.unlink(file.name)
    stack = [int(x) for x in re.findall(r"(?:STACK|LOCAL):(\d+)", text)]
    return max(stack, default=0)


_PTX_MMA = re.compile(r"\b(wgmma\.mma_async\S*|mma\.sync\S*)")
_AMD_MMA = re.compile(r"\b(v_mfma_\S+|v_smfmac_\S+)")
_PTX_GOOD = (
    re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16$"),
    re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32$"),
)
AMD_MMA = "v_mfma_f32_16x16x16_bf16"


def _chain_problems(ttgir: str, accumulator_sums: int) -> list[str]:
    """Whether dots accumulate in place, and whether accumulators are summed outside them."""
    problems = []
    if _float_reduce(ttgir):
        problems.append("a layout-ordered float sum (tl.sum): its bits follow num_warps and the tile")
    if re.search(r"tt\.atomic_rmw\s+(fadd|fmax|fmin)", ttgir):
        problems.append("a float atomic")
    dots = re.findall(
        r"(%[\w#:]+) = (?:tt\.dot|ttng\.warp_group_dot|amdg?\.\S*dot\S*) (%[\w#:]+), (%[\w#:]+), (%[\w#:]+)", ttgir
    )
    names = {name for name, *_ in dots}
    summed = 0
    for left, right in re.findall(r"arith\.addf (%[\w#:]+), (%[\w#:]+)", ttgir):
        summed += left in names and right in names
    if summed > accumulator_sums:
        problems.append(f"{summed} sums of two accumulators where the contract has {accumulator_sums}")
    for lower, step in re.findall(r"scf\.for %\w+ = (%[\w#]+) to %[\w#]+ step (%[\w#]+)", ttgir):
        found = re.search(re.escape(step) + r" = arith\.constant (-?\d+)", ttgir)
        if found and int(found.group(1)) <= 0:
            problems.append(f"a loop from {lower} does not ascend")
    return problems


def _float_reduce(ttgir: str) -> bool:
    """Whether a float sum covers more than two elements; two commute, so a tree may be built from such sums."""
    pattern = r'"tt\.reduce"\(.*?axis = (\d+).*?\}\)? ?: \(tensor<([\dx]+)x\w+'
    for match in re.finditer(pattern, ttgir, re.S):
        extent = int(match.group(2).split("x")[int(match.group(1))])
        if "arith.addf" in match.group(0) and extent > 2:
            return True
    return False


def findings(launch: Launch, family: str, *, accumulator_sums: int = 0) -> Report:
    """Compile one launch and check it; ``accumulator_sums``: additions of finished segments the contract names."""
    report = Report(
        launch.name,
        family,
        {key: value for key, value in launch.arguments.items() if isinstance(value, (int, bool)) and key.isupper()}
        | {"num_warps": launch.options.get("num_warps"), "num_stages": launch.options.get("num_stages")},
    )
    compiled = compile_launch(launch, family)
    report.problems += _chain_problems(compiled.asm["ttgir"], accumulator_sums)
    if launch.options.get("enable_fp_fusion", True):
        report.problems.append("contraction of product and sum is enabled")
    if family == "sm90":
        text = compiled.asm["ptx"]
        report.mma.update(match.rstrip(";") for match in _PTX_MMA.findall(text))
        for name in report.mma:
            if not any(pattern.match(name) for pattern in _PTX_GOOD):
                report.problems.append(f"matrix instruction {name} is not bf16 -> fp32 with k16")
        if re.search(r"\b(atom|red)\.\S*\.(f32|f16|bf16|f16x2|bf16x2|f64)\b", text):
            report.problems.append("a float atomic")
        report.spills = _sm90_spills(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        report.mma.update(re.sub(r"_e\d+$", "", name) for name in _AMD_MMA.findall(text))
        for name in report.mma:
            if not name.startswith(AMD_MMA):
                report.problems.append(f"matrix instruction {name} is not {AMD_MMA}")
        if re.search(r"\b(global|buffer|flat)_atomic_(pk_)?(add|max|min)_(f|bf)\d+", text):
            report.problems.append("a float atomic")
        spills = [int(x) for x in re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s*(\d+)", text)]
        report.spills = max(spills, default=0)
    if report.spills:
        report.problems.append(f"register spills ({report.spills})")
    return report


def same_family(reports: list[Report]) -> list[str]:
    """Problems between the variants of one operator: matrix instructions of different depth or type."""
    kinds = {
        re.sub(r"m\d+n\d+", "", name).replace("wgmma.mma_async.sync.aligned.", "").replace("mma.sync.aligned.", "")
        .replace("row.col.", "").removesuffix(".f32").replace("f32.bf16.bf16", "bf16->f32")
        for report in reports
        for name in report.mma
    }  # fmt: skip
    return [] if len(kinds) <= 1 else [f"variants use different matrix instructions: {', '.join(sorted(kinds))}"]
