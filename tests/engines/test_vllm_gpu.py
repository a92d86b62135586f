"""The rollout engine on a GPU: CUDA graphs, eager steps, chunks and a cache that preempts return the same bits.

Every engine runs in a process of its own: cuBLAS is set up once in the life of a process.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
COUNT, NEW = 24, 40
Found = tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


def _arm(mode: str, fields: dict[str, Any]) -> Found:
    """Tokens and log-probabilities of a batch, log-probabilities of every fourth request alone, and the facts."""
    from recipes.config import ConsistencyConfig, ModelConfig, RolloutConfig
    from recipes.engines.types import SamplingParams
    from recipes.engines.vllm import VllmEngine
    from tests.engines.vllm_helpers import random_weights

    model = ModelConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    sizes = {"max_prompt_len": 300, "max_response_len": NEW, "block_size": 16, "max_num_seqs": 20}
    sizes |= {"kv_cache_bytes": 64 << 20, "enforce_eager": False, **fields}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 2048, length).tolist() for length in rng.integers(1, 300, COUNT)]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with VllmEngine(model, RolloutConfig(**sizes), ConsistencyConfig(mode=mode, virtual_tp=1)) as engine:
        engine.update_weights(random_weights(engine.tensors, 0), 0)
        batch = engine.generate(prompts, params, range(COUNT))
        alone = [engine.generate([prompts[i]], params, [i])[0] for i in range(0, COUNT, 4)]
        facts = engine.info()
    tokens = np.array([sample.response_ids for sample in batch])
    return tokens, *(np.stack([s.rollout_logp for s in samples]) for samples in (batch, alone)), facts


def _run(mode: str, **fields: Any) -> Found:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_arm, (mode, fields))


def _different(a: np.ndarray, b: np.ndarray) -> int:
    return int((a.view(np.int32) != b.view(np.int32)).sum())


def test_graphs_eager_chunks_and_preemption_agree() -> None:
    tokens, logp, alone, facts = _run("strict")
    assert _different(logp[::4], alone) == 0
    assert "0 unprobed in capture" in facts["backends"].get("cublaslt", "0 unprobed in capture")
    small = {"kv_cache_bytes": 60 * 16 * 2 * 2 * 2 * 128 * 2, "max_num_batched_tokens": 64}
    for fields in ({"enforce_eager": True}, small):
        other_tokens, other, other_alone, other_facts = _run("strict", **fields)
        assert other_facts["contract"] == facts["contract"]
        assert np.array_equal(tokens, other_tokens)
        assert _different(logp, other) == _different(alone, other_alone) == 0
    assert other_facts["preemptions"] > 0


def test_stock_operators_notice_the_batch() -> None:
    _, logp, alone, facts = _run("native")
    assert facts["replaced"] == {}
    assert _different(logp[::4], alone) > alone.size // 4
