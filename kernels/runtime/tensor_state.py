"""Detects changes of a tensor that torch counts."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, strided


class TensorState:
    """A tensor at one moment. Holds the tensor weakly, and an alias of its memory, so that its address is not reused.

    Detects in-place operations, also through views, and `.data = other`. Writes through `.data`, NumPy, DLPack or the
    storage go unnoticed. Not for tensors made in inference mode, whose changes torch does not count.
    """

    __slots__ = ("_alias", "_stamp", "reference")

    def __init__(self, tensor: Tensor, on_free: Callable[[weakref.ref], Any] | None = None) -> None:
        """on_free: called with `reference` when the tensor is freed."""
        self.reference = weakref.ref(tensor, on_free)
        self._stamp = _stamp(tensor)
        self._alias = tensor.detach() if tensor.layout is strided else None

    def is_now(self, tensor: Tensor) -> bool:
        """Whether this is the state of this tensor now."""
        return self.reference() is tensor and self._stamp == _stamp(tensor)

    def has_changed(self) -> bool:
        """Whether the tensor is alive and in another state."""
        tensor = self.reference()
        return tensor is not None and self._stamp != _stamp(tensor)


def _stamp(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr() if tensor.layout is strided else 0
