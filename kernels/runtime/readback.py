"""Asynchronous copies of numbers from a GPU to the host."""

from collections import deque

import torch

from .launch import copy_to_host


class _Slot:
    """Pinned memory, and the event of a copy into it; reused, since creating them is slow."""

    def __init__(self, count: int) -> None:
        self.memory = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self.address = self.memory.data_ptr()
        self.event = torch.cuda.Event()


_free: dict[tuple[int, int], deque[_Slot]] = {}  # by GPU and count


class Readback:
    """A copy of int64 numbers to the host, queued on torch's current stream of the GPU `device_index`."""

    def __init__(self, address: int, count: int, device_index: int) -> None:
        """address: device address of the numbers; work queued later may overwrite them."""
        free = _free.get((device_index, count))
        if free is None:
            free = _free[device_index, count] = deque()
        self._free = free
        # The oldest slot; its copy may still be pending if its plan was never called.
        self._slot = free.popleft() if free and free[0].event.query() else _Slot(count)
        copy_to_host(self._slot.address, address, 8 * count, self._slot.event, device_index)

    def is_done(self) -> bool:
        return self._slot.event.query()

    def wait(self) -> None:
        self._slot.event.synchronize()

    def numbers(self) -> list[int]:
        """The numbers, after `is_done` or `wait`."""
        return self._slot.memory.tolist()

    def __del__(self) -> None:
        if slot := self.__dict__.pop("_slot", None):
            self._free.append(slot)
