"""Bytes of the matrix products on a GPU: any M, any tile, any TP size, library and Triton alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_kernel import cublaslt, triton_utils
from tests.ops.gpu_harness import BF16, CASES, Tally, data, differing, rng, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU"),
]
# (N, K) of Qwen3-8B: qkv, o, gate_up, down; their TP 4 shards; Qwen3-0.6B's; small ones with awkward sizes.
QWEN = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
SHARDS = [(1536, 4096), (4096, 1024), (6144, 4096), (4096, 3072)]
SMALL = [(1024, 1024), (3072, 1024), (272, 512), (1000, 896), (128, 64)]
LAUNCHES = [
    {"BM": 16, "BN": 32, "BK": 128, "warps": 4, "stages": 3, "swap": 0, "group": 8, "split": 1},
    {"BM": 64, "BN": 32, "BK": 64, "warps": 4, "stages": 3, "swap": 1, "group": 4, "split": 1},
    {"BM": 32, "BN": 128, "BK": 32, "warps": 8, "stages": 2, "swap": 0, "group": 8, "split": 0},
    {"BM": 128, "BN": 64, "BK": 64, "warps": 8, "stages": 3, "swap": 0, "group": 8, "split": 0},
    {"BM": 128, "BN": 64, "BK": 128, "warps": 4, "stages": 2, "swap": 1, "group": 2, "split": 0},
]


def launch(source):
    return source.choice(LAUNCHES)


def library():
    from rl_kernel.ops.linear import library as module

    reason = cublaslt.unavailable("gfx942" if torch.version.hip else "sm90")
    if reason:
        pytest.skip(reason)
    return module


@pytest.mark.parametrize("part", range(2))
def test_rows_do_not_notice_batch_tile_or_backend(part):
    from rl_kernel.ops.linear import triton as own

    lib, tally, source = library(), Tally(f"linear_{part}"), rng(11 + 100 * part)
    weights = {shape: data(*shape, seed=i, scale=0.02) for i, shape in enumerate(QWEN + SHARDS + SMALL)}
    while tally.cases < CASES // 2:
        shape = source.choice(QWEN if source.random() < 0.2 else SHARDS + SMALL)
        w, m = weights[shape], rows(source, 8192 if shape[0] * shape[1] < 1 << 25 else 2048)
        x = data(m, shape[1], seed=tally.cases)
        out = source.choice([BF16, torch.float32])
        y = lib.matmul(x, w, out_dtype=out)
        tally.equal(y, own.matmul(x, w, out_dtype=out), "library and triton", (shape, m, out))
        a = source.randrange(m)
        b = min(m, a + source.choice([1, 2, 5, 16, 33]))
        tally.equal(y[a:b], lib.matmul(x[a:b], w, out_dtype=out), "library, slice of rows", (shape, m, a, b))
        with triton_utils.override_launch("linear", launch(source)):
            tally.equal(y[a:b], own.matmul(x[a:b], w, out_dtype=out), "triton, slice and launch", (shape, m, a, b))
        n = shape[0] // 2
        tally.equal(y[:, n:], lib.matmul(x, w[n:], out_dtype=out), "column shard", (shape, m))
    tally.done(probe=cublaslt.report())


@pytest.mark.parametrize("part", range(4))
def test_segments_and_tensor_parallel_ranks_give_one_result(part):
    from rl_kernel.ops.collectives import triton as collectives
    from rl_kernel.ops.linear import triton as own

    lib, tally, source = library(), Tally(f"linear_segments_{part}"), rng(12 + 100 * part)
    shapes = [(4096, 4096), (4096, 12288), (1024, 2048), (512, 1024), (272, 896)]
    weights = {shape: data(*shape, seed=i, scale=0.02) for i, shape in enumerate(shapes)}
    while tally.cases < CASES // 4:
        shape, segments = source.choice(shapes), source.choice([2, 4, 8])
        w, m = weights[shape], rows(source, 2048)
        x = data(m, shape[1], seed=tally.cases)
        y = own.matmul(x, w, segments=segments)
        tally.equal(y, lib.matmul(x, w, segments=segments), "library and triton", (shape, m, segments))
        with triton_utils.override_launch("linear_segments", launch(source)):
            tally.equal(y, own.matmul(x, w, segments=segments), "launch", (shape, m, segments))
        a = source.randrange(m)
        tally.equal(y[a:], own.matmul(x[a:], w, segments=segments), "slice of rows")
        tp = source.choice([t for t in (2, 4, 8) if t <= segments])
        k = shape[1] // tp
        partial = torch.stack(
            [
                source.choice([own, lib]).matmul(
                    x[:, r * k : (r + 1) * k],
                    w[:, r * k : (r + 1) * k],
                    segments=segments // tp,
                    out_dtype=torch.float32,
                )
                for r in range(tp)
            ]
        )
        tally.equal(y, collectives.reduce_parts(partial, BF16), "ranks", (shape, m, segments, tp))
    tally.done(probe=cublaslt.report())


@pytest.mark.parametrize("part", range(3))
def test_gradients(part):
    from rl_kernel.ops.collectives import triton as collectives
    from rl_kernel.ops.linear import triton as own

    lib, tally, source = library(), Tally(f"linear_backward_{part}"), rng(13 + 100 * part)
    shapes = [(6144, 4096), (24576, 4096), (1024, 2048), (512, 1024), (768, 256)]
    while tally.cases < CASES // 3 + 1:
        n, k = source.choice(shapes if source.random() < 0.1 else shapes[2:])
        m, segments, parts = rows(source, 2048), source.choice([1, 2, 4]), source.choice([1, 2])
        seed = source.randrange(1 << 30)
        w, dy, x = data(n, k, seed=seed, scale=0.02), data(m, n, seed=seed + 1), data(m, k, seed=seed + 2)
        dx = own.dgrad(dy, w, segments=segments, parts=parts)
        tally.equal(dx, lib.dgrad(dy, w, segments=segments, parts=parts), "dgrad, library and triton", (n, k, m))
        a = source.randrange(m)
        tally.equal(dx[a:], lib.dgrad(dy[a:], w, segments=segments, parts=parts), "dgrad, slice of rows")
        if segments > 1:
            half = n // parts // 2
            ranks = []
            for r in range(2):
                part = [slice((2 * p + r) * half, (2 * p + r + 1) * half) for p in range(parts)]
                ranks.append(
                    own.dgrad(
                        torch.cat([dy[:, s] for s in part], 1),
                        torch.cat([w[s] for s in part]),
                        segments=segments // 2,
                        parts=parts,
                        out_dtype=torch.float32,
                    )
                )
            tally.equal(dx, collectives.reduce_parts(torch.stack(ranks), BF16), "dgrad, two ranks", (n, k, m, parts))
        out = source.choice([BF16, torch.float32])
        dw = lib.wgrad(dy, x, out_dtype=out)
        tally.equal(dw, own.wgrad(dy, x, out_dtype=out), "wgrad, library and triton", (n, k, m, out))
        tally.equal(dw[n // 2 :], lib.wgrad(dy[:, n // 2 :], x, out_dtype=out), "wgrad, column shard")
    tally.done(probe=cublaslt.report())


def test_gradients_of_weights_by_token_counts_unlike_the_probes():
    """Token counts of one bucket share a probe where the gradient is large enough (cublaslt.MANY_TILES)."""
    from rl_kernel.ops.linear import triton as own

    lib, tally, source = library(), Tally("linear_backward_tokens"), rng(14)
    shapes = [*QWEN, *SHARDS, (768, 4096), (4096, 512), (2048, 1024)]
    largest = {size: data(8192, size, seed=size) for size in {x for shape in shapes for x in shape}}
    while tally.cases < CASES // 4:
        n, k = source.choice(shapes if source.random() < 0.2 else shapes[4:])
        assert n * k >= cublaslt.MANY_TILES
        m = rows(source, 8192)
        first = source.randrange(8193 - m)
        dy, x = largest[n][first : first + m], largest[k][first : first + m]
        out = source.choice([BF16, torch.float32])
        right, what = own.wgrad(dy, x, out_dtype=out), (n, k, m, out)
        tally.equal(lib.wgrad(dy, x, out_dtype=out), right, "wgrad, library and triton", what)
        if out == torch.float32:
            start = torch.randn(n, k, device="cuda")
            tally.equal(lib.add_product(dy.t(), x, start.clone()), start + right, "wgrad added", what)
    tally.done(probe=cublaslt.report())


def test_accumulation_into_fp32_is_one_addition():
    lib = library()
    for i, (m, n, k) in enumerate([(512, 1024, 512), (37, 256, 64), (2048, 4096, 1024)]):
        a, b, c = data(m, k, seed=i), data(k, n, seed=i + 1), torch.randn(m, n, device="cuda")
        fresh = lib.product(a, b, torch.empty(m, n, device="cuda"))
        assert differing(c + fresh, lib.add_product(a, b, c.clone())) == 0


def test_graph_replay_and_capture_before_probe():
    lib = library()
    x, w = data(7, 640, seed=1), data(384, 640, seed=2)
    from rl_kernel.ops.linear import triton as own

    eager = own.matmul(x, w)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        own.matmul(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = lib.matmul(x, w)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert differing(captured, eager) == 0
    assert any("k=640" in key for key in cublaslt.report()["unprobed_in_capture"])


def test_accuracy_is_that_of_eager():
    lib = library()
    x, w = data(256, 4096, seed=1), data(4096, 4096, seed=2, scale=0.02)
    exact = x.double() @ w.double().t()
    for segments in (1, 8):
        assert (lib.matmul(x, w, segments=segments) - exact).abs().sum() <= 2 * ((x @ w.t()) - exact).abs().sum()


CONTROL = """
import json, torch
from tests.ops.gpu_harness import data, differing
found = {}
for n, k in ((4096, 4096), (4096, 12288), (6144, 4096)):
    w = data(n, k, seed=1, scale=0.02)
    for m in (1, 8, 64, 256, 1024):
        x = data(m, k, seed=2)
        y = x @ w.t()
        found[f"{n}x{k} M={m}"] = differing(y[:1], x[:1] @ w.t()) + differing(y[-1:], x[-1:] @ w.t())
print(json.dumps(found))
"""


def test_negative_control_default_cublas_differs():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUBLAS")}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CONTROL], env={**environment, "PYTHONPATH": str(root)}, capture_output=True, text=True,
        cwd=root, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    folder = os.environ.get("RLK_REPORT_DIR")
    if folder:
        Path(folder, "control_cublas.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    assert sum(found.values()) > 0
