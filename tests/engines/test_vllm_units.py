"""Parts of the vLLM engine that need no engine: drawing, cache layouts, settings, refusals before start, hashing."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes.config import ConsistencyConfig, ModelConfig, RolloutConfig
from recipes.engines.types import IGNORE_INDEX, PackedBatch, Sample, SamplingParams
from recipes.engines.vllm import VllmEngine
from recipes.engines.vllm_attention import split_cache
from recipes.engines.vllm_config import hf_config
from recipes.engines.vllm_layers import Settings, _read_settings, require
from recipes.engines.weights import content_hash
from recipes.errors import ConfigError, DataError, EngineError, WeightSyncError


class _Rows:
    """What vLLM tells a logits processor about its batch."""

    def __init__(self, removed=(), added=(), moved=()):  # type: ignore[no-untyped-def]
        self.removed, self.added, self.moved = list(removed), list(added), list(moved)


def test_each_row_follows_its_request_through_the_batch() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality

    import rl_kernel
    from recipes.engines.vllm_sampler import SEED_KEY, seed_state

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    state = seed_state()(config, torch.device("cpu"), False)

    def request(seed: int | None) -> SimpleNamespace:
        return SimpleNamespace(extra_args=None if seed is None else {SEED_KEY: seed})

    def numbers(*rows: tuple[int, int]) -> torch.Tensor:
        return rl_kernel.uniforms(*torch.tensor(rows).T)

    tokens: list[list[int]] = [[], [5, 6], [7]]
    state.update_state(_Rows(added=[(i, request(seed), None, tokens[i]) for i, seed in enumerate((11, 22, 33))]))
    assert torch.equal(state.uniforms(3), numbers((11, 0), (22, 2), (33, 1)))
    tokens[0].append(-1)  # asynchronous scheduling: the token is still on the device, its place is not
    del tokens[1][1:]  # a token that vLLM takes back
    state.update_state(None)
    assert torch.equal(state.uniforms(3), numbers((11, 1), (22, 1), (33, 1)))
    state.update_state(_Rows(moved=[(0, 2, MoveDirectionality.SWAP)]))
    assert torch.equal(state.uniforms(3), numbers((33, 1), (22, 1), (11, 1)))
    state.update_state(_Rows(moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))  # request 33 has left row 0
    assert torch.equal(state.uniforms(2), numbers((11, 1), (22, 1)))
    assert state.uniforms(3) is None
    state.update_state(_Rows(added=[(2, request(33), None, [1, 2, 3])]))  # resumed: the list is a new one
    assert torch.equal(state.uniforms(3), numbers((11, 1), (22, 1), (33, 3)))
    state.update_state(_Rows(removed=[2], added=[(1, request(None), None, [])]))
    assert state.uniforms(2) is None and state.uniforms(1) is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda k, v: torch.cat([k, v], -1).transpose(1, 2).contiguous(),
        lambda k, v: torch.cat([k, v], -1),
        lambda k, v: torch.stack([k, v]),
        lambda k, v: torch.stack([k, v]).transpose(2, 3).contiguous(),
        lambda k, v: torch.stack([k, v], 1),
    ],
)
def test_split_cache_finds_keys_and_values(make) -> None:  # type: ignore[no-untyped-def]
    key, value = torch.randn(2, 7, 32, 3, 16)
    found = split_cache(make(key, value), 3, 16)
    assert torch.equal(found[0], key) and torch.equal(found[1], value)


def test_split_cache_refuses_other_layouts() -> None:
    with pytest.raises(EngineError, match="unknown layout"):
        split_cache(torch.zeros(4, 32, 3, 16), 3, 16)


def test_settings() -> None:
    assert _read_settings({}, "x") is None
    assert _read_settings({"mode": "native"}, "x") is None
    assert _read_settings({"mode": "strict", "virtual_tp": "4"}, "x") == Settings("strict", 4)
    with pytest.raises(ConfigError, match="mode='stric' is unknown"):
        _read_settings({"mode": "stric"}, "RL_KERNEL_MODE")
    with pytest.raises(ConfigError, match="virtual_tp=3 must be"):
        _read_settings({"mode": "strict", "virtual_tp": 3}, "x")


def test_missing_extension_points_are_named() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(EngineError, match=r"has no vllm.v1.sample.sampler.Sampler.no_such_thing"):
        require("vllm.v1.sample.sampler", "Sampler", "no_such_thing")


@pytest.mark.parametrize(
    ("rollout", "consistency", "message"),
    [
        ({"top_p": 0.95}, {"mode": "strict"}, r"rollout.top_p: 0.95 truncates"),
        ({"top_k": 20}, {"mode": "audit"}, r"rollout.top_k: 20 truncates"),
        ({"temperature": 0.0}, {"mode": "native"}, r"rollout.temperature: 0.0 must be"),
        ({"tensor_parallel_size": 2}, {"mode": "strict", "virtual_tp": 1}, r"consistency.virtual_tp: 1 is not"),
        ({"kv_cache_bytes": 49152}, {"mode": "strict"}, r"kv_cache_bytes: 49152 bytes do not hold .* at least 65536"),
    ],
)
def test_refused_before_start(rollout: dict, consistency: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmEngine, "_start", lambda *args: pytest.fail("the engine was started"))
    with pytest.raises(ConfigError, match=message):
        VllmEngine(ModelConfig(), RolloutConfig(**rollout), ConsistencyConfig(**consistency))


def test_a_model_path_without_config_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="model.path: .* has no readable config.json"):
        hf_config(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert hf_config(ModelConfig(path=str(tmp_path))) == {"vocab_size": 7}


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 0}, {"n": 0}]
)
def test_sampling_params_are_checked(bad: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SamplingParams(**bad)


def _sample(prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
    logp = -np.arange(1, len(response) + 1, dtype=np.float32)
    return Sample(prompt, response, logp, 0, 0, 0, "stop")


def test_samples_are_checked() -> None:
    with pytest.raises(DataError, match="the response is empty"):
        _sample((1,), ())
    with pytest.raises(DataError, match="the prompt is empty"):
        _sample((), (1,))
    with pytest.raises(DataError, match="rollout_logp is float64"):
        Sample((1,), (2,), np.zeros(1), 0, 0, 0, "stop")


def test_packing_aligns_targets() -> None:
    batch = PackedBatch.from_samples([_sample((1, 2, 3), (4, 5)), _sample((6,), (7,))], pad_to_multiple=8, pad_id=9)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 8]
    assert batch.target_ids.tolist() == [-100, -100, 4, 5, -100, 7, -100, -100]
    assert batch.rollout_logp.tolist() == [0, 0, -1, -2, 0, -1, 0, 0]
    assert batch.sample_index.tolist() == [0, 1, -1]
    assert batch.active.sum() == 3 and batch.max_seqlen == 5 and IGNORE_INDEX == -100
    with pytest.raises(DataError, match="no sample to pack"):
        PackedBatch.from_samples([])


def test_content_hash_sees_names_dtypes_shapes_and_bits() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    reference = content_hash(base)
    assert reference == content_hash(reversed(list(base.items())))
    assert reference == content_hash({**base, "a": torch.zeros(3, 2).T})  # layout in memory is not content
    for changed in (
        {**base, "a": -torch.zeros(2, 3)},
        {**base, "a": torch.zeros(3, 2)},
        {**base, "a": torch.zeros(2, 3, dtype=torch.int32)},
        {"c": base["a"], "b": base["b"]},
    ):
        assert content_hash(changed) != reference


def test_errors_keep_their_parts_between_processes() -> None:
    error = pickle.loads(pickle.dumps(WeightSyncError("it is stale", where="update_weights", fix="Sync again.")))
    assert isinstance(error, WeightSyncError)
    assert str(error) == "update_weights: it is stale. Sync again."
    assert error.fix == "Sync again."
