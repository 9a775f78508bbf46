"""Items of an iterator, made ahead by a thread."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def made_ahead(items: Iterable[Item], count: int) -> Iterator[Iterator[Item]]:
    """Yield an iterator over `items`, of which a thread makes up to `count` more than were taken.

    An error of `items` is raised where its item would be. The thread ends with the block; an item that it is making
    then is the last one.
    """
    made: queue.Queue = queue.Queue(count)
    stop = threading.Event()

    def put(entry: tuple[bool, object]) -> None:
        while not stop.is_set():
            try:
                made.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put((True, item))
                if stop.is_set():
                    return
        except BaseException as error:
            put((False, error))
        else:
            put((False, None))

    def take() -> Iterator[Item]:
        while True:
            is_item, content = made.get()
            if is_item:
                yield content
            elif content is None:
                return
            else:
                raise content

    thread = threading.Thread(target=work, name="made ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        stop.set()
        thread.join()
