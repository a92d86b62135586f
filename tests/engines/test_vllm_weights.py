"""Weight updates are complete, verified and never mixed with cached results of older weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from recipes.engines.types import SamplingParams
from recipes.engines.vllm import VllmEngine
from recipes.engines.weights import content_hash
from recipes.errors import ConfigError, DataError, EngineError, WeightSyncError
from tests.engines import vllm_helpers as helpers

pytestmark = pytest.mark.engines
PARAMS = SamplingParams(max_tokens=8)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def engine(request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    with helpers.start(helpers.tiny_model("bfloat16", request.param)) as started:
        yield started


@pytest.fixture
def weights(engine: VllmEngine) -> dict[str, torch.Tensor]:
    return helpers.random_weights(engine.tensors, seed=5)


def test_placeholder_weights_are_not_sampled_from(engine: VllmEngine) -> None:
    if engine.weight_version < 0:
        with pytest.raises(EngineError, match="placeholder weights"):
            engine.generate([[1]], PARAMS, [0])


def test_update_returns_the_content_hash(engine: VllmEngine, weights: dict) -> None:
    assert ("lm_head.weight" in engine.tensors) is not engine.tied
    found = engine.update_weights(weights, 0, expected_hash=content_hash(weights))
    assert found == content_hash(weights) == engine.info()["weight_hash"]
    changed = dict(weights)
    changed[DOWN] = weights[DOWN].clone()
    changed[DOWN][0, 0] = -changed[DOWN][0, 0]
    assert engine.update_weights(changed, 1) != found
    if engine.tied:  # the head may come along as long as it is the embedding
        assert engine.update_weights({**weights, "lm_head.weight": weights[EMBED].clone()}, 1) == found


def test_prefixes_of_older_weights_are_forgotten(engine: VllmEngine, weights: dict) -> None:
    prompts = helpers.random_prompts((100, 70))
    engine.update_weights(weights, 2)
    engine.generate(prompts, PARAMS, [1, 2])
    newer = helpers.random_weights(engine.tensors, seed=6)
    engine.update_weights(newer, 3)
    samples = engine.generate(prompts, PARAMS, [1, 2], weight_version=3)
    expected = helpers.forward_logp(engine.model, newer, samples, 1.0)
    assert helpers.mismatches([s.rollout_logp for s in samples], expected) == 0


def test_without_the_reset_they_are_not(engine: VllmEngine, weights: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    prompts = helpers.random_prompts((100, 70))
    engine.update_weights(weights, 4)
    engine.generate(prompts, PARAMS, [1, 2])
    newer = helpers.random_weights(engine.tensors, seed=6)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
        engine.update_weights(newer, 5)
        samples = engine.generate(prompts, PARAMS, [1, 2])
    expected = helpers.forward_logp(engine.model, newer, samples, 1.0)
    assert helpers.mismatches([s.rollout_logp for s in samples], expected) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(Q_PROJ), f"1 tensors are missing: {Q_PROJ}"),
        (lambda w: w.update(extra=w[DOWN]), "1 tensors are unknown: extra"),
        (lambda w: w.update({DOWN: w[DOWN].T.contiguous()}), f"{DOWN} has shape .160, 64., .64, 160. is needed"),
        (lambda w: w.update({DOWN: w[DOWN].float()}), f"{DOWN} is float32, the engine holds bfloat16"),
        (lambda w: w.update({EMBED: torch.full_like(w[EMBED], float("nan"))}), f"{EMBED} holds NaN"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "nan"],
)
def test_bad_tensors_are_named(engine: VllmEngine, weights: dict, change: object, message: str) -> None:
    engine.update_weights(weights, 10)
    before = engine.generate([[1, 2, 3]], PARAMS, [0])
    broken = dict(weights)
    change(broken)  # type: ignore[operator]
    with pytest.raises(WeightSyncError, match=message):
        engine.update_weights(broken, 11)
    assert engine.weight_version == 10  # refused before anything was loaded
    assert helpers.different(engine.generate([[1, 2, 3]], PARAMS, [0]), before) == 0


def test_stale_versions_are_refused(engine: VllmEngine, weights: dict) -> None:
    engine.update_weights(weights, 20)
    with pytest.raises(WeightSyncError, match="version 19 is older than 20"):
        engine.update_weights(weights, 19)
    with pytest.raises(WeightSyncError, match="version 21 is expected"):
        engine.generate([[1]], PARAMS, [0], weight_version=21)
    with pytest.raises(WeightSyncError, match="the tensors hash to"):
        engine.update_weights(weights, 21, expected_hash="0" * 64)
    if engine.tied:
        with pytest.raises(WeightSyncError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
            engine.update_weights({**weights, "lm_head.weight": weights[EMBED] * 2}, 21)


@pytest.mark.parametrize("skipped", [Q_PROJ, DOWN, EMBED])
def test_a_half_loaded_model_is_found(
    engine: VllmEngine, weights: dict, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that drops a tensor without a word, as vLLM's may, leaves the engine unusable until a full update."""
    version = engine.weight_version + 1
    engine.update_weights(weights, version)
    model = _model(engine)
    load = type(model).load_weights
    newer = helpers.random_weights(engine.tensors, seed=8)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "load_weights", lambda self, it: load(self, (p for p in it if p[0] != skipped)))
        with pytest.raises(WeightSyncError, match=f"rank 0 does not hold the given weights: {skipped}"):
            engine.update_weights(newer, version + 1)
    with pytest.raises(EngineError, match="a weight update that failed"):
        engine.generate([[1]], PARAMS, [0])
    engine.update_weights(newer, version + 1)
    engine.generate([[1]], PARAMS, [0], weight_version=version + 1)


def _model(engine: VllmEngine) -> torch.nn.Module:
    return engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def test_nan_logits_are_an_error(engine: VllmEngine, weights: dict) -> None:
    """Finite weights that overflow inside the model: never a log-probability of 0.0, and the engine goes on."""
    norm = "model.norm.weight"
    engine.update_weights({**weights, norm: torch.full_like(weights[norm], 3e38)}, 40)
    with pytest.raises(EngineError, match="log-probability at position 0 is nan: the logits hold NaN"):
        engine.generate([[1, 2, 3]], PARAMS, [0])
    engine.update_weights(weights, 41)
    (sample,) = engine.generate([[1, 2, 3]], PARAMS, [0])
    assert np.isfinite(sample.rollout_logp).all()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 0: the prompt is empty"),
        ([[1], [2, helpers.VOCAB]], f"prompt 1: token id {helpers.VOCAB} is outside the vocabulary"),
        ([[1] * 224], "prompt 0: 224 tokens leave no room for a response in a context of 224"),
    ],
)
def test_bad_prompts_are_named(engine: VllmEngine, weights: dict, prompts: list, message: str) -> None:
    engine.update_weights(weights, 50)
    with pytest.raises(DataError, match=message):
        engine.generate(prompts, PARAMS, [0] * len(prompts))


def test_stop_tokens_end_a_response(engine: VllmEngine, weights: dict) -> None:
    engine.update_weights(weights, 60)
    (free,) = engine.generate([[1, 2, 3]], PARAMS, [0])
    stop = free.response_ids[3]
    (stopped,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, stop_token_ids=(stop,)), [0])
    cut = free.response_ids.index(stop) + 1
    assert (stopped.response_ids, stopped.finish_reason) == (free.response_ids[:cut], "stop")
    assert stopped.rollout_logp.tobytes() == free.rollout_logp[:cut].tobytes()
    assert free.finish_reason == "length"


def test_strict_refuses_truncated_distributions(engine: VllmEngine, weights: dict) -> None:
    engine.update_weights(weights, 70)
    with pytest.raises(ConfigError, match=r"rollout.top_p: 0.9 truncates"):
        engine.generate([[1]], SamplingParams(top_p=0.9), [0])
    with pytest.raises(ConfigError, match=r"2 seeds for 1 prompts with n=3"):
        engine.generate([[1]], SamplingParams(n=3), [0, 1])
