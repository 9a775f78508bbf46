"""The ranks of all tests here."""

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
