"""A strict rollout returns the same bits however vLLM schedules it, and a packed training pass repeats them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from recipes.engines.types import Sample, SamplingParams
from recipes.engines.vllm import VllmEngine
from recipes.engines.vllm_config import hf_config
from recipes.engines.vllm_layers import audit_model, clear_shared_layers
from tests.engines import vllm_helpers as helpers

pytestmark = pytest.mark.engines

# Lengths around the cache block (32) and the key block; two prompts share a prefix of three blocks.
LENGTHS = (1, 5, 31, 32, 33, 64, 100, 150)
PARAMS = {t: SamplingParams(temperature=t, max_tokens=24, n=2) for t in (0.7, 1.0, 1.3)}


def prompts() -> list[list[int]]:
    made = helpers.random_prompts(LENGTHS)
    return [*made, made[-1][:96] + made[-2][:20]]


def seeds(params: SamplingParams) -> list[int]:
    return [1000 + i for i in range(len(prompts()) * params.n)]


@pytest.fixture(scope="module", params=[("float32", True), ("bfloat16", False)], ids=["fp32-tied", "bf16-untied"])
def case(request: pytest.FixtureRequest) -> Iterator[dict]:
    """One engine with room for everything; its samples are what every other schedule must repeat."""
    model = helpers.tiny_model(*request.param)
    with helpers.start(model) as engine:
        weights = helpers.random_weights(engine.tensors, seed=7)
        engine.update_weights(weights, 3)
        samples = {t: engine.generate(prompts(), p, seeds(p)) for t, p in PARAMS.items()}
        again = engine.generate(prompts(), PARAMS[1.0], seeds(PARAMS[1.0]))
        alone = _alone(engine)
        info = engine.info()
    yield {"model": model, "weights": weights, "samples": samples, "again": again, "alone": alone, "info": info}


def _alone(engine: VllmEngine) -> list[Sample]:
    """Every second request by itself, on a cold prefix cache."""
    one = SamplingParams(temperature=1.0, max_tokens=24)
    found = []
    for index, prompt in enumerate(prompts()):
        engine._llm.reset_prefix_cache()
        found += engine.generate([prompt], one, [seeds(PARAMS[1.0])[2 * index]])
    return found


def test_samples_are_well_formed(case: dict) -> None:
    for sample in case["samples"][1.0]:
        assert sample.weight_version == 3
        assert len(sample.response_ids) == 24
        assert all(0 <= token < helpers.VOCAB for token in sample.response_ids)
        assert (sample.rollout_logp < 0).all()
    tokens = {sample.response_ids for sample in case["samples"][1.0]}
    assert len(tokens) == len(case["samples"][1.0])  # no two seeds gave the same response
    assert case["samples"][0.7][0].response_ids != case["samples"][1.3][0].response_ids


@pytest.mark.parametrize("temperature", PARAMS)
def test_packed_pass_repeats_every_bit(case: dict, temperature: float) -> None:
    samples = case["samples"][temperature]
    expected = helpers.forward_logp(case["model"], case["weights"], samples, temperature)
    assert helpers.mismatches([s.rollout_logp for s in samples], expected) == 0


def test_alone_equals_batched(case: dict) -> None:
    assert helpers.different(case["alone"], case["samples"][1.0][::2]) == 0


def test_prefix_hits_change_nothing(case: dict) -> None:
    assert case["info"]["prefix_cache_hit_tokens"] > 0
    assert helpers.different(case["again"], case["samples"][1.0]) == 0


def test_chunked_prefill_and_preemption_change_nothing(case: dict) -> None:
    # 16 tokens a step for prompts of up to 150; 10 cache blocks for 16 requests of up to 6 blocks.
    size = 2 if case["model"].dtype == "bfloat16" else 4
    block = 2 * 2 * 32 * 2 * 32 * size  # layers, k and v, tokens, kv heads, head size, bytes
    with helpers.start(case["model"], max_num_batched_tokens=16, kv_cache_bytes=10 * block) as engine:
        engine.update_weights(case["weights"], 3)
        samples = engine.generate(prompts(), PARAMS[1.0], seeds(PARAMS[1.0]))
        assert engine.info()["preemptions"] > 0
    assert helpers.different(samples, case["samples"][1.0]) == 0


def test_tensor_parallel_changes_nothing(case: dict) -> None:
    with helpers.start(case["model"], tensor_parallel_size=2) as engine:
        engine.update_weights(case["weights"], 3)
        samples = engine.generate(prompts(), PARAMS[1.0], seeds(PARAMS[1.0]))
        info = engine.info()
    assert info["contract"] == case["info"]["contract"]
    assert helpers.different(samples, case["samples"][1.0]) == 0


def test_any_vllm_can_be_strict(case: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin alone, switched on by the environment, with vLLM's own seeds: same log-probabilities."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    monkeypatch.setenv("RL_KERNEL_MODE", "strict")
    monkeypatch.setenv("RL_KERNEL_VIRTUAL_TP", str(helpers.SEGMENTS))
    clear_shared_layers()
    (tmp_path / "config.json").write_text(json.dumps(hf_config(case["model"])))
    llm = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=case["model"].dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=8 << 20,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
    )
    (counts, stock) = llm.apply_model(audit_model)[0]
    llm.apply_model(lambda model: model.load_weights(iter(case["weights"].items())) and None)
    params = VllmSamplingParams(temperature=0.7, max_tokens=8, logprobs=0, seed=5, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    assert stock == []
    assert counts == case["info"]["replaced"]
    samples = []
    for output in outputs:
        tokens = tuple(output.outputs[0].token_ids)
        logp = [entry[token].logprob for token, entry in zip(tokens, output.outputs[0].logprobs, strict=True)]
        samples.append(Sample(tuple(output.prompt_token_ids), tokens, np.array(logp, np.float32), 0, 0, 0, "length"))
    expected = helpers.forward_logp(case["model"], case["weights"], samples, 0.7)
    assert helpers.mismatches([s.rollout_logp for s in samples], expected) == 0


def test_stock_operators_differ(case: dict) -> None:
    """Negative control: the same comparison finds differences when vLLM keeps its own operators."""
    with helpers.start(case["model"], mode="native") as engine:
        assert engine.info()["replaced"] == {}
        engine.update_weights(case["weights"], 3)
        samples = engine.generate(prompts(), PARAMS[1.0], seeds(PARAMS[1.0]))
    expected = helpers.forward_logp(case["model"], case["weights"], samples, 1.0)
    count = sum(len(s.response_ids) for s in samples)
    assert helpers.mismatches([s.rollout_logp for s in samples], expected) > count // 4
    largest = max(float(abs(s.rollout_logp - e).max()) for s, e in zip(samples, expected, strict=True))
    assert largest < (1e-3 if case["model"].dtype == "float32" else 0.3)  # the same model all the same
