"""Sampling on the CPU: uniform numbers, the distribution of draws, and the bits of the log-probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import rl_kernel
from rl_kernel.ops.sampling import reference

MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """splitmix64 in Python integers."""

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    gamma = 0x9E3779B97F4A7C15
    return (mix((mix((seed + gamma) & MASK) + (position + 1) * gamma) & MASK) >> 11) / float(1 << 53)


def uniforms_of(seeds, position=0):
    return rl_kernel.uniforms(torch.as_tensor(seeds), torch.full((len(seeds),), position))


def test_uniform_numbers_are_those_of_python_integers():
    generator = np.random.default_rng(0)
    seeds = [0, 1, (1 << 63) - 1, -1, *generator.integers(0, 1 << 63, 500).tolist()]
    positions = [0, 1, 2, (1 << 31), *generator.integers(0, 1 << 20, 500).tolist()]
    got = rl_kernel.uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist()
    assert got == [uniform(seed & MASK, position) for seed, position in zip(seeds, positions)]


def test_uniform_numbers_look_uniform_and_depend_on_both_arguments():
    grid = np.stack([uniforms_of(range(512), position).numpy() for position in range(64)], axis=1)
    assert grid.min() >= 0.0 and grid.max() < 1.0
    assert len(np.unique(grid)) == grid.size
    assert abs(grid.mean() - 0.5) < 0.01 and abs(grid.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0, -2.0])
    count = 20000
    numbers = uniforms_of(range(count))
    out = rl_kernel.sample(logits.expand(count, -1), numbers, 0.7)
    p = (logits.double() / 0.7).softmax(-1)
    found = torch.bincount(out.tokens, minlength=5).double()
    assert found[2] == 0  # impossible tokens are never drawn, not even at the borders
    live = p > 0
    chi_square = float(((found - count * p)[live] ** 2 / (count * p)[live]).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, 0.1 %
    assert torch.equal(out.tokens, rl_kernel.draw(rl_kernel.log_softmax(logits.expand(count, -1), 0.7), numbers))
    borders = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert rl_kernel.sample(logits.expand(2, -1), borders).tokens.tolist() == [0, 4]


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_weights_are_the_softmax(scale):
    logits = torch.randn(8, 20000) * scale
    weight = reference.weights(rl_kernel.log_softmax(logits)).double()
    drawn, exact = weight / weight.sum(-1, keepdim=True), logits.double().softmax(-1)
    assert float((drawn - exact).abs().sum(-1).max() / 2) < 2.0**-20  # total variation
    bound = exact * 2.0**-22 * (3 + 2 * exact.log().abs()) + 2.0**-49
    assert bool(((drawn - exact).abs() <= bound).all())


@pytest.mark.parametrize("columns", [1, 77, 128, 1000, 5000])
def test_logp_and_lse_have_the_bits_of_logp(columns):
    buffer = torch.randn(9, columns + 40) * 4
    logits, temperature = buffer[:, :columns], torch.tensor([0.7, 1.0, 1.3] * 3)
    numbers = uniforms_of(range(9))
    out = rl_kernel.sample(logits, numbers, temperature)
    expected = rl_kernel.logp(logits, out.tokens, temperature=temperature)
    assert torch.equal(out.logp, expected.logp) and torch.equal(out.lse, expected.lse)
    padded = rl_kernel.sample(buffer, numbers, temperature, global_vocab_size=columns)
    slow = rl_kernel.sample(logits, numbers, temperature, backend="reference")
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(out, padded, slow))


def test_a_row_does_not_notice_the_others():
    logits, numbers = torch.randn(37, 211), torch.rand(37, dtype=torch.float64)
    together = rl_kernel.sample(logits, numbers, 0.9)
    alone = [rl_kernel.sample(logits[i : i + 1], numbers[i : i + 1], 0.9) for i in range(37)]
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(together, zip(*alone)))
    assert not torch.equal(together.tokens, rl_kernel.sample(logits, numbers.flip(0), 0.9).tokens)


def test_temperature_zero_is_greedy():
    logits = torch.randn(5, 300)
    logits[2, [40, 200]] = 9.0
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.7, 0.0])
    numbers = torch.rand(5, dtype=torch.float64)
    out = rl_kernel.sample(logits, numbers, temperature)
    mixed = rl_kernel.sample(logits, numbers, torch.where(temperature == 0, 1.0, temperature))
    greedy = temperature == 0
    assert torch.equal(out.tokens[greedy], logits[greedy].argmax(-1)) and out.tokens[2] == 40
    assert torch.equal(out.tokens[~greedy], mixed.tokens[~greedy]) and torch.equal(out.lse, mixed.lse)
    assert torch.equal(out.logp[greedy], rl_kernel.logp(logits, out.tokens).logp[greedy])
    assert torch.equal(rl_kernel.sample(logits, numbers, 0.0).tokens, logits.argmax(-1))


def test_nan_and_infinity_give_a_token_in_range_and_no_log_probability():
    logits = torch.randn(4, 300)
    logits[0, 7], logits[1, 9], logits[2] = math.nan, math.inf, -math.inf
    out = rl_kernel.sample(logits, torch.full((4,), 0.5, dtype=torch.float64))
    assert bool(((out.tokens >= 0) & (out.tokens < 300)).all())
    assert out.logp.isfinite().tolist() == [False, False, False, True]
    alone = rl_kernel.sample(logits[3:], torch.full((1,), 0.5, dtype=torch.float64))
    assert torch.equal(alone.logp, out.logp[3:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uniforms": torch.rand(3)}, "uniforms: torch.float32"),
        ({"uniforms": torch.ones(3, dtype=torch.float64)}, r"\[0, 1\)"),
        ({"uniforms": torch.zeros(2, dtype=torch.float64)}, r"of shape \(3,\)"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": torch.tensor([1.0, math.nan, 1.0])}, "temperature: every row"),
        ({"temperature": torch.ones(2)}, r"temperature: shape \(2,\)"),
        ({"global_vocab_size": 9}, r"global_vocab_size=9 must lie in \[1, 8\]"),
        ({"logits": torch.zeros(3, 8, dtype=torch.float64)}, "logits torch.float64"),
        ({"logits": torch.zeros(8)}, r"must be \[B, V\]"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"logits": torch.zeros(3, 8), "uniforms": torch.zeros(3, dtype=torch.float64), **change}
    with pytest.raises(rl_kernel.ContractError, match=message):
        rl_kernel.sample(**arguments)


def test_no_rows():
    out = rl_kernel.sample(torch.zeros(0, 8), torch.zeros(0, dtype=torch.float64))
    assert [x.shape for x in out] == [(0,)] * 3
    assert rl_kernel.draw(torch.zeros(0, 8), torch.zeros(0, dtype=torch.float64)).dtype == torch.int64


def test_registered_operators():
    logits, numbers = torch.randn(3, 200), torch.rand(3, dtype=torch.float64)
    ops = torch.ops.rl_kernel
    torch.library.opcheck(ops.sample.default, (logits, torch.ones(3), numbers, 190, "auto"))
    torch.library.opcheck(ops.draw.default, (logits.log_softmax(-1), numbers, "auto"))
    torch.library.opcheck(ops.uniforms.default, (torch.arange(3), torch.arange(3)))


def test_other_modes():
    logits, numbers = torch.randn(6, 500), torch.rand(6, dtype=torch.float64)
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.0, 1.3, 0.0])
    strict = rl_kernel.sample(logits, numbers, temperature)
    with rl_kernel.set_mode("native"):
        stock = rl_kernel.sample(logits, numbers, temperature)
    assert torch.equal(strict.tokens, stock.tokens) and torch.allclose(strict.logp, stock.logp, atol=1e-5)
