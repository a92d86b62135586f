"""The contract's fingerprint sees every field, and the registry says who computes what and why."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import rl_kernel
from rl_kernel import contract, platform, registry
from rl_kernel.ops.attention import reference as attention_reference

FAMILIES = ("cpu", "sm90", "gfx942")


def changed(value):
    """Another value of the same type."""
    if isinstance(value, str):
        return value + "."
    if isinstance(value, tuple):
        return (*value, "one more")
    return {**value, "one more": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_every_operator_is_in_the_fingerprint(family):
    base = contract.contract_for(family)
    seen = {base.fingerprint()}
    for name, part in base.ops.items():
        for item in dataclasses.fields(part):
            seen.add(base.with_op(name, **{item.name: changed(getattr(part, item.name))}).fingerprint())
        for key, value in part.parameters.items():
            other = value * 2 if isinstance(value, int) else f"{value}."
            seen.add(base.with_op(name, parameters={**part.parameters, key: other}).fingerprint())
    parameters = sum(len(part.parameters) for part in base.ops.values())
    assert len(seen) == 1 + len(base.ops) * len(dataclasses.fields(contract.OpContract)) + parameters
    assert dataclasses.replace(base, version=2).fingerprint() not in seen
    assert contract.contract_for(family).fingerprint() == base.fingerprint()


def test_settings_of_a_run_are_in_the_fingerprint(monkeypatch):
    found = [contract.fingerprint(f, virtual_tp=s) for f in FAMILIES for s in (1, 2, 4, 8)]
    found.append(contract.fingerprint("cpu", model_dtype="float32"))
    monkeypatch.setenv("RLK_SM90_ATTENTION", "fa3")
    found.append(contract.fingerprint("sm90"))
    assert len(set(found)) == len(found)
    contract.require_equal(found[0], found[0])
    with pytest.raises(rl_kernel.ContractError, match="fingerprints differ"):
        contract.require_equal(found[0], found[1])


def test_numbers_in_the_contract_are_those_of_the_kernels():
    ops = contract.contract_for("cpu").ops
    assert ops["attention"].parameters["key_block"] == attention_reference.KEY_BLOCK
    assert ops["logp"].parameters["leaf"] == contract.VOCAB_LEAF == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "sm80"}, "no contract"),
        ({"family": "cpu", "virtual_tp": 3}, "virtual_tp=3"),
        ({"family": "cpu", "model_dtype": "float16"}, "float16"),
        ({"family": "sm90", "model_dtype": "float32"}, "cpu family only"),
    ],
)
def test_errors_name_the_field(arguments, message):
    with pytest.raises(rl_kernel.ContractError, match=message):
        contract.contract_for(**arguments)


@pytest.mark.parametrize("op", registry.OPS)
def test_explain_names_backend_contract_and_reasons(op):
    text = rl_kernel.explain(op, virtual_tp=4)
    assert "backend: native" in text and "also triton:" in text and "also sm90:" in text
    assert contract.fingerprint("cpu", virtual_tp=4) in text and "primitives:" in text


def test_modes_nest_and_are_restored():
    assert rl_kernel.get_mode() == "strict"
    with rl_kernel.set_mode("fast"):
        with rl_kernel.set_mode("audit"):
            assert rl_kernel.get_mode() == "audit"
        assert rl_kernel.get_mode() == "fast"
    assert rl_kernel.get_mode() == "strict"
    with pytest.raises(rl_kernel.ContractError, match="mode='quick'"):
        rl_kernel.set_mode("quick")
    assert rl_kernel.get_mode() == "strict"


def resolve_without(monkeypatch, *missing):
    """Resolve logp on the CPU while the backends ``missing`` refuse."""
    check = registry._check

    def refusing(request, backend):
        return "is out of order" if backend in missing else check(request, backend)

    monkeypatch.setattr(registry, "_check", refusing)
    registry._resolve.cache_clear()
    return registry.resolve("logp", torch.device("cpu"), torch.float32)


def test_a_backend_that_is_passed_over_is_counted(monkeypatch):
    registry._resolve.cache_clear()
    before = registry.fallback_count()
    assert registry.resolve("logp", torch.device("cpu"), torch.float32).backend == "native"
    assert registry.fallback_count() == before
    choice = resolve_without(monkeypatch, "native")
    assert choice.backend == "reference" and choice.passed_over == (("native", "is out of order"),)
    assert registry.fallback_count() == before + 1
    monkeypatch.undo()
    registry._resolve.cache_clear()


def test_strict_fails_closed_and_names_every_reason(monkeypatch):
    with pytest.raises(rl_kernel.UnsupportedError, match="native: is out of order; reference: is out of order"):
        resolve_without(monkeypatch, "native", "reference")
    monkeypatch.undo()
    registry._resolve.cache_clear()
    with pytest.raises(rl_kernel.UnsupportedError, match="keeps no contract"):
        registry.resolve("logp", torch.device("cpu"), torch.float32, "torch")


def test_unsupported_devices_say_why():
    found = platform.describe("meta")
    assert found.family is None and "no contract" in found.reason
    with pytest.raises(rl_kernel.UnsupportedError, match="no contract"):
        platform.family_of("meta")
