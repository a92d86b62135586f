"""Collectives between GPUs: bits of the tree on every path, in graphs, under skew, and for more ranks than GPUs."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops import collectives
from rl_kernel.ops.collectives import peer, reference

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16
PATHS = {
    "peer": peer.Limits(),
    "peer whole": peer.Limits(0, 1 << 40),
    "peer sliced": peer.Limits(0, 0),
    "gather": None,
}
SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 255, 256, 257, 1000, 2047, 2048, 2049, 8191, 16384, 65535, 65537, 131072)
SIZES += (262144, 300001, 1 << 19, (1 << 20) + 3, 3_000_000, (1 << 22) - 1, 1 << 22)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def wrong(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    return int((bits(a) != bits(b)).sum())


def payload(rank: int, shape: tuple[int, ...] | int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """The same on every rank, heavy tails, a few negative zeros."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
    x = torch.randn(shape, device="cuda", generator=generator)
    x = x * torch.randn(shape, device="cuda", generator=generator).mul_(2).exp_()
    return torch.where(x.abs() < 1e-3, -0.0, x).to(dtype)


def payloads(ranks: int, shape: tuple[int, ...] | int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.stack([payload(r, shape, dtype, seed) for r in range(ranks)])


@contextlib.contextmanager
def forced(group, path: str):
    """Calls of ``group`` on one path."""
    assert collectives.prepare(group), collectives.report()
    known = peer._known[group.group_name]
    peers = known.peers
    before = peers.limits
    known.peers, peers.limits = (None, before) if PATHS[path] is None else (peers, PATHS[path])
    try:
        yield peers
    finally:
        known.peers, peers.limits = peers, before


def _sizes(group, path: str) -> dict:
    rank, bad, cases = group.rank(), [], 0
    with forced(group, path) as peers:
        peers.calls.clear()
        for numel in SIZES:
            for dtype in (F32, BF16):
                parts = payloads(2, numel, dtype, seed=numel)
                x = parts[rank]
                shifted = torch.empty(numel + 1, dtype=dtype, device="cuda")[1:].copy_(x)  # off the 16 byte grid
                for out_dtype in (F32, BF16):
                    total = reference.reduce_parts(parts, out_dtype)
                    found = {"all_reduce": wrong(collectives.all_reduce(x, group, out_dtype=out_dtype), total)}
                    found["unaligned"] = wrong(collectives.all_reduce(shifted, group, out_dtype=out_dtype), total)
                    if numel % 2 == 0:
                        own = total.view(2, -1)[rank]
                        found["scatter"] = wrong(collectives.reduce_scatter(x, group, out_dtype=out_dtype), own)
                        found["scatter unaligned"] = wrong(
                            collectives.reduce_scatter(shifted, group, out_dtype=out_dtype), own
                        )
                    found["all_gather"] = wrong(collectives.all_gather(x, group), parts.view(-1))
                    found["all_gather unaligned"] = wrong(collectives.all_gather(shifted, group), parts.view(-1))
                    cases += len(found)
                    bad += [(numel, dtype, out_dtype, kind, count) for kind, count in found.items() if count]
        matrix = payloads(2, (96, 40), seed=5)
        transposed = matrix.transpose(1, 2)  # not contiguous
        count = wrong(collectives.all_reduce(transposed[rank], group), transposed[0] + transposed[1])
        bad += [("transposed", count)] if count else []
        empty = torch.empty((0, 8), device="cuda")
        assert collectives.all_reduce(empty, group).shape == (0, 8)
        assert collectives.reduce_scatter(empty, group).shape == (0, 8)
        assert collectives.all_gather(empty, group).shape == (0, 8)
        return {"cases": cases, "bad": bad[:10], "calls": dict(peers.calls)}


@pytest.mark.parametrize("path", PATHS)
def test_bits_of_every_size(two_gpus, path):
    for result in two_gpus.run(_sizes, path):
        assert result["cases"] > 500 and not result["bad"], result
        names = set(result["calls"])
        assert ("all_reduce small" in names) == (path == "peer"), names
        assert ("all_reduce sliced" in names) == (path in ("peer", "peer sliced")), names
        assert bool(names) == (path != "gather")


def _control(group) -> dict:
    """Two ranks: a + b commutes, so NCCL's fp32 sum has the tree's bits. Its bf16 sum has not, nor has another order of
    four ranks."""
    import torch.distributed as dist

    parts = payloads(2, 1 << 16)
    ours = collectives.all_reduce(parts[group.rank()], group, out_dtype=BF16)
    plain = parts[group.rank()].clone()
    dist.all_reduce(plain, group=group)
    early = parts[group.rank()].to(BF16)
    dist.all_reduce(early, group=group)
    four = payloads(4, 1 << 16)
    tree, sequential = reference.reduce_parts(four, F32), ((four[0] + four[1]) + four[2]) + four[3]
    return {"fp32": wrong(plain.to(BF16), ours), "bf16": wrong(early, ours), "four ranks": wrong(tree, sequential)}


def test_negative_controls(two_gpus):
    for found in two_gpus.run(_control):
        assert found["fp32"] == 0 and found["bf16"] > 100 and found["four ranks"] > 100, found


def _graph(group, path: str, replays: int) -> dict:
    rank, source = group.rank(), random.Random(group.rank())
    sizes = (2048, 40_000, 300_000, 1 << 21)  # small, small, whole, sliced with the default limits
    with forced(group, path) as peers:
        both = [payloads(2, n, seed=n) for n in sizes]
        noise = [payloads(2, n, seed=n + 1).mul_(1e-3) for n in sizes]
        count = torch.zeros((), dtype=torch.int64, device="cuda")
        last = [torch.empty(n, device="cuda") for n in sizes]

        def body() -> None:
            for parts, step, kept in zip(both, noise, last, strict=True):
                parts.add_(step)
                total = reference.reduce_parts(parts, F32)
                found = collectives.all_reduce(parts[rank], group)
                count.add_((bits(found) != bits(total)).sum())
                kept.copy_(found)
                rounded = collectives.reduce_scatter(parts[rank], group, out_dtype=BF16)
                count.add_((bits(rounded) != bits(total.to(BF16).view(2, -1)[rank])).sum())
                count.add_((bits(collectives.all_gather(rounded, group)) != bits(total.to(BF16))).sum())

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            body()
        first = [kept.clone() for kept in last]
        eager = payloads(2, 5000, seed=9)
        for i in range(replays):
            if source.random() < 0.3:
                torch.cuda._sleep(source.randint(1000, 400_000))  # this rank is late, on the GPU
            if source.random() < 0.02:
                time.sleep(source.random() * 0.01)  # or on the host
            graph.replay()
            if i % 37 == 0:  # calls outside the graph in between
                total = collectives.all_reduce(eager[rank], group)
                count.add_((bits(total) != bits(eager[0] + eager[1])).sum())
        torch.cuda.synchronize()
        changed = min(wrong(a, b) for a, b in zip(first, last, strict=True))
        return {"wrong": int(count), "changed": changed, "calls": dict(peers.calls)}


@pytest.mark.parametrize(("path", "replays"), [("peer", 1000), ("gather", 100)])
def test_graph_replays_under_skew(two_gpus, path, replays):
    for found in two_gpus.run(_graph, path, replays):
        assert found["wrong"] == 0 and found["changed"] > 0, found


def _streams(group) -> dict:
    rank, sizes = group.rank(), [2 ** (3 + i % 18) + i for i in range(300)]
    with forced(group, "peer"):
        inputs = [payloads(2, n, seed=n) for n in sizes]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        outputs = []
        for i, parts in enumerate(inputs):  # no wait between the streams but the collectives' own
            with torch.cuda.stream(streams[(i * i) % 3]):
                if i % 7 == rank:
                    torch.cuda._sleep(200_000)
                outputs.append((collectives.all_reduce(parts[rank], group), collectives.all_gather(parts[rank], group)))
        torch.cuda.synchronize()
        sums = sum(wrong(out, parts[0] + parts[1]) for (out, _), parts in zip(outputs, inputs, strict=True))
        gathers = sum(wrong(out, parts.view(-1)) for (_, out), parts in zip(outputs, inputs, strict=True))
        return {"sums": sums, "gathers": gathers}


def test_calls_from_several_streams(two_gpus):
    for found in two_gpus.run(_streams):
        assert found == {"sums": 0, "gathers": 0}


def _gradients(group, path: str) -> dict:
    rank, bad = group.rank(), {}

    def tree(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
        return reference.reduce_parts(payloads(2, shape, seed=seed), F32)

    with forced(group, path):
        for n, shape in enumerate(((24, 7), (24, 5000), (512, 4096))):
            rows, full = shape[0] // 2, (2 * shape[0], *shape[1:])
            x = payload(rank, shape, seed=1).requires_grad_()
            total = collectives.all_reduce(x, group, out_dtype=BF16)
            (grad,) = torch.autograd.grad(total, x, payload(7, shape, BF16))
            found = {"identity": wrong(grad, payload(7, shape, BF16).float())}
            part = collectives.reduce_scatter(x, group)
            (grad,) = torch.autograd.grad(part, x, payload(rank, (rows, *shape[1:]), seed=2))
            found["gathered"] = wrong(grad, payloads(2, (rows, *shape[1:]), seed=2).flatten(0, 1))
            whole = collectives.all_gather(x, group)
            (grad,) = torch.autograd.grad(whole, x, payload(rank, full, seed=3))
            found["scattered"] = wrong(grad, tree(3, full)[rank * shape[0] : (rank + 1) * shape[0]])
            (grad,) = torch.autograd.grad(collectives.copy_to_group(x, group), x, payload(rank, shape, seed=4))
            found["copied"] = wrong(grad, tree(4, shape))
            bad |= {(n, kind): count for kind, count in found.items() if count}
    return bad


@pytest.mark.parametrize("path", ["peer", "gather"])
def test_gradients(two_gpus, path):
    assert two_gpus.run(_gradients, path) == [{}, {}]


def _unprepared(group) -> dict:
    import torch.distributed as dist

    from rl_kernel.ops.collectives import triton

    other = dist.new_group([0, 1])
    parts = payloads(2, 4096)
    triton.reduce_parts(parts, F32)  # a kernel cannot be loaded inside a capture
    warm = torch.zeros(1, device="cuda")
    dist.all_reduce(warm, group=other)  # NCCL itself must have started
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with pytest.raises(ContractError, match="inside a graph capture"):
            collectives.prepare(other)
        captured = collectives.all_reduce(parts[group.rank()], other)
    graph.replay()
    torch.cuda.synchronize()
    path = collectives.report()[other.group_name]
    eager = collectives.all_reduce(parts[group.rank()], other)  # prepares
    after = collectives.report()[other.group_name]
    total = parts[0] + parts[1]
    return {"captured": wrong(captured, total), "eager": wrong(eager, total), "path": path, "after": after}


def test_a_group_first_met_in_a_capture_gathers(two_gpus):
    for found in two_gpus.run(_unprepared):
        assert found["captured"] == found["eager"] == 0
        assert found["path"]["path"] == "gather" and found["path"]["captured_unprepared"] > 0
        assert found["after"]["path"] == "peer" and found["after"]["reason"] is None


def _setting(group) -> tuple[bool, dict]:
    import os

    import torch.distributed as dist

    other = dist.new_group([0, 1])
    os.environ["RLK_COLLECTIVES"] = "gather"
    try:
        made = collectives.prepare(other)
    finally:
        del os.environ["RLK_COLLECTIVES"]
    return made, collectives.report()[other.group_name]


def test_the_fallback_is_visible(two_gpus):
    for made, found in two_gpus.run(_setting):
        assert not made and found["path"] == "gather" and "RLK_COLLECTIVES=gather" in found["reason"]


def _emulated(group, ranks: int) -> dict:
    """Every rank on a stream of one GPU, with few lanes, so that all ranks' blocks are resident."""
    import rl_kernel._C_gpu  # noqa: F401

    device, size, lanes = torch.device("cuda", torch.cuda.current_device()), 32 << 20, 4
    memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
    addresses = [buffer.data_ptr() for buffer in memory]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    torch.cuda.synchronize()
    members = [peer.Peers(addresses, r, size, device, lanes=lanes, timeout_s=20, owner=memory) for r in range(ranks)]
    bad, cases = [], 0
    for limits in (peer.Limits(), PATHS["peer whole"], PATHS["peer sliced"]):
        for numel in (1, 7, 64, 1000, 4097, 100_003, 1 << 20):
            for dtype, out_dtype in ((F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32)):
                parts = payloads(ranks, (ranks, numel), dtype, seed=numel)
                total = reference.reduce_parts(parts, out_dtype)
                sums = [torch.empty_like(total) for _ in range(ranks)]
                own = [torch.empty_like(total[:1]) for _ in range(ranks)]
                gathered = [torch.empty((ranks, numel), dtype=dtype, device=device) for _ in range(ranks)]
                torch.cuda.synchronize()
                for member in members:
                    member.limits = limits

                def launch(call, parts=parts, sums=sums, own=own, gathered=gathered, out_dtype=out_dtype):
                    # All ranks of one call before the next: loading a kernel may wait for those that run.
                    for r in random.sample(range(ranks), ranks):
                        with torch.cuda.stream(streams[r]):
                            if call == "all_reduce":
                                members[r].all_reduce(parts[r], out_dtype, sums[r])
                            elif call == "reduce_scatter":
                                members[r].reduce_scatter(parts[r], out_dtype, own[r])
                            else:
                                members[r].all_gather(parts[r, r], gathered[r])

                for call in ("all_reduce", "reduce_scatter", "all_gather"):
                    launch(call)
                torch.cuda.synchronize()
                everything = torch.stack([parts[r, r] for r in range(ranks)])
                for r in range(ranks):
                    found = (wrong(sums[r], total), wrong(own[r][0], total[r]), wrong(gathered[r], everything))
                    cases += 3
                    if any(found):
                        bad.append((limits, numel, dtype, out_dtype, r, found))
    return {"cases": cases, "bad": bad[:5], "calls": dict(members[0].calls)}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_more_ranks_than_gpus(one_gpu, ranks):
    (found,) = one_gpu.run(_emulated, ranks)
    assert found["cases"] >= 84 * ranks * 3 and not found["bad"], found
    assert len(found["calls"]) == 7, found["calls"]
