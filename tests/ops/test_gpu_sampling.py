"""Sampling on a GPU: bits of the log-probability, draws of the integer weights, batches, launches, graphs, speed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

import rl_kernel
from rl_kernel import triton_utils
from rl_kernel.ops.sampling import reference
from rl_kernel.ops.sampling.triton import weights_of
from tests.ops.gpu_harness import CASES, Tally, rng
from tests.ops.gpu_harness import rows as random_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an sm90 or gfx942 GPU"),
]
VOCABULARY = 151936


def batch(rows, vocabulary=VOCABULARY, scale=3.0, seed=0):
    """Logits as a view of a padded buffer, uniform numbers, and a temperature for each row."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    buffer = torch.randn(rows, vocabulary + 128, device="cuda", generator=generator) * scale
    seeds = torch.randint(0, 1 << 62, (rows,), device="cuda", generator=generator)
    uniforms = rl_kernel.uniforms(seeds, torch.arange(rows, device="cuda"))
    temperature = torch.tensor([0.7, 1.0, 1.3], device="cuda")[torch.arange(rows, device="cuda") % 3]
    return buffer[:, :vocabulary], uniforms, temperature


@triton.jit
def _weights(y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    tl.store(out_ptr + at, weights_of(tl.load(y_ptr + at, mask=live, other=0.0), live), mask=live)


def kernel_weights(y):
    """The integer weights that the kernels sum."""
    out = torch.empty(y.shape, dtype=torch.int64, device=y.device)
    _weights[(triton.cdiv(y.numel(), 1024),)](y, out, y.numel(), 1024, **triton_utils.options(4))
    return out


def test_uniform_numbers_have_the_bits_of_the_cpu():
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (4000,), generator=generator)
    positions = torch.randint(0, 1 << 20, (4000,), generator=generator)
    on_gpu = rl_kernel.uniforms(seeds.cuda(), positions.cuda()).cpu()
    assert torch.equal(on_gpu.view(torch.int64), rl_kernel.uniforms(seeds, positions).view(torch.int64))


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, VOCABULARY), (33, VOCABULARY), (256, VOCABULARY), (40, 777)])
def test_logp_has_the_bits_of_logp_and_draws_invert_the_weights(rows, vocabulary):
    x, uniforms, temperature = batch(rows, vocabulary)
    out = rl_kernel.sample(x, uniforms, temperature)
    expected = rl_kernel.logp(x, out.tokens, temperature=temperature)
    tally = Tally(f"sampling_{rows}_{vocabulary}")
    tally.equal(out.logp, expected.logp, "logp")
    tally.equal(out.lse, expected.lse, "lse")
    y = rl_kernel.log_softmax(x, temperature)
    weights = kernel_weights(y)
    tally.equal(out.tokens.cpu(), reference.draw_weights(weights.cpu(), uniforms.cpu()), "draw")
    tally.equal(out.tokens, rl_kernel.draw(y, uniforms), "draw from log-probabilities")
    exact = y.double().exp()
    assert bool(((weights / 2.0**50 - exact).abs() <= exact * 2.0**-22 * (2 + y.abs()) + 2.0**-50).all())
    other = rl_kernel.sample(x, uniforms.flip(0), temperature).tokens
    assert rows == 1 or not torch.equal(other, out.tokens)  # the numbers matter
    tally.done()


@pytest.mark.parametrize("seed", range(4))
def test_rows_do_not_notice_batch_or_launch(seed):
    rows = (5, 64, 17, 200)[seed]
    x, uniforms, temperature = batch(rows, seed=seed + 10)
    temperature[rows // 2] = 0.0
    together = rl_kernel.sample(x, uniforms, temperature)
    assert int(together.tokens[rows // 2]) == int(x[rows // 2].argmax())
    tally = Tally(f"sampling_batch_{seed}")
    for begin, end in ((0, 1), (rows // 2, rows // 2 + 1), (1, 4), (rows - 3, rows)):
        part = slice(begin, end)
        for a, b in zip(together, rl_kernel.sample(x[part].clone(), uniforms[part], temperature[part])):
            tally.equal(a[part], b, "rows")
    for chunk, warps in ((128, 1), (1024, 4), (4096, 8)):
        with (
            triton_utils.override_launch("sampling", {"chunk": chunk, "warps": warps}),
            triton_utils.override_launch("logp", {"leaves": 16, "warps": 4}),
        ):
            for a, b in zip(together, rl_kernel.sample(x, uniforms, temperature)):
                tally.equal(a, b, "launch", (chunk, warps))
    tally.done()


def test_random_batches():
    tally, source = Tally("sampling_random"), rng(51)
    while tally.cases < CASES:
        vocabulary = source.choice([VOCABULARY, 151669, 32000, 5000, 777, 128, 1])
        count = random_rows(source, 64 if vocabulary > 50000 else 300)
        scale = source.choice([0.1, 3.0, 30.0])
        x, uniforms, temperature = batch(count, vocabulary, scale, seed=source.randrange(1 << 30))
        temperature[torch.rand(count, device="cuda") < source.choice([0.0, 0.2])] = 0.0
        together, what = rl_kernel.sample(x, uniforms, temperature), (count, vocabulary, scale)
        expected = rl_kernel.logp(x, together.tokens, temperature=temperature.where(temperature > 0, 1.0))
        tally.equal(together.lse, expected.lse, "lse of logp", what)
        tally.equal(together.logp, expected.logp, "logp of logp", what)
        begin = source.randrange(count)
        part = slice(begin, min(count, begin + source.choice([1, 2, 17])))
        launch = {"chunk": source.choice([128, 1024, 4096]), "warps": source.choice([1, 4, 8])}
        with (
            triton_utils.override_launch("sampling", launch),
            triton_utils.override_launch("logp", {"leaves": source.choice([1, 16]), "warps": 4}),
        ):
            for a, b in zip(together, rl_kernel.sample(x[part].clone(), uniforms[part], temperature[part])):
                tally.equal(a[part], b, "rows and launch", (*what, part, launch))
    tally.done()


@pytest.mark.parametrize("rows", [1, 64])
def test_a_graph_gives_the_bits_of_eager(rows):
    x, uniforms, temperature = batch(rows)
    seeds, positions = (torch.arange(rows, device="cuda") for _ in range(2))

    def step():
        return rl_kernel.sample(x, rl_kernel.uniforms(seeds, positions), temperature)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    tally = Tally(f"sampling_graph_{rows}")
    for round_ in range(3):
        x.copy_(torch.randn_like(x) * 3)
        positions.fill_(round_)
        graph.replay()
        for a, b in zip(captured, step()):
            tally.equal(a, b, "graph")
    tally.done()


def test_nothing_waits_for_the_device():
    x, uniforms, temperature = batch(8)
    rl_kernel.sample(x, uniforms, temperature)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = rl_kernel.sample(x, uniforms, temperature)
        rl_kernel.sample(x, uniforms, 0.7)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(out.logp.isfinite().all())


def test_rows_without_a_distribution_stay_in_range():
    x, uniforms, temperature = batch(4, 1000)
    before = rl_kernel.sample(x, uniforms, temperature)
    x[0, 7], x[1, 9], x[2] = torch.nan, torch.inf, -torch.inf
    out = rl_kernel.sample(x, uniforms, temperature)
    assert bool(((out.tokens >= 0) & (out.tokens < 1000)).all())
    assert out.logp.isfinite().tolist() == [False, False, False, True]
    assert all(torch.equal(a[3:], b[3:]) for a, b in zip(before, out))


def test_draws_follow_the_softmax():
    count, vocabulary = 200_000, 50
    row = torch.randn(vocabulary, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3)) * 1.5
    numbers = rl_kernel.uniforms(torch.arange(count, device="cuda"), torch.zeros(count, dtype=torch.int64).cuda())
    tokens = rl_kernel.sample(row.expand(count, -1), numbers, 0.7).tokens
    p = (row.double() / 0.7).softmax(-1) * count
    found = torch.bincount(tokens, minlength=vocabulary).double()
    rare = p < 10
    p, found = (torch.cat([v[~rare], v[rare].sum()[None]]) for v in (p, found))
    chi_square = float(((found - p) ** 2 / p.clamp(min=1e-9)).sum())
    assert chi_square < 95  # at most 50 degrees of freedom, 0.01 %


def test_mass_of_the_weights_against_float64():
    x, _, temperature = batch(8)
    weights = kernel_weights(rl_kernel.log_softmax(x, temperature)).double()
    exact = (x.double() / temperature.double()[:, None]).softmax(-1)
    distance = (weights / weights.sum(-1, keepdim=True) - exact).abs().sum(-1) / 2
    assert float(distance.max()) < 2.0**-20
