"""What linear_logp of the portable GPU backends keeps from forward to backward: how much, and of which columns."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops.linear_logp.workspace import workspace_bytes

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
MIB = 1 << 20


def test_the_workspace_is_a_number_of_mib(monkeypatch):
    monkeypatch.delenv("RLK_WORKSPACE_MIB", raising=False)
    assert workspace_bytes(672) == 672 * MIB
    for text, mib in (("0", 0), (" 512 ", 512)):
        monkeypatch.setenv("RLK_WORKSPACE_MIB", text)
        assert workspace_bytes(672) == mib * MIB
    for text in ("", "1.5", "-1", "2G", "٣"):
        monkeypatch.setenv("RLK_WORKSPACE_MIB", text)
        with pytest.raises(ContractError, match=r"RLK_WORKSPACE_MIB='.*' must be a whole number of MiB"):
            workspace_bytes(672)


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "segments", "mib", "ranges"),
    [
        (6827, [(0, 75968)], 672, [(0, 16384), (16384, 32768), (32768, 49152)]),  # of five blocks
        (6827, [(0, 75968)], 213, []),
        (6827, [(0, 75968)], 214, [(0, 16384)]),
        (1820, [(0, 75968)], 672, [(0, 75968)]),  # one matrix
        (1820, [(0, 75968)], 263, [(0, 16384), (16384, 32768), (32768, 49152), (49152, 65536)]),
        (8192, [(0, 37984)], 672, [(0, 16384), (16384, 32768), (32768, 37984)]),  # too many elements for one matrix
        (1000, [(0, 20352), (20352, 40000), (40000, 40000)], 672, [(0, 40000)]),
        (1000, [(0, 20352), (20352, 40000)], 40, [(0, 16384), (16384, 20352)]),
        (1000, [(0, 0), (0, 0)], 672, []),  # a rank of padding
        (0, [(0, 5000)], 672, []),
        (40000, [(0, 16384)], 672, []),
    ],
)
def test_the_first_blocks_that_fit_are_kept(monkeypatch, tokens, segments, mib, ranges):
    from rl_kernel.ops.linear_logp import tiles

    monkeypatch.setattr(tiles, "KEPT_BYTES", mib * MIB)
    hidden = torch.empty((tokens, 8), dtype=torch.bfloat16, device="meta")
    kept = tiles.Kept.of(hidden, segments)
    assert (kept.ranges if kept else []) == ranges
    assert tiles.Kept.of(hidden.float(), segments) is None  # dlogits of other dtypes do not fit where bf16 was kept
    if kept:
        assert kept.columns == ranges[-1][1]
        assert kept.memory.numel() * 2 <= mib * MIB
        assert kept.maxima.shape == (tokens, -(-kept.columns // 128))
        begins = [kept.matrix(*each).storage_offset() for each in ranges]
        assert begins == sorted(begins) and all(begin % 8 == 0 for begin in begins)
        assert [kept.matrix(*each).shape for each in ranges] == [(tokens, end - begin) for begin, end in ranges]
        kept.release()
        assert kept.memory is None


@needs_triton
def test_borrowed_memory_holds_what_a_tile_needs():
    from rl_kernel.ops.linear_logp import tiles

    for tokens in (1, 7, 1000, 6827):
        for columns in (128, 896, 1024, 1920, 8192, 16384, 24576):
            memory = torch.empty(tokens * columns * 2, dtype=torch.bfloat16, device="meta")
            for width in (128, 640, 1024, 4096, 8192, 26880):
                found = tiles._borrowed(memory, tokens, width)
                assert (found is None) == (columns < min(8192, width)), (tokens, columns, width)
                if found is not None:
                    logits, step = found
                    assert logits.dtype == torch.float32 and step & (step - 1) == 0
                    assert tokens * min(step, width) <= logits.numel(), (tokens, columns, width)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU")
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_memory_of_a_backward_pass(monkeypatch, blocks):
    """No more than what was kept, or a block and a tile, is there beside the results."""
    import rl_kernel
    from rl_kernel.ops.linear_logp import tiles

    tokens, hidden, columns = 2048, 256, 3 * 16384
    block = 2 * tokens * 16384
    monkeypatch.setattr(tiles, "KEPT_BYTES", blocks * block)
    monkeypatch.setattr(tiles, "ONE_MATRIX", 0)
    monkeypatch.setattr(tiles, "TILE_BYTES", block)
    monkeypatch.setattr(tiles, "KEEPING_TILE_BYTES", block // 2)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(columns, hidden, device="cuda") * 0.02).bfloat16().requires_grad_()
    ids = torch.randint(0, columns, (tokens,), device="cuda")

    def both() -> tuple[int, int, int, int]:
        x.grad = w.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = rl_kernel.linear_logp(x, w, ids, backend="triton")
        held, forward = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        (out.logp.sum() + 0.1 * out.entropy.sum()).backward()
        return held, forward, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    both()
    held, forward, backward, after = both()
    results = 2 * w.numel() + 4 * x.numel() + 2 * x.numel()
    slack = block // 4  # statistics (9.4 MiB of these 16), maxima, state
    assert blocks * block <= held <= blocks * block + slack
    assert forward <= (blocks + 0.5 if blocks else 1) * block + slack
    assert backward <= max(2, blocks) * block + results + slack  # two blocks: their memory holds a block and a tile
    assert after <= results + slack
