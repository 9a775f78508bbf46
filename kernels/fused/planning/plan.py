"""Plans of `fused3s`: which arrays a plan needs for given inputs, and how they are built from a graph.

Kernels build plans from an edge list or a CSR (gpu_plan.py) without synchronisation: arrays have room for the upper
bound of each size. Once the GPU has finished, calls raise errors in the ids, and from the second forward pass on
they use the arrays cut to their exact sizes. The host waits for the GPU in three cases: the graph is on the CPU, or,
outside of captures, the choice of the kernel depends on the number of KV tiles (`choice`), or a CSR has at least
COUNTED_EDGES edges (`gpu_csr.num_keys`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ...backends.base import InputSpec
from ...backends.cuda import product_type
from ...graph.csr import CSRPattern, as_tensor
from ...graph.edge_list import EdgeList
from ...graph.grouped import check_graph
from ...runtime.device import gpu_limits
from ...runtime.jit import KernelInstance
from ...runtime.launch import next_waits, stream_handle
from ...runtime.readback import Readback
from ...runtime.semaphores import is_capturing
from ...torch_side.tensor_record import map_tensors
from ..choice import GraphSize, takes_edges
from ..data import Fused3SData
from ..edges.forward import part_edges_for_heads
from ..shapes import COMMON_DIM, EXPRESSION, TILE, VALUE_FEATURES
from ..tiles.backward import pass_schedules
from ..tuning import COMPACTED_EDGES, tuning_for
from .gpu_csr import COUNTS, MOST_EDGES, MOST_IDS, MOST_ROWS, EdgeSource, PlanNumber
from .gpu_plan import COUNT_TILES, GPUPlan, PlanForm
from .schedule import ScheduleForm, most_tiles_of, windows_of

Graph = CSRPattern | EdgeList
ForwardSchedule = Callable[[int], ScheduleForm]  # argument: upper bound of the KV tiles (`most_tiles_of`)
CallInstances = Callable[[Fused3SData], list[KernelInstance]]  # kernels of the calls of a plan


def plan_graph(
    graph: Graph,
    device: torch.device,
    inputs: InputSpec,
    forward: ForwardSchedule,
    perm: torch.Tensor | None = None,
    calls: CallInstances = lambda data: [],
) -> Fused3SData:
    """Queue the plan of a graph on torch's current stream.

    Args:
        graph: a repeated edge of a CSR or an edge list counts as often as it occurs.
        perm: as for `Backend.build`.
        calls: the kernels that the first plan of a process compiles beside its own.

    Raises:
        ValueError: the graph is malformed or exceeds a limit of the kernels; the text names it.
    """
    on_cpu, row_ids = _is_on_cpu(graph), None
    if on_cpu and is_capturing(device):
        raise ValueError(
            f"graph: on the CPU while a CUDA graph is captured, and its plan waits for the GPU; move its arrays to "
            f"{device}, or plan before the capture"
        )
    if perm is not None and len(perm):
        perm = perm.to(device)
        row_ids = perm.new_full((windows_of(len(perm)) * TILE[0],), len(perm))  # num_rows pads the last window
        row_ids[: len(perm)] = perm
    made = queue_plan(graph, device, inputs, forward, row_ids, calls)
    return made.checked() if on_cpu else made.unchecked(follows=not is_capturing(device))


def queue_plan(
    graph: Graph,
    device: torch.device,
    inputs: InputSpec,
    forward: ForwardSchedule,
    row_ids: torch.Tensor | None = None,
    calls: CallInstances = lambda data: [],
) -> "MadePlan":
    """Queue the kernels of a plan. Waits if the choice of the kernel depends on the number of KV tiles."""
    source = _edge_source(graph, device, inputs.backward)
    size = GraphSize(*graph.shape, source.num_edges)
    rows = None if row_ids is None else row_ids[: size.num_rows]
    form, csr = form_of(size, device, inputs, forward), None
    if form is None and not is_capturing(device):
        sorted_edges = GPUPlan(PlanForm(graph.shape, size.num_edges, inputs.backward, (), 0, inputs.edge_data), device)
        sorted_edges.compile_ahead(source, lambda: [COUNT_TILES])
        sorted_edges.fill(source, rows)
        size, csr = replace(size, num_tiles=sorted_edges.count_tiles()), sorted_edges.csr
        form = form_of(size, device, inputs, forward)
    form = form or _form_by_edge(size, device, inputs, forward)
    made = MadePlan(GPUPlan(form, device, csr), size, row_ids, graph)
    made.plan.compile_ahead(source, lambda: calls(made.bounded))
    made.plan.fill(source, rows)
    return made


def make_room(size: GraphSize, device: torch.device, inputs: InputSpec, forward: ForwardSchedule) -> "MadePlan":
    """Memory for plans of graphs up to a size, to be filled later."""
    form = form_of(size, device, inputs, forward) or _form_by_edge(size, device, inputs, forward)
    made = MadePlan(GPUPlan(form, device), size, None, None)
    object.__setattr__(made.bounded, "has_room", True)
    return made


def form_of(size: GraphSize, device: torch.device, inputs: InputSpec, forward: ForwardSchedule) -> PlanForm | None:
    """Contents of a plan for such inputs; None if they depend on the number of KV tiles.

    A plan has KV tiles unless all its forward passes go edge by edge, and row items if any call may go edge by edge.
    """
    heads, dim = inputs.num_heads, inputs.head_dim
    given = tuning_for(gpu_limits(device)), size, heads, dim
    calls = [takes_edges(*given), takes_edges(*given, backward=True) if inputs.backward else False]
    if inputs.edge_data:
        calls += [takes_edges(*given, terms) for terms in (EXPRESSION, VALUE_FEATURES)]
    if None in calls:
        return None
    by_edge, backward_by_edge, *with_terms = calls
    schedules: tuple[ScheduleForm, ...] = ()
    if not (by_edge and all(with_terms)):
        schedules = (forward(most_tiles_of(size.num_edges, size.num_rows)),)
    if inputs.backward and not backward_by_edge:
        schedules += pass_schedules(device, heads, dim, inputs.dtype)
    part_edges = 0
    if by_edge or backward_by_edge or inputs.edge_data:
        dtype = product_type(inputs.dtype or torch.float16)
        part_edges = part_edges_for_heads(size.num_edges, device, heads, dim or COMMON_DIM, dtype)
    shape = max(1, size.num_rows), max(1, size.num_cols)
    return PlanForm(shape, size.num_edges, inputs.backward, schedules, part_edges, inputs.edge_data)


def _form_by_edge(size: GraphSize, device: torch.device, inputs: InputSpec, forward: ForwardSchedule) -> PlanForm:
    """Contents of a plan whose undecided calls go edge by edge, since the host cannot know the number of KV tiles."""
    return form_of(replace(size, num_tiles=size.num_edges + 1), device, inputs, forward)


class MadePlan:
    """A queued plan.

    Attributes:
        plan: memory and kernels.
        size: sizes that decide between the kernels.
        bounded: the plan data with arrays of upper-bound sizes; removed by `unchecked`.
    """

    def __init__(self, plan: GPUPlan, size: GraphSize, row_ids: torch.Tensor | None, graph: Graph | None) -> None:
        self.plan, self.size = plan, size
        self._row_ids, self._graph = row_ids, graph
        self.bounded = self._data(plan)

    def checked(self) -> Fused3SData:
        """The plan with exact sizes. Waits for the GPU and raises for ids out of range."""
        numbers = self.plan.numbers.tolist()
        self.check(numbers)
        return _compacted(self.exact(numbers), self.plan.device)

    def check(self, numbers: list[int]) -> None:
        """Raise a ValueError for ids out of range; `numbers`: as in `exact`."""
        if numbers[PlanNumber.BAD_EDGE] or numbers[PlanNumber.BAD_OFFSET]:
            raise _damage(self._graph, self.plan.device)

    def unchecked(self, follows: bool) -> Fused3SData:
        """The bounded plan. `follows`: later calls get exact sizes, or raise the error, once the GPU is done."""
        bounded = self.bounded
        del self.bounded  # a reference cycle with its progress would keep memory until garbage collection
        if follows and self.plan.device.type == "cuda":
            object.__setattr__(bounded, "progress", PlanProgress(self))
        return _on_stream(bounded, self.plan.device)

    def exact(self, numbers: list[int]) -> Fused3SData:
        """The plan with arrays cut to their exact sizes, from the first PlanNumber.COUNTS numbers."""
        return self._data(self.plan.exact(numbers))

    def _data(self, plan: GPUPlan) -> Fused3SData:
        size, form, csr = self.size, plan.form, plan.csr
        arrays = {}
        if form.schedules:
            arrays |= {"kv_tiles": plan.kv_tiles[0], "tile_offset": plan.tile_offset[0]}
            arrays |= {"work_items": plan.work_items[0], "num_splits": plan.num_splits[0], "windows": plan.windows[0]}
        if plan.slots:
            arrays |= zip(("tile_slots", "slot_edges", "slot_places"), plan.slots, strict=True)
        if form.tile_sides == 2:
            arrays |= {"row_work_items": plan.work_items[1], "row_splits": plan.num_splits[1]}
            arrays |= {"column_work_items": plan.work_items[2], "column_splits": plan.num_splits[2]}
            arrays |= {"column_tiles": plan.kv_tiles[1], "column_tile_offset": plan.tile_offset[1]}
        if form.part_edges:
            arrays |= {"indices": csr.indices, "row_items": plan.row_items[0], "row_parts": plan.row_parts[0]}
        if form.part_edges and form.transposes:
            arrays |= {"column_items": plan.row_items[1], "column_parts": plan.row_parts[1]}
            arrays |= {"column_rows": csr.column_indices, "column_edges": csr.column_edges}
            arrays["column_offsets"] = csr.offsets[1]
        sizes = size.num_rows, size.num_cols, size.num_edges, size.num_tiles
        return Fused3SData(*sizes, self._row_ids, edge_ids=csr.edges, **arrays)


class PlanProgress:
    """Sizes and errors of a plan that the GPU computed, read without waiting.

    Attributes:
        exact: the plan with exact sizes; None until they are known.
    """

    def __init__(self, made: "MadePlan") -> None:
        self.exact: Fused3SData | None = None
        self._device = made.plan.device
        self._forward_passes = 0
        self._made: MadePlan | None = made
        self._numbers: Readback | None = Readback(made.plan.csr.address_of_numbers, COUNTS, made.plan.device.index)

    def plan(self, bounded: Fused3SData, is_forward: bool) -> Fused3SData:
        """The exact plan if known, else `bounded`; see `Fused3SData.ready`.

        Raises:
            ValueError: an id of the graph is out of range.
        """
        if self.exact is None:
            self._forward_passes += is_forward
            if is_capturing(self._device) or not self._numbers.is_done():  # a capture forbids the question
                return bounded
            numbers = self._numbers.numbers()
            self._made.check(numbers)
            if self._forward_passes < 2:
                return bounded
            self._keep_exact(numbers)
        return self.exact

    def exact_plan(self) -> Fused3SData:
        """The exact plan. Waits for the GPU, and raises as `plan` does."""
        self.raise_errors()
        if self.exact is None:
            self._keep_exact(self._numbers.numbers())
        return self.exact

    def settled(self, bounded: Fused3SData) -> Fused3SData:
        """`bounded`; for a graph of many edges the exact plan in memory of its own. Waits for the GPU, and raises as
        `plan` does."""
        self.raise_errors()
        return bounded if bounded.num_edges < COMPACTED_EDGES else _compacted(self.exact_plan(), self._device)

    def raise_errors(self) -> None:
        """Wait for the plan, and raise a ValueError if an id of the graph is out of range."""
        if self.exact is None:
            self._numbers.wait()
            self._made.check(self._numbers.numbers())

    def _keep_exact(self, numbers: list[int]) -> None:
        self.exact = self._made.exact(numbers)
        self._made = self._numbers = None


def _compacted(data: Fused3SData, device: torch.device) -> Fused3SData:
    """An exact plan; for a graph of many edges a copy, so that the memory that was reserved for it becomes free."""
    if data.num_edges >= COMPACTED_EDGES:
        data = map_tensors(data, torch.clone)
        if device.type == "cuda":
            next_waits(device.index)  # the attention kernels read a plan before griddepcontrol.wait
    return _on_stream(data, device)


def _edge_source(graph: Graph, device: torch.device, transposes: bool) -> EdgeSource:
    """The edges of a graph as the planning kernels read them; raises for graphs that they do not support."""
    num_rows, num_cols = graph.shape
    if not (num_rows and num_cols):  # the kernels need at least one row and one column: plan one without an edge
        check_graph(graph, device)
        source = EdgeSource(torch.empty((2, 0), dtype=torch.int64, device=device))
    elif isinstance(graph, EdgeList):
        edge_index = graph.edge_index if graph.edge_index.device == device else graph.edge_index.to(device)
        edge_index = edge_index if edge_index.stride(1) == 1 else edge_index.contiguous()
        source = EdgeSource(edge_index, has_padding=graph.has_padding)
    else:
        offsets, indices = (as_tensor(each).to(device) for each in (graph.indptr, graph.indices))
        _check_csr_arrays(offsets, indices, num_rows)
        source = EdgeSource(indices.contiguous(), offsets.long().contiguous())
    check_size(graph.shape, source.num_edges, transposes)
    return source


def check_size(shape: tuple[int, int], num_edges: int, transposes: bool) -> None:
    """Raise a ValueError for graphs beyond the limits of the planning kernels; `transposes`: with a backward pass."""
    num_rows, num_cols = shape
    most_rows = MOST_IDS if transposes else MOST_ROWS
    if num_edges <= MOST_EDGES and num_rows <= most_rows and num_cols <= MOST_IDS:
        return
    for what, got, most in (("edges", num_edges, MOST_EDGES), ("rows", num_rows, most_rows)):
        if got > most:
            raise ValueError(f"graph: got {got} {what}; fused3s takes up to {most}; split the rows into several graphs")
    raise ValueError(
        f"graph: got {num_cols} columns; fused3s takes up to {MOST_IDS}; split the columns into several graphs, and "
        "combine their outputs by the log-sum-exp"
    )


def _check_csr_arrays(offsets: torch.Tensor, indices: torch.Tensor, num_rows: int) -> None:
    if offsets.dim() != 1 or len(offsets) != num_rows + 1:
        raise ValueError(f"indptr: got shape {tuple(offsets.shape)}; [{num_rows + 1}], the rows and one, is needed")
    if indices.dim() != 1:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}; [nnz] is needed")
    for name, each in (("indptr", offsets), ("indices", indices)):
        if each.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got {each.dtype}; torch.int32 and torch.int64 are allowed")


def _damage(graph: Graph | None, device: torch.device) -> ValueError:
    """The error for a graph with ids out of range."""
    try:
        if graph is not None:
            check_graph(graph, device)
    except ValueError as error:
        return error
    return ValueError("graph: an offset or an id is out of range (its arrays were changed since it was planned)")


def _is_on_cpu(graph: Graph) -> bool:
    return not as_tensor(graph.edge_index if isinstance(graph, EdgeList) else graph.indices).is_cuda


def _on_stream(data: Fused3SData, device: torch.device) -> Fused3SData:
    if device.type == "cuda":
        object.__setattr__(data, "made_on", (device.index, stream_handle(device.index)))
    return data
