"""logp, lse, entropy and log_softmax of logits: bits, accuracy, sharding, bad input."""

from __future__ import annotations

import random

import pytest
import torch

from rl_kernel import ContractError, UnsupportedError, log_softmax, logp, set_mode
from rl_kernel.ops._primitives import count_different, same_bits
from rl_kernel.ops.logp import native, op, reference, shards
from rl_kernel.ops.logp.vocab_tree import VocabLayout, aligned_nodes, leaves_of
from rl_kernel.registry import Request

needs_native = pytest.mark.skipif(
    native.supports(Request("logp", "cpu", torch.float32)) is not None, reason="extension not built"
)
TEMPERATURES = (0.7, 1.0, 1.3)


def make(rows: int, width: int, seed: int = 0, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator) * scale
    return logits, torch.randint(0, width, (rows,), generator=generator)


def loss_of(out, rows: int) -> torch.Tensor:
    """A loss that reaches all three outputs, with a different weight for every row."""
    k = torch.linspace(-1, 1, rows)
    return (out.logp * k).sum() + (out.entropy * (0.5 - k)).sum() - 0.3 * (out.lse * k * k).sum()


def special(rows: int, width: int) -> torch.Tensor:
    """Rows with equal values, zeros of both signs, -inf columns, huge offsets, +inf and NaN."""
    x, _ = make(rows, width)
    x[0] = 0.0
    x[0, ::2] = -0.0
    x[1, 1:] = -torch.inf
    x[2] += 1e4
    x[3] *= 1e30
    x[4, 5] = torch.nan
    x[5, 0] = torch.inf
    x[6] = -torch.inf
    x[7, 0] += 200.0
    return x


# ---- the compiled kernel keeps the specification ---------------------------------------------------------------------
@needs_native
@pytest.mark.parametrize("width,vocab", ((1, 1), (5, 5), (128, 128), (300, 300), (512, 385), (1024, 1000)))
def test_native_equals_reference(width, vocab):
    x, targets = make(9, width)
    targets %= vocab
    targets[3] = -100
    for temperature in (*TEMPERATURES, torch.linspace(0.5, 2, 9)):
        results = []
        for backend in ("native", "reference"):
            leaf = x.clone().requires_grad_()
            out = logp(leaf, targets, global_vocab_size=vocab, temperature=temperature, backend=backend)
            (grad,) = torch.autograd.grad(loss_of(out, 9), leaf)
            results.append((*out, grad, log_softmax(x, temperature, vocab, backend=backend)))
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@needs_native
def test_native_equals_reference_on_special_values():
    x = special(8, 260)
    targets = torch.zeros(8, dtype=torch.int64)
    results = []
    for backend in ("native", "reference"):
        leaf = x.clone().requires_grad_()
        out = logp(leaf, targets, temperature=0.7, backend=backend)
        (grad,) = torch.autograd.grad(loss_of(out, 8), leaf)
        results.append((*out, grad, log_softmax(x, 0.7, backend=backend)))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_special_values():
    out = logp(special(8, 260), torch.zeros(8, dtype=torch.int64))
    assert torch.allclose(out.entropy[0], torch.tensor(260.0).log())
    assert out.logp[1] == 0 and out.entropy[1] == 0  # one column carries all the mass, the others are -inf
    assert all(torch.isfinite(v[[0, 1, 2, 3, 7]]).all() for v in out)
    assert all(v[[4, 5, 6]].isnan().all() for v in out)  # NaN, +inf and a row without any mass


# ---- accuracy --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("offset", (0.0, 1e4))
def test_error_against_float64_is_at_most_twice_eagers(temperature, offset):
    x, targets = make(64, 2000)
    x = x + offset

    def eager(dtype):
        leaf = x.to(dtype).requires_grad_()
        z = leaf / temperature
        y = torch.log_softmax(z, -1)
        out = op.LinearLogpOutput(y.gather(1, targets[:, None])[:, 0], torch.logsumexp(z, -1), -(y.exp() * y).sum(-1))
        return (*out, torch.autograd.grad(loss_of(out, 64), leaf)[0])

    leaf = x.clone().requires_grad_()
    out = logp(leaf, targets, temperature=temperature)
    ours = (*out, torch.autograd.grad(loss_of(out, 64), leaf)[0])
    for mine, stock, exact in zip(ours, eager(torch.float32), eager(torch.float64), strict=True):
        error, allowed = (mine - exact).abs().max(), 2 * (stock - exact).abs().max()
        assert error <= allowed, f"{error} > {allowed}"


# ---- one set of bits -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_log_softmax_column_has_the_bits_of_logp(temperature):
    x, targets = make(40, 1024)
    columns = log_softmax(x, temperature, 1000)
    assert columns[:, 1000:].eq(-torch.inf).all()
    for t in (targets % 1000, torch.full_like(targets, 999), torch.zeros_like(targets)):
        assert same_bits(
            columns.gather(1, t[:, None])[:, 0], logp(x, t, global_vocab_size=1000, temperature=temperature).logp
        )
    assert torch.allclose(columns.exp().sum(1), torch.ones(40))


def test_padding_never_enters():
    x, targets = make(20, 1024)
    targets %= 900
    short = logp(x[:, :900], targets)
    for filler in (torch.nan, torch.inf, 1e30, 0.0):
        y = x.clone()
        y[:, 900:] = filler
        leaf = y.requires_grad_()
        out = logp(leaf, targets, global_vocab_size=900)
        assert all(same_bits(a, b) for a, b in zip(out, short, strict=True))
        (grad,) = torch.autograd.grad(out.logp.sum(), leaf)
        assert grad[:, 900:].eq(0).all() and grad[:, :900].isfinite().all()


def test_rows_threads_and_runs_do_not_matter():
    x, targets = make(300, 1500)
    first = logp(x, targets, temperature=0.7)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(same_bits(a, b) for a, b in zip(logp(x, targets, temperature=0.7), first, strict=True))
    finally:
        torch.set_num_threads(threads)
    for rows in (torch.tensor([7]), torch.arange(299, -1, -1), torch.arange(13, 200, 3)):
        some = logp(x[rows], targets[rows], temperature=0.7)
        assert all(same_bits(a, b[rows]) for a, b in zip(some, first, strict=True))


def simulate(x, targets, borders, vocab, temperature):
    """All ranks of a tensor-parallel group in one process: each computes its part, then the parts are put together."""
    layout = VocabLayout(tuple(borders), vocab)
    t = shards.temperature_rows(temperature, len(x), x.device)
    parts, z = [], torch.zeros(len(x))
    for rank in range(layout.ranks):
        own = x[:, borders[rank] : borders[rank + 1]]
        local = shards.local_targets(targets, borders[rank], layout.columns(rank))
        parts.append(native.leaf_stats(own, t, layout.columns(rank)))
        if own.shape[1]:
            z = torch.where(local >= 0, native.target_logits(own, t, local), z)
    m = torch.stack([p[0].amax(1) if p.shape[2] else torch.full((len(x),), -torch.inf) for p in parts]).amax(0)
    nodes = [native.tree_nodes(p, m, layout.local_ranges(rank), layout.max_nodes()) for rank, p in enumerate(parts)]
    return native.finish(torch.cat(nodes), layout.merges(), layout.first_slot(), m, z)


@needs_native
def test_any_partition_gives_the_same_bits():
    draw = random.Random(1)
    for _ in range(60):
        leaves = draw.randint(1, 40)
        vocab = 128 * leaves - draw.choice((0, 0, 1, 77, 127))
        ranks = draw.randint(1, min(9, leaves))
        borders = [0, *(128 * b for b in sorted(draw.sample(range(1, leaves), ranks - 1))), 128 * leaves + 256]
        x, targets = make(5, borders[-1], seed=leaves)
        targets %= vocab
        whole = logp(x, targets, global_vocab_size=vocab, temperature=0.7)
        assert all(same_bits(a, b) for a, b in zip(simulate(x, targets, borders, vocab, 0.7)[:3], whole, strict=True))


def test_aligned_subtrees_tile_the_range():
    for first in range(20):
        for last in range(first, 40):
            nodes = aligned_nodes(first, last)
            covered = [leaf for level, i in nodes for leaf in range(i << level, (i + 1) << level)]
            assert covered == list(range(first, last))
            assert len(nodes) <= 2 * max(1, (last - first).bit_length())
            for level, i in nodes:  # maximal: the parent leaves the range
                parent = i >> 1
                assert parent << (level + 1) < first or (parent + 1) << (level + 1) > last


def _logp_on_a_rank(group, borders, vocab):
    x, targets = make(33, borders[-1])
    targets %= vocab
    targets[5] = -100
    rank = group.rank()
    own = x[:, borders[rank] : borders[rank + 1]].clone().requires_grad_()
    out = logp(own, targets, tp_group=group, vocab_start_index=borders[rank], global_vocab_size=vocab, temperature=1.3)
    (grad,) = torch.autograd.grad(loss_of(out, 33), own)
    return [t.detach().numpy() for t in (*out, grad)]


@pytest.mark.parametrize("borders", ([0, 512, 1024], [0, 128, 640, 1024], [0, 256, 512, 768, 1024]), ids=len)
def test_real_processes(ranks, borders):
    vocab = 900
    x, targets = make(33, 1024)
    targets %= vocab
    targets[5] = -100
    leaf = x.requires_grad_()
    out = logp(leaf, targets, global_vocab_size=vocab, temperature=1.3)
    (grad,) = torch.autograd.grad(loss_of(out, 33), leaf)
    for rank, result in enumerate(ranks.run(len(borders) - 1, _logp_on_a_rank, borders, vocab)):
        *values, own = map(torch.from_numpy, result)
        assert all(same_bits(a, b) for a, b in zip(values, out, strict=True))
        assert same_bits(own, grad[:, borders[rank] : borders[rank + 1]])


# ---- negative controls: other arithmetic gives other bits ------------------------------------------------------------
def test_other_arithmetic_differs(monkeypatch):
    x, targets = make(400, 2048)
    ours = logp(x, targets, temperature=0.7, backend="reference")
    stock = torch.log_softmax(x / 0.7, -1).gather(1, targets[:, None])[:, 0]
    assert count_different(ours.logp, stock) > 0
    assert count_different(ours.logp, logp(x / 0.7, targets, temperature=0.7).logp) > 300  # applied twice
    with set_mode("native"):
        assert count_different(ours.logp, logp(x, targets, temperature=0.7).logp) > 0
    monkeypatch.setattr(reference, "VOCAB_LEAF", 64)  # leaves of 64 columns
    t = torch.full((400,), 0.7)
    stats = reference.leaf_stats(x, t, 2048)
    m = stats[0].amax(1)
    nodes = reference.tree_nodes(stats, m, [(0, 32)], 1)
    other = reference.finish(nodes, [], 0, m, reference.target_logits(x, t, targets))
    assert count_different(ours.logp, other[0]) > 0


def test_merging_per_rank_sums_differs():
    """The usual tensor-parallel softmax, a sum of per-rank sums in rank order, does not keep the tree."""
    x, targets = make(400, 2048)
    whole = logp(x, targets)
    m = x.amax(1, keepdim=True)
    total = sum((part - m).exp().sum(1) for part in x.chunk(4, dim=1))
    assert count_different(whole.lse, m[:, 0] + total.log()) > 0


# ---- masks, empty input, modes, errors -------------------------------------------------------------------------------
def test_ignored_rows_are_zero_and_not_read():
    x, targets = make(12, 200)
    targets[::2] = -100
    x[::2] = torch.nan
    leaf = x.requires_grad_()
    out = logp(leaf, targets)
    (grad,) = torch.autograd.grad(loss_of(out, 12), leaf)
    assert all(v[::2].eq(0).all() and v[1::2].isfinite().all() for v in out)
    assert grad[::2].eq(0).all() and grad[1::2].isfinite().all()


@pytest.mark.parametrize("rows", (0, 3))
def test_nothing_to_do(rows):
    leaf = torch.randn(rows, 200, requires_grad=True)
    out = logp(leaf, torch.full((rows,), -100))
    (grad,) = torch.autograd.grad(loss_of(out, rows), leaf)
    assert all(v.shape == (rows,) and v.eq(0).all() for v in out) and grad.eq(0).all()
    assert log_softmax(torch.randn(0, 10)).shape == (0, 10)


def test_an_unused_output_costs_nothing():
    x, targets = make(10, 300)
    leaf = x.requires_grad_()
    (only,) = torch.autograd.grad(logp(leaf, targets).logp.sum(), leaf)
    out = logp(leaf, targets)
    (both,) = torch.autograd.grad(out.logp.sum() + 0.0 * out.entropy.sum(), leaf)
    assert same_bits(only, both)


def test_narrow_logits_are_widened():
    x, targets = make(6, 300)
    narrow = x.to(torch.bfloat16).requires_grad_()
    out = logp(narrow, targets)
    assert all(same_bits(a, b) for a, b in zip(out, logp(narrow.float(), targets), strict=True))
    (grad,) = torch.autograd.grad(out.logp.sum(), narrow)
    assert grad.dtype == torch.bfloat16


def test_native_mode_is_the_stock_formula():
    x, targets = make(30, 1000)
    with set_mode("native"):
        out = logp(x, targets, global_vocab_size=990, temperature=0.7)
        assert torch.allclose(log_softmax(x, 0.7), torch.log_softmax(x / 0.7, -1))
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(out, logp(x, targets, global_vocab_size=990, temperature=0.7), strict=True)
    )


@pytest.mark.parametrize(
    "change,message",
    (
        ({"target_ids": torch.tensor([1, 300, 2])}, r"row 1 is 300, outside \[0, 300\)"),
        ({"target_ids": torch.tensor([1, -1, 2])}, "row 1 is -1"),
        ({"target_ids": torch.tensor([1.0, 2.0, 3.0])}, "int64 or int32"),
        ({"target_ids": torch.tensor([1, 2])}, r"shape \(3,\)"),
        ({"temperature": 0.0}, "temperature=0.0 must be finite and above 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1e-46}, "temperature=1e-46 must be finite and above 0, in float32"),
        ({"temperature": 1e39}, r"temperature=1e\+39"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, "row 1 is -1.0"),
        ({"temperature": torch.ones(2)}, r"shape \(2,\)"),
        ({"temperature": torch.ones(3, requires_grad=True)}, "no gradient is defined"),
        ({"vocab_start_index": 128}, "needs tp_group"),
        ({"global_vocab_size": 301}, "global_vocab_size=301"),
        ({"global_vocab_size": 0}, "global_vocab_size=0"),
        ({"logits": torch.randn(3)}, r"must be \[T, V\]"),
        ({"logits": torch.randn(3, 300, dtype=torch.float64)}, "float32"),
    ),
)
def test_errors_name_the_field(change, message):
    arguments = {"logits": torch.randn(3, 300), "target_ids": torch.tensor([1, 2, 3]), **change}
    with pytest.raises(ContractError, match=message):
        logp(arguments.pop("logits"), arguments.pop("target_ids"), **arguments)


def test_stock_backend_is_refused_in_strict_mode():
    with pytest.raises(UnsupportedError, match="keeps no contract"):
        logp(torch.randn(3, 300), torch.tensor([1, 2, 3]), backend="torch")


def _errors_on_a_rank(group):
    """Every rank gets the message, nobody hangs."""
    x, targets, start = torch.randn(3, 200), torch.tensor([1, 2, 3]), 200 * group.rank()
    for arguments, message in (
        ({"vocab_start_index": start}, "multiple of 128"),
        ({"vocab_start_index": 256 * group.rank()}, "end of the previous rank's shard"),
        ({"vocab_start_index": start, "global_vocab_size": 300 + group.rank()}, "global_vocab_size differs"),
    ):
        with pytest.raises(ContractError, match=message):
            logp(x, targets, tp_group=group, **arguments)
    with pytest.raises(ContractError, match="number of rows differs"):
        logp(x[: 2 + group.rank()], targets[: 2 + group.rank()], tp_group=group, vocab_start_index=start)


def test_bad_layout_raises_on_every_rank(ranks):
    ranks.run(2, _errors_on_a_rank)


def test_opcheck():
    x, targets = make(6, 300)
    targets[2] = -100
    t = torch.full((6,), 0.7)
    torch.library.opcheck(op._logp.registered, (x.requires_grad_(), targets, t, [0, 300], 290, -100, "", "auto"))
    torch.library.opcheck(op._log_softmax.registered, (x.detach(), t, 300, "auto"))
    state, grads = torch.randn(3, 6), torch.randn(3, 6)
    torch.library.opcheck(op._logp_backward.registered, (x.detach(), targets, t, state, grads, 0, 290, -100, "auto"))


def test_layout_counts():
    layout = VocabLayout((0, 512, 1024), 900)
    assert [layout.columns(r) for r in range(2)] == [512, 388] and layout.max_leaves() == leaves_of(512)
    assert layout.local_segments(1, 4) == [(0, 256), (256, 388)]
    with pytest.raises(ContractError, match="power of two and a multiple of the 2 ranks"):
        layout.local_segments(0, 1)
