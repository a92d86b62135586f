"""The training engine on GPUs: the same code over nccl. Needs an sm90 or gfx942 device; two for tensor parallelism."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from tests.engines import megatron_jobs as jobs
from tests.engines.megatron_ranks import Case, run

pytestmark = [
    pytest.mark.engines,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def test_packing_changes_no_bit() -> None:
    (ways,) = run(1, jobs.splits, Case(model=SIZES))
    assert len(set(ways.values())) == 1


def test_training_repeats_its_bits_and_stock_operators_differ() -> None:
    (first,) = run(1, jobs.train, Case(model=SIZES), 3)
    (second,) = run(1, jobs.train, Case(model=SIZES), 3)
    assert first == second
    (native,) = run(1, jobs.train, Case(model=SIZES, mode="native"), 3)
    assert native["last"] != first["last"]
    assert np.array(native["history"]) == pytest.approx(np.array(first["history"]), rel=0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensor_parallel_has_the_same_bits() -> None:
    (one,) = run(1, jobs.train, Case(model=SIZES), 3)
    for rank in run(2, jobs.train, Case(model=SIZES, tp=2), 3):
        assert (rank["last"], rank["history"], rank["hash"]) == (one["last"], one["history"], one["hash"])
