"""Items made ahead by a thread: all of them, in order, with their errors."""

import threading

import pytest

from data.prefetch import made_ahead


@pytest.mark.parametrize("count", [1, 100])
def test_items_come_in_order(count):
    with made_ahead(iter(range(50)), count) as items:
        assert list(items) == list(range(50))


def test_a_thread_makes_no_more_than_asked_for():
    made, full = [], threading.Event()

    def items():
        for item in range(100):
            made.append(item)
            if item == 2:
                full.set()  # two wait
            yield item

    with made_ahead(items(), 2) as ahead:
        assert next(ahead) == 0
        assert full.wait(5)
    assert len(made) <= 4  # the block's end also ends the thread
    assert "made ahead" not in {thread.name for thread in threading.enumerate()}


def test_an_error_comes_in_the_place_of_its_item():
    def items():
        yield 1
        raise ValueError("the second item")

    with made_ahead(items(), 2) as ahead:
        assert next(ahead) == 1
        with pytest.raises(ValueError, match="the second item"):
            next(ahead)
