"""The hash of weights: one value on every device and in every implementation, and a change of anything changes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.engines import weights as w

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [((0, 4), torch.bfloat16), ((1,), torch.uint8), ((3, 5), torch.bfloat16), ((7, 64), torch.float32)]
SHAPES += [((41, 801), torch.bfloat16), ((2, 40000), torch.float32)]


def by_numpy(tensor: torch.Tensor) -> bytes:
    """The formula of the module's docstring."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    word = np.frombuffer(data + b"\0" * (-len(data) % 8), np.uint64)
    with np.errstate(over="ignore"):
        z = word ^ (np.arange(1, len(word) + 1, dtype=np.uint64) * np.uint64(w.G))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(w.M1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(w.M2)
        z = z ^ (z >> np.uint64(31))
        y = (z ^ (z >> np.uint64(32))) * np.uint64(w.M3)
        y = y ^ (y >> np.uint64(29))
        return z.sum(dtype=np.uint64).tobytes() + y.sum(dtype=np.uint64).tobytes()


def tensor_of(shape, dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_torch_operations_equal_the_formula(shape, dtype) -> None:
    tensor = tensor_of(shape, dtype)
    assert w.digests({"t": tensor})["t"] == by_numpy(tensor)
    # A view at an odd place, and one that is not contiguous.
    holder = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:] if tensor.numel() else tensor.reshape(-1)
    assert w.digests({"t": holder})["t"] == by_numpy(tensor)
    if tensor.dim() == 2 and tensor.numel():
        assert w.digests({"t": tensor.T})["t"] == by_numpy(tensor.T.contiguous())


def test_triton_kernel_equals_torch_operations() -> None:
    pytest.importorskip("triton")
    code = (
        "import torch\nfrom recipes.engines import weights as w\n"
        "from recipes.engines.digest_triton import sums_triton\n"
        "for n in (0, 1, 5, 1023, 8192, 20001):\n"
        "    t = torch.randint(-2**63, 2**63 - 1, (n,))\n"
        "    assert torch.equal(w.sums_torch(t), sums_triton(t)), n\n"
        "assert not torch.equal(w.sums_torch(t), sums_triton(t + 1))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_change_is_seen() -> None:
    tensor = tensor_of((33, 70), torch.bfloat16)
    tensor[0, 0] = 0.0
    bits = tensor.view(torch.int16)
    start = w.content_hash({"a": tensor, "b": tensor[:2]})
    assert w.content_hash([("b", tensor[:2].clone()), ("a", tensor.clone())]) == start  # the order does not matter

    def changed(**cells: int) -> str:
        other = bits.clone()
        for cell, value in cells.items():
            other.view(-1)[int(cell[1:])] = value
        return w.content_hash({"a": other.view(torch.bfloat16), "b": tensor[:2]})

    flat = bits.view(-1)
    seen = {start}
    seen |= {changed(**{f"c{i}": int(flat[i]) ^ 1 << k}) for i in (0, 1, 700, 2309) for k in (0, 7, 14)}
    seen |= {changed(**{f"c{i}": int(flat[i]) ^ -(1 << 15)}) for i in (0, 3, 2309)}  # -0.0 is one of them
    # Two signs at the top of two words: a sum of plain products would lose them.
    seen.add(changed(c3=int(flat[3]) ^ -(1 << 15), c7=int(flat[7]) ^ -(1 << 15)))
    seen |= {changed(c5=int(flat[9]), c9=int(flat[5])), changed(c5=int(flat[6]), c6=int(flat[5]))}  # exchanged
    seen |= {changed(c8=nan) for nan in (0x7FC0, 0x7FC1, 0x7FA0)}
    seen.add(w.content_hash({"a": tensor}))
    seen.add(w.content_hash({"a": tensor[:2], "b": tensor}))  # the same bytes under other names
    seen.add(w.content_hash({"a": tensor.reshape(70, 33), "b": tensor[:2]}))
    seen.add(w.content_hash({"a": tensor.view(torch.float16), "b": tensor[:2]}))
    assert len(seen) == 1 + 12 + 3 + 1 + 2 + 3 + 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_devices_agree(shape, dtype) -> None:
    tensor = tensor_of(shape, dtype)
    assert w.digests({"t": tensor.cuda()})["t"] == by_numpy(tensor)
    assert torch.equal(w.sums_torch(w.words_of(tensor.cuda())[0]).cpu(), w.sums_torch(w.words_of(tensor)[0]))
