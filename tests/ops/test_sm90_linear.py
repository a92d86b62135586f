"""Bytes of the Hopper products of few rows and of segments, beside the Triton backend."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from rl_kernel import registry
from rl_kernel.ops.linear import library, sm90, triton
from rl_kernel.triton_utils import override_launch
from tests.ops.gpu_harness import differing

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
MISSING = sm90.supports(registry.Request("linear", "sm90", BF16))
if MISSING:
    pytest.skip(MISSING, allow_module_level=True)
ROWS = (1, 7, 16, 33, 64, 65, 97, 128, 129, 200, 256, 300, 796, 1024, 1820, 6827)
CHAIN = {"BM": 64, "BN": 64, "BK": 64, "warps": 4, "stages": 3, "swap": 0, "group": 8, "split": 0}


@contextlib.contextmanager
def launches(w=None, rows=32, per_processor=1, dependent=0):
    """All products that these kernels can compute go to them; ``w`` [N, K]: those of one segment with it too."""
    few = {"rows": rows, "per_processor": per_processor, "dependent": dependent}
    with contextlib.ExitStack() as stack:
        stack.enter_context(override_launch("linear_few_sm90", {**few, "rows": 32}))
        stack.enter_context(override_launch("linear_segments_sm90", {"longest": 1 << 60}))
        if w is not None:
            stack.enter_context(override_launch("linear_few_{}x{}_sm90".format(*w.shape), few))
        yield


def heavy(*shape, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=g)
    return (x * torch.randn(shape, device="cuda", generator=g).exp_()).bfloat16()


def tree(leaves):
    while len(leaves) > 1:
        leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def chains(a, b, segments, parts=1):
    """fp32 a [M, K] @ b [K, N]: every leaf a chain of its own by Triton, then the tree."""
    m, k = a.shape
    a, b = a.reshape(m, parts, segments, -1), b.reshape(parts, segments, -1, b.shape[1])
    with override_launch("linear", CHAIN):
        return tree([
            triton.multiply(a[:, :, s].reshape(m, -1), b[:, s].reshape(k // segments, -1), out_dtype=F32)
            for s in range(segments)
        ])  # fmt: skip


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize("n, k", [(640, 2048), (1032, 1024), (4096, 4096)])
def test_products(n, k, segments):
    w, other = heavy(n, k, seed=1), 0
    for m in ROWS:
        x = heavy(m, k, seed=m)
        expected = chains(x, w.t(), segments)
        for how in ((32, 1, 0), (64, 1, 1), (32, 2, 1)):
            with launches(w, *how):
                found = sm90.matmul(x, w, segments=segments, out_dtype=F32)
                assert differing(found, expected) == 0, (m, how)
                assert differing(sm90.matmul(x, w, segments=segments), expected.bfloat16()) == 0, (m, how)
        assert differing(sm90.matmul(x, w, segments=segments, out_dtype=F32), expected) == 0, (m, "table")
        other += differing(found, chains(x, w.t(), 2 if segments == 1 else segments // 2))
    assert other > 0


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("rows", [32, 64])
def test_rows_that_do_not_exist(rows, segments):
    """Their place in shared memory is not written: here it has NaN from the call before."""
    x, w = heavy(128, 2048), heavy(1032, 2048, seed=1)
    poison = torch.full_like(x, torch.nan)
    expected = chains(x, w.t(), segments).bfloat16()
    with launches(w, rows=rows, dependent=1):
        for m in (*range(1, 65), *range(65, 128, 6), 128):
            bad = sm90.matmul(poison, w, segments=segments)
            found = sm90.matmul(x[:m], w, segments=segments)
            assert bool(bad.isnan().all()) and differing(found, expected[:m]) == 0, m


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_triton_agrees(segments):
    x, w = heavy(796, 4096, seed=2), heavy(1024, 4096, seed=1)
    with launches(w):
        found = sm90.matmul(x, w, segments=segments)
    assert differing(found, triton.matmul(x, w, segments=segments)) == 0


@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("n, k", [(2048, 640), (3072, 1032)])
def test_gradient_of_x(n, k, segments, parts):
    w = heavy(n, k, seed=1)
    for m in (1, 65, 300, 1024, 1820):
        dy = heavy(m, n, seed=m)
        expected = chains(dy, w, segments, parts)
        with launches(w):
            found = sm90.dgrad(dy, w, segments=segments, parts=parts, out_dtype=F32)
            rounded = sm90.dgrad(dy, w, segments=segments, parts=parts)
        assert differing(found, expected) == 0, m
        assert differing(rounded, expected.bfloat16()) == 0, m
        assert differing(sm90.dgrad(dy, w, segments=segments, parts=parts, out_dtype=F32), expected) == 0, (m, "table")


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_lengths_of_segments(segments):
    """K of 64 to 1280 a segment, tiles whose last rows and columns are missing, again and again."""
    for size in (64, 128, 192, 256, 320, 640, 1280):
        x, w = heavy(333, size * segments, seed=size), heavy(776, size * segments, seed=1)
        expected = chains(x, w.t(), segments)
        for _ in range(10):
            with launches(w):
                found = sm90.matmul(x, w, segments=segments, out_dtype=F32)
                turned = sm90.dgrad(x, w.t().contiguous(), segments=segments, out_dtype=F32)
                rounded = sm90.matmul(x, w, segments=segments)
            assert differing(found, expected) == 0 and differing(turned, expected) == 0, size
            assert differing(rounded, expected.bfloat16()) == 0, size
    assert differing(expected, chains(x, w.t(), 1)) > 0


@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_nothing_is_written_behind_the_output(segments, dtype):
    """Segments store whole tiles, by the copy engine in bf16: what lies outside of the output stays as it is."""
    for m, n in ((1, 8), (65, 264), (129, 1000), (333, 776), (1500, 4104)):
        x, w = heavy(m, 192 * segments, seed=m), heavy(n, 192 * segments, seed=n)
        memory = torch.full((m + 130, n), 7.0, device="cuda", dtype=dtype)
        torch.ops.rlk.sm90_segments(x, w, False, segments, 1, memory[:m])
        assert differing(memory[:m], chains(x, w.t(), segments).to(dtype)) == 0, (m, n)
        assert bool((memory[m:] == 7).all()), (m, n)


def test_strided_rows():
    wide, w = heavy(500, 4096, seed=3), heavy(512, 4096, seed=4)
    x, part = wide[:, 1024:3072], w[:, 2048:]
    for segments in (2, 8):
        right = chains(x, part.t(), segments).bfloat16()
        for m in (33, 500):
            with launches(part):
                assert differing(sm90.matmul(x[:m], part, segments=segments), right[:m]) == 0


def test_sizes_that_other_kernels_serve(monkeypatch):
    """Odd widths, slices that are no multiple of 64 and unaligned data go on to the library backend."""
    met = []
    for name in ("matmul", "dgrad"):
        run = getattr(library, name)
        monkeypatch.setattr(library, name, lambda *a, run=run, **kw: met.append(run) or run(*a, **kw))
    x, w = heavy(300, 1024, seed=5), heavy(515, 1024, seed=6)
    cases = [(x, w), (x[:, :416], w[:512, :416]), (x[:, 1:257].contiguous().view(300, 256), heavy(257, 256)),
             (x[:, 1:257], heavy(256, 256))]  # fmt: skip
    for count, (a, b) in enumerate(cases, 1):
        with launches(b):
            found = sm90.matmul(a, b, segments=2)
        assert differing(found, chains(a, b.t(), 2).bfloat16()) == 0
        assert len(met) == count


def test_one_graph_for_all():
    w = heavy(1024, 2048, seed=1)
    inputs = [heavy(m, 2048, seed=m) for m in (8, 64, 300, 1024)]
    with launches(w, dependent=1):
        expected = [sm90.matmul(x, w, segments=4) for x in inputs]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [sm90.matmul(x, w, segments=4) for x in inputs]
        for _ in range(3):
            for y in found:
                y.zero_()
            graph.replay()
            assert [differing(y, z) for y, z in zip(found, expected, strict=True)] == [0] * len(inputs)


@pytest.mark.parametrize("graphed", [False, True])
def test_kernels_that_start_early_see_what_is_in_front_of_them(graphed):
    """Outputs feed the next product, and weights and inputs are written right before they are read."""
    n, steps = 4096, 12
    fresh = [heavy(n, n, seed=i) * 2**-7 for i in range(3)]
    x, w, buffer = heavy(8, n, seed=9), torch.empty_like(fresh[0]), heavy(8, n, seed=8)

    def work():
        results, y = [], x
        for i in range(steps):
            w.copy_(fresh[i % 3])
            buffer.copy_(y)
            y = sm90.matmul(sm90.matmul(buffer, w), w)  # the second starts while the first, which it reads, ends
            results.append(y)
        return results

    with launches(w, per_processor=2):
        expected = [y.clone() for y in work()]
    torch.cuda.synchronize()
    with launches(w, per_processor=2, dependent=1):
        work()
        torch.cuda.synchronize()
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = work()
        for _ in range(20):
            if graphed:
                for y in found:
                    y.zero_()
                graph.replay()
            else:
                found = work()
            assert [differing(y, z) for y, z in zip(found, expected, strict=True)] == [0] * steps
    assert differing(expected[0], expected[1]) > 0


def test_a_kernel_with_other_bits_is_not_used(monkeypatch):
    from rl_kernel import cublaslt

    x, w = heavy(300, 2048, seed=1), heavy(512, 2048, seed=2)
    right = chains(x, w.t(), 4).bfloat16()
    wrong = lambda a, b, out, *rest: out.zero_()  # noqa: E731
    monkeypatch.setattr(sm90, "_segments", wrong)
    monkeypatch.setattr(cublaslt, "_verdicts", dict(cublaslt._verdicts))
    sm90._probe.cache_clear()
    try:
        with pytest.warns(UserWarning, match="not used"), launches():
            assert differing(sm90.matmul(x, w, segments=4), right) == 0
        assert sm90._probe() == {"segments"}
        assert any("segments" in name for name in cublaslt.report()["replaced"])
    finally:
        sm90._probe.cache_clear()


def test_chosen_by_default():
    x = torch.zeros(1, device="cuda")
    found = registry.resolve("linear", x.device, BF16)
    assert found.module is sm90 and not found.passed_over and not sm90._probe()


def test_probe_holds_under_another_default_dtype():
    """Engines resolve operators while they build a model, with bfloat16 as the default."""
    sm90._probe.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert not sm90._probe()
    finally:
        torch.set_default_dtype(before)
        sm90._probe.cache_clear()
