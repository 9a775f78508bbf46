"""Calls in several threads at once."""

import sys
import threading
from collections.abc import Callable
from typing import Any


def in_threads(call: Callable[[], Any], threads: int = 8) -> list[Any]:
    """Results of call(), or its exceptions, in threads that begin at once; switched as often as Python can."""
    met, found, interval = threading.Barrier(threads), [], sys.getswitchinterval()

    def work() -> None:
        met.wait()
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    sys.setswitchinterval(1e-6)
    try:
        started = [threading.Thread(target=work) for _ in range(threads)]
        for each in started:
            each.start()
        for each in started:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    return found


def errors_in_threads(call: Callable[[], Any], threads: int = 8) -> list[Exception]:
    """The exceptions of `in_threads`."""
    return [each for each in in_threads(call, threads) if isinstance(each, Exception)]
