"""Asynchronous copies of numbers from a GPU to the host, by any thread."""

from collections import deque

import torch

from .launch import copy_to_host, outside_of_captures, stream_handle


class _Slot:
    """Pinned memory, and the event of a copy into it; reused, since creating them is slow."""

    def __init__(self, count: int) -> None:
        self.memory = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self.address = self.memory.data_ptr()
        self.event = torch.cuda.Event()


# Key: GPU, stream, count of numbers. As many free slots as the stream had copies at once: they run in order, so that
# those behind a pending one are pending, too. They live as long as the process. Operations of a deque are atomic.
_free: dict[tuple[int, int, int], deque[_Slot]] = {}


class Readback:
    """A copy of int64 numbers to the host, queued on torch's current stream of the GPU `device_index`."""

    def __init__(self, address: int, count: int, device_index: int) -> None:
        """address: device address of the numbers; work queued later may overwrite them."""
        self._free = _free.setdefault((device_index, stream_handle(device_index), count), deque())
        with outside_of_captures():  # else a question would end a capture of another thread in "global" mode
            self._slot = self._take() or _Slot(count)
        copy_to_host(self._slot.address, address, 8 * count, self._slot.event, device_index)

    def _take(self) -> _Slot | None:
        """The oldest free slot, unless its copy is pending: nobody may have called its plan."""
        try:
            slot = self._free.popleft()
        except IndexError:
            return None
        if slot.event.query():
            return slot
        self._free.appendleft(slot)
        return None

    def is_done(self) -> bool:
        with outside_of_captures():
            return self._slot.event.query()

    def wait(self) -> None:
        with outside_of_captures():
            self._slot.event.synchronize()

    def numbers(self) -> list[int]:
        """The numbers, after `is_done` or `wait`."""
        return self._slot.memory.tolist()

    def __del__(self) -> None:
        if slot := self.__dict__.pop("_slot", None):
            self._free.append(slot)
