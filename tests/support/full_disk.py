"""A disk that is full, as this process sees it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_after(largest: int) -> Iterator[None]:
    """Inside, writing more than so many bytes to a file fails with "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
