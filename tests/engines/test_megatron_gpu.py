"""The training engine on GPUs: the same code over nccl. Needs an sm90 or gfx942 device; two for the parallel layouts.

A process does all it can: starting one (imports, kernels) costs more than what is tested in it.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
# FlashAttention-3 comes with vLLM.
BASE: dict[str, Any] = {"model": SIZES, "attention": "auto" if importlib.util.find_spec("vllm") else "blocks"}
Groups = dict[str, Future]  # of the results of every rank
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run(1, jobs.gpu, Case(**BASE), str(tmp_path_factory.mktemp("state")))
    return found


def test_packing_changes_no_bit(strict: dict[str, Any]) -> None:
    assert len(set(strict["packings"].values())) == 1


def test_training_repeats_its_bits(strict: dict[str, Any]) -> None:
    assert strict["first"] == strict["second"]
    assert strict["first"]["hash"] != strict["first"]["start"]


@pytest.mark.parametrize("name", ["recompute", "recompute_one"])
def test_recomputing_activations_changes_no_bit(strict: dict[str, Any], name: str) -> None:
    assert strict[name] == strict["first"]


def test_sgd_trains_too(strict: dict[str, Any]) -> None:
    assert strict["sgd"]["start"] == strict["first"]["start"]
    assert len({strict["sgd"]["hash"], strict["first"]["hash"], strict["first"]["start"]}) == 3
    # The first gradient is that of the same weights.
    assert strict["sgd"]["history"][0][:2] == strict["first"]["history"][0][:2]


@pytest.mark.parametrize("name", ["first", "sgd"])
def test_resume_continues_with_the_same_bits(strict: dict[str, Any], name: str) -> None:
    assert strict[name + "_resumed"] == strict[name]


def test_the_process_says_what_it_uses(strict: dict[str, Any]) -> None:
    info = strict["info"]
    assert info["contract"] and info["device"].startswith("cuda")
    assert isinstance(info["fallback_count"], int)
    if torch.version.cuda is not None:
        assert info["cublaslt"]["environment"]["CUBLASLT_WORKSPACE_SIZE"] == "1"


def test_stock_operators_differ(strict: dict[str, Any]) -> None:
    (native,) = run(1, jobs.train, Case(**BASE, mode="native"), 3)
    assert native["last"] != strict["first"]["last"]
    assert np.array(native["history"]) == pytest.approx(np.array(strict["first"]["history"]), rel=0.05)


@pytest.fixture(scope="module")
def groups() -> Groups:
    """What every group of two ranks returns, and one rank beside them: all at the same time, since what takes long is
    the start of a process."""
    wanted = {
        "one": (1, Case(**BASE), 3),
        "tp2": (2, Case(**BASE, tp=2), 3),
        "dp2": (2, Case(**BASE, dp=2), 2),
        "dp2 again": (2, Case(**BASE, dp=2), 2),
        "stock tp2": (2, Case(**BASE, mode="native", tp=2), 2),
        "stock dp2": (2, Case(**BASE, mode="native", dp=2), 2),
    }
    with ThreadPoolExecutor(len(wanted)) as pool:
        return {name: pool.submit(run, world, jobs.train, case, n) for name, (world, case, n) in wanted.items()}


@two_devices
def test_tensor_parallel_has_the_same_bits(groups: Groups) -> None:
    (one,) = groups["one"].result()
    for rank in groups["tp2"].result():
        assert (rank["last"], rank["history"], rank["hash"]) == (one["last"], one["history"], one["hash"])


@two_devices
@pytest.mark.parametrize("name", ["stock tp2", "stock dp2"])
def test_stock_operators_run_in_parallel(groups: Groups, name: str) -> None:
    ranks = groups[name].result()
    assert ranks[0]["hash"] == ranks[1]["hash"]
    assert np.isfinite(np.array([rank["history"] for rank in ranks])).all()


@two_devices
def test_data_parallel_repeats_its_bits(groups: Groups) -> None:
    first, second = groups["dp2"].result(), groups["dp2 again"].result()
    assert first[0]["hash"] == first[1]["hash"] == second[0]["hash"]
