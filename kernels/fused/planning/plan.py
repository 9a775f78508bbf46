"""Plans of `fused3s`: which arrays a plan needs for given inputs, and how they are built from a graph.

Kernels build plans from an edge list or a CSR (gpu_plan.py) without synchronisation, in arrays of upper-bound sizes.
`plan_state.Fused3SPlan` owns the result, its errors and its exact sizes. The host waits for the GPU in three cases: the
graph is on the CPU, or, outside of captures, the choice of the kernel depends on the number of KV tiles (`choice`), or
a CSR has at least COUNTED_EDGES edges (`gpu_csr.num_keys`).
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
from ...runtime.semaphores import is_capturing
from ..choice import GraphSize, goes_edge_by_edge
from ..data import Fused3SData
from ..edges.forward import part_edges_for_heads
from ..plan_state import Fused3SPlan, check_numbers, compacted
from ..shapes import COMMON_DIM, EXPRESSION, TILE, VALUE_FEATURES
from ..tiles.backward import pass_schedules
from ..tuning import tuning_for
from .gpu_csr import MOST_EDGES, MOST_IDS, MOST_ROWS, EdgeSource
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
) -> Fused3SPlan:
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
    memory, arrays = queue_plan(graph, device, inputs, forward, row_ids, calls)
    if not on_cpu:
        return Fused3SPlan(arrays, memory, None if is_capturing(device) else graph)
    numbers = memory.numbers.tolist()  # waits for the GPU
    check_numbers(numbers, graph, device)
    return Fused3SPlan(compacted(memory.exact(arrays, numbers)))


def queue_plan(
    graph: Graph,
    device: torch.device,
    inputs: InputSpec,
    forward: ForwardSchedule,
    row_ids: torch.Tensor | None = None,
    calls: CallInstances = lambda data: [],
) -> tuple[GPUPlan, Fused3SData]:
    """Queue the kernels of a plan. Waits if the choice of the kernel depends on the number of KV tiles."""
    source = _edge_source(graph, device, inputs.backward)
    size = GraphSize(*graph.shape, source.num_edges)
    rows = None if row_ids is None else row_ids[: size.num_rows]
    form, csr = form_of(size, device, inputs, forward), None
    if form is None and not is_capturing(device):
        sorted_edges = GPUPlan(PlanForm(graph.shape, size.num_edges, inputs.backward, (), 0, inputs.edge_data), device)
        sorted_edges.compile_ahead(source, lambda: [COUNT_TILES])
        sorted_edges.fill(source, rows)
        size, csr = size._replace(num_tiles=sorted_edges.count_tiles()), sorted_edges.csr
        form = form_of(size, device, inputs, forward)
    memory = GPUPlan(form or _form_by_edge(size, device, inputs, forward), device, csr)
    arrays = memory.arrays(size, row_ids)
    memory.compile_ahead(source, lambda: calls(arrays))
    memory.fill(source, rows)
    return memory, arrays


def make_room(
    size: GraphSize,
    device: torch.device,
    inputs: InputSpec,
    forward: ForwardSchedule,
    memory: torch.Tensor | None = None,
) -> tuple[GPUPlan, Fused3SData]:
    """Memory for plans of graphs up to a size, to be filled later; or the plan that is in `memory`, see `GPUPlan`."""
    form = form_of(size, device, inputs, forward) or _form_by_edge(size, device, inputs, forward)
    plan = GPUPlan(form, device, memory=memory)
    return plan, replace(plan.arrays(size, None), has_room=True)


def form_of(size: GraphSize, device: torch.device, inputs: InputSpec, forward: ForwardSchedule) -> PlanForm | None:
    """Contents of a plan for such inputs; None if they depend on the number of KV tiles.

    A plan has KV tiles unless all its forward passes go edge by edge, and row items if any call may go edge by edge.
    """
    heads, dim = inputs.num_heads, inputs.head_dim
    given = tuning_for(gpu_limits(device)), size, heads, dim
    calls = [goes_edge_by_edge(*given), goes_edge_by_edge(*given, backward=True) if inputs.backward else False]
    values_by_edge = True  # in the backward pass
    if inputs.edge_data:
        calls += [goes_edge_by_edge(*given, terms) for terms in (EXPRESSION, VALUE_FEATURES)]
        if inputs.backward and inputs.dtype != torch.float32 and calls[1] is not True:
            values_by_edge = goes_edge_by_edge(*given, EXPRESSION, backward=True)
    if None in (*calls, values_by_edge):
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
    of_edges = inputs.edge_data, not values_by_edge
    return PlanForm(shape, size.num_edges, inputs.backward, schedules, part_edges, *of_edges)


def _form_by_edge(size: GraphSize, device: torch.device, inputs: InputSpec, forward: ForwardSchedule) -> PlanForm:
    """Contents of a plan whose undecided calls go edge by edge, since the host cannot know the number of KV tiles."""
    return form_of(size._replace(num_tiles=size.num_edges + 1), device, inputs, forward)


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


def _is_on_cpu(graph: Graph) -> bool:
    return not as_tensor(graph.edge_index if isinstance(graph, EdgeList) else graph.indices).is_cuda
