"""The rounds of a weight update: plan, order, completeness, hashes, buffers that are gone with their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes.engines.device_memory import Handle, HostBuffer, HostView, WeightLinkError, allocate, open_view, place_of
from recipes.engines.weight_transfer import WeightExporter, WeightReader, plan, used_bytes
from recipes.engines.weights import combined_hash, content_hash, digests, dtype_name
from recipes.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 16), "a.norm": (16,), "a.q": (48, 16), "a.k": (7, 3), "head": (300, 16), "one": ()}
    return {name: torch.randn(shape, generator=g).to(torch.bfloat16) for name, shape in shapes.items()}


def described(named):
    return {k: (tuple(t.shape), dtype_name(t.dtype)) for k, t in named.items()}


def exporter(named, *, shares=True, bucket=4096, stream=None):
    stream = iter(named.items()) if stream is None else stream
    return WeightExporter(described(named), stream, device=CPU, kind="host", shares=shares, bucket_bytes=bucket)


@pytest.mark.parametrize("bucket", [1, 1000, 4096, 1 << 20])
def test_plan(bucket: int) -> None:
    buckets = plan(described(model()), bucket)
    assert [e.name for part in buckets for e in part] == list(model())
    for part in buckets:
        assert used_bytes(part) <= bucket or len(part) == 1
        assert all(a.offset + a.nbytes <= b.offset and b.offset % 256 == 0 for a, b in zip(part, part[1:]))
    assert len(buckets) == {1: 6, 1000: 6, 4096: 4, 1 << 20: 1}[bucket]
    assert plan({}, 10) == []


@pytest.mark.parametrize("bucket", [1, 4096, 1 << 20])
def test_what_arrives_is_what_was_sent(bucket: int) -> None:
    named = model()
    export, silent = exporter(named, bucket=bucket), exporter(named, bucket=bucket, shares=False)
    assert silent.offer.handle is None and silent.offer.tensors == export.offer.tensors
    readers = [WeightReader(export.offer.handle, CPU) for _ in range(2)]
    got: list[dict] = [{}, {}]
    for index, entries in enumerate(export.offer.buckets):
        for one in (export, silent):
            one.fill(index)
        for reader, mine in zip(readers, got):
            mine |= {k: t.clone() for k, t in reader.read(entries).items()}
    assert silent.finish() is None
    wanted = export.finish()
    assert wanted == content_hash(named) == combined_hash(export.offer.tensors, digests(got[0]))
    for mine in got:
        assert all(torch.equal(mine[k].view(torch.int16), t.view(torch.int16)) for k, t in named.items())
    assert content_hash(model(1)) != wanted
    for thing in (*readers, export, silent, export):  # twice is fine
        thing.close()


def test_rounds_in_order_and_complete() -> None:
    named = model()
    export = exporter(named)
    with pytest.raises(EngineError, match="bucket 1 was asked for, 0 is next"):
        export.fill(1)
    export.fill(0)
    with pytest.raises(EngineError, match="1 of 4 buckets were sent"):
        export.finish()
    export.close()
    other = exporter(named, stream=iter(model(1).items()))
    other.fill(0)
    other.close()
    wrong = exporter(named, stream=iter({**named, "embed": named["embed"].float()}.items()))
    with pytest.raises(EngineError, match=r"\('embed', \(300, 16\), 'float32'\) came where"):
        wrong.fill(0)
    wrong.close()
    longer = exporter(named, stream=iter([*named.items(), ("more", named["one"])]), bucket=1 << 20)
    longer.fill(0)
    with pytest.raises(EngineError, match="buckets were sent"):
        longer.finish()
    longer.close()


def test_a_buffer_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(WeightLinkError, match="one container"):
        open_view(Handle("host", 10, b"/proc/1/fd/12345", "cpu"), CPU)
    buffer = HostBuffer(4096)
    assert place_of(CPU) == "cpu" and allocate("host", 1, CPU).handle.kind == "host"
    view = HostView(buffer.handle)
    buffer.write(256, torch.arange(4))
    out = torch.zeros(512, dtype=torch.uint8)
    view.read(512, out)
    assert out[256:288].view(torch.int64).tolist() == [0, 1, 2, 3]
    buffer.close()
    view.read(512, out)  # the reader's mapping lives as long as the reader wants
    view.close()
    with pytest.raises(WeightLinkError):
        HostView(buffer.handle)


def test_another_process_reads_it_and_a_killed_owner_leaves_nothing() -> None:
    code = (
        "import sys, torch\nfrom recipes.engines.device_memory import HostBuffer\n"
        "b = HostBuffer(1 << 20)\nb.write(0, torch.full((1 << 17,), 7, dtype=torch.int64))\n"
        "print(b.handle.key.decode(), flush=True)\nsys.stdin.read()\n"
    )
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        handle = Handle("host", 1 << 20, owner.stdout.readline().strip().encode(), "cpu")
        out = torch.zeros(1 << 20, dtype=torch.uint8)
        view = open_view(handle, CPU)
        view.read(1 << 20, out)
        assert bool((out.view(torch.int64) == 7).all())
        owner.kill()
    with pytest.raises(WeightLinkError):
        open_view(handle, CPU)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "rl_kernel" in name}
