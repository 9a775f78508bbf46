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

    __slots__ = ("_address", "_alias", "_version", "reference")

    def __init__(self, tensor: Tensor, on_free: Callable[[weakref.ref], Any] | None = None) -> None:
        """on_free: called with `reference` when the tensor is freed."""
        self.reference, self._version = weakref.ref(tensor, on_free), tensor._version
        is_dense = tensor.layout is strided  # a sparse tensor has no address
        self._address, self._alias = (tensor.data_ptr(), tensor.detach()) if is_dense else (None, None)

    def is_now(self, tensor: Tensor) -> bool:
        """Whether this is the state of this tensor now."""
        address = self._address
        return (
            self.reference() is tensor
            and tensor._version == self._version
            and (address is None or tensor.data_ptr() == address)
        )

    def has_changed(self) -> bool:
        """Whether the tensor is alive and in another state."""
        tensor = self.reference()
        return tensor is not None and not self.is_now(tensor)
