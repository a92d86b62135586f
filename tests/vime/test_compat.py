"""A vime that differs from the tested one is refused by name, commit and signature."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from recipes.errors import ConfigError
from recipes.vime import compat, head, init, logp


@pytest.fixture
def vime(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Modules of the names that compat reads, with the tested signatures."""
    names = ["vime", "vime.backends", "vime.backends.megatron_utils", compat.LOSS, compat.HOLDERS[1]]
    for name in names:
        module = ModuleType(name)
        module.__path__, module.__file__ = [], "/nowhere/vime/__init__.py"
        monkeypatch.setitem(sys.modules, name, module)
    loss = sys.modules[compat.LOSS]
    for name, parameters in compat.SIGNATURES.items():
        setattr(loss, name, eval(f"lambda {', '.join(parameters)}: None"))
    sys.modules[compat.HOLDERS[1]].get_log_probs_and_entropy = loss.get_log_probs_and_entropy  # type: ignore[attr-defined]
    return loss


def arguments(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"rollout_top_p": 1.0, "rollout_top_k": -1, "allgather_cp": False, **changes})


def test_the_tested_signatures_pass_and_every_holder_is_rebound(
    vime: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_KERNEL_MODE", "strict")
    assert compat.check() is vime
    init.init(arguments())  # type: ignore[arg-type]
    for name in (compat.LOSS, compat.HOLDERS[1]):
        assert sys.modules[name].get_log_probs_and_entropy is logp.get_log_probs_and_entropy


def test_native_rebinds_nothing(vime: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_KERNEL_MODE", "native")
    before = vime.get_log_probs_and_entropy
    init.init(arguments(rollout_top_p=0.9))  # type: ignore[arg-type]
    assert vime.get_log_probs_and_entropy is before


@pytest.mark.parametrize("change", ["renamed", "missing"])
def test_another_signature_is_refused(vime: ModuleType, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_KERNEL_MODE", "strict")
    if change == "renamed":
        vime._extract_per_sample = lambda log_prob_full, entropy_full, lengths: None  # type: ignore[attr-defined]
        says = "_extract_per_sample(log_prob_full, entropy_full, lengths) was (log_prob_full,"
    else:
        del vime._build_shifted_tokens
        says = "_build_shifted_tokens is missing"
    before = vime.get_log_probs_and_entropy
    with pytest.raises(ConfigError) as caught:
        init.init(arguments())  # type: ignore[arg-type]
    message = str(caught.value)
    assert says in message and "vime at commit unknown, tested commits: c0ed6d83" in message
    assert vime.get_log_probs_and_entropy is before


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
        ({"rollout_top_k": 20}, "--rollout-top-k"),
        ({"allgather_cp": True}, "--allgather-cp"),
        ({"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size"),
        ({"recompute_loss_function": True}, "--recompute-loss-function"),
    ],
)
def test_arguments_without_a_contract_are_refused(
    vime: ModuleType, change: dict[str, object], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_KERNEL_MODE", "strict")
    with pytest.raises(ConfigError, match=flag):
        init.init(arguments(**change))  # type: ignore[arg-type]


def test_log_probabilities_without_captured_hidden_states_are_refused(
    vime: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_current", None)
    shape = {"unconcat_tokens": [], "total_lengths": [], "response_lengths": []}
    with pytest.raises(Exception, match="before-log-prob-hook-path"):
        logp.get_log_probs_and_entropy(torch.zeros(1, 4, 8), args=arguments(), **shape)  # type: ignore[arg-type]
