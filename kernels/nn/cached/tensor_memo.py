"""Results cached per tensor, while the tensor lives and does not change."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Entry(NamedTuple):
    tensor: weakref.ref
    stamp: tuple[int, int]
    memory: Tensor | None  # an alias, so that the address in the stamp is not reused
    results: dict[Any, Any]


class TensorMemo:
    """A dictionary of results for each tensor object.

    Detects changes that torch counts: in-place operations, also through views, and `.data = other`. Writes through
    `.data`, NumPy, DLPack or the storage go unnoticed.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by id

    def results(self, tensor: Tensor) -> dict[Any, Any]:
        """The results of a tensor; empty if it is new or has changed.

        Always empty for a tensor made in inference mode, whose changes torch does not count, and while a CUDA graph is
        captured, whose replays must compute the results from the tensor's current values.
        """
        if tensor.is_inference() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return {}
        key, entries = id(tensor), self._entries
        has_address = tensor.layout == torch.strided
        stamp = (tensor._version, tensor.data_ptr() if has_address else 0)
        entry = entries.get(key)
        if entry is None or entry.tensor() is not tensor or entry.stamp != stamp:

            def forget(reference: weakref.ref) -> None:
                if key in entries and entries[key].tensor is reference:
                    del entries[key]

            entry = entries[key] = _Entry(
                weakref.ref(tensor, forget), stamp, tensor.detach() if has_address else None, {}
            )
        return entry.results
