"""Items of an iterator, made ahead by a thread."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def made_ahead(items: Iterable[Item], count: int) -> Iterator[Iterator[Item]]:
    """Yield an iterator over `items`, of which a thread makes up to `count` more than were taken.

    An error of `items` is raised where its item would be. The thread ends with the block; an item that it is making
    then is the last one.
    """
    iterator, end = iter(items), object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="made ahead")
    waiting = deque(pool.submit(next, iterator, end) for _ in range(count))

    def take() -> Iterator[Item]:
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, iterator, end))
            yield item

    try:
        yield take()
    finally:
        pool.shutdown(cancel_futures=True)
