"""Bytes of the products of the Hopper kernels: dH and dW of given gradients, tiles of every shape."""

from __future__ import annotations

import pytest
import torch

from rl_kernel.ops.linear_logp import sm90
from tests.ops.gpu_harness import differing
from tests.ops.sm90_harness import assert_same, need_hopper, operands

need_hopper()

pytestmark = pytest.mark.gpu

# Tokens as columns of a tile of dH wherever that wastes less: 160 to 248 of them; elsewhere, or few, they are rows.
COLUMNS = [129, 136, 160, 161, 200, 248, 249, 256, 257, 300, 384, 385, 555, 796, 800, 900, 1000, 1820, 1856]


def product_operands(tokens, width, columns, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    d = sm90.new_kept(tokens, columns, torch.device("cuda"))
    d.copy_(torch.randn(tokens, columns, device="cuda", generator=g))
    h = torch.randn(tokens, width, device="cuda", generator=g).bfloat16()
    w = torch.empty(columns, width, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02, generator=g)
    return d, w, h


def dh_of_rows(d, w, h, **more):
    """dH, 128 tokens a call: as many are always rows of their tile."""
    parts = []
    for first in range(0, len(d), 128):
        part = slice(first, first + 128)
        parts.append(torch.empty(h[part].shape, device="cuda"))
        sm90.products(d[part], w, h[part], dh=parts[-1], **more)
    return torch.cat(parts)


@pytest.mark.parametrize("width", [1024, 2048, 2560, 4096, 520])
@pytest.mark.parametrize("tokens", COLUMNS)
def test_tokens_as_rows_or_columns(tokens, width):
    d, w, h = product_operands(tokens, width, 33000)  # three blocks, the last one short
    expected = dh_of_rows(d, w, h)
    for with_dw in (False, True):
        found = torch.full_like(expected, 7.0)
        sm90.products(d, w, h, dh=found, dw=torch.empty_like(w) if with_dw else None)
        assert_same([found], [expected])
        for count in {0, 1, tokens - 128, tokens // 2, tokens - 8, tokens - 1} - {
            -1
        }:  # the kernel chooses by the count
            found.fill_(7.0)
            active = torch.tensor([count + 3], device="cuda", dtype=torch.int32)
            sm90.products(d, w, h, dh=found, dw=torch.empty_like(w) if with_dw else None, active=active, skipped=3)
            assert_same([found[:count]], [expected[:count]])
            assert bool((found[count:] == 7.0).all())
    d[tokens // 2, 5] = float("nan")  # stays in its row
    changed = torch.empty_like(expected)
    sm90.products(d, w, h, dh=changed)
    rows = torch.arange(tokens, device="cuda") != tokens // 2
    assert_same([changed[rows]], [expected[rows]])
    assert bool(changed[tokens // 2].isnan().all())


@pytest.mark.parametrize("columns", [1, 8, 159, 160, 161, 320, 325, 481, 5003])
@pytest.mark.parametrize("tokens, width", [(129, 264), (200, 8), (200, 2048), (796, 1032)])
def test_tall_tiles_of_dw(tokens, width, columns):
    """256 of the hidden size x 160 of the vocabulary; a chain that goes on from 0 has tiles of the other shape."""
    d, w, h = product_operands(tokens, width, columns)
    expected = torch.empty(w.shape, device="cuda")
    sm90.products(d, w, h, dw=expected, dw_init=torch.zeros_like(expected))
    found, rounded = torch.full_like(expected, 7.0), torch.full_like(w, 7.0)
    sm90.products(d, w, h, dw=found)
    sm90.products(d, w, h, dh=torch.empty(h.shape, device="cuda"), dw=rounded)
    assert_same([found, rounded], [expected, expected.bfloat16()])
    h[-1] = h[0]
    sm90.products(d, w, h, dw=rounded)
    assert differing(rounded, expected.bfloat16()) > 0


@pytest.mark.parametrize("tokens", [300, 796, 1820])
def test_tokens_as_columns_of_a_segment(tokens):
    d, w, h = product_operands(tokens, 1024, 40003)
    for first, last in ((128, 128 + 16384 + 64), (19968, 40003), (39936, 40003)):
        found = torch.full(h.shape, 7.0, device="cuda")
        sm90.products(d, w, h, dh=found, first=first, last=last)
        assert_same([found], [dh_of_rows(d, w, h, first=first, last=last)])
    whole = torch.empty_like(found)
    sm90.products(d, w, h, dh=whole)
    assert differing(whole, found) > 0


@pytest.mark.parametrize("last", [1, 15, 16, 17, 28, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("tiles", [2, 4, 12])
def test_zeros_left_out_of_dw_change_nothing(tiles, last):
    """The second half of the last tile of tokens, where it is zeros, is multiplied only where the chain continues."""
    tokens = tiles * 64 + last
    d, w, h = product_operands(tokens, 1024, 2048)
    d[:, :64] = -0.0
    h[:, ::3], h[:, 1::3] = h[:, ::3].abs(), -h[:, 1::3].abs()  # sums of -0, of 0, of both
    d[:, 64:128] = torch.where(torch.rand(tokens, 64, device="cuda") < 0.5, -0.0, 0.0)
    d[3, 130], h[5, 7] = float("inf"), float("nan")
    whole, found, start = (torch.empty(w.shape, device="cuda") for _ in range(3))
    sm90.products(d, w, h, dw=whole)
    rest = (
        torch.zeros(64 - last, 2048, device="cuda", dtype=d.dtype),
        torch.zeros(64 - last, 1024, device="cuda").bfloat16(),
    )
    sm90.products(torch.cat([d, rest[0]]), w, torch.cat([h, rest[1]]), dw=found)  # nothing is left out
    assert_same([whole], [found])
    active = torch.tensor([tokens], device="cuda", dtype=torch.int32)
    more = torch.zeros(64, 2048, device="cuda", dtype=d.dtype), torch.zeros(64, 1024, device="cuda").bfloat16()
    sm90.products(torch.cat([d, more[0]]), w, torch.cat([h, more[1]]), dw=found.zero_(), active=active)
    assert_same([whole], [found])
    sm90.products(d[:64], w, h[:64], dw=start)
    sm90.products(d[64:], w, h[64:], dw=found.zero_(), dw_init=start)
    assert_same([whole[128:]], [found[128:]])  # a chain that starts from 0 need not keep -0


def test_one_chain_of_tokens_in_chunks():
    h, w, t = operands(513, 1024, 2048, 2048)
    d = torch.randn(513, 2048, device="cuda").bfloat16()
    whole, carry, chunks = torch.empty_like(w), torch.empty(w.shape, device="cuda"), torch.empty_like(w)
    sm90.products(d, w, h, dw=whole)
    sm90.products(d[:256], w, h[:256], dw=carry)
    sm90.products(d[256:], w, h[256:], dw=chunks, dw_init=carry)
    assert_same([whole], [chunks])
    exact = torch.empty_like(carry)
    sm90.products(d, w, h, dw=exact)
    assert_same([exact.bfloat16()], [whole])


@pytest.mark.parametrize("active", [1, 63, 64, 65, 128])
def test_dw_of_fewer_rows_than_its_tiles_have(active):
    d, w, h = product_operands(129, 1024, 2048)
    d[active:], h[active:] = 0, 0
    whole, found, more = (torch.empty(w.shape, device="cuda") for _ in range(3))
    sm90.products(d[:active], w, h[:active], dw=whole)
    taken = torch.tensor([active], device="cuda", dtype=torch.int32)
    sm90.products(d, w, h, dw=found, active=taken)
    assert_same([whole], [found])
    d[active] = d[0]
    h[active] = h[0]
    sm90.products(d, w, h, dw=more)
    assert differing(more, found) > 0
