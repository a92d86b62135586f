"""What follows from a configuration before vLLM meets a GPU: graphs, attention, libraries of the process."""

from __future__ import annotations

import os

import pytest
import torch

from recipes.config import ConsistencyConfig, RolloutConfig, build_config
from recipes.engines.mode import prepare_process
from recipes.engines.vllm_config import capture_sizes, gpu_options
from recipes.engines.vllm_layers import Settings, _read_settings
from recipes.errors import ConfigError
from rl_kernel import contract, cublaslt


@pytest.mark.parametrize("most", [1, 3, 8, 60, 64, 100, 255, 256, 300, 1000])
def test_every_decode_batch_has_a_graph(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    gaps = [b - a for a, b in zip(sizes, sizes[1:], strict=False)]
    assert max(gaps, default=1) <= (8 if most <= 256 else 16)


def test_strict_captures_and_native_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    rollout = RolloutConfig(enforce_eager=False, max_num_seqs=12)
    assert gpu_options("native", rollout, "FLASH_ATTN") == {}
    options = gpu_options("strict", rollout, "FLASH_ATTN")
    assert options["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 12]
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "compilation_config" not in gpu_options("audit", RolloutConfig(enforce_eager=True), "FLASH_ATTN")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT: it replaces"):
        gpu_options("strict", rollout, "FLASH_ATTN")


def test_vllm_accepts_the_compilation_settings() -> None:
    config = pytest.importorskip("vllm.config")
    given = gpu_options("strict", RolloutConfig(enforce_eager=False), "FLASH_ATTN")["compilation_config"]
    found = config.CompilationConfig(**given)
    assert found.mode == config.CompilationMode.NONE and found.cudagraph_mode == config.CUDAGraphMode.FULL_DECODE_ONLY


def test_attention_is_resolved_by_the_family() -> None:
    assert ConsistencyConfig().attention_on("sm90") == "fa3" and ConsistencyConfig().attention_on("gfx942") == "blocks"
    assert ConsistencyConfig(attention="blocks").attention_on("sm90") == "blocks"
    assert build_config({}).consistency.attention == "blocks"
    h200 = {"hardware": {"device": "cuda", "family": "sm90", "devices": 8}}
    assert build_config(h200).consistency.attention == "fa3"
    assert build_config({**h200, "consistency": {"attention": "blocks"}}).consistency.attention == "blocks"
    with pytest.raises(ConfigError, match="consistency.attention: fa3 exists on sm90 only"):
        build_config({"consistency": {"attention": "fa3"}})
    with pytest.raises(ConfigError, match="consistency.attention: 'fa2' is not a choice"):
        build_config({"consistency": {"attention": "fa2"}})


def test_attention_travels_to_workers_and_into_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _read_settings({"mode": "strict", "attention": "fa3"}, "x") == Settings("strict", 1, "fa3")
    with pytest.raises(ConfigError, match="attention='flash' must be"):
        _read_settings({"mode": "strict", "attention": "flash"}, "x")
    monkeypatch.setenv("RLK_SM90_ATTENTION", "blocks")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cublaslt, "setup", lambda: calls.append("setup"))
    calls: list[str] = []
    before = contract.fingerprint("sm90")
    prepare_process("native", "fa3")
    assert contract.fingerprint("sm90") == before and not calls
    prepare_process("strict", "fa3")
    assert contract.fingerprint("sm90") != before and calls == ["setup"]
    assert os.environ["RLK_SM90_ATTENTION"] == "fa3"


def test_start_up_probes_cover_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_own_class", {24, 40})
    for limit in (1, 5, 16, 17, 64, 1000, 2048, 8192):
        ends = cublaslt.classes_up_to(limit)
        assert ends[-1] == limit
        met = {cublaslt.bucket(m) for m in range(1, limit + 1)}
        assert met == {cublaslt.bucket(m) for m in ends}, limit
