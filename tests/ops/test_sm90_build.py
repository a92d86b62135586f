"""The Hopper kernels compile for sm_90a with nvcc alone, without spills, and use the warpgroup matrix instructions."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_kernel.ops.linear_logp import sm90
from rl_kernel.registry import Request

SOURCES = Path(__file__).parents[2] / "csrc" / "sm90"
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]


def disassembled(cubin: Path) -> list[str]:
    """One listing a kernel, with the encoding of each instruction; none without a disassembler (CUDA's or Triton's)."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton and triton.origin else None
    tool = shutil.which("cuobjdump") or (str(beside) if beside and beside.exists() else None)
    if tool is None:
        return []
    run = subprocess.run([tool, "--dump-sass", str(cubin)], capture_output=True, text=True, check=True)
    return run.stdout.split("Function : ")[1:]


def overtaken(kernel: str) -> list[str]:
    """Loads from shared memory of one kernel's listing that an arrival at an mbarrier may overtake.

    Arrivals do not queue behind loads. A load names one of six counters (7: that of the next load or shuffle), and
    instructions say for which counters they wait: on every path from a load to an arrival one must wait for the load's,
    or a fence in front of bulk copies, which is done after the loads before it. Otherwise whoever has waited for the
    arrival may replace what the load has yet to read.
    """
    encoded = r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;\s+/\* 0x\w{16} \*/\s+/\* 0x(\w{16}) \*/"
    code = [(at, text, int(high, 16)) for at, text, high in re.findall(encoded, kernel)]
    place = {int(at, 16): i for i, (at, _, _) in enumerate(code)}
    found = []
    for start, (at, load, high) in enumerate(code):
        if not re.search(r"\bLDSM?\b", load):
            continue
        ahead, seen = [(start + 1, high >> 46 & 7)], set()
        while ahead:
            i, counter = ahead.pop()
            if i == len(code) or (i, counter) in seen:
                continue
            seen.add((i, counter))
            to, text, high = code[i]
            if high >> 52 & 63 & 1 << counter or "FENCE.VIEW.ASYNC" in text:
                continue
            if "SYNCS.ARRIVE" in text:
                found.append(f"{at} {load} | {to} {text}")
                continue
            if counter == 7 and re.search(r"\b(LDSM?|SHFL)\b", text):
                counter = high >> 46 & 7
            if branch := re.search(r"\bBRA\b.*\b0x([0-9a-f]+)$", text):
                ahead.append((place[int(branch[1], 16)], counter))
            if not re.match(r"BRA 0x|EXIT|RET", text):
                ahead.append((i + 1, counter))
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "name", ["rows", "policy_loss", "few_rows", "segments", "kept_gradient", "gemm", "gemm_gradient", "gemm_statistics"]
)
def test_compiles_without_spills(tmp_path, name):
    cubin = tmp_path / f"{name}.cubin"
    run = subprocess.run(
        ["nvcc", *FLAGS, "-Xptxas", "-v", "-cubin", "-o", str(cubin), str(SOURCES / f"{name}.cu")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", run.stderr)]
    assert spills and max(spills) == 0, run.stderr
    # The compiler says so when it waits for each matrix product before it issues the next.
    assert "(C75" not in run.stderr and "serialized" not in run.stderr, run.stderr
    kernels = disassembled(cubin)
    if not kernels:
        pytest.skip("compiled; its instructions were not read, for want of cuobjdump")
    assert not [found for kernel in kernels for found in overtaken(kernel)]
    # Copies to global memory start when what was written for them is visible to them, and have read it before the end.
    for *stores, after in [kernel.split("UTMACMDFLUSH") for kernel in kernels]:
        assert all(re.search(r"FENCE\.VIEW\.ASYNC(?:(?!STSM).)*UTMASTG", part, re.S) for part in stores)
        assert not stores or "STSM" in stores[0].split("UTMASTG")[0]
        assert not stores or "DEPBAR.LE SB0, 0x0" in after
    # Kernels that may start before the one in front has ended wait for it ahead of their first access to memory.
    source = (SOURCES / f"{name}.cu").read_text(encoding="utf-8")
    dependent = re.findall(r'launch_dependent\("[^"]*", (\w+)', source)
    assert len(dependent) == source.count("launch_dependent(")
    assert all(any(each in kernel.split()[0] for kernel in kernels) for each in dependent)
    for kernel in [kernel for kernel in kernels if any(each in kernel.split()[0] for each in dependent)]:
        before, waits, _ = kernel.partition("ACQBULK")
        assert waits and not re.search(r"\b(LDG?|STG?|ATOM\w*|RED\w*)\.", before), kernel[:100]
    if name.startswith("gemm"):
        products = sum(kernel.count("HGMMA.64x256x16.F32.BF16") for kernel in kernels)
        assert products == {"gemm": 16, "gemm_gradient": 8, "gemm_statistics": 32}[name]
        # Tiles of dh with tokens as columns: one loop for each size. Tall tiles of dw: 160 columns. Carried rows: 32.
        sizes = {n for kernel in kernels for n in re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16", kernel)}
        others = {
            "gemm": {str(n) for n in range(160, 256, 8)},
            "gemm_gradient": {"128"},
            "gemm_statistics": {"128", "32"},
        }
        assert sizes == {"256"} | others[name]
        # Acquires of a wider scope empty the L1. The cluster's barriers at either end of a kernel do, and waiting for
        # blocks of dh after their products, which come before those of dw, once for tokens as rows and once for tokens
        # as columns; nothing else may, above all not the loops over k.
        for kernel in kernels:
            places = [m.start() for m in re.finditer("HGMMA", kernel)]
            emptied = kernel[places[0] : places[-1]].count("CCTL.IVALL")
            assert emptied <= (4 if "gemm_kernel" in kernel.split()[0] else 0), kernel[:100]


READER = """
#include "ptx.cuh"
using namespace rlk::sm90;
__global__ void __cluster_dims__(2, 1, 1) kernel(int* out) {
  __shared__ uint64_t barrier;
  __shared__ int2 value;
  int seen;
  READ
  barrier_arrive(smem_address(&barrier), 0);
  out[threadIdx.x] = seen;
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_an_arrival_that_may_overtake_a_load_is_found(tmp_path):
    plain = r'asm volatile("ld.shared.b32 %0, [%1];" : "=r"(seen) : "r"(smem_address(&value)) : "memory");'
    found = []
    for read in (plain, "seen = read_shared_pair(smem_address(&value)).x;"):
        source, cubin = tmp_path / "reader.cu", tmp_path / "reader.cubin"
        source.write_text(READER.replace("READ", read), encoding="utf-8")
        subprocess.run(["nvcc", *FLAGS, f"-I{SOURCES}", "-cubin", "-o", str(cubin), str(source)], check=True)
        kernels = disassembled(cubin)
        if not kernels:
            pytest.skip("needs cuobjdump")
        found.append(len(overtaken(kernels[0])))
    assert found == [1, 0]


def test_a_cpu_machine_says_what_is_missing():
    import torch

    assert "sm90" in sm90.supports(Request("linear_logp", "cpu", torch.bfloat16))
    assert "bfloat16" in sm90.supports(Request("linear_logp", "sm90", torch.float32))
    try:
        import rl_kernel._C_gpu  # noqa: F401
    except (ImportError, OSError):
        assert "RLK_BUILD=cuda" in sm90.supports(Request("linear_logp", "sm90", torch.bfloat16))


def test_schemas_are_valid():
    import torch

    text = "".join((SOURCES / f"{name}.cpp").read_text(encoding="utf-8") for name in ("bindings", "linear_logp"))
    defined = []
    for body in re.findall(r"m\.def\((.*?)\);", text, re.S):
        schema = "".join(re.findall(r'"([^"]*)"', body))
        defined.append(torch._C.parse_schema(f"rlk::{schema}").name)
    assert sorted(defined) == sorted(f"rlk::{name}" for name in re.findall(r'm\.impl\("(\w+)"', text))
