"""linear_logp and lm_head: the fused operator has the bits of the unfused one, on every number of ranks."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernel import ContractError, linear_logp, lm_head, logp, padded_vocab_size, set_mode
from rl_kernel.ops._primitives import count_different, same_bits
from rl_kernel.ops.linear_logp import native, op
from rl_kernel.registry import Request

needs_native = pytest.mark.skipif(
    native.supports(Request("linear_logp", "cpu", torch.float32)) is not None, reason="extension not built"
)
DTYPES = (torch.float32, torch.bfloat16)
TEMPERATURES = (0.7, 1.0, 1.3)


def make(rows: int, hidden: int, vocab: int, dtype: torch.dtype, seed: int = 0, real: int | None = None):
    """hidden [T, H], weight N(0, 0.02) [V, H] with a real row norm, targets below ``real`` with some ignored."""
    generator = torch.Generator().manual_seed(seed)
    h = (torch.randn(rows, hidden, generator=generator) * 20).to(dtype)
    w = (torch.randn(vocab, hidden, generator=generator) * 0.02).to(dtype)
    targets = torch.randint(0, real or vocab, (rows,), generator=generator)
    targets[3::5] = -100
    if rows > 1:
        targets[0], targets[1] = (real or vocab) - 1, 0  # the last column of the last shard, the first of the first
    return h, w, targets


def loss_of(out, rows: int) -> torch.Tensor:
    k = torch.linspace(-1, 1, rows)
    return (out.logp * k).sum() + (out.entropy * (0.5 - k)).sum() - 0.3 * (out.lse * k * k).sum()


def run(h, w, targets, *, fused: bool = True, segments: int | None = None, **arguments):
    """(logp, lse, entropy, dH, dW)."""
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    if fused:
        out = linear_logp(h, w, targets, grad_segments=segments, **arguments)
    else:
        out = logp(lm_head(h, w, grad_segments=segments), targets, **arguments)
    return [t.detach() for t in (*out, *torch.autograd.grad(loss_of(out, len(targets)), (h, w)))]


# ---- the compiled kernel keeps the specification ---------------------------------------------------------------------
@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows,hidden,vocab,real", ((5, 33, 129, 129), (13, 48, 512, 500), (7, 16, 700, 260)))
def test_native_equals_reference(dtype, rows, hidden, vocab, real):
    h, w, targets = make(rows, hidden, vocab, dtype, real=real)
    arguments = {"global_vocab_size": real, "temperature": torch.linspace(0.5, 2, rows), "segments": 4}
    pairs = zip(*(run(h, w, targets, backend=b, **arguments) for b in ("native", "reference")), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


@needs_native
def test_native_equals_reference_on_special_values():
    h, w, targets = make(6, 16, 300, torch.float32)
    h[0], h[1, 3], h[2] = 1e30, torch.nan, 0.0
    pairs = zip(*(run(h, w, targets, backend=b) for b in ("native", "reference")), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


# ---- fused = unfused -------------------------------------------------------------------------------------------------
GRID = (  # rows, hidden, real vocabulary, dtype
    (0, 32, 1000, torch.float32),
    (1, 32, 1000, torch.float32),
    (7, 48, 2300, torch.bfloat16),
    (796, 48, 2300, torch.float32),
    (1820, 32, 1000, torch.bfloat16),
    (6827, 32, 1000, torch.float32),
    (6827, 16, 1024, torch.bfloat16),
    (9, 16, 151936, torch.bfloat16),  # the vocabulary of Qwen3, not a multiple of 128 * 8
)


def cases():
    for i, (rows, hidden, real, dtype) in enumerate(GRID):
        vocab = padded_vocab_size(real, 8)
        per_row = torch.linspace(0.5, 1.5, rows)
        for temperature in TEMPERATURES if rows in (7, 796) else (TEMPERATURES[i % 3], per_row):
            yield make(rows, hidden, vocab, dtype, seed=i, real=real), real, temperature


def test_equals_logp_of_lm_head_forward_and_backward():
    for operands, real, temperature in cases():
        arguments = {"global_vocab_size": real, "temperature": temperature, "segments": 8}
        fused, unfused = (run(*operands, fused=f, **arguments) for f in (True, False))
        assert all(same_bits(a, b) for a, b in zip(fused, unfused, strict=True)), (operands[0].shape, temperature)


def test_unpadded_vocabulary_has_the_bits_of_the_padded_one():
    h, w, targets = make(50, 32, 1024, torch.bfloat16, real=901)
    padded = run(h, w, targets, global_vocab_size=901, segments=8)
    short = run(h, w[:901], targets, segments=8)
    assert all(same_bits(a, b) for a, b in zip(padded[:4], short[:4], strict=True))
    assert same_bits(padded[4][:901], short[4]) and padded[4][901:].eq(0).all()
    w[901:] = torch.nan
    assert all(same_bits(a, b) for a, b in zip(run(h, w, targets, global_vocab_size=901, segments=8), padded))


# ---- tensor parallelism ----------------------------------------------------------------------------------------------
def digest(t: torch.Tensor) -> str:
    return hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b"").hexdigest()


def _grid_on_a_rank(group):
    results = []
    for (h, w, targets), real, temperature in cases():
        size = w.shape[0] // group.size()
        start = size * group.rank()
        out = run(
            h,
            w[start : start + size],
            targets,
            tp_group=group,
            vocab_start_index=start,
            global_vocab_size=real,
            temperature=temperature,
            segments=8,
        )
        results.append([digest(t) for t in out])
    return results


@pytest.fixture(scope="module")
def one_rank():
    return [
        run(*operands, global_vocab_size=real, temperature=temperature, segments=8)
        for operands, real, temperature in cases()
    ]


@pytest.mark.parametrize("size", (1, 2, 4, 8))
def test_every_number_of_ranks_gives_the_same_bits(ranks, one_rank, size):
    for rank, results in enumerate(ranks.run(size, _grid_on_a_rank)):
        for result, expected in zip(results, one_rank, strict=True):
            rows = expected[4].shape[0] // size
            own = expected[4][rank * rows : (rank + 1) * rows]
            assert result == [digest(t) for t in (*expected[:4], own)]


BORDERS = [0, 128, 640, 1024]


def _uneven_on_a_rank(group):
    h, w, targets = make(40, 32, 1024, torch.bfloat16, real=1000)
    begin, end = BORDERS[group.rank() : group.rank() + 2]
    arguments = {"tp_group": group, "vocab_start_index": begin, "global_vocab_size": 1000}
    own = w[begin:end].clone()
    out = [t.numpy() for t in linear_logp(h, own, targets, **arguments)]
    with pytest.raises(ContractError, match="grad_segments=3 must be a power of two"):
        linear_logp(h, own.requires_grad_(), targets, **arguments)
    return out


def test_shards_of_different_size(ranks):
    """Forward accepts every partition at the borders of leaves; the gradient needs whole segments and says so."""
    h, w, targets = make(40, 32, 1024, torch.bfloat16, real=1000)
    expected = linear_logp(h, w, targets, global_vocab_size=1000)
    for result in ranks.run(3, _uneven_on_a_rank):
        assert all(same_bits(torch.from_numpy(a), b) for a, b in zip(result, expected, strict=True))


# ---- accuracy --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ("logp", "lse", "entropy", "all"))
def test_gradients_are_at_most_twice_as_far_from_float64_as_eager(dtype, which):
    h, w, targets = make(120, 64, 1000, dtype)
    active = targets != -100

    def gradients(function, operands):
        leaves = [x.clone().requires_grad_() for x in operands]
        out = function(*leaves)
        loss = loss_of(out, 120) if which == "all" else (getattr(out, which) * torch.linspace(-1, 1, 120)).sum()
        return [*(t.detach() for t in out), *torch.autograd.grad(loss, leaves)]

    def eager(h_, w_):
        z = (h_ @ w_.t()).to(torch.promote_types(h_.dtype, torch.float32)) / 0.7
        y = torch.log_softmax(z, -1)
        picked = y.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        out = picked, torch.logsumexp(z, -1), -(y.exp() * y).sum(-1)
        return op.LinearLogpOutput(*(torch.where(active, x, 0) for x in out))

    ours = gradients(lambda a, b: linear_logp(a, b, targets, temperature=0.7, grad_segments=8), (h, w))
    stock = gradients(eager, (h, w))
    exact = gradients(eager, (h.double(), w.double()))
    for mine, other, true in zip(ours, stock, exact, strict=True):
        error, allowed = (mine - true).abs().max(), 2 * (other - true).abs().max()
        assert error <= allowed, f"{error} > {allowed}"


def test_one_gradient_at_a_time():
    h, w, targets = make(30, 32, 512, torch.float32)
    both = run(h, w, targets)
    a = h.clone().requires_grad_()
    assert same_bits(torch.autograd.grad(loss_of(linear_logp(a, w, targets), 30), a)[0], both[3])
    b = w.clone().requires_grad_()
    assert same_bits(torch.autograd.grad(loss_of(linear_logp(h, b, targets), 30), b)[0], both[4])


# ---- one set of bits -------------------------------------------------------------------------------------------------
def test_rows_threads_and_runs_do_not_matter():
    h, w, targets = make(500, 40, 1000, torch.bfloat16)
    first = run(h, w, targets, temperature=0.7)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(same_bits(a, b) for a, b in zip(run(h, w, targets, temperature=0.7), first, strict=True))
    finally:
        torch.set_num_threads(threads)
    if torch.set_flush_denormal(True):  # another library may have switched subnormals off
        try:
            assert all(same_bits(a, b) for a, b in zip(run(h, w, targets, temperature=0.7), first, strict=True))
        finally:
            torch.set_flush_denormal(False)
    for rows in (torch.tensor([6]), torch.arange(499, -1, -1), torch.arange(13, 200, 3)):
        some = linear_logp(h[rows], w, targets[rows], temperature=0.7)
        assert all(same_bits(a, b[rows]) for a, b in zip(some, first[:3], strict=True))


def test_chunks_of_tokens_do_not_matter(monkeypatch):
    h, w, targets = make(500, 40, 1000, torch.float32)
    whole = run(h, w, targets)
    monkeypatch.setattr(op, "_FORWARD_BYTES", 0)
    assert all(same_bits(a, b) for a, b in zip(run(h, w, targets), whole, strict=True))


# ---- memory ----------------------------------------------------------------------------------------------------------
class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


def test_no_operator_returns_the_logits():
    h, w, targets = make(300, 8, 4000, torch.float32)
    with LargestTensor() as fused:
        run(h, w, targets)
    with LargestTensor() as unfused:
        run(h, w, targets, fused=False)
    assert unfused.largest >= 300 * 4000 and fused.largest <= 4000 * 8


_PEAK = """
import json, torch
from rl_kernel import linear_logp, lm_head, logp
def peak():  # not ru_maxrss: a child inherits that from the process that started it
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
rows, vocab = 2048, 32768
h = torch.randn(rows, 16, requires_grad=True)
w = torch.randn(vocab, 16, requires_grad=True)
t = torch.randint(0, vocab, (rows,))
def run(function, n):
    out = function(h[:n], w, t[:n])
    torch.autograd.grad(out.logp.sum() + out.entropy.sum(), (h, w))
unfused = lambda h, w, t: logp(lm_head(h, w), t)
run(linear_logp, 64)
run(unfused, 64)
start = peak()
run(linear_logp, rows)
fused = peak()
run(unfused, rows)
print(json.dumps({"logits": rows * vocab * 4 / 2**20, "fused": fused - start, "unfused": peak() - start}))
"""


def test_peak_memory_proves_that_the_logits_are_never_made():
    """MiB over a warmed-up process; the logits would be 256 MiB, forward and again backward."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, timeout=300, check=True)
    peak = json.loads(done.stdout)
    assert peak["fused"] < peak["logits"] / 8, peak
    assert peak["unfused"] > peak["logits"], peak  # negative control: the measurement sees logits


# ---- negative controls -----------------------------------------------------------------------------------------------
def test_other_arithmetic_differs():
    h, w, targets = make(400, 64, 2048, torch.float32)
    ours = run(h, w, targets, temperature=0.7, segments=1)
    stock = torch.log_softmax(h @ w.t() / 0.7, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    assert count_different(ours[0], torch.where(targets >= 0, stock, 0)) > 100
    assert count_different(ours[0], linear_logp(h / 0.7, w, targets, temperature=0.7).logp) > 100  # applied twice
    assert count_different(ours[3], run(h, w, targets, temperature=0.7, segments=8)[3]) > 100
    assert same_bits(ours[4], run(h, w, targets, temperature=0.7, segments=8)[4])
    with set_mode("native"):
        stock = run(h, w, targets, temperature=0.7)
    assert count_different(ours[0], stock[0]) > 100
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in zip(ours, stock, strict=True))


def test_leaves_of_another_size_differ(monkeypatch):
    from rl_kernel.ops.linear_logp import reference

    h, w, targets = make(100, 16, 256, torch.float32)
    ours = linear_logp(h, w, targets, backend="reference")
    t, local = torch.ones(100), targets.clamp(min=0)
    m = ours.lse.new_zeros(0)
    for width in (128, 64):
        monkeypatch.setattr("rl_kernel.ops.logp.reference.VOCAB_LEAF", width)
        monkeypatch.setattr(reference, "VOCAB_LEAF", width)
        stats, z = reference.leaf_stats(h, w, t, local, 256)
        m = stats[0].amax(1)
        nodes = reference.logp_reference.tree_nodes(stats, m, [(0, 256 // width)], 1)
        lse = reference.logp_reference.finish(nodes, [], 0, m, z)[1]
        differs = count_different(torch.where(targets >= 0, lse, 0), ours.lse)
        assert differs == 0 if width == 128 else differs > 0


# ---- masks, bad values, errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", (0, 4))
def test_nothing_to_do(rows):
    h, w, _ = make(rows, 16, 256, torch.bfloat16)
    out = run(h, w, torch.full((rows,), -100))
    assert all(v.shape == (rows,) and v.eq(0).all() for v in out[:3]) and all(v.eq(0).all() for v in out[3:])


def test_ignored_rows_cannot_reach_anything():
    h, w, targets = make(40, 16, 256, torch.float32)
    clean = run(h, w, targets)
    h[targets == -100] = torch.nan
    assert all(same_bits(a, b) for a, b in zip(run(h, w, targets), clean, strict=True))
    own = torch.where(targets == -100, 7, targets)  # a token id can be the one that is ignored
    assert same_bits(linear_logp(h, w, own, ignore_index=7).logp[targets == -100], torch.zeros(8))


def test_nan_reaches_the_output():
    h, w, targets = make(8, 16, 256, torch.float32)
    h[2, 3] = torch.nan
    out = linear_logp(h, w, targets)
    assert all(v[2].isnan() and v[[0, 1, 4]].isfinite().all() for v in out)
    w[200, 1] = torch.nan
    assert all(v[targets >= 0].isnan().all() for v in linear_logp(h, w, targets))


def test_huge_logits():
    h, w, targets = make(8, 16, 256, torch.float32)
    h[:, 0], w[:, 0] = 100.0, 100.0  # adds 1e4 to every logit
    out = linear_logp(h, w, targets)
    exact = torch.log_softmax(h.double() @ w.double().t(), -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    eager = torch.log_softmax(h @ w.t(), -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    kept = targets >= 0
    error, bound = ((v.double() - exact)[kept].abs().max() for v in (out.logp, eager))
    assert 0 < error <= 2 * bound  # a logit near 1e4 is known to 2**-11 only, by either path


@pytest.mark.parametrize(
    "change,message",
    (
        ({"weight": torch.randn(256, 17)}, r"with the same H"),
        ({"hidden": torch.randn(4, 2, 16)}, r"must be \[T, H\]"),
        ({"weight": torch.randn(256, 16, dtype=torch.bfloat16)}, "both must be bfloat16 or both float32"),
        ({"targets": torch.tensor([0, 1, 256, 2])}, r"row 2 is 256, outside \[0, 256\)"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"vocab_start_index": 100}, "needs tp_group"),
        ({"global_vocab_size": 257}, "global_vocab_size=257"),
        ({"grad_segments": 3}, "grad_segments=3 must be a power of two"),
        ({"grad_segments": 0}, "grad_segments=0 must be a power of two"),
        ({"weight": torch.randn(256, 16).to("meta")}, "lm_head_weight is on meta"),
        ({"targets": torch.tensor([0, 1, 2, 3], device="meta")}, "target_ids are on meta"),
        ({"backend": "cuda"}, "backend='cuda' is unknown"),
    ),
)
def test_errors_name_the_field(change, message):
    arguments = {
        "hidden": torch.randn(4, 16, requires_grad=True),
        "weight": torch.randn(256, 16),
        "targets": torch.tensor([0, 1, 2, 3]),
        **change,
    }
    with pytest.raises(ContractError, match=message):
        linear_logp(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("targets"), **arguments)


def _errors_on_a_rank(group):
    h, w, targets = make(4, 16, 200, torch.float32)
    with pytest.raises(ContractError, match="vocab_start_index=200 of rank 1 must be a multiple of 128"):
        linear_logp(h, w, targets, tp_group=group, vocab_start_index=200 * group.rank())
    h, w, targets = make(4, 16 + group.rank(), 256, torch.float32)
    with pytest.raises(ContractError, match=r"hidden size differs between the ranks of tp_group: \[16, 17\]"):
        linear_logp(h, w, targets, tp_group=group, vocab_start_index=256 * group.rank())


def test_bad_layout_raises_on_every_rank(ranks):
    ranks.run(2, _errors_on_a_rank)


def test_opcheck():
    h, w, targets = make(6, 16, 300, torch.bfloat16)
    t = torch.full((6,), 0.7)
    shared = ([0, 300], 290, -100, 4, "", "auto")
    targets %= 290
    torch.library.opcheck(op._linear_logp.registered, (h.requires_grad_(), w.requires_grad_(), targets, t, *shared))
    state, grads = torch.randn(3, 6), torch.randn(3, 6)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            op._linear_logp_backward.registered, (h.detach(), w.detach(), targets, t, state, grads, *shared, *needs)
        )
