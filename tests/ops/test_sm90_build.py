"""The Hopper kernels compile for sm_90a with nvcc alone, without spills, and use the warpgroup matrix instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_kernel.ops.linear_logp import sm90
from rl_kernel.registry import Request

SOURCES = Path(__file__).parents[2] / "csrc" / "sm90"
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "name", ["rows", "policy_loss", "few_rows", "segments", "segments_wide", "gemm", "gemm_gradient", "gemm_statistics"]
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
    # segments_wide keeps 192 values a thread: some of its kernels leave another one in memory.
    assert spills and max(spills) <= (16 if name == "segments_wide" else 0), run.stderr
    # The compiler says so when it waits for each matrix product before it issues the next.
    assert "(C75" not in run.stderr and "serialized" not in run.stderr, run.stderr
    disassembler = shutil.which("cuobjdump")
    if name.startswith("gemm") and disassembler:
        listing = subprocess.run([disassembler, "--dump-sass", str(cubin)], capture_output=True, text=True).stdout
        assert listing.count("HGMMA.64x256x16.F32.BF16") == {"gemm": 16, "gemm_gradient": 8, "gemm_statistics": 8}[name]
        # Acquires of a wider scope empty the L1. The cluster's barriers at either end of a kernel do, and waiting for
        # blocks of dh after their products, which come before those of dw; nothing else may, above all not the loops
        # over k.
        for kernel in listing.split("Function : ")[1:]:
            products = [m.start() for m in re.finditer("HGMMA", kernel)]
            emptied = kernel[products[0] : products[-1]].count("CCTL.IVALL")
            assert emptied <= (2 if "gemm_kernelILi2ELi2E" in kernel else 0), kernel[:100]


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
