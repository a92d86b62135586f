"""Sampling and the log-probability of the sampled token inside vLLM.

Log-probability: z = logits / temperature in fp32, then rl_kernel.log_softmax, for every request of the batch alike.

Token: the inverse of the cumulative distribution at one uniform number that is a function of (seed, position) alone.
Weights floor(p * 2**50) are summed as integers, so a draw depends neither on the other requests of the batch nor on
the order of a sum. vLLM's own generators are not used: they carry state from step to step, and vLLM cannot rewind a
CPU generator after a prefill chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

import rl_kernel
from recipes.engines.vllm_layers import active_settings, require
from recipes.errors import ConfigError

SEED_KEY = "rl_kernel_seed"  # in SamplingParams.extra_args
_MASK = (1 << 64) - 1
_WEIGHT_BITS = 50


def _mix(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers whose output bits look independent."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on ``seed`` and ``position`` (0: the first token)."""
    gamma = 0x9E3779B97F4A7C15
    state = _mix((_mix((seed + gamma) & _MASK) + (position + 1) * gamma) & _MASK)
    return (state >> 11) / float(1 << 53)


def draw(logp: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [B] from log-probabilities [B, V] and one uniform number (float64 [B]) for each row.

    A token whose probability is below 2**-50 is never drawn. Rows with NaN give some token id in range: the caller
    finds them by their log-probability.
    """
    weights = (logp.double().exp() * float(1 << _WEIGHT_BITS)).to(torch.int64)
    cumulative = weights.cumsum(-1)  # exact
    total = cumulative[:, -1]
    target = (uniforms.to(logp.device) * total.double()).floor().to(torch.int64)
    target = torch.minimum(target, total - 1)
    tokens = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return tokens.clamp_(0, logp.shape[-1] - 1)


@functools.cache
def seed_state() -> Any:
    """A vLLM logits processor that changes no logit: vLLM tells it which request sits in which row of the batch."""
    base: Any = require("vllm.v1.sample.logits_processor", "LogitsProcessor", "update_state", "apply")
    directions = require("vllm.v1.sample.logits_processor.interface", "MoveDirectionality", "SWAP")

    class SeedState(base):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self.rows: dict[int, tuple[int, list[int]]] = {}  # row -> (seed, the request's sampled tokens so far)

        def is_argmax_invariant(self) -> bool:
            return True

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            rows = self.rows
            for row in batch_update.removed:
                rows.pop(row, None)
            for row, params, _, sampled in batch_update.added:
                seed = (params.extra_args or {}).get(SEED_KEY)
                if seed is None:
                    rows.pop(row, None)
                else:
                    rows[row] = (seed, sampled)
            for a, b, direction in batch_update.moved:
                first, second = rows.pop(a, None), rows.pop(b, None)
                if first is not None:
                    rows[b] = first
                if second is not None and direction == directions.SWAP:
                    rows[a] = second

        def uniforms(self, count: int) -> torch.Tensor | None:
            """float64 [count] for the next token of each row, or ``None`` if a row has no seed."""
            rows = [self.rows.get(row) for row in range(count)]
            if any(row is None for row in rows):
                return None
            return torch.tensor([uniform(row[0], len(row[1])) for row in rows if row], dtype=torch.float64)

    return SeedState


def __getattr__(name: str) -> Any:
    # vLLM loads the processor by the name "recipes.engines.vllm_sampler:SeedState"; vLLM is imported only then.
    if name == "SeedState":
        return seed_state()
    raise AttributeError(name)


def _uniforms(processors: Iterable[Any], count: int) -> torch.Tensor | None:
    for processor in processors:
        if isinstance(processor, seed_state()):
            return processor.uniforms(count)
    return None


def _check_untouched(metadata: Any) -> None:
    """Refuse whatever changes logits between the LM head and the sampler: the trainer cannot follow it."""
    processors = (*metadata.logitsprocs.argmax_invariant, *metadata.logitsprocs.non_argmax_invariant)
    unknown = [
        type(p).__name__
        for p in processors
        if not isinstance(p, seed_state())
        # The state of vLLM's own processors: empty while no request of the batch uses them.
        and (
            getattr(p, "min_toks", None)
            or getattr(p, "biases", None)
            or getattr(p, "min_p_count", None)
            or not hasattr(type(p), "update_state")
            or type(p).__module__.split(".")[0] != "vllm"
        )
    ]
    for name, used in (
        ("top_p", metadata.top_p is not None),
        ("top_k", metadata.top_k is not None),
        ("penalties", not metadata.no_penalties),
        ("allowed_token_ids", metadata.allowed_token_ids_mask is not None),
        ("bad_words", bool(metadata.bad_words_token_ids)),
        (", ".join(unknown), bool(unknown)),
    ):
        if used:
            raise ConfigError(
                f"{name} changes the distribution, and a strict engine returns log-probabilities that a trainer can "
                "repeat",
                where="SamplingParams",
                fix="Leave it at its default, or use consistency=native.",
            )


@functools.cache
def install() -> None:
    """Patch vLLM's sampler, once per process. A stock engine without request seeds samples as before.

    Raises:
        EngineError: an extension point is missing.
    """
    sampler = require(
        "vllm.v1.sample.sampler", "Sampler", "sample", "compute_logprobs", "apply_temperature", "gather_logprobs"
    )
    tensors = require("vllm.v1.outputs", "LogprobsTensors")
    stock_init, stock_sample, stock_gather = sampler.__init__, sampler.sample, sampler.gather_logprobs

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        settings = active_settings()
        self.rl_kernel = settings if settings is not None and settings.mode in ("strict", "audit") else None
        if self.rl_kernel is not None:
            self.compute_logprobs = lambda logits: rl_kernel.log_softmax(logits.float())
        # Stock code compiles a kernel for the rank of the token, which nobody reads.
        self.gather_logprobs = _gather

    def _gather(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs != 0:
            return stock_gather(logprobs, num_logprobs, token_ids)
        column = token_ids.unsqueeze(-1)
        return tensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))

    @functools.wraps(stock_sample)
    def sample(self: Any, logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        strict = getattr(self, "rl_kernel", None) is not None
        if strict:
            _check_untouched(metadata)
        numbers = _uniforms(metadata.logitsprocs.argmax_invariant, logits.shape[0])
        if (not strict and numbers is None) or metadata.all_greedy:
            return stock_sample(self, logits, metadata, *args, **kwargs)
        greedy = None if metadata.all_random else logits.argmax(dim=-1)
        z = self.apply_temperature(logits, metadata.temperature, metadata.all_random)
        if strict:
            logp = rl_kernel.log_softmax(z)
            stock = None
        else:
            for processor in metadata.logitsprocs.argmax_invariant:
                z = processor.apply(z)
            stock, logp = self.topk_topp_sampler(z, {}, metadata.top_k, metadata.top_p)
        if numbers is not None:
            tokens = draw(logp if logp is not None else z.log_softmax(-1), numbers)
        elif stock is None:
            tokens = self.topk_topp_sampler(z, metadata.generators, None, None)[0]
        else:
            tokens = stock
        if greedy is not None:
            tokens = torch.where(metadata.temperature < 1e-5, greedy, tokens)
        return tokens, logp

    sampler.__init__ = init
    sampler.sample = sample
