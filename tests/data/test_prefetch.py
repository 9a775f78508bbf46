"""Items made ahead by a thread; their order and errors: tests/models/inference/test_batches.py."""

import threading

from data.prefetch import made_ahead


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
