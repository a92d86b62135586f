"""Bytes of attention on a GPU: packed, chunked, paged and split calls agree for every query row."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from rl_kernel import triton_utils
from rl_kernel.registry import Request
from tests.ops.gpu_harness import BF16, CASES, Tally, data, differing, rng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU"),
]
HEADS = [(32, 8, 128), (16, 4, 128), (8, 2, 128), (16, 8, 64), (4, 4, 64)]


def cumulative(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def lengths(source, count, most):
    return [max(1, int(2 ** source.uniform(0, most.bit_length() - 0.01))) for _ in range(count)]


def paged(k, v, starts, used, page, source):
    """A paged cache with the first ``used[i]`` keys of each sequence, pages in random order, garbage elsewhere."""
    pages = [-(-n // page) for n in used]
    total = sum(pages) + 3
    order = torch.randperm(total, device="cuda")
    cache = torch.full((2, total, page, *k.shape[1:]), float("nan"), dtype=BF16, device="cuda")
    table = torch.zeros((len(used), max(pages) + source.randrange(3)), dtype=torch.int32, device="cuda")
    at = 0
    for i, n in enumerate(used):
        mine = order[at : at + pages[i]]
        at += pages[i]
        table[i, : pages[i]] = mine.to(torch.int32)
        slots = (mine[:, None] * page + torch.arange(page, device="cuda")).flatten()[:n]
        cache[0].view(-1, *k.shape[1:])[slots] = k[starts[i] : starts[i] + n]
        cache[1].view(-1, *v.shape[1:])[slots] = v[starts[i] : starts[i] + n]
    return cache[0], cache[1], table


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("backend", ["triton", "library"])
def test_packed_chunked_and_paged_rows_agree(backend, part, monkeypatch):
    if backend == "triton":
        from rl_kernel.ops.attention import triton as op
    else:
        from rl_kernel.ops.attention import library as op

        monkeypatch.setenv("RLK_SM90_ATTENTION", "fa3")
        family = "gfx942" if torch.version.hip else "sm90"
        reason = op.supports(Request("attention", family, BF16))
        if reason:
            pytest.skip(reason)
    tally, source = Tally(f"{'attention' if backend == 'triton' else 'attention_fa3'}_{part}"), rng(21 + 100 * part)
    while tally.cases < CASES // 4:
        heads, kv_heads, dim = source.choice(HEADS if backend == "triton" else HEADS[:3])
        long = source.random() < 0.05
        n = lengths(source, source.choice([1, 2, 3, 8, 24]) if not long else 2, 8192 if long else 1024)
        seed = source.randrange(1 << 30)
        total = sum(n)
        q = data(total, heads, dim, seed=seed, heavy=False)
        k, v = data(total, kv_heads, dim, seed=seed + 1, heavy=False), data(total, kv_heads, dim, seed=seed + 2)
        cu = cumulative(n)
        starts = cu.tolist()
        out, lse = op.varlen_forward(q, k, v, cu)
        what = (heads, kv_heads, dim, n)
        # One sequence alone, and with another tile.
        i = source.randrange(len(n))
        own = slice(starts[i], starts[i + 1])
        with triton_utils.override_launch("attention", {"BM": 64, "warps": 4, "stages": 2}):
            forward = getattr(op, "portable_forward", op.varlen_forward)  # another tile, and on Hopper another kernel
            alone = forward(q[own], k[own], v[own], *[cumulative([n[i]])] * 2)
        tally.equal(out[own], alone[0], "alone, other tile", what)
        assert differing(lse[own], alone[1]) == 0
        # A tensor-parallel rank's heads.
        if kv_heads > 1:
            h, g = kv_heads // 2, heads // 2
            tally.equal(out[:, g:], op.varlen_forward(q[:, g:], k[:, h:], v[:, h:], cu)[0], "head shard", what)
        # Mixed batches over a paged cache: decodes and chunks at random positions, several page sizes and splits.
        for _ in range(6):
            used, new = [], []
            for length in n:
                last = source.randint(1, length)
                chunk = 1 if source.random() < 0.6 else source.randint(1, min(last, 300))
                used.append(last)
                new.append(chunk)
            page = source.choice([16, 32, 64])
            k_cache, v_cache, table = paged(k, v, starts, used, page, source)
            pick = torch.cat(
                [torch.arange(starts[j] + used[j] - new[j], starts[j] + used[j], device="cuda") for j in range(len(n))]
            )
            split = {"split": source.choice([True, False, None])} if backend == "triton" else {}
            got = op.paged_forward(
                q[pick], k_cache, v_cache, table, cumulative(new), torch.tensor(used, device="cuda", dtype=torch.int32),
                max_query_len=source.choice([None, max(new)]), **split,
            )  # fmt: skip
            tally.equal(out[pick], got, f"paged, page {page}", (what, used, new, split))
    tally.done()


def test_decode_to_8k_equals_prefill_under_a_graph():
    from rl_kernel.ops.attention import triton as op

    n = 8192
    q, k, v = (data(n, h, 128, seed=h, heavy=False) for h in (32, 8, 9))
    v = v[:, :8]
    out, _ = op.varlen_forward(q, k, v, cumulative([n]))
    k_cache, v_cache, table = paged(k, v.contiguous(), [0], [n], 16, rng(1))
    length = torch.ones(1, dtype=torch.int32, device="cuda")
    token, cu = q[:1].clone(), cumulative([1])
    op.paged_forward(token, k_cache, v_cache, table, cu, length, max_query_len=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op.paged_forward(token, k_cache, v_cache, table, cu, length, max_query_len=1)
    wrong = 0
    for position in [0, 1, 15, 16, 127, 128, 129, 1000, 4095, 4096, 8191]:
        token.copy_(q[position : position + 1])
        length.fill_(position + 1)
        graph.replay()
        wrong += differing(got, out[position : position + 1])
    assert wrong == 0


@pytest.mark.parametrize("part", range(2))
def test_backward_is_repeatable_and_per_sequence_and_per_head(part):
    from rl_kernel.ops.attention import triton as op

    tally, source = Tally(f"attention_backward_{part}"), rng(22 + 100 * part)
    while tally.cases < CASES // 2:
        heads, kv_heads, dim = source.choice(HEADS)
        n = lengths(source, source.choice([1, 3, 8]), 1024)
        seed = source.randrange(1 << 30)
        total = sum(n)
        q, dout = data(total, heads, dim, seed=seed, heavy=False), data(total, heads, dim, seed=seed + 1)
        k, v = data(total, kv_heads, dim, seed=seed + 2, heavy=False), data(total, kv_heads, dim, seed=seed + 3)
        cu = cumulative(n)
        out, lse = op.varlen_forward(q, k, v, cu)
        grads = op.varlen_backward(dout, q, k, v, out, lse, cu)
        i = source.randrange(len(n))
        own = slice(int(cu[i]), int(cu[i + 1]))
        alone = op.varlen_backward(dout[own], q[own], k[own], v[own], out[own], lse[own], cumulative([n[i]]))
        again = op.varlen_backward(dout, q, k, v, out, lse, cu)
        h, g = kv_heads // 2, heads // 2
        part = op.varlen_backward(dout[:, g:], q[:, g:], k[:, h:], v[:, h:], out[:, g:], lse[:, g:], cu)
        for name, full, one, second, shard in zip(("dq", "dk", "dv"), grads, alone, again, part):
            tally.equal(full[own], one, f"{name} alone", (heads, n, i))
            tally.equal(full, second, f"{name} run to run")
            tally.equal(full[:, (g if name == "dq" else h) :], shard, f"{name} head shard")
    tally.done()


def _hopper(direction):
    from rl_kernel.ops.attention import hopper

    found = hopper.module(torch.device("cuda", torch.cuda.current_device()), direction)
    if isinstance(found, str):
        pytest.skip(found)
    return found


LENGTHS = [
    ([1], None),
    ([7], None),
    ([796], None),
    ([1820], None),
    ([300, 0, 77, 1024, 1, 0, 640, 5, 0], None),
    ([100, 1, 333, 0], [400, 129, 333, 50]),
    ([1] * 130, None),
    ([777] * 20, None),
]


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (16, 8, 128), (40, 8, 128), (8, 8, 128), (32, 2, 128), (6, 2, 128), (16, 8, 64)]
)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_hopper_prefill_has_the_bytes_of_triton(heads, queries, keys):
    from rl_kernel.ops.attention import triton as op

    own = _hopper("forward")
    h, kv, dim = heads
    q = data(sum(queries), h + 2 * kv, dim, seed=1, heavy=False)[:, :h]
    k, v = (data(sum(keys or queries), h + 2 * kv, dim, seed=i, heavy=False)[:, -kv:] for i in (2, 3))
    cu, cu_k = cumulative(queries), cumulative(keys or queries)
    assert own.unusable(q, k, v, cu, cu_k) is None
    out = op.varlen_forward(q, k, v, cu, cu_k)
    for ours, triton in zip(out, op.portable_forward(q, k, v, cu, cu_k)):
        assert differing(ours, triton) == 0
    if len(queries) == 9:  # NaN in the last live sequences: nothing before them changes
        end = int(cu[6])
        sick = [x.clone() for x in (q, k, v)]
        for x in sick:
            x[end:] = float("nan")
        for clean, other in zip(out, op.varlen_forward(*sick, cu, cu_k)):
            assert differing(clean[:end], other[:end]) == 0


def test_hopper_prefill_names_what_it_cannot_and_is_named():
    from rl_kernel.ops.attention import hopper
    from rl_kernel.ops.attention import triton as op

    own = _hopper("forward")
    q, k = data(40, 4, 128, seed=1), data(40, 2, 128, seed=2)
    cu = cumulative([40])
    assert "strides" in own.unusable(q, k, torch.zeros(40, 2, 129, device="cuda", dtype=BF16)[..., 1:], cu, cu)
    assert "int32" in own.unusable(q, k, k, cu.long(), cu)
    assert "heads of 32" in own.unusable(q[..., :32], k[..., :32], k[..., :32], cu, cu)
    op.varlen_forward(q, k, k, cu)
    op.varlen_forward(q[..., :32], k[..., :32], k[..., :32], cu)
    assert "forward: " in hopper.summary() and "Gluon" in hopper.summary()
    assert "x Triton (torch.bfloat16 heads of 32" in hopper.summary()
    out, lse = op.varlen_forward(q[:0], k[:0], k[:0], cumulative([0, 0]))
    assert out.shape == (0, 4, 128) and lse.shape == (0, 4)


def test_hopper_prefill_under_a_graph_follows_the_offsets():
    """More tiles than a wave, then fewer and others: the launch is the same, the offsets are read on the device."""
    from rl_kernel.ops.attention import triton as op

    _hopper("forward")
    q, k, v = (data(4096, heads, 128, seed=heads, heavy=False) for heads in (32, 8, 9))
    v = v[:, :8]
    cu = cumulative([1000, 3096])
    op.varlen_forward(q, k, v, cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = op.varlen_forward(q, k, v, cu)
    for n in ([1000, 3096], [4096, 0], [1, 4095], [0, 4096]):
        cu.copy_(cumulative(n))
        graph.replay()
        for captured, triton in zip((out, lse), op.portable_forward(q, k, v, cu, cu)):
            assert differing(captured, triton) == 0


def _backward_case(n, heads, kv_heads, n_keys=None, seed=0):
    """Arguments of a backward: q and v are strided views, as an engine passes them."""
    from rl_kernel.ops.attention import triton as op

    n_keys = n_keys or n
    q = data(sum(n), heads + 2 * kv_heads, 128, seed=seed, heavy=False)[:, :heads]
    k = data(sum(n_keys), kv_heads, 128, seed=seed + 1, heavy=False)
    v = data(sum(n_keys), heads + 2 * kv_heads, 128, seed=seed + 2, heavy=False)[:, -kv_heads:]
    cu, cu_k = cumulative(n), cumulative(n_keys)
    out, lse = op.varlen_forward(q, k, v, cu, cu_k)
    dout = data(sum(n), heads, 128, seed=seed + 3)
    return dout, q, k, v, out, lse, cu, cu_k, 128**-0.5, heads // kv_heads


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (32, 2), (16, 8), (40, 8), (8, 8), (6, 2)])
@pytest.mark.parametrize(("queries", "keys"), [*LENGTHS, ([6827], None)])
def test_hopper_backward_has_the_bytes_of_triton(heads, queries, keys):
    from rl_kernel.ops.attention.triton_backward import portable

    hopper = _hopper("backward")
    case = _backward_case(queries, *heads, keys)
    assert hopper.unusable(*case[1:4], *case[6:8]) is None
    for name, own, other in zip(("dq", "dk", "dv"), hopper.backward(*case), portable(*case)):
        assert differing(own, other) == 0, name


@pytest.mark.parametrize("heads", [(32, 8), (40, 8)])
def test_hopper_backward_never_reads_a_neighbour_and_names_what_it_cannot(heads):
    from rl_kernel.ops.attention import triton as op

    hopper = _hopper("backward")
    case = list(_backward_case([100, 77, 300], *heads))
    clean = hopper.backward(*case)
    for i in range(6):  # dout, q, k, v, out, lse
        case[i] = case[i].clone()
        case[i][177:] = float("nan")
    for own, other in zip(clean, hopper.backward(*case)):
        assert differing(own[:177], other[:177]) == 0
    q, k, v, cu = case[1], case[2], case[3], case[6]
    assert "strides" in hopper.unusable(q, k, torch.zeros(477, 8, 129, device="cuda", dtype=BF16)[..., 1:], cu, cu)
    assert "int32" in hopper.unusable(q, k, v, cu.long(), cu)
    assert "heads of 64" in hopper.unusable(q[..., :64], k[..., :64], v[..., :64], cu, cu)
    none = torch.empty(0, 32, 128, device="cuda", dtype=BF16)
    empty = op.varlen_backward(none, none, none[:, :8], none[:, :8], none, none[..., 0].float(), cumulative([0, 0]))
    assert [x.shape[0] for x in empty] == [0, 0, 0]


def _sdpa(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def test_accuracy_is_that_of_eager():
    from rl_kernel.ops.attention import triton as op

    q, k, v = data(700, 8, 128, seed=1, heavy=False), data(700, 2, 128, seed=2, heavy=False), data(700, 2, 128, seed=3)
    dout = data(700, 8, 128, seed=4)
    cu = cumulative([700])
    exact_in = [x.double().requires_grad_() for x in (q, k, v)]
    exact = _sdpa(*exact_in)
    exact.backward(dout.double())
    eager_in = [x.clone().requires_grad_() for x in (q, k, v)]
    eager = _sdpa(*eager_in)
    eager.backward(dout)
    out, lse = op.varlen_forward(q, k, v, cu)
    assert (out - exact).abs().sum() <= 2 * (eager - exact).abs().sum()
    for own, e, x in zip(op.varlen_backward(dout, q, k, v, out, lse, cu), eager_in, exact_in):
        assert (own - x.grad).abs().sum() <= 2 * (e.grad - x.grad).abs().sum()


def test_negative_control_sdpa_decode_differs_from_prefill():
    q, k, v = (data(1500, heads, 128, seed=i, heavy=False) for i, heads in enumerate((32, 8, 8)))
    whole = _sdpa(q, k, v)
    found = {}
    for position in (100, 777, 1499):
        one = torch.nn.functional.scaled_dot_product_attention(
            q[position : position + 1].transpose(0, 1)[None], k[: position + 1].transpose(0, 1)[None],
            v[: position + 1].transpose(0, 1)[None], enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
        found[position] = differing(whole[position : position + 1], one)
    folder = os.environ.get("RLK_REPORT_DIR")
    if folder:
        Path(folder, "control_sdpa.json").write_text(json.dumps(found), encoding="utf-8")
    assert sum(found.values()) > 0
