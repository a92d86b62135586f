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
import functools
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from rl_kernel import triton_utils

TARGETS = {"sm90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}


@functools.cache
def _backend(family: str) -> Any:
    return make_backend(TARGETS[family])


def _source_type(kernel: JITFunction) -> type[ASTSource]:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


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

    def specialization(self, family: str) -> tuple[Any, ...]:
        """What Triton's own binder makes of the arguments on ``family``: launches that differ in it compile anew.

        An element a parameter: its type, or "constexpr" and the value, and what the compiler is told about it.
        """
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, _backend(family))
        return tuple(bind(**self.arguments, **self.options)[1])

    def identity(self, family: str) -> str:
        """Equal for launches that compile to the same code."""
        return repr((self.name, self.specialization(family), self.options))


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
    for name, module in list(sys.modules.items()):
        if name.startswith("rl_kernel.ops.") and getattr(module, "is_hip", None) is hip:
            setattr(module, "is_hip", triton_utils.is_hip)  # noqa: B010
            patched.append(module)
    try:
        yield launches
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
        triton_utils.is_hip = hip  # type: ignore[assignment]
        for module in patched:
            setattr(module, "is_hip", hip)  # noqa: B010


def compile_launch(launch: Launch, family: str) -> triton.compiler.CompiledKernel:
    """Compile a captured launch with the specialisation that a real launch would get."""
    backend, kernel = _backend(family), launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = _source_type(kernel)(kernel, signature, constants, attributes)
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
# Bytes (on gfx942 registers) that may spill: a handful around the loops of attention, what three accumulators of the
# Hopper prefill leave no room for (48 with Triton 3.6, 280 with 3.9; the schedule without spills is slower), and the
# four subtrees of eight segments, between their loops.
EXPECTED_SPILLS = {
    ("attention.triton_backward._dkdv", "sm90"): 64,  # 40 with Triton 3.6, none with 3.9
    ("attention.sm90_forward._prefill", "sm90"): 320,
    ("attention.sm90_backward._dkdv", "sm90"): 192,  # 24 with Triton 3.6
    ("linear.triton._gemm S=8", "sm90"): 256,
    ("linear.triton._gemm S=8", "gfx942"): 64,
}


_SSA = r"%[\w#]+"
_PASS_THROUGH = ("ttg.convert_layout", "ttng.warp_group_dot_wait", "tt.reshape", "tt.trans", "tt.split", "arith.truncf")
_DOTS = ("tt.dot", "ttng.warp_group_dot")


def accumulator_sums(ttgir: str) -> int:
    """Float additions that read an accumulator directly: a second chain, a split reduction, or an epilogue sum.

    Follows the results of matrix products through loops, branches and layout changes; the accumulator operand of a
    product is the chain itself and no addition.
    """
    edges: list[tuple[str, str]] = []  # (target, source): target holds the same accumulator as source
    derived: set[str] = set()
    sums: list[list[str]] = []
    regions: list[tuple[str, list[str]]] = []  # result name and, for loops, the names of the carried arguments
    for line in ttgir.splitlines():
        found = re.match(rf"\s*({_SSA})(?::\d+)? = \"?([\w.]+)\"?(.*)", line)
        text = line.strip()
        if found and found.group(2) in ("scf.for", "scf.if", "scf.while"):
            name = found.group(1)
            carried = re.search(r"iter_args\((.*?)\)", line)
            pairs = re.findall(rf"({_SSA}) = ({_SSA})", carried.group(1)) if carried else []
            edges += pairs
            regions.append((name, [argument for argument, _ in pairs]))
        elif re.match(r"scf\.(for|if|while)", text):
            regions.append(("", []))
        elif text.startswith("scf.yield"):
            if regions:
                name, arguments = regions[-1]
                values = re.findall(_SSA, text.split(" : ")[0])
                for i, value in enumerate(values):
                    edges.append((name if len(values) == 1 else f"{name}#{i}", value))
                    if i < len(arguments):
                        edges.append((arguments[i], value))
        elif text.startswith("}") and regions and "else" not in text and not text.startswith("})"):
            regions.pop()
        elif found:
            name, op, rest = found.groups()
            values = re.findall(_SSA, rest.split(" : ")[0])
            if op in _DOTS:
                derived.add(name)
            elif op in _PASS_THROUGH:
                if op == "ttng.warp_group_dot_wait" and len(values) > 1:
                    edges += [(f"{name}#{i}", value) for i, value in enumerate(values)]
                elif values:
                    edges.append((name, values[0]))
            elif op == "arith.select":
                edges += [(name, value) for value in values[1:]]
            elif op == "arith.addf":
                sums.append(values)
                # A sum of accumulators is one itself: further sums of it count again.
                edges += [(name, value) for value in values]
    changed = True
    while changed:
        changed = False
        for target, source in edges:
            if source in derived and target not in derived:
                derived.add(target)
                changed = True
    return sum(any(value in derived for value in values) for values in sums)


def _chain_problems(ttgir: str, allowed_sums: int) -> list[str]:
    """Whether products accumulate in one chain, and whether anything else is summed in an order of the layout."""
    problems = []
    if _float_reduce(ttgir):
        problems.append("a layout-ordered float sum (tl.sum): its bits follow num_warps and the tile")
    if re.search(r"tt\.atomic_rmw\s+(fadd|fmax|fmin)", ttgir):
        problems.append("a float atomic")
    sums = accumulator_sums(ttgir)
    if sums > allowed_sums:
        problems.append(f"{sums} sums of accumulators where the contract has {allowed_sums}")
    return problems


def _float_reduce(ttgir: str) -> bool:
    """Whether a float sum covers more than two elements; two commute, so a tree may be built from such sums."""
    pattern = r'"tt\.reduce"\(.*?axis = (\d+).*?\}\)? ?: \(tensor<([\dx]+)x\w+'
    for match in re.finditer(pattern, ttgir, re.S):
        extent = int(match.group(2).split("x")[int(match.group(1))])
        if "arith.addf" in match.group(0) and extent > 2:
            return True
    return False


def _allowed_sums(arguments: dict[str, Any]) -> int:
    """Additions of accumulators that the contract names: segments in one program, and a block's addition."""
    segments = 1 if arguments.get("SPLIT") else int(arguments.get("SEGMENTS", 1))
    return segments - 1 + bool(arguments.get("ADD"))


def findings(launch: Launch, family: str) -> Report:
    """Compile one launch and check it."""
    report = Report(
        launch.name,
        family,
        {key: value for key, value in launch.arguments.items() if isinstance(value, (int, bool)) and key.isupper()}
        | {"num_warps": launch.options.get("num_warps"), "num_stages": launch.options.get("num_stages")},
    )
    compiled = compile_launch(launch, family)
    report.problems += _chain_problems(compiled.asm["ttgir"], _allowed_sums(launch.arguments))
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
    variant = f"{report.name} S=8" if _allowed_sums(launch.arguments) == 7 else report.name
    if report.spills > EXPECTED_SPILLS.get((variant, family), 0):
        report.problems.append(f"register spills ({report.spills} bytes or registers)")
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
