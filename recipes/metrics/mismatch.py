"""Exact train/rollout consistency metrics: how many log-probabilities differ in at least one bit, where, and how far.

Notation, for every *active* token (sampled by the policy and not masked):

    p = train_logp      fp32, the trainer's log-probability of the sampled token
    q = rollout_logp    fp32, the rollout engine's log-probability of the same token
    d = p - q           float64, in nats (exact whenever the two exponents are within 29 bits)
    r = exp(d)          the importance ratio pi_train / pi_rollout, float64

What counts as a mismatch: the two fp32 bit patterns differ (compared as int32), **or** either value is not finite.
Hence 0.0 against -0.0 is a mismatch although d = 0, and NaN against the same NaN is one as well: a log-probability
that is not a number cannot be called consistent. Such tokens are also counted in ``nonfinite_count`` and left out of
every sum and maximum, so no metric is ever NaN or infinite.

Aggregation is exact. A step's tokens are spread over micro-batches and data-parallel (and context-parallel) ranks; each
part becomes a :class:`MismatchStats` of counts, extrema and sums, and :meth:`MismatchStats.merge` adds them. The sums
are kept as integers in units of 2**-1126, which represent every float64 exactly, so addition is associative and the
metrics have the same bits for any partition and any order of merging. Only the last division rounds, once.

Tensor-parallel ranks all hold the same log-probabilities: build the statistics on tensor-parallel rank 0 only, or every
token counts several times. :meth:`MismatchStats.require_tokens` catches that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
import torch

from recipes.errors import DataError, EngineError

if TYPE_CHECKING:
    from recipes.engines.types import PackedBatch

PREFIX = "consistency/"
VIME_ABS_DIFF = "train/train_rollout_logprob_abs_diff"

_UNIT_BITS = 1126  # the smallest subnormal is 2**-1074; 52 more bits below the scaled mantissa of 53
_MAX_CHUNK = 1 << 26  # elements for which a sum of 27-bit halves stays below 2**53
_MAX_EXPONENT = 300.0  # |d| is clamped to this inside exp, so that r, r**2 and their sums stay finite
_NO_INDEX = -1


def exact_sum(values: np.ndarray) -> int:
    """The sum of finite float64 ``values`` without any rounding, as an integer in units of ``2**-1126``.

    Mantissas are split into two halves and added per exponent; both sums stay below 2**53 and are therefore exact.
    """
    total = 0
    for start in range(0, values.size, _MAX_CHUNK):
        chunk = values[start : start + _MAX_CHUNK]
        chunk = chunk[chunk != 0]
        if not chunk.size:
            continue
        fraction, exponent = np.frexp(chunk)
        mantissa = np.ldexp(fraction, 53).astype(np.int64)
        lowest = int(exponent.min())
        bins = exponent - lowest
        high = np.bincount(bins, weights=(mantissa >> 26).astype(np.float64))
        low = np.bincount(bins, weights=(mantissa & ((1 << 26) - 1)).astype(np.float64))
        for i in np.flatnonzero((high != 0) | (low != 0)).tolist():
            total += ((int(high[i]) << 26) + int(low[i])) << (lowest + i - 53 + _UNIT_BITS)
    return total


def _ratio(total: int, divisor: int) -> float:
    """``total`` units divided by ``divisor``, rounded once to float64; 0.0 when there is nothing to divide."""
    return total / (divisor << _UNIT_BITS) if divisor else 0.0


def ordered_int(x: np.ndarray) -> np.ndarray:
    """int64 that counts representable fp32 values from zero: neighbours differ by 1, and both zeros map to 0."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@dataclass(frozen=True)
class Sums:
    """Sufficient statistics of one group of tokens. ``s_*`` are exact sums in units of 2**-1126."""

    active: int = 0
    mismatch: int = 0
    nonfinite: int = 0
    clipped: int = 0
    max_abs: float = 0.0
    max_ulp: int = 0
    ratio_min: float = float("inf")
    ratio_max: float = 0.0
    s_diff: int = 0
    s_abs: int = 0
    s_k3: int = 0
    s_ratio: int = 0
    s_ratio_sq: int = 0
    s_exp_abs: int = 0

    @property
    def finite(self) -> int:
        """Active tokens with two finite log-probabilities: the denominator of every mean."""
        return self.active - self.nonfinite

    def __add__(self, other: Sums) -> Sums:
        merged = {}
        for f in fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            merged[f.name] = min(a, b) if f.name == "ratio_min" else max(a, b) if "max" in f.name else a + b
        return Sums(**merged)


def _sums(p: np.ndarray, q: np.ndarray, differs: np.ndarray, finite: np.ndarray) -> Sums:
    """Statistics of the active tokens ``p``, ``q`` (fp32 [n]); ``differs`` and ``finite`` are their bool masks."""
    n, n_finite = p.size, int(finite.sum())
    if not n_finite:
        return Sums(active=n, mismatch=int(differs.sum()), nonfinite=n)
    # Only tokens with d != 0 need arithmetic; the others contribute exactly r = 1 and nothing else.
    d_all = p.astype(np.float64)[finite] - q.astype(np.float64)[finite]
    d = d_all[d_all != 0]
    equal = n_finite - d.size
    common = {"active": n, "mismatch": int(differs.sum()), "nonfinite": n - n_finite, "clipped": int(d.size)}
    ones = equal << _UNIT_BITS
    if not d.size:
        return Sums(**common, ratio_min=1.0, ratio_max=1.0, s_ratio=ones, s_ratio_sq=ones, s_exp_abs=ones)
    clamped = np.clip(d, -_MAX_EXPONENT, _MAX_EXPONENT)
    r = np.exp(clamped)
    pair_differs = (d_all != 0).nonzero()[0]
    ulp = np.abs(ordered_int(p[finite][pair_differs]) - ordered_int(q[finite][pair_differs]))
    bound = 1.0 if equal else None
    return Sums(
        **common,
        max_abs=float(np.abs(d).max()),
        max_ulp=int(ulp.max()),
        ratio_min=min(float(r.min()), bound or float("inf")),
        ratio_max=max(float(r.max()), bound or 0.0),
        s_diff=exact_sum(d),
        s_abs=exact_sum(np.abs(d)),
        s_k3=exact_sum(np.maximum(np.expm1(clamped) - clamped, 0.0)),
        s_ratio=exact_sum(r) + ones,
        s_ratio_sq=exact_sum(r * r) + ones,
        s_exp_abs=exact_sum(np.exp(np.abs(clamped))) + ones,
    )


def _as_array(x: torch.Tensor | np.ndarray, name: str, dtype: type) -> np.ndarray:
    array = x.detach().to("cpu").numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
    if dtype is np.float32 and array.dtype != np.float32:
        raise DataError(
            f"{name} is {array.dtype}, float32 is needed",
            where="MismatchStats",
            fix="Pass the log-probabilities as the engine returned them; a cast changes the bits that are compared.",
        )
    return np.ascontiguousarray(array.reshape(-1), dtype=dtype)


@dataclass(frozen=True)
class MismatchStats:
    """Consistency of a set of tokens, mergeable without loss.

    Attributes:
        prefill: tokens at response position 0; the rollout engine computed their log-probability in a prefill pass.
        decode: tokens at later positions, from decode passes (or from the prefill that follows a preemption).
        first: (sample index, response position) of the smallest mismatching pair in that order; (-1, -1) when none.
        samples: per sample index, (finite active tokens, exact sum of abs(d)): ``vime`` averages over samples.
    """

    prefill: Sums = field(default_factory=Sums)
    decode: Sums = field(default_factory=Sums)
    first: tuple[int, int] = (_NO_INDEX, _NO_INDEX)
    samples: dict[int, tuple[int, int]] = field(default_factory=dict)

    # ------------------------------------------------------------------ construction

    @classmethod
    def from_tokens(
        cls,
        train_logp: torch.Tensor | np.ndarray,
        rollout_logp: torch.Tensor | np.ndarray,
        mask: torch.Tensor | np.ndarray,
        sample_index: torch.Tensor | np.ndarray,
        position: torch.Tensor | np.ndarray,
    ) -> MismatchStats:
        """Statistics of a flat list of tokens in any order (a context-parallel shard, for example).

        Args:
            train_logp: float32 [N].
            rollout_logp: float32 [N].
            mask: bool or 0/1 [N]; tokens with 0 are ignored, whatever their values.
            sample_index: integers [N], unique within the step over all ranks.
            position: integers [N], position inside the response, 0 = first sampled token.

        Raises:
            DataError: a log-probability tensor is not float32, or lengths differ.
        """
        p_all, q_all = (
            _as_array(train_logp, "train_logp", np.float32),
            _as_array(rollout_logp, "rollout_logp", np.float32),
        )
        active = _as_array(mask, "mask", np.bool_)
        index, pos = _as_array(sample_index, "sample_index", np.int64), _as_array(position, "position", np.int64)
        sizes = {"train_logp": p_all, "rollout_logp": q_all, "mask": active, "sample_index": index, "position": pos}
        if len({a.size for a in sizes.values()}) != 1:
            listed = ", ".join(f"{k} {a.size}" for k, a in sizes.items())
            raise DataError(f"lengths differ: {listed}", where="MismatchStats")
        p, q, index, pos = p_all[active], q_all[active], index[active], pos[active]
        finite = np.isfinite(p) & np.isfinite(q)
        differs = (p.view(np.int32) != q.view(np.int32)) | ~finite

        first = (_NO_INDEX, _NO_INDEX)
        if differs.any():
            where = np.flatnonzero(differs)
            best = where[np.lexsort((pos[where], index[where]))[0]]
            first = (int(index[best]), int(pos[best]))

        samples: dict[int, tuple[int, int]] = {}
        if finite.any():
            order = np.argsort(index[finite], kind="stable")
            sorted_index = index[finite][order]
            distance = np.abs(p[finite][order].astype(np.float64) - q[finite][order].astype(np.float64))
            keys, starts = np.unique(sorted_index, return_index=True)
            for key, part in zip(keys.tolist(), np.split(distance, starts[1:])):
                samples[key] = (part.size, exact_sum(part) if part.any() else 0)

        is_first = pos == 0
        groups = [_sums(p[g], q[g], differs[g], finite[g]) for g in (is_first, ~is_first)]
        return cls(prefill=groups[0], decode=groups[1], first=first, samples=samples)

    @classmethod
    def from_batch(
        cls,
        train_logp: torch.Tensor | np.ndarray,
        rollout_logp: torch.Tensor | np.ndarray,
        mask: torch.Tensor | np.ndarray,
        lengths: Iterable[int],
        *,
        sample_indices: Iterable[int] | None = None,
    ) -> MismatchStats:
        """Statistics of responses laid end to end.

        Args:
            train_logp: float32 [N], one value a response token.
            rollout_logp: float32 [N].
            mask: bool or 0/1 [N].
            lengths: response tokens of each sample; their sum is N. 0 is allowed.
            sample_indices: the step-wide index of each sample; 0, 1, ... when absent (one rank and one batch only).

        Raises:
            DataError: as in :meth:`from_tokens`, or the lengths do not add up.
        """
        sizes = np.asarray(list(lengths), dtype=np.int64)
        indices = np.arange(sizes.size) if sample_indices is None else np.asarray(list(sample_indices), dtype=np.int64)
        total = int(sizes.sum())
        if indices.size != sizes.size or total != int(np.prod(np.shape(train_logp))):
            raise DataError(
                f"{sizes.size} lengths that add up to {total} and {indices.size} sample indices do not describe "
                f"{int(np.prod(np.shape(train_logp)))} log-probabilities",
                where="MismatchStats.from_batch",
            )
        starts = np.cumsum(sizes) - sizes
        position = np.arange(total) - np.repeat(starts, sizes)
        return cls.from_tokens(train_logp, rollout_logp, mask, np.repeat(indices, sizes), position)

    @classmethod
    def from_packed(
        cls, train_logp: torch.Tensor, packed: PackedBatch, *, mask: torch.Tensor | None = None
    ) -> MismatchStats:
        """Statistics of one packed micro-batch.

        Args:
            train_logp: float32 [T], aligned with ``packed.target_ids`` (position t scores the token after t).
            packed: the batch; its ``rollout_logp``, ``active`` and ``sample_index`` are used.
            mask: bool [T], a further restriction of the active positions.
        """
        lengths = (packed.cu_seqlens[1:] - packed.cu_seqlens[:-1]).to(torch.int64)
        position = packed.position_ids - torch.repeat_interleave(packed.prompt_lens - 1, lengths)
        active = packed.active if mask is None else packed.active & mask.to(torch.bool)
        return cls.from_tokens(
            train_logp, packed.rollout_logp, active, torch.repeat_interleave(packed.sample_index, lengths), position
        )

    # ------------------------------------------------------------------ merging

    def merge(self, other: MismatchStats) -> MismatchStats:
        """Statistics of the union of two disjoint sets of tokens. Associative and commutative, to the bit."""
        samples = dict(self.samples)
        for key, (count, total) in other.samples.items():
            old_count, old_total = samples.get(key, (0, 0))
            samples[key] = (old_count + count, old_total + total)
        found = [f for f in (self.first, other.first) if f[0] != _NO_INDEX]
        return MismatchStats(
            prefill=self.prefill + other.prefill,
            decode=self.decode + other.decode,
            first=min(found) if found else (_NO_INDEX, _NO_INDEX),
            samples=samples,
        )

    @classmethod
    def merge_all(cls, parts: Iterable[MismatchStats]) -> MismatchStats:
        """The merge of all ``parts`` (micro-batches, ranks); the statistics of nothing when there is none."""
        merged = cls()
        for part in parts:
            merged = merged.merge(part)
        return merged

    # ------------------------------------------------------------------ results

    @property
    def total(self) -> Sums:
        """Prefill and decode together."""
        return self.prefill + self.decode

    @property
    def mismatch_count(self) -> int:
        """Active tokens whose bits differ or that are not finite."""
        return self.prefill.mismatch + self.decode.mismatch

    @property
    def active_tokens(self) -> int:
        """Tokens compared."""
        return self.prefill.active + self.decode.active

    def require_tokens(self, expected: int) -> None:
        """Check that every sampled token was compared once.

        Raises:
            EngineError: the number of active tokens is not ``expected``.
        """
        if self.active_tokens != expected:
            raise EngineError(
                f"{self.active_tokens} log-probabilities were compared, {expected} tokens were sampled",
                where="consistency/active_tokens",
                fix="Collect them once per data-parallel rank, on tensor-parallel rank 0, of every micro-batch.",
            )

    def metrics(self) -> dict[str, float | int]:
        """The step's metrics. All are 0 when no token is active (``first_mismatch_*``: -1), never NaN.

        ``consistency/`` followed by

        ========================== ======== ==========================================================================
        name                       unit     definition (means are over finite active tokens)
        ========================== ======== ==========================================================================
        mismatch_count             tokens   bits of p and q differ, or one is not finite
        active_tokens              tokens   compared
        mismatch_rate              1        mismatch_count / active_tokens
        nonfinite_count            tokens   p or q is NaN or infinite
        max_abs_diff               nats     max abs(d)
        mean_abs_diff              nats     mean abs(d)
        max_ulp                    ulp      max distance in representable fp32 values; 0.0 and -0.0 are 0 apart
        ratio_mean, _min, _max     1        of r
        k1_kl                      nats     mean(-d): Schulman's k1 estimate of KL(rollout || train); any sign
        k3_kl                      nats     mean((r - 1) - d): Schulman's k3 estimate of the same; >= 0, low variance
        token_mult_prob_error      1        mean exp(abs(d)), the name NeMo-RL uses; 1 when equal
        ess                        1        (sum r)**2 / (n * sum r**2), effective sample size; 1 when equal
        clipfrac0                  1        fraction with r != 1: what a PPO clip range of 0 would clip
        first_mismatch_sample      index    smallest (sample index, response position) that mismatches; -1 when none
        first_mismatch_position    index    the position that belongs to it
        ========================== ======== ==========================================================================

        and ``prefill_`` / ``decode_`` variants of active_tokens, mismatch_count, max_abs_diff, mean_abs_diff, max_ulp.
        ``train/train_rollout_logprob_abs_diff`` is vime's: the mean over samples of the sample's mean abs(d).
        """
        total = self.total
        n, some = total.finite, total.finite > 0
        out: dict[str, float | int] = {
            "mismatch_count": total.mismatch,
            "active_tokens": total.active,
            "mismatch_rate": total.mismatch / total.active if total.active else 0.0,
            "nonfinite_count": total.nonfinite,
            "max_abs_diff": total.max_abs,
            "mean_abs_diff": _ratio(total.s_abs, n),
            "max_ulp": total.max_ulp,
            "ratio_mean": _ratio(total.s_ratio, n),
            "ratio_min": total.ratio_min if some else 0.0,
            "ratio_max": total.ratio_max if some else 0.0,
            "k1_kl": _ratio(-total.s_diff, n),
            "k3_kl": _ratio(total.s_k3, n),
            "token_mult_prob_error": _ratio(total.s_exp_abs, n),
            "ess": total.s_ratio * total.s_ratio / (n * total.s_ratio_sq << _UNIT_BITS) if some else 0.0,
            "clipfrac0": total.clipped / n if some else 0.0,
            "first_mismatch_sample": self.first[0],
            "first_mismatch_position": self.first[1],
        }
        for name, part in (("prefill", self.prefill), ("decode", self.decode)):
            out[f"{name}_active_tokens"] = part.active
            out[f"{name}_mismatch_count"] = part.mismatch
            out[f"{name}_max_abs_diff"] = part.max_abs
            out[f"{name}_mean_abs_diff"] = _ratio(part.s_abs, part.finite)
            out[f"{name}_max_ulp"] = part.max_ulp
        result = {PREFIX + key: value for key, value in out.items()}
        means = np.array([_ratio(total, count) for _, (count, total) in sorted(self.samples.items())])
        result[VIME_ABS_DIFF] = _ratio(exact_sum(means), len(means))
        return result


def metric_names() -> tuple[str, ...]:
    """Every key of :meth:`MismatchStats.metrics`, in its order."""
    return tuple(MismatchStats().metrics())
