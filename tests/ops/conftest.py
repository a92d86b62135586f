"""Fixtures of the operator tests."""

from __future__ import annotations

import pytest

from tests.ops.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Real gloo processes, started once: ``ranks.run(size, function, *args)``."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_gpus():
    """One NCCL process a GPU, started once: ``two_gpus.run(function, *args)``."""
    import torch

    from tests.ops.gpu_ranks import GpuRanks

    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = GpuRanks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_gpu():
    """A process of its own on one GPU, in which several ranks can be emulated on streams."""
    import torch

    from tests.ops.gpu_ranks import GpuRanks

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pool = GpuRanks(1)
    yield pool
    pool.close()
