"""What the GPU backends decide before any kernel runs: tables, buckets, alignment, reasons, the attention variant."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter

import pytest
import torch

from rl_kernel import cublaslt, registry
from rl_kernel.contract import contract_for, fingerprint
from rl_kernel.errors import ContractError
from rl_kernel.registry import Request

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from rl_kernel import triton_utils

OPS = (
    "linear",
    "rms_norm",
    "rope",
    "attention",
    "swiglu",
    "embedding",
    "logp",
    "linear_logp",
    "sampling",
    "collectives",
)


def test_tables_of_both_families_have_the_same_operators_and_end_open():
    sm90, gfx942 = (triton_utils.launch_table(family) for family in ("sm90", "gfx942"))
    assert {op for op in sm90 if not op.endswith("_sm90")} == set(gfx942)  # kernels that only Hopper has
    for table in (sm90, gfx942):
        for rows in table.values():
            sizes = [row["upto"] for row in rows]
            assert sizes == sorted(sizes) and sizes[-1] >= 1 << 62


def test_override_is_undone():
    before = triton_utils.launch_row("logp", 10)
    with triton_utils.override_launch("logp", {"leaves": 1, "warps": 1}):
        assert triton_utils.launch_row("logp", 10)["leaves"] == 1
    assert triton_utils.launch_row("logp", 10) == before


@pytest.mark.parametrize("op", OPS)
def test_every_operator_has_a_triton_backend_that_refuses_the_cpu(op):
    module = importlib.import_module(f"rl_kernel.ops.{op}.triton")
    assert "not cpu" in module.supports(Request(op, "cpu", torch.bfloat16))
    dtype = torch.float32 if op in ("logp", "sampling", "collectives") else torch.bfloat16
    for family in ("sm90", "gfx942"):
        assert module.supports(Request(op, family, dtype)) is None


def test_products_of_other_dtypes_are_refused_with_the_reason():
    from rl_kernel.ops.linear import library, triton

    for module in (library, triton):
        assert "bfloat16" in module.supports(Request("linear", "sm90", torch.float32))
    assert "sm90" in library.supports(Request("linear", "gfx942", torch.bfloat16))


def test_buckets_cover_and_never_shrink():
    ends = [cublaslt.bucket(m) for m in range(1, 9000)]
    assert all(end >= m for m, end in enumerate(ends, 1)) and ends == sorted(ends)
    assert all(cublaslt.bucket(end) == end for end in ends)
    assert ends[:16] == list(range(1, 17)) and len(set(ends)) < 120


def test_token_counts_of_a_bucket_share_a_class_except_in_small_gradients(monkeypatch):
    def classes(n: int, k: int) -> int:
        found = set()
        for tokens in (1793, 1800, 1820, 1920):  # one bucket
            dy, x = (torch.empty(tokens, size, dtype=torch.bfloat16, device="meta") for size in (n, k))
            found.add(cublaslt.shape_class(dy.t(), x, torch.bfloat16, False))
        return len(found)

    assert cublaslt.bucket(1793) == cublaslt.bucket(1920)
    monkeypatch.setattr(cublaslt, "version", lambda: 130102)
    assert (classes(4096, 512), classes(4096, 504), classes(1 << 18, 64)) == (1, 4, 4)
    monkeypatch.setattr(cublaslt, "version", lambda: 130200)
    assert classes(4096, 512) == 4
    forward = [torch.empty(t, 64, dtype=torch.bfloat16, device="meta") for t in (1793, 1920)]
    w = torch.empty(32, 64, dtype=torch.bfloat16, device="meta")
    assert len({cublaslt.shape_class(x, w.t(), torch.bfloat16, False) for x in forward}) == 1


def test_unaligned_operands_never_reach_the_library():
    x, w = torch.zeros(5, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert cublaslt.aligned(x, w.t())
    assert not cublaslt.aligned(x, w[:31].t())  # result rows of 31 elements
    assert not cublaslt.aligned(x[:, :60], w[:, :60].t())
    assert not cublaslt.aligned(torch.zeros(5, 65, dtype=torch.bfloat16)[:, 1:], w.t())


def test_setup_overrides_a_setting_that_allows_splits(monkeypatch):
    monkeypatch.setattr(cublaslt, "_done", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    with pytest.warns(UserWarning, match="CUBLAS_WORKSPACE_CONFIG=:4096:8 lets cuBLAS split"):
        cublaslt.setup()
    assert cublaslt.report()["environment"] == cublaslt.ENVIRONMENT


def test_attention_variant_is_part_of_the_contract(monkeypatch):
    from rl_kernel.ops.attention import library, triton

    blocks, cpu = fingerprint("sm90"), fingerprint("cpu")
    request = Request("attention", "sm90", torch.bfloat16)
    assert triton.supports(request) is None and "RLK_SM90_ATTENTION=fa3" in library.supports(request)
    monkeypatch.setenv("RLK_SM90_ATTENTION", "fa3")
    assert fingerprint("sm90") != blocks and fingerprint("cpu") == cpu
    assert "fa3" in triton.supports(request)
    assert contract_for("gfx942").ops["attention"].parameters["key_block"] == 64
    monkeypatch.setenv("RLK_SM90_ATTENTION", "other")
    with pytest.raises(ContractError, match="must be blocks or fa3"):
        fingerprint("sm90")


def test_segments_that_do_not_divide_are_refused():
    from rl_kernel.ops.linear import triton

    x, w = torch.zeros(2, 36, dtype=torch.bfloat16), torch.zeros(8, 36, dtype=torch.bfloat16)
    with pytest.raises(ContractError, match="does not divide into 8 segments"):
        triton.matmul(x, w, segments=8)


def test_manifest_names_the_kernels_of_packed_attention(monkeypatch):
    from rl_kernel.ops.attention import hopper

    monkeypatch.setattr(hopper, "_calls", Counter())
    assert hopper.summary() is None and "attention" not in registry.resolved()
    x, cu = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.tensor([0, 4], dtype=torch.int32)
    assert hopper.choose("forward", x, x, x, cu, cu) is None
    assert registry.resolved()["attention"] == "forward: 1 x Triton (cpu is not a Hopper GPU)"


@pytest.mark.parametrize(("vocabulary", "ranks"), [(151936, 8), (151936, 4), (128256, 4), (151936, 2), (500, 8)])
def test_hopper_schedules_are_the_same_on_ranks_with_and_without_padding(vocabulary, ranks):
    """Each chunk of tokens and each schedule is a collective of its own."""
    from types import SimpleNamespace

    from rl_kernel.ops.linear_logp import sm90, sm90_schedules
    from rl_kernel.ops.logp.vocab_tree import VocabLayout

    step = -(-vocabulary // (128 * ranks)) * 128
    layout = VocabLayout(tuple(step * r for r in range(ranks + 1)), vocabulary)
    none = torch.empty(0)
    calls = [
        sm90_schedules.Call(none, None, layout, -100, ranks, SimpleNamespace(rank=lambda r=r: r)) for r in range(ranks)
    ]
    for tokens in (1, 796, 11200, 14571, 15807, 21270, 60000, 400000):
        assert len({sm90_schedules._chunk_rows(call, tokens, 4096) for call in calls}) == 1
        assert len({call.kept_bytes(tokens) for call in calls}) == 1
    for call in calls:
        assert call.columns_to_keep(1, 4096) == call.columns and call.columns_to_keep(10**9, 4096) == 0
        for begin, end in call.local_segments():
            for tokens in (6827, 11200, 30000):  # whole blocks of a segment, or all of it
                keep = call.columns_to_keep(tokens, 4096)
                assert keep % 256 == 0 or keep == call.columns
                assert keep <= begin or (keep - begin) % 16384 == 0 or keep >= end
    # What each rank has itself would not do.
    assert len({sm90.kept_columns(call.columns) for call in calls}) > 1 or step * ranks == vocabulary
