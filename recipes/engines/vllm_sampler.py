"""Sampling and the log-probability of the sampled token inside vLLM.

Both come from one operator, :func:`rl_kernel.sample`: log-probabilities of logits / temperature with the bits of the
contract, and the inverse of the cumulative distribution at one uniform number that is a function of (seed, position)
alone. A draw depends neither on the other requests of the batch nor on the order of a sum. vLLM's own generators are
not used: they carry state from step to step, and vLLM cannot rewind a CPU generator after a prefill chunk.

The position is the number of tokens that vLLM has sampled for the request so far: the length of the list that vLLM
hands to logits processors with the request. vLLM keeps that length right (not the content) before it samples: with
asynchronous scheduling it appends -1 for the token still in flight; a token sampled at the end of a prefill chunk is
dropped and never appended; after a preemption the list comes back with the request, as long as before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import rl_kernel
from recipes.engines.vllm_layers import active_settings, asked_for, require
from recipes.errors import ConfigError

SEED_KEY = "rl_kernel_seed"  # in SamplingParams.extra_args
_MASK = (1 << 64) - 1
_GREEDY_BELOW = 1e-5  # vLLM's border


@dataclass(frozen=True)
class SampledLogp:
    """Log-probabilities [B] of the sampled tokens, in the place where vLLM passes a [B, V] tensor around."""

    logp: torch.Tensor


@functools.cache
def seed_state() -> Any:
    """A vLLM logits processor that changes no logit: vLLM tells it which request sits in which row of the batch."""
    base: Any = require("vllm.v1.sample.logits_processor", "LogitsProcessor", "update_state", "apply")
    directions = require("vllm.v1.sample.logits_processor.interface", "MoveDirectionality", "SWAP")

    class SeedState(base):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            rows = vllm_config.scheduler_config.max_num_seqs
            self.device, self.pin_memory = torch.device(device), is_pin_memory
            self.seeds, self.seeded = np.zeros(rows, np.uint64), np.zeros(rows, bool)
            self.sampled: list[list[int]] = [[]] * rows  # vLLM's live list of each row's request

        def is_argmax_invariant(self) -> bool:
            return True

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

        def update_state(self, batch_update: Any) -> None:
            if batch_update is None:
                return
            for row in batch_update.removed:
                self.seeded[row], self.sampled[row] = False, []
            for row, params, _, tokens in batch_update.added:
                seed = (params.extra_args or {}).get(SEED_KEY)
                self.seeded[row], self.seeds[row] = seed is not None, (seed or 0) & _MASK
                self.sampled[row] = tokens
            for a, b, direction in batch_update.moved:
                for state in (self.seeds, self.seeded, self.sampled):
                    state[a], state[b] = state[b], state[a]  # type: ignore[index]
                if direction != directions.SWAP:
                    self.seeded[a], self.sampled[a] = False, []

        def uniforms(self, count: int) -> torch.Tensor | None:
            """float64 [count] for the next token of each row, on the device; ``None`` if a row has no seed."""
            if not self.seeded[:count].all():
                return None
            both = np.empty((2, count), np.int64)
            both[0] = self.seeds[:count].view(np.int64)
            both[1] = np.fromiter(map(len, self.sampled[:count]), np.int64, count)
            tensor = torch.from_numpy(both)
            if self.pin_memory and self.device.type != "cpu":
                # A pinned copy of this step alone: torch reuses its memory only once the device has read it, so the
                # host may run ahead.
                tensor = tensor.pin_memory()
            return rl_kernel.uniforms(*tensor.to(self.device, non_blocking=True))

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
    if not processors:  # vLLM warms the sampler up with made-up parameters; a request never comes without processors
        return
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
        if asked_for():
            # Stock code compiles a kernel for the rank of the token, which our engine does not read.
            self.gather_logprobs = _gather

    def _gather(logprobs: torch.Tensor | SampledLogp, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        column = token_ids.unsqueeze(-1)
        if isinstance(logprobs, SampledLogp):
            picked = logprobs.logp.unsqueeze(-1)
        elif num_logprobs == 0:
            picked = logprobs.gather(-1, column)
        else:
            return stock_gather(logprobs, num_logprobs, token_ids)
        return tensors(column.to(torch.int32), picked, torch.zeros_like(token_ids))

    @functools.wraps(stock_sample)
    def sample(self: Any, logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        strict = getattr(self, "rl_kernel", None) is not None
        if strict:
            _check_untouched(metadata)
        numbers = _uniforms(metadata.logitsprocs.argmax_invariant, logits.shape[0])
        if strict:
            return _strict(self, logits, metadata, numbers)
        if numbers is None or metadata.all_greedy:
            return stock_sample(self, logits, metadata, *args, **kwargs)
        greedy = None if metadata.all_random else logits.argmax(dim=-1)
        z = self.apply_temperature(logits, metadata.temperature, metadata.all_random)
        for processor in metadata.logitsprocs.argmax_invariant:
            z = processor.apply(z)
        if metadata.top_k is None and metadata.top_p is None:
            logp = z.log_softmax(-1)
        else:
            logp = self.topk_topp_sampler(z, {}, metadata.top_k, metadata.top_p)[1]
            logp = z.log_softmax(-1) if logp is None else logp
        tokens = rl_kernel.draw(logp, numbers)
        if greedy is not None:
            tokens = torch.where(metadata.temperature < _GREEDY_BELOW, greedy, tokens)
        return tokens, logp

    def _strict(self: Any, logits: torch.Tensor, metadata: Any, numbers: torch.Tensor | None) -> Any:
        if metadata.all_greedy:
            temperature = logits.new_zeros(logits.shape[0])
            numbers = temperature.double()
        elif metadata.all_random:
            temperature = metadata.temperature
        else:
            temperature = torch.where(metadata.temperature < _GREEDY_BELOW, 0.0, metadata.temperature)
        divisor = temperature if metadata.all_random else torch.where(temperature == 0, 1.0, temperature)
        wanted = metadata.max_num_logprobs
        everything = bool(wanted) or bool(getattr(metadata, "logprob_token_ids", None))
        if numbers is None:  # a request came without a seed: vLLM draws, as it would without this module
            tokens = self.topk_topp_sampler(logits / divisor[:, None], metadata.generators, None, None)[0].long()
            if not metadata.all_random:
                tokens = torch.where(temperature == 0, logits.argmax(dim=-1), tokens)
            if not everything and wanted is not None:
                return tokens, SampledLogp(rl_kernel.logp(logits, tokens, temperature=divisor).logp)
        else:
            out = rl_kernel.sample(logits, numbers, temperature)
            tokens = out.tokens
            if not everything:
                return tokens, SampledLogp(out.logp)
        return tokens, rl_kernel.log_softmax(logits, divisor) if everything else None

    sampler.__init__ = init
    sampler.sample = sample
