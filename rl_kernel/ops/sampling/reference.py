"""Specification of temperature sampling, and of the uniform numbers it draws with.

Uniform number of (seed, position), in 64-bit integers modulo 2^64 (splitmix64, whose output bits look independent)::

    mix(v): v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9;  v = (v ^ v >> 27) * 0x94D049BB133111EB;  v ^ v >> 31
    u = (mix(mix(seed + g) + (position + 1) * g) >> 11) / 2^53          with g = 0x9E3779B97F4A7C15

For one row of fp32 logits x [V], temperature t and a uniform number u in [0, 1):

1. y_j = (z_j - m) - log(l) with z_j = x_j / t: the log-probabilities of :mod:`rl_kernel.ops.logp.reference`.
2. w_j = floor(exp(y_j) * 2^50), an integer; 0 where y_j is NaN. A token below a probability of 2^-50 has weight 0.
3. c_j = w_0 + ... + w_j, exact: any order and any partition gives the same integers.
4. r = min(floor(u * c_{V-1}), c_{V-1} - 1), the product rounded to float64; the token is the first j with c_j > r, and
   0 where every weight is 0 (rows with NaN; the caller finds them by their log-probability).
5. logp = y_token, lse = m + log(l).

t = 0 is greedy: t counts as 1 in the steps above, and the token is the first j with the largest x_j instead.

exp of step 2 is float64 in the cpu family and the fp32 primitive of the contract in the GPU families: a token's
probability is off by less than 2^-22 (3 + 2 |y|) of itself, mostly the rounding of the fp32 log-probability that both
engines report. A draw depends on the row's logits, t and u alone. Every backend has the same functions.
"""

from __future__ import annotations

import torch

from rl_kernel.ops.logp import reference as logp
from rl_kernel.ops.logp.reference import supports
from rl_kernel.ops.logp.vocab_tree import VocabLayout

__all__ = ["WEIGHT_BITS", "draw", "draw_weights", "fill_uniforms", "sample", "supports", "tokens_of", "weights"]

WEIGHT_BITS = 50
_GAMMA = 0x9E3779B97F4A7C15
_MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The int64 with the bits of the 64-bit ``value``."""
    return value - (1 << 64) if value >> 63 else value


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    for bits, factor in _MIX:
        value = (value ^ _shift(value, bits)) * _signed(factor)
    return value ^ _shift(value, 31)


def fill_uniforms(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """u of each (seed, position): int64 [B] each, float64 [B] out."""
    state = _mix(_mix(seeds + _signed(_GAMMA)) + (positions + 1) * _signed(_GAMMA))
    out.copy_(_shift(state, 11).double() / float(1 << 53))


def weights(y: torch.Tensor) -> torch.Tensor:
    """Step 2: log-probabilities [B, V] fp32 -> int64 [B, V]."""
    p = y.double().exp().mul_(float(1 << WEIGHT_BITS))
    return p.nan_to_num_(0.0).to(torch.int64)


def draw_weights(weight: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Steps 3 and 4: int64 weights [B, V] and float64 [B] -> token ids int64 [B]."""
    cumulative = weight.cumsum(-1)
    total = cumulative[:, -1]
    target = (uniforms * total.double()).floor().to(torch.int64)
    target = torch.minimum(target.clamp_(min=0), total - 1)
    tokens = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return tokens.clamp_(0, weight.shape[-1] - 1)


def draw(y: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Steps 2 to 4 from log-probabilities [B, V]."""
    return draw_weights(weights(y), uniforms)


def tokens_of(y: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Step 4 with the greedy rows: y [B, columns], logits [B, columns]."""
    tokens = draw(y, uniforms)
    greedy = temperature == 0
    return torch.where(greedy, logits.argmax(-1), tokens) if bool(greedy.any()) else tokens


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All steps.

    Args:
        logits: [B, V] fp32; columns from ``columns`` on are padding.
        temperature: [B] fp32, 0 for greedy rows.
        uniforms: [B] float64.

    Returns:
        tokens [B] int64, logp and lse [B] fp32.
    """
    t = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    stats = logp.leaf_stats(logits, t, columns)
    m = stats[0].amax(1)
    layout = VocabLayout((0, logits.shape[1]), columns)
    nodes = logp.tree_nodes(stats, m, layout.local_ranges(0), layout.max_nodes())
    out = logp.finish(nodes, layout.merges(), layout.first_slot(), m, torch.zeros_like(m))
    y = logp.log_softmax(logits, t, torch.stack([m, out[3]]), columns)[:, :columns]
    tokens = tokens_of(y, logits[:, :columns], temperature, uniforms)
    return tokens, y.gather(1, tokens[:, None])[:, 0], out[1]
