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
