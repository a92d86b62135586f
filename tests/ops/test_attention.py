"""attention: packed, paged, chunked and step by step, one set of bits."""

from __future__ import annotations

import pytest
import torch

import rl_kernel
from rl_kernel.errors import ContractError
from rl_kernel.ops.attention import reference
from tests.ops.numerics import (
    DTYPES,
    assert_as_good_as_eager,
    assert_differ,
    assert_same,
    backend,
    heavy,
    normal,
    threads,
)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def qkv(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple:
    shapes = ((tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, width))
    return tuple(normal(*shape, dtype=dtype, seed=seed + i, scale=1.5) for i, shape in enumerate(shapes))


class Cache:
    """A paged cache in the layout [2, blocks, kv heads, block size, D], filled through a shuffled block table."""

    def __init__(self, lengths: list[int], block_size: int, kv_heads: int, width: int, dtype: torch.dtype):
        pages = [-(-n // block_size) for n in lengths]
        blocks = sum(pages) + 3
        store = normal(2, blocks, kv_heads, block_size, width, dtype=dtype, seed=77)  # unused slots hold garbage
        self.k, self.v = (part.transpose(1, 2) for part in store)
        self.block_size = block_size
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(5)).tolist()
        self.table = torch.full((len(lengths), max(pages) + 1), blocks - 1, dtype=torch.int32)
        for row, count in enumerate(pages):
            for column in range(count):
                self.table[row, column] = order.pop()

    def write(self, row: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for j in range(len(k)):
            page, slot = self.table[row, (first + j) // self.block_size], (first + j) % self.block_size
            self.k[page, slot], self.v[page, slot] = k[j], v[j]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (5, 16, 40, 80))
@pytest.mark.parametrize("heads", ((4, 2), (2, 2), (3, 1)), ids=str)
def test_native_equals_reference(heads, width, dtype):
    native = backend("attention", "native")
    lengths = [1, 7, 0, 33, 40]
    cu, scale = offsets(lengths), width**-0.5
    q, k, v = qkv(81, *heads, width, dtype)
    k = heavy(*k.shape, dtype=dtype)
    expected = reference.varlen_forward(q, k, v, cu, cu, scale)
    assert_same(native.varlen_forward(q, k, v, cu, cu, scale), expected)
    dout = normal(*q.shape, dtype=dtype, seed=9)
    assert_same(
        native.varlen_backward(dout, q, k, v, *expected, cu, cu, scale),
        reference.varlen_backward(dout, q, k, v, *expected, cu, cu, scale),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_keys_than_queries_padding_rows_and_strided_inputs(dtype):
    native = backend("attention", "native")
    cu_q, cu_k = offsets([3, 1, 5]), offsets([40, 33, 5])
    packed = normal(12, 4 * 24 + 3, dtype=dtype)  # three rows more than the sequences have
    q = packed[:, 3:].view(12, 4, 24)
    kv = normal(78, 2, 2, 24, dtype=dtype, seed=1)
    k, v = kv[:, 0], kv[:, 1]
    expected = reference.varlen_forward(q, k, v, cu_q, cu_k, 0.3)
    assert_same(native.varlen_forward(q, k, v, cu_q, cu_k, 0.3), expected)
    assert not expected[0][9:].any()
    dout = normal(12, 4, 24, dtype=dtype, seed=2)
    grads = native.varlen_backward(dout, q, k, v, *expected, cu_q, cu_k, 0.3)
    assert_same(grads, reference.varlen_backward(dout, q, k, v, *expected, cu_q, cu_k, 0.3))
    for count in (0, 1, 7):
        part = qkv(count, 4, 2, 16, dtype)
        assert_same(
            native.varlen_forward(*part, offsets([count]), offsets([count]), 0.25),
            reference.varlen_forward(*part, offsets([count]), offsets([count]), 0.25),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", (16, 32, 64))
@pytest.mark.parametrize("heads", ((4, 4), (8, 2)), ids=str)
def test_packed_equals_chunked_prefill_equals_decode(heads, block_size, dtype):
    lengths, width = [1, 31, 32, 33, 65, 100], 32
    cu = offsets(lengths)
    q, k, v = qkv(sum(lengths), *heads, width, dtype)
    packed = rl_kernel.attention_varlen(q, k, v, cu)
    cache = Cache(lengths, block_size, heads[1], width, dtype)
    row = [slice(int(cu[b]), int(cu[b + 1])) for b in range(len(lengths))]

    # Prefill in chunks of other sizes in every sequence, all sequences of a step in one call.
    out, done = torch.empty_like(q), [0] * len(lengths)
    chunks = [1, 7, 40, 2, 33, 50, 100, 100]
    for step in range(len(chunks)):
        take = [min(chunks[(step + b) % len(chunks)], n - d) for b, (n, d) in enumerate(zip(lengths, done))]
        index = torch.cat(
            [torch.arange(row[b].start + d, row[b].start + d + n) for b, (d, n) in enumerate(zip(done, take))]
        )
        for b, n in enumerate(take):
            part = slice(row[b].start + done[b], row[b].start + done[b] + n)
            cache.write(b, done[b], k[part], v[part])
        done = [d + n for d, n in zip(done, take)]
        seq_lens = torch.tensor(done, dtype=torch.int32)
        out[index] = rl_kernel.attention_paged(q[index], cache.k, cache.v, cache.table, offsets(take), seq_lens)
    assert done == lengths
    assert_same(out, packed)

    # Decode: every position of the longest sequences as a batch of single tokens.
    for position in range(0, 100, 3):
        live = [b for b, n in enumerate(lengths) if n > position]
        index = torch.tensor([row[b].start + position for b in live])
        seq_lens = torch.full((len(live),), position + 1, dtype=torch.int32)
        args = (cache.k, cache.v, cache.table[live], offsets([1] * len(live)), seq_lens)
        assert_same(rl_kernel.attention_paged(q[index], *args), packed[index], f"position {position}")
        room = torch.full_like(q[index], torch.nan)
        given = rl_kernel.attention_paged(q[index], *args, max_query_len=1, max_seq_len=position + 1, out=room)
        assert given is room
        assert_same(room, packed[index], "bounds and a buffer")


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_prefix_pages(dtype):
    """Two sequences whose first pages are the same pages equal the packed sequences."""
    prefix, tails, width = 48, (5, 21), 16
    q, k, v = qkv(prefix + sum(tails), 4, 2, width, dtype)
    cache = Cache([prefix + tail for tail in tails], 16, 2, width, dtype)
    cache.table[1, : prefix // 16] = cache.table[0, : prefix // 16]
    cache.write(0, 0, k[:prefix], v[:prefix])
    parts, first = [], prefix
    for b, tail in enumerate(tails):
        own = torch.arange(first, first + tail)
        cache.write(b, prefix, k[own], v[own])
        whole = torch.cat((torch.arange(prefix), own))
        parts.append(rl_kernel.attention_varlen(q[whole], k[whole], v[whole], offsets([len(whole)]))[prefix:])
        first += tail
    args = (offsets(list(tails)), torch.tensor([prefix + tail for tail in tails], dtype=torch.int32))
    assert_same(rl_kernel.attention_paged(q[prefix:], cache.k, cache.v, cache.table, *args), torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_does_not_depend_on_batch_heads_or_threads(dtype):
    lengths = [70, 3, 129, 40]
    cu = offsets(lengths)
    q, k, v = qkv(sum(lengths), 8, 4, 64, dtype)
    dout = normal(*q.shape, dtype=dtype, seed=5)

    def run(q, k, v, cu, dout):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out, lse = rl_kernel.attention_varlen(*leaves, cu, return_lse=True)
        return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)

    with threads(2):
        whole = run(q, k, v, cu, dout)
    with threads(1):
        assert_same(run(q, k, v, cu, dout), whole)
        for b in range(4):
            rows = slice(int(cu[b]), int(cu[b + 1]))
            alone = run(q[rows], k[rows], v[rows], offsets([lengths[b]]), dout[rows])
            assert_same(alone, tuple(t[rows] for t in whole), f"sequence {b}")
        for ranks in (2, 4):  # tensor-parallel shards of the heads
            shards = zip(*(t.chunk(ranks, 1) for t in (q, k, v, dout)))
            found = [run(a, b, c, cu, d) for a, b, c, d in shards]
            for index, expected in enumerate(whole):
                assert_same(torch.cat([f[index] for f in found], 1), expected, f"{ranks} ranks, output {index}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_controls(dtype):
    q, k, v = qkv(150, 4, 2, 32, dtype)
    cu = offsets([150])
    ours, lse = rl_kernel.attention_varlen(q, k, v, cu, return_lse=True)
    stock, stock_lse = backend("attention", "torch").varlen_forward(q, k, v, cu, cu, 32**-0.5)
    assert_differ(ours, stock)
    assert_differ(lse, stock_lse)
    # Keys in blocks from another origin: drop the first key of a row that gives it no weight at all.
    far = k.clone()
    far[0] = 0
    far[0, :, 0], q2 = -1e4, q.clone()
    q2[:, :, 0] = 1.0
    whole = rl_kernel.attention_varlen(q2, far, v, cu)[1:]
    assert_differ(whole, rl_kernel.attention_varlen(q2[1:], far[1:], v[1:], offsets([149])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    lengths = [70, 1, 33]
    cu, stock = offsets(lengths), backend("attention", "torch")
    q, k, v = (normal(*t.shape, dtype=dtype, seed=i) for i, t in enumerate(qkv(sum(lengths), 4, 2, 32, dtype)))
    dout = normal(*q.shape, dtype=dtype, seed=5)

    def eager(q, k, v, cu):
        spans = [slice(a, b) for a, b in zip(cu.tolist(), cu.tolist()[1:])]
        return torch.cat([stock._sequence(q[s], k[s], v[s], 32**-0.5) for s in spans])

    def run(function, kind):
        leaves = [t.to(kind).requires_grad_() for t in (q, k, v)]
        out = function(*leaves, cu)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(kind))

    exact = run(eager, torch.float64)
    for a, b, c in zip(run(rl_kernel.attention_varlen, dtype), run(eager, dtype), exact):
        assert_as_good_as_eager(a, b, c)


def test_nan_reaches_exactly_the_rows_that_see_it():
    q, k, v = qkv(50, 2, 1, 16, torch.float32)
    cu = offsets([20, 30])
    clean = rl_kernel.attention_varlen(q, k, v, cu)
    k[5, 0, 3], v[40, 0, 2] = torch.nan, torch.inf
    out = rl_kernel.attention_varlen(q, k, v, cu)
    assert torch.isnan(out[5:20]).all() and torch.isinf(out[40:, :, 2]).all()
    for rows in (slice(0, 5), slice(20, 40)):
        assert_same(out[rows], clean[rows])
    assert_same(out, reference.varlen_forward(q, k, v, cu, cu, 0.25)[0])


def test_operator_registration():
    q, k, v = (t.requires_grad_() for t in qkv(9, 4, 2, 16, torch.float32))
    cu, ops = offsets([4, 5]), torch.ops.rl_kernel
    torch.library.opcheck(ops.attention_varlen.default, (q, k, v, cu, cu, 0.25))
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = ops.attention_varlen(q, k, v, cu, cu, 0.25)
    torch.library.opcheck(ops.attention_varlen_backward.default, (out, q, k, v, out, lse, cu, cu, 0.25))
    cache = Cache([4, 5], 16, 2, 16, torch.float32)
    args = (q, cache.k, cache.v, cache.table, cu, torch.tensor([4, 5], dtype=torch.int32), 0.25)
    torch.library.opcheck(ops.attention_paged.default, (*args, 1, 64))


def test_errors():
    q, k, v = qkv(9, 4, 2, 16, torch.float32)
    cu = offsets([4, 5])
    cache = Cache([4, 5], 16, 2, 16, torch.float32)
    lens = torch.tensor([4, 5], dtype=torch.int32)
    bad_table = cache.table.clone()
    bad_table[1, 0] = 99
    cases = (
        (lambda: rl_kernel.attention_varlen(q[:, :3], k, v, cu), "3 query heads are not a multiple of 2"),
        (lambda: rl_kernel.attention_varlen(q, k.bfloat16(), v, cu), "must be one dtype"),
        (lambda: rl_kernel.attention_varlen(q, k, v, offsets([4, 6])), "ends at 10 but there are 9 tokens"),
        (lambda: rl_kernel.attention_varlen(q, k, v, cu, offsets([3, 6])), "sequence 0 has fewer keys than queries"),
        (
            lambda: rl_kernel.attention_paged(q, cache.k, cache.v, bad_table, cu, lens),
            "block_table.1, 0. = 99 must lie",
        ),
        (
            lambda: rl_kernel.attention_paged(q.clone().requires_grad_(), cache.k, cache.v, cache.table, cu, lens),
            "it has no gradient; use attention_varlen",
        ),
        (lambda: rl_kernel.attention_varlen(q[..., :0], k[..., :0], v[..., :0], cu), "must be .T, heads, D."),
        (lambda: rl_kernel.attention_paged(q, cache.k, cache.v, cache.table, cu, lens - 2), "has seq_len 2 and 4"),
        (lambda: rl_kernel.attention_paged(q, cache.k, cache.v, cache.table, cu, lens, out=q[1:]), "out .* must be"),
        (lambda: rl_kernel.attention_paged(q, cache.k, cache.v, cache.table, cu, lens + 90), "holds 2 pages of 16"),
    )
    for call, message in cases:
        with pytest.raises(ContractError, match=message):
            call()
