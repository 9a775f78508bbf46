"""`fused3s`: the fast fused kernel; see cuda/fused3s.cu and formats/schedule.py."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..edge_data import BoundEdges
from ..formats.gpu_csr import MOST_EDGES
from ..formats.gpu_schedule import BlockShape, ScheduleInputs
from ..formats.schedule import TileSlots
from ..fragments import WARP_SIZE
from ..runtime.device import GPULimits, gpu_limits
from ..runtime.jit import ELEMENTS, Element, KernelInstance, get_kernel, input_element, instance_sizes
from ..runtime.launch import launch_kernel
from ..runtime.semaphores import semaphores
from .base import Call, Gradients, InputSpec, Memory
from .cuda import LOG2E, MAX_DIM, CudaBackend, check_out_dtype, checked_inputs, load_bytes, product_type
from .fused3s_edges import (
    BIAS,
    DROPOUT,
    KEY_FEATURES,
    MULTIPLIER,
    VALUE_FEATURES,
    compile_edge_kernel,
    contiguous,
    launch_edge_kernel,
    pad_weights,
    term_scalars,
    terms_of,
)
from .fused3s_gradients import launch_gradients
from .fused3s_planning import Fused3SData, MadePlan, check_size, make_room, plan_graph, replan
from .fused3s_shapes import COMMON_DIM, SLICE
from .kernel_choice import GraphSize, takes_edges

WARPS = 4
FEW_WARPS = 2  # for wide heads: the rings of four warps leave a block alone on its SM, or do not fit it at all
WIDE_DIM = 192  # heads wider than this take FEW_WARPS where the graph has work for all SMs
SMALL_TILES_PER_SM = 12  # a graph with fewer KV tiles cannot give every warp of the GPU one
WARP_COLUMNS = 64  # of one float32 head: wider ones go to teams of warps, or few warps' rings would fill an SM
GROUP_WIDTH = 64  # most columns of a head group: wider ones leave fewer warps on an SM (kernels/NOTES.md)
LEAST_SCALE = 2.0**-120  # in place of 0, which times -infinity is NaN; any score times it has the exponential 1
PACK_THREADS = 256  # as in cuda/pack_features.cu
PACK_FEATURES = KernelInstance("pack_features.cu", "pack_features")


class FusedArguments(NamedTuple):
    """Template arguments of cuda/fused3s.cu.

    Attributes:
        element: of query, key and value.
        out_dtype: torch.float32 or the inputs' type.
        dim: dimensions of a head, an even number up to 256.
        heads: heads of a head group, which a block computes together (cuda/head_group.cuh).
        warps: of a thread block.
        terms: bits of enum EdgeTerm (cuda/score_terms.cuh), only with one head a group; float32: dropout alone.
        dim_warps: warps of a team, which share the columns of a float32 head; a work item goes to a team.
    """

    element: Element
    out_dtype: torch.dtype
    dim: int
    heads: int
    warps: int
    terms: int
    dim_warps: int = 1


def fused_instance(
    element: Element,
    out_dtype: torch.dtype,
    dim: int,
    items: int = WARPS,
    heads: int = 1,
    terms: int = 0,
    dim_warps: int = 1,
) -> KernelInstance:
    """The instance of cuda/fused3s.cu for blocks of `items` work items; the other arguments as in `FusedArguments`."""
    arguments = FusedArguments(element, out_dtype, dim, heads, items * dim_warps, terms, dim_warps)
    return KernelInstance("fused3s.cu", "fused3s", arguments)


@lru_cache  # on small graphs a call takes as long as its launch: no instance is made twice
def choose_instance(
    element: Element, out_dtype: torch.dtype, dim: int, items: int, num_heads: int = 1, terms: int = 0
) -> KernelInstance:
    """The instance that computes `num_heads` heads."""
    heads = 1 if terms else heads_of_group(num_heads, dim)
    is_shared = element.dtype == torch.float32 and heads == 1
    dim_warps = -(-SLICE * -(-dim // SLICE) // WARP_COLUMNS) if is_shared else 1
    return fused_instance(element, out_dtype, dim, items, heads, terms, dim_warps)


class Fused3SBackend(CudaBackend):
    name = "fused3s"
    summary = "the fast fused kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16, bf16 and float32"
    data_type = Fused3SData
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
        return MOST_EDGES  # numbered by the planning kernels

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> Fused3SData:
        data = plan_graph(graph, device, inputs, _block_shapes(gpu_limits(device), inputs, device.index), perm)
        _compile(data, device, inputs)
        return data

    def make_room(self, shape: tuple[int, int], num_edges: int, device: torch.device, inputs: InputSpec) -> MadePlan:
        """A plan with room for `num_edges` edges, to be filled."""
        shapes = _block_shapes(gpu_limits(device), inputs, device.index)
        check_size(shape, num_edges, inputs.backward)
        made = make_room(GraphSize(*shape, num_edges), device, inputs, shapes)
        _compile(made.bounded, device, inputs)
        return made

    def rebuild(self, data: Fused3SData, device: torch.device, inputs: InputSpec) -> Fused3SData:
        data = replan(data, device, inputs, _block_shapes(gpu_limits(device), inputs, device.index))
        _compile(data, device, inputs)
        return data

    def raise_graph_errors(self, data: Fused3SData) -> None:
        if data.progress is not None:
            data.progress.raise_errors()

    def sorted_edges(self, data: Fused3SData) -> torch.Tensor | None:
        return data.edge_ids

    def describe(self, data: Fused3SData) -> str:
        data, lines = data if data.progress is None else data.progress.exact_plan(), []
        if data.schedule and data.schedule.windows:
            by_warp, by_block, split = data.schedule.windows
            lines = [
                f"{data.tile_offset.numel() - 1} row windows, {len(data.kv_tiles) - 2} KV tiles of 16 keys",
                f"windows by one warp {by_warp}, by one block {by_block}, by several blocks {split} "
                f"({data.schedule.num_splits} splits)",
                f"{data.schedule.num_blocks} blocks of {data.schedule.warps} warps a head; {data.schedule.heuristic}",
            ]
        elif data.schedule:
            lines = [f"room for {len(data.kv_tiles) - 2} KV tiles of 16 keys, {data.schedule.num_blocks} blocks a head"]
        if data.by_edge:
            lines.append(f"edge by edge: {data.by_edge.work.items.shape[0]} items")
        return "\n  ".join(lines)

    def attend(self, data: Fused3SData, call: Call) -> torch.Tensor:
        data = data.ready()
        if (dtype := product_type(call.query.dtype)) != call.query.dtype:
            check_out_dtype(call.out_dtype, call.query.dtype)
            call = call.to(dtype)
        query, key, value, scale, out_dtype, lse, edges = call
        num_heads, dim = query.shape[1:]
        if dim % 2:  # rows of pairs of elements are what the kernel can copy
            padded = (functional.pad(each, (0, -dim % 8)) for each in (query, key, value))
            edges = None if edges is None else pad_weights(edges, -dim % 8)
            return self.attend(data, Call(*padded, scale, out_dtype, lse, edges))[..., :dim].contiguous()
        if _takes_edge_kernel(data, query.dtype, num_heads, dim, edges):
            return launch_edge_kernel(data.by_edge, query, key, value, scale, out_dtype, lse, edges)
        terms = terms_of(edges)
        element = input_element(query.dtype)
        instance = choose_instance(element, out_dtype, dim, data.schedule.warps, num_heads, terms)
        return launch(instance, data, query, key, value, scale, lse, edges)

    def attend_backward(
        self,
        data: Fused3SData,
        call: Call,
        output: torch.Tensor,
        grad_output: torch.Tensor,
        wanted: frozenset[str],
        into: Memory | None = None,
    ) -> Gradients:
        data, dtype = data.ready(is_forward=False), call.query.dtype
        if (rounded := product_type(dtype)) != dtype:
            call, into = call.to(rounded), None
        tensors = (grad_output.to(rounded), *call[:3], output, call.lse)
        found = launch_gradients(data.backward, data.by_edge, *tensors, call.scale, call.edges, wanted, into)
        if rounded != dtype:
            found = Gradients(*[None if gradient is None else gradient.to(dtype) for gradient in found])
        return found


def _takes_edge_kernel(
    data: Fused3SData, dtype: torch.dtype, num_heads: int, dim: int, edges: BoundEdges | None
) -> bool:
    """Whether a call runs cuda/fused3s_edges.cu."""
    if data.by_edge is None or data.schedule is None:
        return data.by_edge is not None
    terms = terms_of(edges)
    if dtype == torch.float32 and terms & ~DROPOUT:
        return True  # the other kernel has none of these terms in float32
    return takes_edges(data.size, num_heads, dim, terms) is not False


def heads_of_group(num_heads: int, dim: int) -> int:
    """Heads of a head group: the fewest groups of at most GROUP_WIDTH columns, of equal size but for the last."""
    width = SLICE // 2 if dim <= SLICE // 2 else SLICE * -(-dim // SLICE)
    num_groups = -(-num_heads // max(1, GROUP_WIDTH // width))
    return -(-num_heads // num_groups)


@lru_cache  # of a plan on a small graph these sizes would take a tenth of the time
def _block_shapes(gpu: GPULimits, inputs: InputSpec, device_index: int | None = None) -> ScheduleInputs:
    """What the schedule depends on besides the graph."""
    dim = _even(inputs.head_dim or COMMON_DIM)
    dtype, out_dtype = inputs.dtype or torch.float16, inputs.out_dtype
    if inputs.dtype is None or out_dtype is None:
        out_dtype = dtype
    check_out_dtype(out_dtype, dtype)
    element, num_heads = input_element(dtype), inputs.num_heads

    def instances_of(items: int) -> list[KernelInstance]:
        """The instance of the inputs, and those with most shared memory of all inputs that the plan leaves open."""
        widest = dim if inputs.head_dim else MAX_DIM
        instances = [choose_instance(element, out_dtype, dim, items, num_heads)]
        if not inputs.head_dim:
            instances.append(choose_instance(element, dtype, widest, items, num_heads))
        if inputs.dtype is None:
            instances.append(choose_instance(Element.FLOAT, torch.float32, widest, items, num_heads))
        if inputs.edge_data and dtype != torch.float32:  # the edge-by-edge kernel takes those of float32
            all_terms = BIAS | MULTIPLIER | KEY_FEATURES | VALUE_FEATURES
            instances.append(fused_instance(element, dtype, widest, items, terms=all_terms))
        return instances

    def shape_of(items: int) -> BlockShape:
        sizes = instance_sizes(tuple(instances_of(items)), device_index)
        if items > 1 and any(each.shared_bytes > gpu.block_shared_bytes for each in sizes):
            return shape_of(items // 2)
        return BlockShape(items, gpu.num_sms * sizes[0].resident_blocks(gpu.sm_shared_bytes) * items)

    small = shape_of(WARPS)
    if dtype == torch.float32:
        large = shape_of(max(1, WARPS // choose_instance(element, dtype, dim, 1, num_heads).arguments.dim_warps))
    else:
        large = shape_of(FEW_WARPS if dim > WIDE_DIM else WARPS)
    num_groups = -(-num_heads // heads_of_group(num_heads, dim))
    return ScheduleInputs(num_groups, gpu.num_sms * SMALL_TILES_PER_SM, small, large)


def _even(dim: int) -> int:
    """Columns of a head as `attend` pads them."""
    return dim + (-dim % 8 if dim % 2 else 0)


def _compile(data: Fused3SData, device: torch.device, inputs: InputSpec) -> None:
    """Compile the kernel of `inputs` without edge data, where their type is known."""
    dtype, num_heads = inputs.dtype, inputs.num_heads
    if dtype is None or inputs.head_dim is None:
        return
    dim, out_dtype = _even(inputs.head_dim), inputs.out_dtype or dtype
    dtype = product_type(dtype)
    if _takes_edge_kernel(data, dtype, num_heads, dim, None):
        compile_edge_kernel(dtype, out_dtype, dim, num_heads, device)
    else:
        instance = choose_instance(input_element(dtype), out_dtype, dim, data.schedule.warps, num_heads)
        get_kernel(instance, device.index)


def launch(
    instance: KernelInstance,
    data: Fused3SData,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None = None,
    edges: BoundEdges | None = None,
) -> torch.Tensor:
    """Run the kernel on torch's current stream, without waiting for it.

    The kernel reads `data` before griddepcontrol.wait: its arrays must be complete on the device, not only queued.

    Args:
        instance: its dimension, types and work items must be those of the tensors and of the schedule.
        data: A, on the tensors' GPU.
        query: [num_rows, H, d] fp16, bf16 or float32, any row and head strides.
        key, value: [num_cols, H, d], likewise.
        scale: factor of the scores.
        lse: [num_rows, H] float32 contiguous, filled with the log of each row's sum of exp(scale * score), -inf for a
            row without an edge; None: not wanted.
        edges: terms other than types, in CSR order; those of the instance.

    Returns:
        [num_rows, H, d] contiguous, of the instance's output type.

    Raises:
        ValueError: the instance does not fit the tensors or the schedule, or gradients are asked for.
    """
    schedule = data.schedule
    element, out_dtype, dim, heads, warps, _, dim_warps = instance.arguments
    if (warps // dim_warps, dim, element.dtype) != (schedule.warps, query.shape[2], query.dtype):
        raise ValueError(
            f"instance: got {element.dtype}, d = {dim}, {warps // dim_warps} work items a block; the tensors have "
            f"{query.dtype}, d = {query.shape[2]}, and the schedule {schedule.warps} work items"
        )
    itemsize = query.itemsize
    query, key, value = checked_inputs("fused3s", out_dtype, query, key, value, row_bytes=load_bytes(dim, itemsize))
    num_rows, num_heads = query.shape[:2]
    num_groups = -(-num_heads // heads)
    output = torch.empty_like(query, dtype=out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    of_edges = {} if edges is None else _edge_tensors(instance.arguments, data.slots, edges, num_heads)
    kernel = get_kernel(instance, query.device.index)
    partial = arrived = None
    if num_partials := schedule.num_splits * num_groups:
        # Scratch memory of this call alone: plans may run on several streams.
        partial = query.new_empty(num_partials * kernel.sizes.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_partials * warps, query.device)
    (query_row, query_head, _), (key_row, key_head, _), (value_row, value_head, _) = (
        query.stride(),
        key.stride(),
        value.stride(),
    )
    launch_kernel(
        kernel,
        (schedule.num_blocks, num_groups),
        WARP_SIZE * warps,
        {
            "kv_tiles": data.kv_tiles,
            "work_items": schedule.work_items,
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "lse": lse,
            "partial": partial,
            "semaphores": arrived,
            "row_ids": data.row_ids,
            **of_edges,
        },
        kernel.scalars(
            query_head_stride=query_head,
            key_head_stride=key_head,
            value_head_stride=value_head,
            query_row_bytes=query_row * itemsize,
            key_row_bytes=key_row * itemsize,
            value_row_bytes=value_row * itemsize,
            num_rows=num_rows,
            num_heads=num_heads,
            sign_bits=(0x80008000 if itemsize == 2 else 0x80000000) if scale < 0 else 0,
            scale_log2e=max(abs(scale) * LOG2E, LEAST_SCALE),
            clamp_log2e=0.0 if edges is None or edges.clamp is None else edges.clamp * LOG2E,
            **term_scalars(edges),
        ),
        overlaps=True,
    )
    return output


def _edge_tensors(
    arguments: FusedArguments, slots: TileSlots | None, edges: BoundEdges, num_heads: int
) -> dict[str, torch.Tensor | None]:
    """Members of struct Params for edge data; weights of features are packed first."""
    bias, multiplier = contiguous(edges.bias, edges.multiplier)
    tensors = {"bias": bias, "multiplier": multiplier}
    if slots is not None:
        tensors |= {"tile_slots": slots.tile_slots, "slot_edges": slots.slot_edges, "slot_places": slots.slot_places}
    if edges.padded_features is not None:
        tensors |= {
            "features": edges.padded_features.contiguous(),
            "feature_weights": pack_features(arguments, edges, num_heads),
        }
    if edges.dropout is not None:
        tensors["dropout_seed"] = edges.dropout.seed
    return tensors


def pack_features(arguments: FusedArguments, edges: BoundEdges, num_heads: int) -> torch.Tensor:
    """[H, 2 words] 16-bit: the weights of features as an instance reads them (PackedWeights of cuda/tile_features.cuh),
    queued on torch's current stream."""
    dim, terms = arguments.dim, arguments.terms
    key_words = 256 * -(-dim // 32) if terms & KEY_FEATURES else 0
    value_words = 128 * -(-dim // SLICE) if terms & VALUE_FEATURES else 0
    packed = edges.padded_features.new_empty((num_heads, 2 * (key_words + value_words)))
    key_weight, value_weight = contiguous(edges.key_weight, edges.value_weight)
    kernel = get_kernel(PACK_FEATURES, packed.device.index)
    launch_kernel(
        kernel,
        (-(-(key_words + value_words) // PACK_THREADS), num_heads),
        PACK_THREADS,
        {"packed": packed, "key_weight": key_weight, "value_weight": value_weight},
        kernel.scalars(dim=dim, num_features=edges.num_features, key_words=key_words, value_words=value_words),
        overlaps=True,
    )
    return packed
