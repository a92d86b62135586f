"""The engine inside a Ray actor, with tensor-parallel worker processes of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

import ray

from recipes.engines.types import Sample, SamplingParams
from tests.engines import vllm_helpers as helpers

pytestmark = [pytest.mark.engines, pytest.mark.slow]


class Actor:
    def rollout(self, tensor_parallel_size: int) -> tuple[list[Sample], str]:
        model = helpers.tiny_model("bfloat16", True)
        with helpers.start(model, tensor_parallel_size=tensor_parallel_size) as engine:
            found = engine.update_weights(helpers.random_weights(engine.tensors, seed=2), 1)
            prompts = helpers.random_prompts((3, 40, 90))
            return engine.generate(prompts, SamplingParams(max_tokens=16, n=2), range(6)), found


def test_tensor_parallel_engine_in_an_actor() -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(2)]
        calls = [actor.rollout.remote(size) for actor, size in zip(actors, (1, 2), strict=True)]
        (one, hash_one), (two, hash_two) = ray.get(calls, timeout=400)
    finally:
        ray.shutdown()
    assert hash_one == hash_two
    assert helpers.different(one, two) == 0
