"""Plans of `fused3s`: a graph's format, its schedules, and its other forms where inputs need them.

On a GPU the kernels of formats/gpu_plan.py build a plan, with the bits that torch builds elsewhere. The host waits
twice: for the sizes, and at the end. It waits once more for each of these:

    the number of repeated edges, and the sizes without them   unsorted or repeated columns, where the rest of the plan
                                                               reads distinct edges
    the KV tiles of A^T, the row items of A^T                  backward=True, and A is not symmetric
"""

from dataclasses import dataclass, replace

import torch

from ..formats.bsb import BSB
from ..formats.csr import CSRPattern, as_tensor
from ..formats.edges import distinct_csr
from ..formats.gpu_columns import rows_by_column
from ..formats.gpu_edges import gpu_csr_of_tiles, make_gpu_tile_slots
from ..formats.gpu_plan import PlanSizes, QueuedPlan, queue_plan
from ..formats.gpu_reverse import MOST_EDGES
from ..formats.gpu_row_items import make_gpu_row_items
from ..formats.gpu_schedule import ScheduleInputs, make_schedules, wait_for
from ..formats.schedule import Schedule, TileSlots, csr_of_tiles, make_kv_tiles, make_tile_slots
from ..formats.transpose import TransposedCSR, transpose_csr
from .base import InputSpec
from .fused3s_backward import BackwardData, PassData, column_pass, pass_inputs
from .fused3s_edges import EdgeKernelData, build_edge_kernel_data, part_edges_for_heads
from .fused3s_edges_backward import EdgeBackwardData
from .fused3s_gradients import GradientData, build_gradient_data, compile_gradients, goes_by_edge
from .fused3s_shapes import COMMON_DIM, NARROW_DIM, TILE

FORWARD, BY_ROW, BY_COLUMN = range(3)  # schedules of a plan on a GPU


@dataclass(frozen=True, eq=False)
class Fused3SData:
    """A graph as cuda/fused3s.cu reads it.

    Attributes:
        kv_tiles: [num_tiles + 2, 24] int32, see `make_kv_tiles`; the same for every schedule.
        tile_offset: [num_row_windows + 1] int32, first KV tile of each window.
        row_ids: [16 num_row_windows] int32, row of query and output of each row of the windows, num_rows where there is
            none; None where rows have their own order.
        schedule: the work items.
        num_rows, num_cols: shape of A.
        by_edge: the graph as cuda/fused3s_edges.cu reads it; None where no input of the plan takes that kernel.
        slots: where the edges are in the KV tiles; None for plans without edge data.
        backward: for the backward pass; None for plans without one.
    """

    kv_tiles: torch.Tensor
    tile_offset: torch.Tensor
    row_ids: torch.Tensor | None
    schedule: Schedule
    num_rows: int
    num_cols: int
    by_edge: EdgeKernelData | None = None
    slots: TileSlots | None = None
    backward: GradientData | None = None

    @property
    def num_tiles(self) -> int:
        return self.kv_tiles.shape[0] - 2


def prefers_edges(num_rows: int, num_edges: int, num_tiles: int, num_heads: int, dim: int | None) -> bool:
    """Whether cuda/fused3s_edges.cu is the faster kernel for such heads without edge data (kernels/NOTES.md)."""
    if not _is_narrow(num_heads, dim):
        return False
    if dim <= 16:
        return num_edges < (48 if dim <= 8 else 36) * num_tiles
    return num_edges < 20 * num_tiles and num_edges >= 4 * num_rows


def plan_graph(
    graph: BSB | CSRPattern,
    device: torch.device,
    inputs: InputSpec,
    shapes: ScheduleInputs,
    perm: torch.Tensor | None = None,
) -> Fused3SData:
    """Format and schedules of a graph, complete on `device`, and the kernels of the backward pass compiled.

    Args:
        shapes: what the forward pass's schedule depends on besides the graph.
        perm: as for `Backend.build`.

    Raises:
        ValueError: the graph is malformed.
    """
    row_ids = None
    if perm is not None:
        perm = perm.to(device)
        row_ids = perm.new_full((-(-len(perm) // TILE[0]) * TILE[0],), len(perm))  # no row pads the last window
        row_ids[: len(perm)] = perm
    if device.type == "cuda" and isinstance(graph, CSRPattern):
        data = plan_by_kernels(graph, device, inputs, shapes, row_ids)
        if data is not None:
            return data
    return _plan_by_torch(graph, device, inputs, shapes, row_ids)


def replan(data: Fused3SData, device: torch.device, inputs: InputSpec, shapes: ScheduleInputs) -> Fused3SData:
    """`data` for other inputs; what does not depend on them is shared. Complete on `device`."""
    on_gpu = data.kv_tiles.is_cuda and len(data.tile_offset) > 1
    (schedule,) = make_schedules(data.kv_tiles, data.tile_offset, shapes)
    csr, slots = None, data.slots
    if inputs.edge_data or inputs.backward or _is_narrow(inputs.num_heads, inputs.head_dim):
        indptr, indices = (gpu_csr_of_tiles if on_gpu else csr_of_tiles)(data.kv_tiles, data.tile_offset)
        csr = indptr[: data.num_rows + 1], indices
        if inputs.edge_data and slots is None:
            slots = _tile_slots(data.kv_tiles, data.tile_offset, len(indices))
    data = _with_other_forms(replace(data, schedule=schedule, slots=slots), csr, device, inputs)
    wait_for(device)
    return data


def _plan_by_torch(
    graph: BSB | CSRPattern,
    device: torch.device,
    inputs: InputSpec,
    shapes: ScheduleInputs,
    row_ids: torch.Tensor | None,
) -> Fused3SData:
    """On any device, for any graph; raises for damaged ones."""
    bsb = BSB.from_graph(graph, TILE, device)
    kv_tiles, tile_offset = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap), bsb.tcb_row_offset
    (schedule,) = make_schedules(kv_tiles, tile_offset, shapes)
    prefers = prefers_edges(graph.shape[0], bsb.nnz, bsb.num_tcbs, inputs.num_heads, inputs.head_dim)
    csr = distinct_csr(graph, device) if prefers or inputs.edge_data or inputs.backward else None
    slots = _tile_slots(kv_tiles, tile_offset, bsb.nnz) if inputs.edge_data else None
    data = Fused3SData(kv_tiles, tile_offset, row_ids, schedule, *graph.shape, slots=slots)
    data = _with_other_forms(data, csr, device, inputs)
    wait_for(device)
    return data


def _with_other_forms(
    data: Fused3SData, csr: tuple[torch.Tensor, torch.Tensor] | None, device: torch.device, inputs: InputSpec
) -> Fused3SData:
    """`data` with what the edge kernel and the backward pass read, where `inputs` need it.

    Args:
        csr: indptr and indices of A in the order of the windows' rows, where one of the two may be needed.
    """
    by_edge = backward = None
    if inputs.backward:
        arrays = (data.kv_tiles, data.tile_offset, data.row_ids)
        backward = build_gradient_data(*arrays, *csr, data.num_cols, inputs, data.backward)
    of_heads = (data.num_tiles, inputs.num_heads, inputs.head_dim)
    prefers = csr is not None and prefers_edges(data.num_rows, len(csr[1]), *of_heads)
    if prefers or inputs.edge_data or (backward and backward.edges):
        row_ids = None if data.row_ids is None else data.row_ids[: data.num_rows]
        by_edge = build_edge_kernel_data(*csr, row_ids, device, inputs.num_heads, inputs.head_dim or COMMON_DIM)
    return replace(data, by_edge=by_edge, backward=backward)


def plan_by_kernels(
    graph: CSRPattern,
    device: torch.device,
    inputs: InputSpec,
    shapes: ScheduleInputs,
    row_ids: torch.Tensor | None,
) -> Fused3SData | None:
    """On a GPU; None for graphs that the kernels do not take, damaged ones among them."""
    indptr, indices = (as_tensor(array).to(device) for array in (graph.indptr, graph.indices))
    num_heads, dim = inputs.num_heads, inputs.head_dim
    may_go_by_edge = inputs.edge_data or _is_narrow(num_heads, dim)
    part_edges = part_edges_for_heads(indices.numel(), device, num_heads, dim or COMMON_DIM) if may_go_by_edge else 0
    queued = queue_plan(
        indptr,
        indices,
        graph.shape,
        (shapes, *(pass_inputs(device, num_heads, dim, inputs.dtype) if inputs.backward else ())),
        looks_for_symmetry=inputs.backward and row_ids is None,
        wants_reverse=may_go_by_edge,
        part_edges=part_edges,
        row_ids=None if row_ids is None else row_ids[: graph.shape[0]],
    )
    sizes = None if queued is None else queued.sizes()
    if sizes is None:
        return None
    kv_tiles = queued.write_tiles(sizes)
    if not sizes.is_distinct and (may_go_by_edge or inputs.backward):  # the rest reads distinct edges
        found = gpu_csr_of_tiles(kv_tiles, queued.tile_offset, queued.num_distinct(sizes))
        distinct = CSRPattern(found[0][: graph.shape[0] + 1], found[1], graph.shape)
        return plan_by_kernels(distinct, device, inputs, shapes, row_ids)

    num_edges = indices.numel()
    by_edge = slots = backward = None
    prefers = prefers_edges(graph.shape[0], num_edges, sizes.num_tiles, num_heads, dim)
    gradients_by_edge = inputs.backward and goes_by_edge(num_edges, sizes.num_tiles, num_heads, dim)
    if prefers or inputs.edge_data or gradients_by_edge:
        by_edge = EdgeKernelData(indices.to(torch.int32, copy=True), queued.rows(sizes))
    if inputs.edge_data:
        slots = make_gpu_tile_slots(kv_tiles, queued.tile_offset, num_edges)
    schedule = queued.schedule(FORWARD, sizes, kv_tiles)
    if inputs.backward:
        tiles = None if gradients_by_edge else (kv_tiles, queued.tile_offset, row_ids)
        backward = _gradient_data(queued, sizes, row_ids, tiles, by_edge, inputs)
    wait_for(device)
    return Fused3SData(kv_tiles, queued.tile_offset, row_ids, schedule, *graph.shape, by_edge, slots, backward)


def _gradient_data(
    queued: QueuedPlan,
    sizes: PlanSizes,
    row_ids: torch.Tensor | None,
    of_matrix: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    by_edge: EdgeKernelData | None,
    inputs: InputSpec,
) -> GradientData:
    """What the backward pass reads, of a distinct pattern. The arrays are queued.

    Args:
        of_matrix: KV tiles, first KV tile of each window, and row ids, for the kernel over KV tiles; None without it.
        by_edge: for the kernel edge by edge; None without it.
    """
    (num_rows, num_cols), device = queued.shape, queued.indptr.device
    tiles = edges = transposed = None
    if not sizes.is_symmetric:
        row_ids = None if row_ids is None else row_ids[:num_rows]
        if by_edge or queued.indices.numel() > MOST_EDGES:
            transposed = transpose_csr(queued.indptr, queued.indices.int(), num_cols, row_ids)
            of_columns = transposed.indptr, transposed.indices
        else:  # KV tiles alone need no order in a column
            of_columns = rows_by_column(queued.indptr, queued.indices, num_cols, row_ids)
    if of_matrix:
        by_row = PassData(*of_matrix, queued.schedule(BY_ROW, sizes, of_matrix[0]))
        if sizes.is_symmetric:
            by_column = PassData(*of_matrix, queued.schedule(BY_COLUMN, sizes, of_matrix[0]))
        else:
            _, shapes = pass_inputs(device, inputs.num_heads, inputs.head_dim, inputs.dtype)
            by_column = column_pass(*of_columns, num_rows, shapes)
        tiles = BackwardData(by_row, by_column, num_rows, num_cols)
    if by_edge and sizes.is_symmetric:
        edges = EdgeBackwardData(TransposedCSR(queued.indptr.clone(), by_edge.indices, queued.reverse), by_edge.work)
    elif by_edge:
        work = make_gpu_row_items(transposed.indptr, len(transposed.edge), None, by_edge.work.part_edges)
        edges = EdgeBackwardData(transposed, work)
    compile_gradients(tiles, device, inputs)
    return GradientData(tiles, edges)


def _is_narrow(num_heads: int, dim: int | None) -> bool:
    """Whether calls with such heads may go edge by edge without edge data."""
    return num_heads > 1 and dim is not None and dim <= NARROW_DIM


def _tile_slots(kv_tiles: torch.Tensor, tile_offset: torch.Tensor, num_edges: int) -> TileSlots:
    if kv_tiles.is_cuda and len(tile_offset) > 1:
        return make_gpu_tile_slots(kv_tiles, tile_offset, num_edges)
    return make_tile_slots(kv_tiles, tile_offset)
