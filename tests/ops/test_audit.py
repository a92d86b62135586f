"""The instruction audit: the shipped kernels pass, and variants that would change bits do not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the audit compiles kernels; TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)

import triton
import triton.language as tl

from rl_kernel import audit, triton_utils

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sm90", "gfx942"])
def test_sampled_variants_of_every_operator_pass(family):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "audit_kernels.py"), "--sample", "--family", family],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@triton.jit
def _bad(a_ptr, b_ptr, c_ptr, K, KIND: tl.constexpr):
    m = tl.arange(0, 64)
    k = tl.arange(0, 64)
    one = tl.zeros([64, 64], tl.float32)
    two = tl.zeros([64, 64], tl.float32)
    if KIND == "two chains":
        for start in range(0, K, 128):
            a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
            b = tl.load(b_ptr + m[None, :] * K + start + k[:, None])
            one = tl.dot(a, b, one)
            a = tl.load(a_ptr + m[:, None] * K + start + 64 + k[None, :])
            b = tl.load(b_ptr + m[None, :] * K + start + 64 + k[:, None])
            two = tl.dot(a, b, two)
        one += two
    elif KIND == "chunks":
        for start in range(0, K, 128):
            chunk = tl.zeros([64, 64], tl.float32)
            for step in range(start, start + 128, 64):
                a = tl.load(a_ptr + m[:, None] * K + step + k[None, :])
                b = tl.load(b_ptr + m[None, :] * K + step + k[:, None])
                chunk = tl.dot(a, b, chunk)
            one += chunk
    else:
        for start in range(0, K, 64):
            a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
            b = tl.load(b_ptr + m[None, :] * K + start + k[:, None])
            one = tl.dot(a, b, one)
    if KIND == "sum":
        tl.store(c_ptr + m, tl.sum(one, 1))
    elif KIND == "atomic":
        tl.atomic_add(c_ptr + m[:, None] * 64 + m[None, :], one)
    else:
        tl.store(c_ptr + m[:, None] * 64 + m[None, :], one)


def report_of(kind, family, dtype=torch.bfloat16, **options):
    a, c = torch.empty(64, 256, dtype=dtype), torch.empty(64, 64)
    hip = {"matrix_instr_nonkdim": 16, "kpack": 1} if family == "gfx942" else {}
    with audit.record(family) as launches:
        _bad[(1,)](a, a, c, 256, kind, **{"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False, **hip, **options})
    return audit.findings(launches[0], family)


@pytest.mark.parametrize("family", ["sm90", "gfx942"])
def test_a_single_chain_passes(family):
    report = report_of("good", family)
    assert report.mma and not report.problems


@pytest.mark.parametrize("family", ["sm90", "gfx942"])
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("two chains", "accumulators"),
        ("chunks", "accumulators"),
        ("sum", "layout-ordered float sum"),
        ("atomic", "float atomic"),
    ],
)
def test_variants_that_change_bits_fail(family, kind, problem):
    assert any(problem in found for found in report_of(kind, family).problems)


def test_contraction_another_mfma_and_another_type_fail():
    assert any("contraction" in found for found in report_of("good", "sm90", enable_fp_fusion=True).problems)
    other = report_of("good", "gfx942", matrix_instr_nonkdim=32)
    assert any("v_mfma_f32_32x32" in found for found in other.problems)
    half = report_of("good", "sm90", dtype=torch.float16)
    assert any("not bf16" in found for found in half.problems)
    assert audit.same_family([report_of("good", "gfx942"), other])


def test_a_register_spill_fails():
    assert "spills" in " ".join(report_of("good", "sm90", maxnreg=128, num_warps=1).problems)


def test_tree_of_two_element_sums_is_not_a_layout_ordered_sum():
    from rl_kernel.ops.logp import triton as logp

    with audit.record("sm90") as launches:
        logp.leaf_stats(torch.empty(4, 1024), None, 1024)
    assert not audit.findings(launches[0], "sm90").problems
    assert triton_utils.log2_exact(128) == 7


@pytest.mark.parametrize("family", ["sm90", "gfx942"])
@pytest.mark.parametrize("h", [2048, 4096])
def test_backward_of_the_norm_keeps_its_rows_in_registers(h, family):
    from rl_kernel.ops.rms_norm import triton as norm

    x, w, rstd = torch.empty(64, h, dtype=torch.bfloat16), torch.empty(h, dtype=torch.bfloat16), torch.empty(64)
    for dres, table in ((None, "rms_norm_backward"), (x, "add_rms_norm_backward")):
        with audit.record(family) as launches:
            norm.backward(x, dres, x, w, rstd)
            row = triton_utils.launch_row(table, h)
        report = audit.findings(launches[0], family)
        assert not report.problems, (table, report.problems)
        assert (report.constants["ROWS"], report.constants["num_warps"]) == (row["rows"], row["warps"])


def test_a_spill_of_the_backward_with_residual_is_found():
    from rl_kernel.ops.rms_norm import triton as norm

    x, w = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    with (
        audit.record("sm90") as launches,
        triton_utils.override_launch("add_rms_norm_backward", {"rows": 4, "warps": 8}),
    ):
        norm.backward(x, x, x, w, torch.empty(64))
    assert "spills" in " ".join(audit.findings(launches[0], "sm90").problems)
