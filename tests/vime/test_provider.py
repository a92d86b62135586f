"""``recipes.vime.provider`` on requests shaped as a provider build's.

``VIME_PROVIDER_FILE`` may point at such a build's module of requests and results (the file that defines
``compute_linear_logp``): the provider then also passes through it, in its strict mode.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import rl_kernel
from recipes.vime import provider

TOKENS, HIDDEN, VOCAB, PADDED = 9, 64, 300, 384
FILE = os.environ.get("VIME_PROVIDER_FILE")


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    weight = (torch.randn(PADDED, HIDDEN, generator=generator) * 0.02).to(torch.bfloat16)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, VOCAB - 1
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def request(**changes: Any) -> SimpleNamespace:
    hidden, weight, targets = tensors()
    context = SimpleNamespace(
        hidden=hidden.float(),
        projection=SimpleNamespace(weight=weight, bias=None),
        vocab_partition=SimpleNamespace(local_start=0, local_size=PADDED, real_size=VOCAB, padded_size=PADDED),
    )
    fields: dict[str, Any] = {
        "context": context,
        "target_ids": targets,
        "tensor_parallel_group": None,
        "temperature": 0.7,
        "with_entropy": True,
        "with_entropy_grad": True,
        "log_prob_keep_mask": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def expected(temperature: Any = 0.7) -> rl_kernel.LinearLogpOutput:
    hidden, weight, targets = tensors()
    return rl_kernel.linear_logp(hidden, weight, targets, global_vocab_size=VOCAB, temperature=temperature)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.detach().view(torch.int32), y.detach().view(torch.int32))


@pytest.mark.parametrize("temperature", [0.7, None, torch.full((TOKENS,), 0.7)])
def test_bits_are_linear_logps(temperature: Any) -> None:
    result = provider.linear_logp(request(temperature=temperature))
    out = expected(1.0 if temperature is None else 0.7)
    assert result.logp.shape == (TOKENS, 1) and same_bits(result.logp[:, 0], out.logp)
    assert result.entropy is not None and same_bits(result.entropy, out.entropy)
    assert result.backend_id.startswith("rl_kernel.linear_logp.") and ".cpu." in result.contract_id


def test_entropy_is_what_was_asked_for() -> None:
    assert provider.linear_logp(request(with_entropy=False)).entropy is None
    without = provider.linear_logp(request(with_entropy_grad=False))
    assert without.logp.requires_grad and not without.entropy.requires_grad
    assert provider.linear_logp(request()).entropy.requires_grad


@pytest.mark.parametrize("what", ["context", "bias", "top-p"])
def test_what_has_no_contract_is_left_to_vime(what: str) -> None:
    asked = request()
    if what == "context":
        asked.context = None
    elif what == "bias":
        asked.context.projection.bias = torch.zeros(PADDED)
    else:
        asked.log_prob_keep_mask = torch.ones(TOKENS, PADDED, dtype=torch.bool)
    with pytest.raises(provider.ProviderUnavailableError) as caught:
        provider.linear_logp(asked)
    assert caught.value.linear_logp_provider_unavailable


def provider_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vime_provider_build", str(FILE))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not FILE, reason="VIME_PROVIDER_FILE is not set to a provider build's module")
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_a_provider_build_takes_it(mode: str) -> None:
    build = provider_build()
    hidden, weight, targets = tensors()
    partition = build.VocabPartition(local_start=0, local_size=PADDED, real_size=VOCAB, padded_size=PADDED)
    fields = {
        "logits": torch.nn.functional.linear(hidden, weight).float(),
        "target_ids": targets,
        "tensor_parallel_group": None,
        "token_layout": build.TokenLayout(world_size=1, rank=0, layout="single"),
        "with_entropy": True,
        "with_entropy_grad": True,
        "chunk_size": -1,
        "context": build.LinearLogpContext(hidden, build.LinearProjection(weight), partition),
        "temperature": 0.7,
    }
    asked = build.LinearLogpRequest(**fields)
    args = SimpleNamespace(linear_logp_provider="recipes.vime.provider.linear_logp", linear_logp_provider_mode=mode)

    def native(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(TOKENS, 1), torch.zeros(TOKENS)

    logp, entropy = build.compute_linear_logp(args=args, request=asked, native=native)
    assert same_bits(logp[:, 0], expected().logp) and same_bits(entropy, expected().entropy)
    logp.sum().backward()
    assert hidden.grad is not None and weight.grad is not None and hidden.grad.abs().sum() > 0
    without = dataclasses.replace(asked, context=None)
    if mode == "auto":
        assert not build.compute_linear_logp(args=args, request=without, native=native)[0].any()
    else:
        with pytest.raises(RuntimeError, match="no hidden states"):
            build.compute_linear_logp(args=args, request=without, native=native)
