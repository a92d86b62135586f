"""Products by algorithms of cuBLASLt that the launch table names: bits, graphs, streams, and what is not there."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an H100 or H200", allow_module_level=True)

from rl_kernel import cublaslt, registry
from rl_kernel.ops.linear import library, sm90, triton
from rl_kernel.triton_utils import launch_table
from tests.ops.gpu_harness import differing

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MISSING = sm90.supports(registry.Request("linear", "sm90", BF16))
if MISSING:
    pytest.skip(MISSING, allow_module_level=True)
if (cublaslt.version() or 0) // 100 != sm90.ALGORITHM_VERSION:
    pytest.skip(
        f"cuBLASLt {cublaslt.version()}: the launch table names algorithms of another version", allow_module_level=True
    )
CELLS = [
    (*map(int, name.split("_")[2].split("x")), row["upto"])
    for name, rows in launch_table("sm90").items()
    if name.startswith("linear_library_")
    for row in rows
    if row["id"]
]


def heavy(*shape, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=g)
    return (x * torch.randn(shape, device="cuda", generator=g).exp_()).bfloat16()


def replaced():
    return [name for name in cublaslt.report()["replaced"] if "algorithm='id" in name]


@pytest.mark.parametrize("n, k, m", CELLS)
def test_bits_and_graph(n, k, m):
    x, w = heavy(m, k, seed=m), heavy(n, k, seed=1)
    row = sm90.algorithm(x, w)
    assert row is not None and row["id"] and not replaced()
    right = triton.matmul(x, w)
    assert differing(sm90.matmul(x, w), right) == 0
    assert differing(library.matmul(x, w), right) == 0
    assert differing(sm90.matmul(x, w), triton.matmul(x, w, segments=2)) > 0  # control
    for other in (x[:-1], x.roll(1, 0)[: m // 2]):  # one row does not depend on the batch
        assert differing(sm90.matmul(other, w), triton.matmul(other, w)) == 0
    torch.cuda.synchronize()
    graph, still = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        found = sm90.matmul(still, w)
    before = cublaslt.replaced()
    for seed in (3, 4):
        still.copy_(heavy(m, k, seed=seed))
        found.zero_()
        graph.replay()
        assert differing(found, triton.matmul(still, w)) == 0
    assert cublaslt.replaced() == before


def test_other_results_and_strides_go_to_the_library():
    n, k, m = CELLS[0]
    x, w = heavy(m, k, seed=2), heavy(n, k, seed=1)
    assert sm90.algorithm(x, w) is not None
    assert sm90.algorithm(x, w, 2) is None and sm90.algorithm(x, w, 1, torch.float32) is None
    assert (
        sm90.algorithm(heavy(m, k + 8)[:, :k], w) is None and sm90.algorithm(heavy(m * k + 8)[8:].view(m, k), w) is None
    )
    assert sm90.algorithm(x[:-1], w) is None


def test_streams_and_threads():
    n, k, m = CELLS[0]
    w = heavy(n, k, seed=1)
    inputs = [heavy(m, k, seed=s) for s in range(4)]
    right = [triton.matmul(x, w) for x in inputs]
    sm90.matmul(inputs[0], w)
    torch.cuda.synchronize()
    bad = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                late = torch.zeros_like(inputs[i])
                torch.cuda._sleep(20000)
                late.copy_(inputs[i])  # a product in another stream would read zeros
                bad.append(differing(sm90.matmul(late, w), right[i]))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == [0] * 80


def test_another_version_of_the_library_chooses_itself(monkeypatch):
    n, k, m = CELLS[0]
    x, w = heavy(m, k, seed=1), heavy(n, k, seed=2)
    monkeypatch.setattr(cublaslt, "version", lambda: 120900)
    assert sm90.algorithm(x, w) is None
    assert differing(sm90.matmul(x, w), triton.matmul(x, w)) == 0 and not replaced()


def test_an_algorithm_with_other_bits_is_not_used(monkeypatch):
    monkeypatch.setattr(cublaslt, "_verdicts", {})
    n, k, m = CELLS[0]
    x, w = heavy(m, k, seed=1), heavy(n, k, seed=2)
    monkeypatch.setattr(sm90, "_by_algorithm", lambda a, b, row: torch.zeros(m, n, device="cuda", dtype=BF16))
    with pytest.warns(UserWarning, match="elements differ"):
        found = sm90.matmul(x, w)
    assert differing(found, triton.matmul(x, w)) == 0 and replaced()


def test_start_up_probe_meets_the_algorithms(monkeypatch):
    monkeypatch.setattr(cublaslt, "_verdicts", {})
    monkeypatch.setattr(cublaslt, "_probed", set())
    n, k, m = CELLS[0]
    w = heavy(n, k, seed=2)
    cublaslt.probe([w], [m])
    assert any(getattr(key, "algorithm", "") for key in cublaslt._verdicts) and not replaced()
