"""The backend `fused3s`: builds plans, and chooses the kernels of a call."""

from functools import partial
from typing import Any

import torch

from ..backends.base import BackwardCall, Call, Gradients, InputSpec
from ..backends.cuda import MAX_DIM, CudaBackend, check_out_dtype, product_type
from ..runtime.device import gpu_limits
from ..runtime.jit import ELEMENTS, KernelInstance, compile_ahead, get_kernel, input_element
from ..terms.edge_data import BoundEdges
from ..torch_side.tensor_record import map_tensors
from .choice import GraphSize, goes_edge_by_edge
from .data import Fused3SData
from .edges.forward import edge_columns, edge_instance, launch_edge_kernel, padded_call, takes_columns
from .gradients import gradient_instances, launch_gradients
from .plan_state import Fused3SPlan
from .planning.gpu_csr import MOST_EDGES, EdgeSource
from .planning.plan import check_size, make_room, plan_graph
from .score_values import folds_heads, forward_fits_tiles, require_edge_arrays, terms_of
from .shapes import tile_columns
from .tiles.forward import choose_instance, forward_schedule, launch
from .tuning import tuning_for


class Fused3SBackend(CudaBackend):
    name = "fused3s"
    summary = "the fast fused kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16, bf16 and float32"
    data_type = Fused3SPlan
    writes_lse = True
    reorders = True
    takes_edge_lists = True
    takes_edges = True
    takes_dropout = True
    has_backward = True

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype in ELEMENTS and 1 <= head_dim <= MAX_DIM:
            return None
        types = ", ".join(map(str, ELEMENTS))
        return f"it takes {types}, and 1 to {MAX_DIM} columns a head; got {dtype}, {head_dim}"

    def most_edges(self, inputs: InputSpec) -> int | None:
        return MOST_EDGES  # limit of the planning kernels

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> Fused3SPlan:
        forward = partial(forward_schedule, gpu_limits(device), inputs, device.index)
        plan = plan_graph(graph, device, inputs, forward, perm, partial(_call_instances, device, inputs))
        _compile(plan.arrays, device, inputs)
        return plan

    def make_room(
        self,
        shape: tuple[int, int],
        num_edges: int,
        device: torch.device,
        inputs: InputSpec,
        memory: torch.Tensor | None = None,
    ) -> Fused3SPlan:
        """The plan of no edges, in memory with room for `num_edges` edges; or the plan that is in the given memory."""
        check_size(shape, num_edges, inputs.backward)
        forward = partial(forward_schedule, gpu_limits(device), inputs, device.index)
        plan, arrays = make_room(GraphSize(*shape, num_edges), device, inputs, forward, memory)
        _compile(arrays, device, inputs)
        if memory is None:
            plan.fill(EdgeSource(torch.empty((2, 0), dtype=torch.int64, device=device)))
        return Fused3SPlan(arrays, plan)

    def settled(self, data: Fused3SPlan) -> Fused3SPlan:
        return data.settled()

    def tensors(self, data: Fused3SPlan) -> Fused3SData:
        return data.arrays

    def moved(self, data: Fused3SPlan, device: torch.device) -> Fused3SPlan:
        return Fused3SPlan(map_tensors(data.exact(), lambda tensor: tensor.to(device)))

    def sorted_edges(self, data: Fused3SPlan) -> torch.Tensor | None:
        return data.arrays.edge_ids

    def describe(self, plan: Fused3SPlan) -> str:
        data, lines = plan.exact(), []
        if data.windows:
            by_warp, by_block, split, warp_tiles, split_tiles, segment = data.windows
            num_blocks, warps, _ = data.work_items.shape
            lines = [
                f"{data.tile_offset.numel() - 1} row windows, {len(data.kv_tiles) - 2} KV tiles of 16 keys",
                f"windows by one warp {by_warp}, by one block {by_block}, by several blocks {split} "
                f"({data.num_splits} splits)",
                f"{num_blocks} blocks of {warps} warps a head; warp_tiles {warp_tiles}, split_tiles {split_tiles}, "
                f"sort_segment {segment or 'all'}",
            ]
        elif data.work_items is not None:
            lines = [f"room for {len(data.kv_tiles) - 2} KV tiles of 16 keys, {len(data.work_items)} blocks a head"]
        if data.row_items is not None:
            lines.append(f"edge by edge: {len(data.row_items)} items")
        return "\n  ".join(lines)

    def attend(self, data: Fused3SPlan, call: Call) -> torch.Tensor:
        dtype = call.query.dtype
        if dtype is torch.float32 and (rounded := product_type(dtype)) is not dtype:
            check_out_dtype(call.out_dtype, dtype)
            call = call.to(rounded)
        return launch_forward(data.ready(), call)

    def attend_backward(self, data: Fused3SPlan, given: BackwardCall) -> Gradients:
        data, dtype = data.ready(is_forward=False), given.call.query.dtype
        if dtype is not torch.float32 or (rounded := product_type(dtype)) is dtype:
            return launch_gradients(data, given)
        found = launch_gradients(data, given._replace(call=given.call.to(rounded), into=None))
        return Gradients(*[None if gradient is None else gradient.to(dtype) for gradient in found])


def launch_forward(data: Fused3SData, call: Call) -> torch.Tensor:
    """Queue the forward pass on torch's current stream, by one of the two kernels."""
    _, num_heads, dim = call.query.shape
    by_edge = _takes_edge_kernel(data, call.query, call.edges)
    if dim % 2 and not (by_edge and takes_columns(call)):
        return launch_forward(data, padded_call(call))[..., :dim].contiguous()
    if by_edge:
        return launch_edge_kernel(data, call)
    of_edges = (0, None, True)
    if call.edges is not None:
        of_edges = terms_of(call.edges), call.edges.score, folds_heads(call.edges)
    arguments = call.out_dtype, dim, data.work_items.shape[1], num_heads
    return launch(choose_instance(input_element(call.query.dtype), *arguments, *of_edges), data, call)


def _takes_edge_kernel(data: Fused3SData, query: torch.Tensor, edges: BoundEdges | None) -> bool:
    """Whether a call runs cuda/edges/forward.cu."""
    if data.work_items is None:
        return True
    if edges is not None and not forward_fits_tiles(edges, query.dtype):
        require_edge_arrays(data.row_items)
        return True
    if data.row_items is None:
        return False
    tuning, (_, num_heads, dim) = tuning_for(gpu_limits(query.device)), query.shape
    is_cheap = edges is None or (folds_heads(edges) and edges.edge_values is None)
    terms = 0 if is_cheap else terms_of(edges)
    return goes_edge_by_edge(tuning, data.size, num_heads, dim, terms) is not False


def _call_instances(device: torch.device, inputs: InputSpec, data: Fused3SData) -> list[KernelInstance]:
    """The kernels for `inputs` without edge data and dropout, if their type is known."""
    dtype, num_heads = inputs.dtype, inputs.num_heads
    if dtype is None or inputs.head_dim is None:
        return []
    dim, out_dtype = tile_columns(inputs.head_dim), inputs.out_dtype or dtype
    found = gradient_instances(data, inputs) if inputs.backward else []
    dtype = product_type(dtype)
    if _takes_edge_kernel(data, torch.empty((0, num_heads, dim), dtype=dtype, device=device), None):
        columns = edge_columns(num_heads, inputs.head_dim, dtype)
        return [*found, edge_instance(dtype, out_dtype, columns, num_heads, 0)]
    items = data.work_items.shape[1]
    return [*found, choose_instance(input_element(dtype), out_dtype, dim, items, num_heads)]


def _compile(data: Fused3SData, device: torch.device, inputs: InputSpec) -> None:
    """Compile the kernels of `_call_instances`, side by side."""
    instances = _call_instances(device, inputs, data)
    if len(instances) > 1 and device.type == "cuda":
        compile_ahead(instances, device.index)
    for instance in instances:
        get_kernel(instance, device.index)


BACKENDS = (Fused3SBackend(),)
