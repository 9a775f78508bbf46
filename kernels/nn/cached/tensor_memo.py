"""Results cached per tensor, while the tensor lives and does not change."""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...runtime.cuda_graph import kept_results
from ...runtime.semaphores import is_capturing
from ...runtime.streams import Made
from ...runtime.tensor_state import TensorState
from ...torch_side.torch_private import is_traced

Value = TypeVar("Value")
MOST_RESULTS = 16  # per tensor


class _Result(NamedTuple):
    value: Any
    tensors: tuple[Tensor, ...]
    made: Made
    owner: weakref.ref | None


class _Entry(NamedTuple):
    state: TensorState
    results: dict[Hashable, _Result]


class TensorMemo:
    """A cache of results for each tensor object.

    One cache per module that makes it; it serves all layers and threads. Key: the tensor, and a key per result.
    Bound: MOST_RESULTS for each living tensor; the oldest is dropped. Lifetime: until the tensor is freed, until a call
    finds it changed (`TensorState`), or until the result's owner is freed.

    Args:
        name: argument of the layers that the tensors come from, for errors.
        in_captures: whether `capture` may keep a result that was made before it, see `get`.
    """

    def __init__(self, name: str, in_captures: bool = True) -> None:
        self._name, self._in_captures = name, in_captures
        self._entries: dict[int, _Entry] = {}  # by id
        self._lock = threading.Lock()

    def get(
        self,
        tensor: Tensor,
        key: Hashable,
        make: Callable[[], Value],
        tensors: Callable[[Value], tuple[Tensor, ...]],
        serves: Callable[[Value], bool] = lambda value: True,
        owner: Any = None,
    ) -> Value:
        """The result for the tensor's current values, complete for torch's current stream.

        It is computed outside of inference mode, so training can use it, too. Nothing is cached for a tensor that is
        traced or was made in inference mode, and no result of a capture is cached. `runtime.cuda_graph.capture` keeps
        results that were made before it, and checks the tensor at each replay; any other capture computes its own.

        Args:
            make: computes the result, without gradients.
            tensors: all tensors of a result.
            serves: whether a cached result suits this call; otherwise it is replaced.
            owner: an object whose death also frees the result; its id is part of the key.
        """
        if is_traced(tensor) or tensor.is_inference():
            return make()
        entry = self._entries.get(id(tensor))
        results = entry.results if entry is not None and entry.state.is_now(tensor) else {}
        if owner is not None:
            key = key, id(owner)
        found = results.get(key)
        if found is not None and not serves(found.value):
            found = None
        if is_capturing(tensor.device):
            kept = kept_results(tensor.device) if self._in_captures else None
            if found is None or kept is None:
                return make()
            kept.add(self._name, entry.state, found)
            return found.value
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                value = make()
            with self._lock:
                results = self._results(tensor)
                reference = None if owner is None else weakref.ref(owner, lambda _: results.pop(key, None))
                found = _Result(value, tensors(value), Made.on(tensor.device), reference)
                results.pop(key, None)
                while len(results) >= MOST_RESULTS:
                    results.pop(next(iter(results)), None)
                results[key] = found
        else:
            found.made.used_by_current_stream(found.tensors)
        return found.value

    def _results(self, tensor: Tensor) -> dict[Hashable, _Result]:
        """The results cached for the tensor in its current state; a new dictionary if there is none."""
        key, entries = id(tensor), self._entries
        entry = entries.get(key)
        if entry is None or not entry.state.is_now(tensor):

            def forget(reference: weakref.ref) -> None:
                if key in entries and entries[key].state.reference is reference:
                    entries.pop(key).results.clear()

            if entry is not None:
                entry.results.clear()  # callbacks of owners reference it: its memory would stay until a gc
            entry = entries[key] = _Entry(TensorState(tensor, forget), {})
        return entry.results
