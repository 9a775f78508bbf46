"""Plans of `fused3s`: what a plan consists of for given inputs, and how it is made from a graph.

On a GPU, kernels make plans from an edge list or a CSR (formats/gpu_plan.py), and the host does not wait: arrays have
room for the most that there can be. Once the GPU has come so far, calls raise errors in the ids, and from the second
forward pass on they have the arrays cut to what is used. The host waits for a graph on the CPU; and outside of captures
where the choice of the kernel takes the number of KV tiles (`kernel_choice`).

Elsewhere, and for graphs without rows or columns, torch makes the same plan (formats/torch_plan.py).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..formats.bsb import BSB
from ..formats.csr import CSRPattern, as_tensor, csr_from_edges
from ..formats.edge_list import EdgeList, check_ids
from ..formats.edges import canonical_csr
from ..formats.gpu_csr import COUNTS, GPUCSR, MOST_EDGES, MOST_IDS, MOST_ROWS, EdgeSource, PlanNumber
from ..formats.gpu_edges import gpu_csr_of_tiles
from ..formats.gpu_plan import GPUPlan, PlanForm, PlanSizes, ScheduleForm
from ..formats.gpu_schedule import ScheduleInputs, most_tiles_of, windows_of
from ..formats.schedule import Schedule, TileSlots, csr_of_tiles, make_kv_tiles, make_tile_slots
from ..formats.torch_plan import TILE, tiles_of_csr
from ..formats.transpose import TransposedCSR
from ..runtime.launch import stream_handle
from ..runtime.readback import Readback
from ..runtime.semaphores import is_capturing
from ..tensor_record import tensors_of
from .base import InputSpec
from .fused3s_backward import BackwardData, PassData, build_backward_data, pass_inputs
from .fused3s_edges import BIAS, VALUE_FEATURES, EdgeKernelData, build_edge_kernel_data, part_edges_for_heads
from .fused3s_edges_backward import EdgeBackwardData, build_edge_backward_data
from .fused3s_gradients import GradientData, compile_gradients
from .fused3s_shapes import COMMON_DIM
from .kernel_choice import GraphSize, takes_edges

Graph = BSB | CSRPattern | EdgeList


@dataclass(frozen=True, eq=False)
class Fused3SData:
    """A graph as the kernels of `fused3s` read it.

    Attributes:
        kv_tiles: [num_tiles + 2, 24] int32 or longer, see `make_kv_tiles`; None, as the next and the schedule, where
            calls for the inputs of the plan go edge by edge.
        tile_offset: [num_row_windows + 1] int32, first KV tile of each window.
        row_ids: [16 num_row_windows] int32, row of query and output of each row of the windows, num_rows where there is
            none; None where rows have their own order.
        schedule: the work items.
        size: what decides between the kernels.
        by_edge: the graph as cuda/fused3s_edges.cu reads it; None where no input of the plan takes that kernel.
        offsets: [num_rows + 1] int64, first edge of each row; None with `by_edge`.
        edge_ids: [num_edges] int32, the number of each edge of `by_edge` in the edge list or CSR that kernels made the
            plan from; None for other plans, and for those without edge data.
        slots: where the edges are in the KV tiles; None for plans without edge data or KV tiles.
        backward: for the backward pass; None for plans without one.
    """

    kv_tiles: torch.Tensor | None
    tile_offset: torch.Tensor | None
    row_ids: torch.Tensor | None
    schedule: Schedule | None
    size: GraphSize
    by_edge: EdgeKernelData | None = None
    offsets: torch.Tensor | None = None
    edge_ids: torch.Tensor | None = None
    slots: TileSlots | None = None
    backward: GradientData | None = None

    # Of the object that planning returned, and of no copy: what the GPU finds out, and where memory was allocated.
    progress: ClassVar["PlanProgress | None"] = None
    made_on: ClassVar[tuple[int, int] | None] = None  # GPU and stream

    @property
    def num_rows(self) -> int:
        return self.size.num_rows

    @property
    def num_cols(self) -> int:
        return self.size.num_cols

    def ready(self, is_forward: bool = True) -> "Fused3SData":
        """For a call on torch's current stream: the plan with exact sizes, from the second forward pass on once the GPU
        has found them. A plan that serves one step would not get the host's work for them back.

        Memory goes back to the stream that it was allocated on, which does not know of others: they are named here.

        Raises:
            ValueError: an id of the graph is out of range.
        """
        data = self if self.progress is None else self.progress.plan(self, is_forward)
        if self.made_on is not None and stream_handle(self.made_on[0]) != self.made_on[1]:
            stream = torch.cuda.current_stream(self.made_on[0])
            for tensor in tensors_of(self):
                tensor.record_stream(stream)
        return data


class PlanProgress:
    """What the GPU found out about a plan, read without waiting for it.

    Attributes:
        exact: the plan with exact sizes; None where they are not known yet.
    """

    def __init__(self, made: "MadePlan") -> None:
        self.exact: Fused3SData | None = None
        self._forward_passes = 0
        self._made: MadePlan | None = made
        self._numbers: Readback | None = Readback(made.plan.csr.address_of_numbers, COUNTS, made.plan.device.index)

    def plan(self, bounded: Fused3SData, is_forward: bool) -> Fused3SData:
        """The exact plan, or `bounded`, see `Fused3SData.ready`.

        Raises:
            ValueError: an id of the graph is out of range.
        """
        if self.exact is None:
            self._forward_passes += is_forward
            if not self._numbers.is_done():
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

    def raise_errors(self) -> None:
        """Wait for the plan, and raise a ValueError if an id of the graph is out of range."""
        if self.exact is None:
            self._numbers.wait()
            self._made.check(self._numbers.numbers())

    def _keep_exact(self, numbers: list[int]) -> None:
        self.exact = self._made.exact(numbers)
        self._made = self._numbers = None


@dataclass(frozen=True)
class Kernels:
    """Which kernels the calls of a plan may take."""

    tiles: bool
    edges: bool
    tile_gradients: bool
    edge_gradients: bool

    @classmethod
    def of(cls, size: GraphSize, inputs: InputSpec) -> "Kernels | None":
        """None where the choice takes the number of KV tiles."""
        heads = inputs.num_heads, inputs.head_dim
        calls = [takes_edges(size, *heads), takes_edges(size, *heads, backward=True) if inputs.backward else False]
        if inputs.edge_data:
            calls += [takes_edges(size, *heads, terms) for terms in (BIAS, VALUE_FEATURES)]
        if None in calls:
            return None
        forward, backward, *with_terms = calls
        edge_gradients = inputs.backward and (backward or inputs.edge_data)
        return cls(
            tiles=not (forward and all(with_terms)),
            edges=forward or inputs.edge_data or edge_gradients,
            tile_gradients=inputs.backward and not backward,
            edge_gradients=edge_gradients,
        )

    @classmethod
    def or_edges(cls, size: GraphSize, inputs: InputSpec) -> "Kernels":
        """Edge by edge where the choice takes the number of KV tiles, and the host cannot know it."""
        return cls.of(size, inputs) or cls.of(replace(size, num_tiles=size.num_edges + 1), inputs)


def plan_graph(
    graph: Graph,
    device: torch.device,
    inputs: InputSpec,
    shapes: ScheduleInputs,
    perm: torch.Tensor | None = None,
) -> Fused3SData:
    """Plan of a graph, queued on torch's current stream, and the kernels of the backward pass compiled.

    Args:
        graph: repeated edges of a CSR or an edge list count as often as they occur.
        shapes: what the forward pass's schedule depends on besides the graph.
        perm: as for `Backend.build`.

    Raises:
        ValueError: the graph is malformed, or beyond what the kernels take; the text says what it would need.
    """
    row_ids = None
    if perm is not None:
        perm = perm.to(device)
        row_ids = perm.new_full((windows_of(len(perm)) * TILE[0],), len(perm))  # no row pads the last window
        row_ids[: len(perm)] = perm
    return _plan_rows(graph, device, inputs, shapes, row_ids)


def replan(data: Fused3SData, device: torch.device, inputs: InputSpec, shapes: ScheduleInputs) -> Fused3SData:
    """The plan of the same graph for other inputs."""
    shape = data.num_rows, data.num_cols
    if data.by_edge:
        offsets, indices = data.offsets, data.by_edge.indices
    elif data.kv_tiles.is_cuda:
        offsets, indices = gpu_csr_of_tiles(data.kv_tiles, data.tile_offset, data.size.num_edges)
    else:
        offsets, indices = csr_of_tiles(data.kv_tiles, data.tile_offset)
    graph = CSRPattern(offsets[: data.num_rows + 1], indices, shape)
    return _plan_rows(graph, device, inputs, shapes, data.row_ids)


def _plan_rows(
    graph: Graph,
    device: torch.device,
    inputs: InputSpec,
    shapes: ScheduleInputs,
    row_ids: torch.Tensor | None,
) -> Fused3SData:
    if device.type == "cuda" and all(graph.shape):
        return plan_by_kernels(graph, device, inputs, shapes, row_ids)
    return plan_by_torch(graph, device, inputs, shapes, row_ids)


def plan_by_torch(
    graph: Graph, device: torch.device, inputs: InputSpec, shapes: ScheduleInputs, row_ids: torch.Tensor | None
) -> Fused3SData:
    """On any device; raises for damaged graphs."""
    offsets, indices = canonical_csr(csr_from_edges(graph) if isinstance(graph, EdgeList) else graph, device)
    (num_rows, num_cols), num_edges = graph.shape, indices.numel()
    heads, dim = inputs.num_heads, inputs.head_dim
    size = GraphSize(num_rows, num_cols, num_edges)
    kernels, tiles = Kernels.of(size, inputs), None
    if kernels is None or kernels.tiles:
        tiles = tiles_of_csr(offsets, indices, num_cols)
    if kernels is None:
        size = replace(size, num_tiles=len(tiles[0]) - 2)
        kernels = Kernels.of(size, inputs)
    rows = None if row_ids is None else row_ids[:num_rows]
    kv_tiles = tile_offset = schedule = slots = by_edge = backward = None
    if kernels.tiles:
        kv_tiles, tile_offset = tiles
        schedule = shapes.schedule_by_torch(*tiles, most_tiles_of(num_edges, num_rows))
        if inputs.edge_data:
            slots = make_tile_slots(*tiles)
    if kernels.edges:
        by_edge = build_edge_kernel_data(offsets, indices, rows, device, heads, dim or COMMON_DIM)
    if inputs.backward:
        of_tiles = of_edges = None
        if kernels.tile_gradients:
            of_inputs = heads, dim, inputs.dtype
            of_tiles = build_backward_data(kv_tiles, tile_offset, row_ids, offsets, indices, num_cols, *of_inputs)
        if kernels.edge_gradients:
            arrays = (offsets, indices, num_cols, device)
            of_edges = build_edge_backward_data(*arrays, heads, dim or COMMON_DIM, rows)
        compile_gradients(of_tiles, device, inputs)
        backward = GradientData(of_tiles, of_edges)
    return Fused3SData(
        *(kv_tiles, tile_offset, row_ids, schedule, size, by_edge),
        offsets=offsets if by_edge else None,
        slots=slots,
        backward=backward,
    )


def plan_by_kernels(
    graph: Graph,
    device: torch.device,
    inputs: InputSpec,
    shapes: ScheduleInputs,
    row_ids: torch.Tensor | None = None,
) -> Fused3SData:
    """On a GPU, for a graph with rows and columns."""
    made = queue_plan(graph, device, inputs, shapes, row_ids)
    return made.checked() if _is_on_cpu(graph) else made.unchecked(follows=not _captures(device))


def queue_plan(
    graph: Graph, device: torch.device, inputs: InputSpec, shapes: ScheduleInputs, row_ids: torch.Tensor | None = None
) -> "MadePlan":
    """Queue the kernels of a plan. Waits where the choice of the kernel takes the number of KV tiles."""
    source = _edge_source(graph, device, inputs.backward)
    size = GraphSize(*graph.shape, source.num_edges)
    rows = None if row_ids is None else row_ids[: size.num_rows]
    kernels, csr = Kernels.of(size, inputs), None
    if kernels is None and not _captures(device):
        form = PlanForm(graph.shape, size.num_edges, inputs.backward, (), 0, inputs.edge_data)
        sorted_edges = GPUPlan(form, device)
        sorted_edges.fill(source, rows)
        size, csr = replace(size, num_tiles=sorted_edges.count_tiles()), sorted_edges.csr
    kernels = kernels or Kernels.or_edges(size, inputs)
    made = MadePlan(new_plan(size, kernels, inputs, shapes, device, csr), size, kernels, row_ids, graph)
    made.plan.fill(source, rows)
    if inputs.backward:
        compile_gradients(made.bounded.backward.tiles, device, inputs)
    return made


def make_room(size: GraphSize, device: torch.device, inputs: InputSpec, shapes: ScheduleInputs) -> "MadePlan":
    """Memory for the plans of graphs of a size, to be filled, and the kernels of the backward pass compiled."""
    kernels = Kernels.or_edges(size, inputs)
    made = MadePlan(new_plan(size, kernels, inputs, shapes, device), size, kernels, None, None)
    if inputs.backward:
        compile_gradients(made.bounded.backward.tiles, device, inputs)
    return made


def new_plan(
    size: GraphSize,
    kernels: Kernels,
    inputs: InputSpec,
    shapes: ScheduleInputs,
    device: torch.device,
    csr: GPUCSR | None = None,
) -> GPUPlan:
    """Memory of a plan; `csr`: what is sorted already."""
    heads, dim, shape = inputs.num_heads, inputs.head_dim, (size.num_rows, size.num_cols)
    schedules = []
    if kernels.tiles:
        tiles = most_tiles_of(size.num_edges, size.num_rows)
        schedules.append(ScheduleForm(False, shapes.num_groups, shapes.shape(tiles)))
    if kernels.tile_gradients:
        of_passes = pass_inputs(device, heads, dim, inputs.dtype)
        schedules += [ScheduleForm(bool(i), each.num_groups, each.large) for i, each in enumerate(of_passes)]
    part_edges = part_edges_for_heads(size.num_edges, device, heads, dim or COMMON_DIM) if kernels.edges else 0
    form = PlanForm(shape, size.num_edges, inputs.backward, tuple(schedules), part_edges, inputs.edge_data)
    return GPUPlan(form, device, csr)


class MadePlan:
    """A queued plan.

    Attributes:
        plan: its memory.
        size: what decides between the kernels.
        bounded: the plan with room for the most that there can be; gone with `unchecked`.
    """

    def __init__(
        self, plan: GPUPlan, size: GraphSize, kernels: Kernels, row_ids: torch.Tensor | None, graph: Graph | None
    ) -> None:
        self.plan, self.size = plan, size
        self._kernels, self._row_ids, self._graph = kernels, row_ids, graph
        self.bounded = self._data(plan.kv_tiles, plan.schedules, plan.row_items, plan.slots)

    def checked(self) -> Fused3SData:
        """The plan with exact sizes. Waits for the GPU, and raises for ids out of range."""
        numbers = self.plan.numbers.tolist()
        self.check(numbers)
        return _on_stream(self.exact(numbers), self.plan.device)

    def check(self, numbers: list[int]) -> None:
        """Raise a ValueError for ids out of range; `numbers`: as `exact` takes them."""
        if numbers[PlanNumber.BAD_EDGE] or numbers[PlanNumber.BAD_OFFSET]:
            raise _damage(self._graph, self.plan.device)

    def unchecked(self, follows: bool) -> Fused3SData:
        """The bounded plan; `follows`: with exact sizes, or the error, at a call when the GPU has come so far."""
        bounded = self.bounded
        del (
            self.bounded
        )  # or it and its progress would hold each other, and their memory, until Python looks for cycles
        if follows and self.plan.device.type == "cuda":
            object.__setattr__(bounded, "progress", PlanProgress(self))
        return _on_stream(bounded, self.plan.device)

    def exact(self, numbers: list[int]) -> Fused3SData:
        """The plan cut to what is used, from the first PlanNumber.COUNTS numbers."""
        plan, form = self.plan, self.plan.form
        sizes = PlanSizes.of(numbers, form)
        tiles = [sizes.num_tiles(bool(side), form) for side in range(form.tile_sides)]
        schedules = [
            sizes.exact_schedule(which, schedule, windows_of(form.rows_of(of.of_transpose)))
            for which, (schedule, of) in enumerate(zip(plan.schedules, form.schedules, strict=True))
        ]
        slots = plan.slots and replace(plan.slots, tile_slots=plan.slots.tile_slots[: tiles[0] + 3])
        return self._data(
            [each[: count + 2] for each, count in zip(plan.kv_tiles, tiles, strict=True)],
            schedules,
            [sizes.exact_items(side, work) for side, work in enumerate(plan.row_items)],
            slots,
        )

    def _data(self, kv_tiles, schedules, row_items, slots) -> Fused3SData:
        plan, kernels, size = self.plan, self._kernels, self.size
        of_tiles = of_edges = None
        by_edge = EdgeKernelData(plan.csr.indices, row_items[0]) if kernels.edges else None
        if kernels.tile_gradients:
            *_, by_row, by_column = schedules
            of_tiles = BackwardData(
                PassData(kv_tiles[0], plan.tile_offset[0], self._row_ids, by_row),
                PassData(kv_tiles[1], plan.tile_offset[1], None, by_column),
                size.num_rows,
                size.num_cols,
            )
        if kernels.edge_gradients:
            transposed = TransposedCSR(plan.csr.offsets[1], plan.csr.column_indices, plan.csr.column_edges)
            of_edges = EdgeBackwardData(transposed, row_items[1])
        has_gradients = kernels.tile_gradients or kernels.edge_gradients
        return Fused3SData(
            kv_tiles[0] if kernels.tiles else None,
            plan.tile_offset[0] if kernels.tiles else None,
            self._row_ids,
            schedules[0] if kernels.tiles else None,
            size,
            by_edge,
            offsets=plan.csr.offsets[0] if by_edge else None,
            edge_ids=plan.csr.edges,
            slots=slots,
            backward=GradientData(of_tiles, of_edges) if has_gradients else None,
        )


def _edge_source(graph: Graph, device: torch.device, transposes: bool) -> EdgeSource:
    """The edges of a graph for the kernels; raises for what they do not take."""
    num_rows = graph.shape[0]
    if isinstance(graph, BSB):
        bsb = BSB.from_graph(graph, TILE, device)
        tiles = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap)
        offsets, indices = gpu_csr_of_tiles(tiles, bsb.tcb_row_offset, bsb.nnz)
        source = EdgeSource(indices, offsets[: num_rows + 1])
    elif isinstance(graph, EdgeList):
        edge_index = graph.edge_index if graph.edge_index.device == device else graph.edge_index.to(device)
        source = EdgeSource(edge_index if edge_index.stride(1) == 1 else edge_index.contiguous())
    else:
        offsets, indices = (as_tensor(each).to(device) for each in (graph.indptr, graph.indices))
        _check_csr_arrays(offsets, indices, num_rows)
        source = EdgeSource(indices.contiguous(), offsets.long().contiguous())
    check_size(graph.shape, source.num_edges, transposes)
    return source


def check_size(shape: tuple[int, int], num_edges: int, transposes: bool) -> None:
    """Raise a ValueError for graphs that the planning kernels do not take; `transposes`: with a backward pass."""
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
    """The error of a graph with ids out of range."""
    try:
        if isinstance(graph, EdgeList):
            check_ids(graph)
        elif graph is not None:
            canonical_csr(graph, device)
    except ValueError as error:
        return error
    return ValueError("graph: an offset or an id is out of range (its arrays were changed since it was planned)")


def _is_on_cpu(graph: Graph) -> bool:
    if isinstance(graph, BSB):
        return graph.device.type == "cpu"
    return not as_tensor(graph.edge_index if isinstance(graph, EdgeList) else graph.indices).is_cuda


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and is_capturing(device)


def _on_stream(data: Fused3SData, device: torch.device) -> Fused3SData:
    if device.type == "cuda":
        object.__setattr__(data, "made_on", (device.index, stream_handle(device.index)))
    return data
