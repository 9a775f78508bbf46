"""The ranks of all tests here."""

import os
from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk would take most of the time of a partition."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
