"""`Fused3SPlan`: one object that owns the arrays of a graph, and the state of the kernels that fill them."""

from dataclasses import replace
from threading import Lock
from typing import Any

import torch

from ..graph.edge_list import EdgeList
from ..graph.grouped import check_graph
from ..runtime.launch import next_waits
from ..runtime.readback import Readback
from ..runtime.semaphores import is_capturing
from ..runtime.streams import Made
from ..torch_side.tensor_record import map_tensors, tensors_of
from .data import Fused3SData
from .planning.gpu_csr import COUNTS, EdgeSource, PlanNumber
from .planning.gpu_plan import GPUPlan
from .tuning import COMPACTED_EDGES, CUT_PASSES


class Fused3SPlan:
    """The plan of one graph, for calls from any thread and on any stream.

    Planning kernels fill arrays of upper-bound sizes, and the host does not wait for them. Later calls check whether
    the GPU is done. If it is, they raise an error for ids out of range, and from the CUT_PASSES-th forward pass on they
    use arrays of exact sizes; in a CUDA graph at once. (A plan of a single step would not gain back the cost of cutting
    them.)

    It holds no tensor object of the caller: caches of plans are keyed by the caller's tensors, weakly.

    Attributes:
        arrays: for the next call.
    """

    def __init__(self, arrays: Fused3SData, memory: GPUPlan | None = None, graph: Any = None) -> None:
        """Create it after the work that fills the arrays was queued on torch's current stream.

        Args:
            memory: of the arrays; None if they have exact sizes.
            graph: what was planned, if nobody has checked it.
        """
        self.arrays, self._memory, self._lock = arrays, memory, Lock()
        self._tensors = tuple(tensors_of(arrays))
        self._device = self._tensors[0].device
        self._forward_passes, self._is_stale = 0, False
        self._graph = self._numbers = None
        self._made = Made.on(self._device)
        if self._device.type == "cuda":
            next_waits(self._device.index)  # the attention kernels read a plan before griddepcontrol.wait
        if graph is not None:
            is_list = isinstance(graph, EdgeList)
            self._graph = replace(graph, edge_index=graph.edge_index.detach()) if is_list else graph
            self._numbers = Readback(memory.csr.address_of_numbers, COUNTS, self._device.index)

    def ready(self, is_forward: bool = True) -> Fused3SData:
        """The arrays for a call on torch's current stream, which waits for the kernels that fill them.

        Raises:
            ValueError: an id of the graph is out of range.
            RuntimeError: the arrays hold another graph, or a fill failed.
        """
        if self._numbers is not None:
            self._look(is_forward)
        if self._is_stale:
            raise RuntimeError(
                "plan: PlanRoom.fill planned another graph between the forward and the backward pass of a call, or "
                "failed; call backward first, take a second PlanRoom, or fill it again"
            )
        self._made.used_by_current_stream(self._tensors)
        return self.arrays

    def settled(self) -> "Fused3SPlan":
        """The plan after waiting for the GPU; for a graph of many edges, with memory of exact size.

        Raises:
            ValueError: an id of the graph is out of range.
        """
        if self._numbers is None:
            return self
        with self._lock:
            self._check()
        return self if self.arrays.size.num_edges < COMPACTED_EDGES else Fused3SPlan(compacted(self.exact()))

    def exact(self) -> Fused3SData:
        """The arrays of exact sizes for the current stream, after waiting for the GPU; of a `PlanRoom`, or planned in a
        capture: as they are.

        Raises:
            ValueError: an id of the graph is out of range.
        """
        with self._lock:
            if self._numbers is not None:
                self._check()
                self._cut()
        self._made.used_by_current_stream(self._tensors)
        return self.arrays

    def refilled(self, source: EdgeSource) -> "Fused3SPlan":
        """The plan of another graph in the same memory. This one then refuses calls and backward passes."""
        self._is_stale = True  # first: a fill that fails may have written some of the arrays
        self._memory.fill(source)
        return Fused3SPlan(self.arrays, self._memory)

    @property
    def numbers(self) -> torch.Tensor:
        """[PlanNumber.COUNTS] int64 on the GPU, for torch's current stream; of a plan with `memory`."""
        self._made.used_by_current_stream(self._tensors)
        return self._memory.numbers

    def __reduce__(self) -> tuple[type, tuple[Fused3SData]]:
        """Pickling and copying wait for the GPU; the copy is complete."""
        return Fused3SPlan, (self.exact(),)

    def _look(self, is_forward: bool) -> None:
        """Check the graph and cut the arrays, if it is time and the GPU is done."""
        with self._lock:
            self._forward_passes += is_forward
            if self._numbers is None or not self._numbers.is_done():
                return
            self._check()
            # A CUDA graph keeps the sizes of its capture for all replays.
            if self._forward_passes >= CUT_PASSES or is_capturing(self._device):
                self._cut()

    def _check(self) -> None:
        """Raise a ValueError if an id of the graph is out of range. Waits for the GPU."""
        if self._graph is not None:
            self._numbers.wait()
            check_numbers(self._numbers.numbers(), self._graph, self._device)
            self._graph = None

    def _cut(self) -> None:
        self.arrays = self._memory.exact(self.arrays, self._numbers.numbers())
        self._numbers = self._memory = None


def check_numbers(numbers: list[int], graph: Any, device: torch.device) -> None:
    """Raise a ValueError if the planning kernels found ids of the graph out of range."""
    if numbers[PlanNumber.BAD_EDGE] or numbers[PlanNumber.BAD_OFFSET]:
        if is_capturing(device):  # which cannot wait for the arrays
            raise ValueError("graph: an offset or an id is out of range; a call outside of the capture names it")
        check_graph(graph, device)  # names them
        raise ValueError("graph: an offset or an id is out of range (its arrays were changed since it was planned)")


def compacted(arrays: Fused3SData) -> Fused3SData:
    """Arrays of exact sizes; of many edges a copy, so that the memory that was reserved for them becomes free."""
    return map_tensors(arrays, torch.clone) if arrays.size.num_edges >= COMPACTED_EDGES else arrays
