"""Bytes of the Hopper kernels: schedules, backends, shards, rows and odd inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernel.contract import VOCAB_BLOCK
from rl_kernel.errors import ContractError
from rl_kernel.ops.linear_logp import linear_logp, lm_head, sm90, sm90_schedules
from rl_kernel.ops.logp.op import logp
from rl_kernel.ops.logp.vocab_tree import VocabLayout
from tests.ops.gpu_harness import differing, where
from tests.ops.sm90_harness import SHAPES, assert_same, need_hopper, operands

need_hopper()

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def workspace():
    before = sm90.WORKSPACE_BYTES
    yield
    sm90.WORKSPACE_BYTES = before


def both(h, w, t, *, mib=512, entropy=True, **arguments):
    """(logp, lse, entropy, dH, dW) with fixed upstream gradients."""
    sm90.WORKSPACE_BYTES = mib << 20
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    out = linear_logp(h, w, t, **arguments)
    g = torch.Generator(device="cuda").manual_seed(7)
    upstream = [torch.randn(t.shape, device="cuda", generator=g) for _ in range(3)]
    outputs = tuple(out) if entropy else (out.logp,)
    return [x.detach() for x in out] + list(torch.autograd.grad(outputs, (h, w), upstream[: len(outputs)]))


def some_kept(h, w, t, **arguments):
    """With a workspace for the logits of some of the columns only."""
    met, gradients = [], sm90.gradients

    def spy(weight, slots, kept, *more):
        met.append(None if kept is None else kept.shape[1])
        return gradients(weight, slots, kept, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "gradients", spy)
        found = both(h, w, t, mib=2 * len(t) * len(w) * 2 // 3 >> 20, **arguments)
    assert 0 < met[0] < arguments["global_vocab_size"], met
    return found


def mixed_temperature(tokens):
    temperature = torch.full((tokens,), 0.7, device="cuda")
    temperature[::3] = 1.0
    temperature[1::3] = 1.3
    return temperature


# Hidden sizes about which the halves of a tile begin to end apart.
SHORT = [(300, hidden, 2688, 2601) for hidden in (64, 192, 200, 256, 264)]


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("shape", SHAPES + SHORT)
def test_schedules_and_backends_agree(shape, entropy):
    h, w, t = operands(*shape)
    t[5:9] = -100
    common = {"entropy": entropy, "temperature": mixed_temperature(len(t)), "global_vocab_size": shape[3]}
    kept = both(h, w, t, **common)
    assert_same(both(h, w, t, **common), kept)
    assert_same(both(h, w, t, mib=1, **common), kept)
    if shape[3] > 2 * VOCAB_BLOCK:
        assert_same(some_kept(h, w, t, **common), kept)
    for backend in ("library", "triton"):
        assert_same(both(h, w, t, backend=backend, **common), kept)
    wrong = both(h, w, t, **{**common, "temperature": mixed_temperature(len(t)) * 1.0001})
    assert all(differing(a, b) for a, b in zip(wrong, kept, strict=True))


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("segments", [2, 8])
def test_segments_agree(segments, entropy):
    h, w, t = operands(*SHAPES[1])
    common = {"grad_segments": segments, "global_vocab_size": SHAPES[1][3], "entropy": entropy}
    kept = both(h, w, t, **common)
    assert_same(both(h, w, t, mib=1, **common), kept)
    assert_same(some_kept(h, w, t, **common), kept)
    assert_same(both(h, w, t, backend="triton", **common), kept)
    assert differing(both(h, w, t, global_vocab_size=SHAPES[1][3], entropy=entropy)[3], kept[3])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("keep", [40003, 0])
@pytest.mark.parametrize(
    "tokens, width", [(7, 520), (300, 520), (384, 1024), (796, 1024), (1820, 520), (2100, 1024), (2100, 2568)]
)
def test_hidden_gradient_by_row_is_the_sum_by_slot(tokens, width, keep, share):
    """Of 7, 384 and 2100 tokens the last block of columns ends as bf16 rows in their places, zeros elsewhere."""
    columns = 40003  # three blocks
    h, w, t = operands(tokens, width, columns + 61, columns)
    g = torch.Generator(device="cuda").manual_seed(tokens + width)
    t[torch.rand(tokens, device="cuda", generator=g) < share] = -100
    upstream = torch.randn(tokens, device="cuda", generator=g)
    sm90.WORKSPACE_BYTES = 8 << 20

    def gradient(by_row, upstream):
        out, slots, stats, kept = sm90.forward(h, w, t, None, 0, columns, -100, float("nan"), keep, True)
        torch.full(
            (tokens, width), float("nan"), device="cuda", dtype=torch.bfloat16
        )  # memory that is not written shows
        arguments = (upstream, None, None), 0, columns, (1, columns), True, by_row, None
        return sm90.gradients(w, slots, kept, stats, out, *arguments), slots

    sums, slots = gradient(False, upstream)
    active = int(slots.active[0])
    expected = torch.zeros((tokens, width), device="cuda", dtype=torch.bfloat16)
    expected[slots.order[:active]] = sums[:active].bfloat16()
    assert_same([gradient(True, upstream)[0]], [expected])
    assert (differing(gradient(True, upstream * 1.01)[0], expected) > 0) == (active > 0)


@pytest.mark.parametrize("mib", [512, 20, 1])
def test_weight_alone_with_short_segments(mib):
    """Without a gradient of the hidden states nothing is cut at segments, of which 20 MiB keep the first."""
    h, w, t = operands(*SHAPES[1])
    common = {"grad_segments": 8, "global_vocab_size": SHAPES[1][3]}
    upstream, found = torch.randn(len(t), device="cuda"), []
    for size, need in ((512, True), (mib, False)):
        sm90.WORKSPACE_BYTES = size << 20
        x, y = h.clone().requires_grad_(need), w.clone().requires_grad_()
        found.append(list(torch.autograd.grad(linear_logp(x, y, t, **common).logp, [y], upstream)))
    assert_same(*found)
    other = linear_logp(h, y, t, temperature=1.0001, **common).logp
    assert differing(torch.autograd.grad(other, y, upstream)[0], found[0][0])


@pytest.mark.parametrize("entropy", [True, False])
def test_carried_rows_with_some_kept(entropy):
    h, w, t = operands(796, 320, 40960, 40000)
    common = {"temperature": mixed_temperature(len(t)), "global_vocab_size": 40000, "entropy": entropy}
    kept = both(h, w, t, **common)
    assert_same(some_kept(h, w, t, **common), kept)
    wrong = some_kept(h, w, t, **{**common, "temperature": mixed_temperature(len(t)) * 1.0001})
    assert all(differing(a, b) for a, b in zip(wrong, kept, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_logp_of_logits_and_rows_alone(shape):
    h, w, t = operands(*shape)
    temperature = mixed_temperature(len(t))
    arguments = {"temperature": temperature, "global_vocab_size": shape[3]}
    with torch.no_grad():
        mine = linear_logp(h, w, t, **arguments)
        assert_same(logp(lm_head(h, w), t, **arguments), mine)
        for row in (0, len(t) // 2, len(t) - 1):
            part = slice(row, row + 1)
            alone = linear_logp(h[part], w, t[part], temperature=temperature[part], global_vocab_size=shape[3])
            assert_same(alone, [x[part] for x in mine])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_agree(ranks):
    from rl_kernel.ops.logp import triton as finish

    tokens, _, rows, vocabulary = SHAPES[1]
    h, w, t = operands(*SHAPES[1])
    temperature = mixed_temperature(tokens)
    layout = VocabLayout(tuple(rows // ranks * r for r in range(ranks + 1)), vocabulary)
    stats, z = [], torch.zeros(tokens, device="cuda")
    for r in range(ranks):
        local = t - layout.borders[r]
        local = torch.where((local >= 0) & (local < layout.columns(r)), local, -1)
        part = w[layout.borders[r] : layout.borders[r + 1]]
        leaf, own = sm90.leaf_stats(h, part, temperature, local, layout.columns(r))
        stats.append(leaf)
        z = torch.where(local >= 0, own, z)
    m = torch.stack([s[0].amax(1) for s in stats]).amax(0)
    nodes = [finish.tree_nodes(s, m, layout.local_ranges(r), layout.max_nodes()) for r, s in enumerate(stats)]
    out = finish.finish(torch.cat(nodes), layout.merges(), layout.first_slot(), m, z)
    assert_same(out[:3], linear_logp(h, w, t, temperature=temperature, global_vocab_size=vocabulary))


@pytest.mark.parametrize("tokens", [300, 796, 1000])
@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("segments", [1, 8])
def test_schedules_agree_with_tokens_as_columns(tokens, share, segments):
    h, w, t = operands(tokens, 1024, 40960, 40000)
    g = torch.Generator(device="cuda").manual_seed(5)
    t = torch.where(torch.rand(tokens, device="cuda", generator=g) < share, -100, t)
    common = {"grad_segments": segments, "global_vocab_size": 40000, "temperature": mixed_temperature(tokens)}
    kept = both(h, w, t, **common)
    assert_same(both(h, w, t, mib=1, **common), kept)
    assert_same(both(h, w, t, backend="triton", **common), kept)
    assert differing(both(h, w, t, **{**common, "grad_segments": 2})[3], kept[3])


def test_more_values_than_an_int_counts():
    """Kept logits of 2.5e9 values; recomputed ones are fewer at a time."""
    tokens = 16500
    h, w, t = operands(tokens, 264, 151936, 151936)
    temperature = mixed_temperature(tokens)
    kept = both(h, w, t, mib=5000, entropy=False, temperature=temperature)
    assert_same(both(h, w, t, mib=1, entropy=False, temperature=temperature), kept)
    last = slice(tokens - 100, tokens)
    assert_same(linear_logp(h[last], w, t[last], temperature=temperature[last]), [x[last] for x in kept[:3]])


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(tokens):
    h, w, t = operands(2, 128, 1000, 1000)
    h, t = h[:tokens], t[:tokens]
    found = both(h, w, t, temperature=0.7)
    assert_same(found, both(h, w, t, temperature=0.7, backend="triton"))
    assert [x.shape for x in found] == [(tokens,)] * 3 + [h.shape, w.shape]
    assert bool(found[4].count_nonzero()) == (tokens > 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_rows_stay_alone(value):
    h, w, t = operands(64, 128, 1000, 1000)
    good = linear_logp(h, w, t)
    h[3, 5] = value
    bad = linear_logp(h, w, t)
    assert torch.isnan(bad.logp[3]) and torch.isnan(bad.lse[3])
    others = torch.arange(64, device="cuda") != 3
    assert_same([x[others] for x in bad], [x[others] for x in good])
    w[700] = float("nan")
    assert torch.isnan(linear_logp(h, w, t).logp).all()


def test_huge_logits():
    h, w, t = operands(64, 128, 1000, 1000)
    h = torch.cat([h, torch.full((64, 8), 100.0, device="cuda", dtype=torch.bfloat16)], 1)
    w = torch.cat([w, torch.full((1000, 8), 12.5, device="cuda", dtype=torch.bfloat16)], 1)  # adds 1e4
    expected = torch.log_softmax(h.double() @ w.double().T, -1).gather(1, t[:, None])[:, 0]
    eager = torch.log_softmax(h.float() @ w.float().T, -1).gather(1, t[:, None])[:, 0]
    error = (linear_logp(h, w, t).logp.double() - expected).abs().max()
    assert error <= 4 * (eager.double() - expected).abs().max()


@pytest.mark.parametrize("share", [0.3, 0.97, 1.0])
@pytest.mark.parametrize("mib", [512, 1])
@pytest.mark.parametrize("entropy", [True, False])
def test_ignored_rows_leave_no_trace(share, mib, entropy):
    h, w, t = operands(*SHAPES[1])
    g = torch.Generator(device="cuda").manual_seed(3)
    ignored = torch.rand(len(t), device="cuda", generator=g) < share
    h[ignored] = float("nan")
    t = torch.where(ignored, -100, t)
    temperature = mixed_temperature(len(t))
    common = {"temperature": temperature, "global_vocab_size": SHAPES[1][3], "entropy": entropy}
    found = both(h, w, t, mib=mib, **common)
    clean = torch.where(ignored[:, None], 0, h)
    assert_same(both(clean, w, t, backend="triton", **common), found)
    assert not any(x[ignored].count_nonzero() for x in found[:4]) and (share < 1 or not found[4].count_nonzero())


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("mib", [512, 1])
@pytest.mark.parametrize("tokens, hidden", [(1, 64), (64, 320), (284, 320), (796, 512), (900, 2048)])
def test_hidden_states_by_row_or_by_slot(tokens, hidden, mib, entropy):
    """Where all rows take part they are read where they lie, with one row more to ignore a copy of them."""
    h, w, t = operands(tokens + 1, hidden, 2901, 2901)
    temperature, vocabulary = mixed_temperature(tokens + 1), {"global_vocab_size": 2901, "entropy": entropy, "mib": mib}
    copied = both(h, w, torch.cat((t[:-1], t.new_tensor([-100]))), temperature=temperature, **vocabulary)
    copied = [x[:-1] for x in copied[:4]] + copied[4:]
    upstream = torch.Generator(device="cuda").manual_seed(7)  # those of `both` depend on the number of rows
    g = [torch.randn(tokens + 1, device="cuda", generator=upstream)[:-1] for _ in range(3)]
    wide = torch.full((tokens, hidden + 24), float("nan"), device="cuda", dtype=h.dtype)
    wide[:, :hidden] = h[:-1]
    for rows in (h[:-1].clone(), wide[:, :hidden]):
        x, weight = rows.detach().requires_grad_(), w.clone().requires_grad_()
        out = linear_logp(x, weight, t[:-1], temperature=temperature[:-1], global_vocab_size=2901)
        outputs = tuple(out) if entropy else (out.logp,)
        if out.logp.grad_fn.saved_tensors[2] is not None:  # rows: the memory of the copy has not been written
            out.logp.grad_fn.slots.hidden.fill_(torch.nan)
        gradients = torch.autograd.grad(outputs, (x, weight), g[: len(outputs)])
        assert_same([*(x.detach() for x in out), *gradients], copied)
    changed = h[:-1].clone()
    changed[-1, 3] += 1.0
    found = linear_logp(changed, w, t[:-1], temperature=temperature[:-1], global_vocab_size=2901)
    assert differing(found.logp, copied[0])


@pytest.mark.parametrize("ahead", [0, 1])  # values in front of them in memory: read where they lie, or copied first
def test_changed_hidden_states_are_noticed(ahead):
    """They are read again for the gradient of the weight."""
    h, w, t = operands(*SHAPES[1])
    weight = w.requires_grad_()
    inner = torch.empty(ahead + h.numel(), device="cuda", dtype=h.dtype)[ahead:].view(h.shape).copy_(h).requires_grad_()
    out = linear_logp(inner, weight, t, global_vocab_size=SHAPES[1][3])
    inner.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logp.sum().backward()


@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.parametrize("mib", [512, 1])
def test_nothing_waits_for_the_gpu(mib, ignored):
    sm90.WORKSPACE_BYTES = mib << 20
    h, w, t = operands(*SHAPES[0])
    t[3 : 3 + ignored] = -100
    h, w = h.requires_grad_(), w.requires_grad_()
    upstream = torch.randn(len(t), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = linear_logp(h, w, t, global_vocab_size=5003, temperature=0.7)
        torch.autograd.grad(out.logp, (h, w), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mib", [512, 1])
@pytest.mark.parametrize("ahead", [0, 2])  # values in front of it in Megatron's buffer
@pytest.mark.parametrize("shape", [SHAPES[3], (200, 264, 5003, 5003)])
def test_weight_gradient_into_main_grad(mib, ahead, shape):
    sm90.WORKSPACE_BYTES = mib << 20
    h, w, t = operands(*shape)
    before, nothing = torch.randn(w.shape, device="cuda"), torch.full(w.shape, -0.0, device="cuda")
    w.requires_grad_()

    def added_to(start):
        buffer = torch.full((ahead + w.numel(),), 7.0, device="cuda")
        w.main_grad, w.grad_added_to_main_grad = buffer[ahead:].view(w.shape).copy_(start), False
        linear_logp(h, w, t, accumulate_main_grad=True).logp.sum().backward()
        assert w.grad_added_to_main_grad and differing(w.main_grad, start) and bool((buffer[:ahead] == 7.0).all())
        return w.main_grad

    plain = w.detach().clone().requires_grad_()
    linear_logp(h, plain, t).logp.sum().backward()
    exact = added_to(nothing)  # -0 adds nothing to anything
    assert_same([exact.bfloat16(), added_to(before)], [plain.grad, before + exact])
    with pytest.raises(ContractError, match="main_grad"):
        linear_logp(h, plain, t, accumulate_main_grad=True)


def test_gradient_that_megatron_reads_beside_main_grad(monkeypatch):
    """Of a tied weight: its hook adds the gradient of the embedding, and with it what is returned here."""
    h, w, t = operands(*SHAPES[3])
    w.requires_grad_()
    w.main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = torch.zeros(w.shape, device="cuda"), False, True
    made = torch.empty_like

    def poisoned(x, **more):  # what memory from the cache may hold
        return made(x, **more).fill_(torch.nan) if x.is_floating_point() else made(x, **more)

    monkeypatch.setattr(torch, "empty_like", poisoned)
    linear_logp(h, w, t, accumulate_main_grad=True).logp.sum().backward()
    assert w.grad_added_to_main_grad and w.grad.count_nonzero() == 0 and w.main_grad.count_nonzero() > 0


@pytest.mark.parametrize("tokens, ignored", [(1, 0), (3, 0), (6, 0), (42, 0), (1, 1), (42, 42), (200, 199), (200, 200)])
def test_no_tile_is_lost_between_long_stores(tokens, ignored):
    """Next to no products, and stores that read first: the id of the next tile is read before another replaces it."""
    h, w, t = operands(tokens, 1024, 41984, 40000)
    t[:ignored] = -100  # all: no products, or of zeros
    w.requires_grad_()
    upstream = torch.randn(3, tokens, device="cuda")

    def run(**more):
        out = linear_logp(h, w, t, global_vocab_size=40000, **more)
        torch.autograd.backward(tuple(out), list(upstream))
        return [x.detach() for x in out]

    rows = run()
    expected, nothing = w.grad.clone(), torch.full(w.shape, -0.0, device="cuda")
    assert differing(expected[:40000], nothing[:40000].bfloat16()) > 0  # what a lost tile leaves
    for repeat in range(50):
        w.grad, w.main_grad = None, nothing.clone()
        found = run(accumulate_main_grad=True)
        assert_same(found, rows)
        rounded = w.main_grad.bfloat16()
        assert differing(rounded[:40000], expected[:40000]) == 0, (repeat, where(rounded[:40000], expected[:40000]))


@pytest.mark.parametrize("tokens", [300, 284])
def test_kept_values_stay_in_their_columns(tokens):
    h, w, t = operands(tokens, 320, 2688, 301)
    expected, wide = sm90.new_kept(tokens, 301, h.device), torch.full((tokens, 512), 7.0, device="cuda").bfloat16()
    stats, _ = sm90.leaf_stats(h, w, None, t, 301, expected)
    others, _ = sm90.leaf_stats(h, w, None, t, 301, wide[:, :301])
    assert_same([stats, expected.contiguous()], [others, wide[:, :301].contiguous()])
    assert bool((wide[:, 304:] == 7).all())
    warmer, temperature = sm90.new_kept(tokens, 301, h.device), torch.full((tokens,), 1.01, device="cuda")
    other, _ = sm90.leaf_stats(h, w, temperature, t, 301, warmer)
    assert differing(other, stats) > 0 and differing(warmer, expected) > 0


# Rows beyond whole tiles of 128: 1 to 32 of them are carried by other tiles, of 256 and more that take part.
CARRIED = [257, 284, 288, 289, 543, 796, 1820, 389]


@pytest.mark.parametrize("hidden", [200, 256, 328])
@pytest.mark.parametrize("vocabulary", [2560, 2901, 700])
@pytest.mark.parametrize("tokens", CARRIED)
def test_carried_rows(tokens, vocabulary, hidden):
    h, w, t = operands(tokens, hidden, vocabulary + 8, vocabulary)
    t[-1], t[-2] = vocabulary - 1, 130
    common = {"temperature": mixed_temperature(tokens), "global_vocab_size": vocabulary}
    kept = both(h, w, t, **common)
    assert_same(both(h, w, t, backend="triton", **common), kept)
    with torch.no_grad():  # nothing kept
        assert_same(linear_logp(h, w, t, **common), kept[:3])
        for row in (tokens - 1, tokens - tokens % 128):
            part = slice(row, row + 1)
            arguments = {"temperature": common["temperature"][part], "global_vocab_size": vocabulary}
            assert_same(linear_logp(h[part], w, t[part], **arguments), [x[part] for x in kept[:3]])
    h[-1, 7] += 1.0
    assert [differing(a[-1:], b[-1:]) for a, b in zip(both(h, w, t, **common)[:3], kept[:3], strict=True)] == [1] * 3


@pytest.mark.parametrize("tokens, hidden", [(284, 320), (284, 328), (796, 320), (796, 512)])
def test_carried_rows_of_many_tiles(tokens, hidden):
    """A cluster's tiles that carry rows (of 284 all do) put their logits into memory that those before have used."""
    h, w, t = operands(tokens, hidden, 60000, 60000)
    common = {"temperature": mixed_temperature(tokens), "global_vocab_size": 60000}
    kept = both(h, w, t, **common)
    with torch.no_grad():
        for _ in range(5):
            assert_same(linear_logp(h, w, t, **common), kept[:3])
        temperature = common["temperature"][:-28]
        assert_same(
            linear_logp(h[:-28], w, t[:-28], temperature=temperature, global_vocab_size=60000),
            [x[:-28] for x in kept[:3]],
        )
        alone = linear_logp(h[-28:], w, t[-28:], temperature=common["temperature"][-28:], global_vocab_size=60000)
        assert_same(alone, [x[-28:] for x in kept[:3]])
        wrong = linear_logp(h, w, t, temperature=common["temperature"] * 1.0001, global_vocab_size=60000)
    assert differing(wrong.logp[-28:], kept[0][-28:])


@pytest.mark.parametrize("active", [1, 129, 255, 256, 257, 288, 289, 300, 384, 400, 512, 539, 768, 780])
def test_rows_that_take_part_and_may_be_carried(active):
    """Whether rows are carried follows from how many take part, which the host does not know."""
    h, w, t = operands(796, 320, 2901, 2901)
    g = torch.Generator(device="cuda").manual_seed(active)
    t[torch.randperm(796, device="cuda", generator=g)[active:]] = -100
    common = {"temperature": mixed_temperature(796), "global_vocab_size": 2901}
    kept = both(h, w, t, **common)
    assert_same(both(h, w, t, backend="triton", **common), kept)
    wrong = both(h, w, t, **{**common, "temperature": mixed_temperature(796) * 1.0001})
    assert differing(wrong[0], kept[0]) and differing(wrong[4], kept[4])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e30])
def test_carried_rows_with_bad_values(value):
    tokens = 284
    h, w, t = operands(tokens, 320, 1000, 1000)
    good = sm90.leaf_stats(h, w, None, t, 1000)[0]
    h[260] = value
    for temperature in (None, mixed_temperature(tokens)):
        stats, z = sm90.leaf_stats(h, w, temperature, t, 1000)
        part = None if temperature is None else temperature[256:]
        alone, own = sm90.leaf_stats(h[256:].contiguous(), w, part, t[256:].contiguous(), 1000)
        assert_same([stats[:, 256:], z[256:]], [alone, own])
        if temperature is None:
            others = torch.arange(tokens, device="cuda") != 260
            assert differing(stats[:, others], good[:, others]) == 0 and differing(stats[:, 260], good[:, 260])


@pytest.mark.parametrize("hidden", [200, 320])
def test_targets_in_every_column(hidden):
    """Each row's target lies in another place of its leaf, each column is some row's target."""
    h, w, _ = operands(700, hidden, 700, 700)
    for shift in (0, 1, 37):
        t = (torch.arange(700, device="cuda") + shift) % 700
        for temperature in (None, mixed_temperature(700)):
            stats, z = sm90.leaf_stats(h, w, temperature, t, 700)
            logits = lm_head(h, w) if temperature is None else lm_head(h, w) / temperature[:, None]
            assert_same([z], [logits.gather(1, t[:, None])[:, 0]])
            assert differing(z, logits.gather(1, (t[:, None] + 2) % 700)[:, 0]) > 0


@pytest.mark.parametrize("ignored", [0, 1])
def test_second_backward_recomputes(ignored):
    h, w, t = operands(*SHAPES[0])
    t[3 : 3 + ignored] = -100
    h, w = h.requires_grad_(), w.requires_grad_()
    out = linear_logp(h, w, t, global_vocab_size=5003)
    first = torch.autograd.grad(out.logp.sum(), (h, w), retain_graph=True)
    assert_same(torch.autograd.grad(out.logp.sum(), (h, w)), first)
    assert sm90_schedules.run is sm90.operator()


@pytest.mark.parametrize("ignored", [0, 1])
def test_under_activation_checkpointing(ignored):
    h, w, t = operands(*SHAPES[0])
    t[3 : 3 + ignored] = -100
    h, w = h.requires_grad_(), w.requires_grad_()

    def call(hidden):
        return linear_logp(hidden * 2, w, t, global_vocab_size=5003, temperature=0.7).logp

    expected = torch.autograd.grad(call(h).square().sum(), (h, w))
    again = checkpoint(call, h, use_reentrant=False)
    assert_same(torch.autograd.grad(again.square().sum(), (h, w)), expected)


@pytest.mark.parametrize("tokens", [1, 2, 7, 796, 1820, 6827])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_that_take_part_come_first(tokens, share):
    g = torch.Generator(device="cuda").manual_seed(tokens)
    h = torch.randn(tokens, 136, device="cuda", generator=g).bfloat16()[:, :128]  # rows apart
    t = torch.randint(0, 500, (tokens + 1,), device="cuda", generator=g)[1:]
    t = torch.where(torch.rand(tokens, device="cuda", generator=g) < share, -100, t)
    temperature = mixed_temperature(tokens)
    out = torch.ones(5, tokens, device="cuda")
    slots = sm90.select(h, t, temperature, -100, out, absent=3.0)
    active, ignored = (t != -100).nonzero()[:, 0], (t == -100).nonzero()[:, 0]
    order = torch.cat([active, ignored])
    count = len(active)
    assert slots.active.tolist() == [count] + [0] * 63
    assert torch.equal(slots.order, order) and torch.equal(slots.targets, t[order])
    assert torch.equal(slots.temperature, temperature[order]) and bool((slots.z_target == 3.0).all())
    place = torch.full((tokens,), -1, device="cuda", dtype=torch.int32)
    place[active] = torch.arange(count, device="cuda", dtype=torch.int32)
    assert torch.equal(slots.place, place)
    assert differing(slots.hidden[:count], h[active]) == 0
    assert not slots.hidden[count : min(-(-count // 64) * 64, tokens)].count_nonzero()
    assert not out[:, ignored].count_nonzero() and bool((out[:, active] == 1).all())


@pytest.mark.parametrize("leaves", [1, 5, 32, 33, 594, 640, 641, 1187, 2100])
def test_merge_equals_the_tree_of_the_other_backends(leaves):
    from rl_kernel.ops.logp import triton as finish

    tokens = 45
    g = torch.Generator(device="cuda").manual_seed(leaves)
    stats = torch.randn(3, tokens, leaves, device="cuda", generator=g)
    stats[0] = stats[0] * 20 + torch.rand(tokens, leaves, device="cuda", generator=g)
    stats[1] = stats[1].abs() + 1
    stats[:, ::4, leaves // 2 : leaves // 2 + leaves // 3] = torch.tensor([-torch.inf, 0.0, 0.0], device="cuda")[
        :, None, None
    ]
    z = torch.randn(tokens, device="cuda", generator=g)
    out = torch.zeros(5, tokens, device="cuda")
    order = torch.randperm(tokens, device="cuda", generator=g)
    count = torch.tensor([tokens - 3], device="cuda", dtype=torch.int32)
    torch.ops.rlk.sm90_merge(stats, z, count, 2, order, out)
    m, expected = finish.whole_rows(stats, z)
    expected = torch.stack([*expected[:3], m, expected[3]])
    rows = order[: tokens - 5]
    assert_same([out[:, rows]], [expected[:, : tokens - 5]])
    assert not out[:, order[tokens - 5 :]].count_nonzero()
    # Another sum in the leaf of the row's maximum, which enters with the factor 1 (one elsewhere may vanish beside it).
    stats[1].scatter_add_(1, stats[0].argmax(1, keepdim=True), torch.ones(tokens, 1, device="cuda"))
    assert differing(finish.whole_rows(stats, z)[1][0], expected[0]) == tokens


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("segments", [4, 8])
def test_segments_with_ignored_rows(segments, share):
    h, w, t = operands(*SHAPES[1])
    g = torch.Generator(device="cuda").manual_seed(4)
    t = torch.where(torch.rand(len(t), device="cuda", generator=g) < share, -100, t)
    common = {"grad_segments": segments, "global_vocab_size": 16000}  # segments cut off and empty
    t = torch.where(t >= 16000, -100, t)
    kept = both(h, w, t, **common)
    for mib in (512, 1):
        assert_same(both(h, w, t, mib=mib, **common), kept)
    assert_same(both(h, w, t, backend="triton", **common), kept)
    common["global_vocab_size"] = 40000
    wide = both(h, w, t, **common)
    assert_same(both(h, w, t, backend="library", **common), wide)
    assert share == 1.0 or differing(wide[3], kept[3])


FIRST = """
import torch
from rl_kernel.ops.linear_logp import linear_logp
large, small = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 19, device="cuda")
h = torch.randn(300, 512, device="cuda").bfloat16().requires_grad_()
w = torch.randn(5003, 512, device="cuda").mul_(0.02).bfloat16().requires_grad_()
t, up = torch.randint(0, 5003, (300,), device="cuda"), torch.randn(300, device="cuda")
logp = linear_logp(h, w, t).logp
del large, small
found = torch.autograd.grad(logp, (h, w), up)
assert all(bool(x.isfinite().all()) and bool(x.count_nonzero()) for x in found)
"""


def test_backward_is_the_first_call_of_its_thread():
    """Its memory is in torch's cache, so that nothing before has given autograd's thread a CUDA context."""
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("ignored", [0, 1])
def test_several_streams_and_a_graph(ignored):
    h, w, t = operands(*SHAPES[0])
    t[3 : 3 + ignored] = -100
    h, w = h.requires_grad_(), w.requires_grad_()
    upstream = torch.randn(len(t), device="cuda")

    def call():
        out = linear_logp(h, w, t, global_vocab_size=5003)
        return [out.logp.detach(), *torch.autograd.grad(out.logp, (h, w), upstream)]

    expected = call()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            found.append(call())
    torch.cuda.synchronize()
    for result in found:
        assert_same(result, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for x in captured:
        x.zero_()
    graph.replay()
    assert_same(captured, expected)
