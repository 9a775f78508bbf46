"""The forward pass of `fused3s` over KV tiles; see cuda/tiles/forward.cu and fused/planning/schedule.py."""

from functools import lru_cache
from typing import NamedTuple

import torch

from ...backends.base import Call, InputSpec
from ...backends.cuda import (
    MAX_DIM,
    aligned_rows,
    check_out_dtype,
    load_bytes,
    planned_kernel,
    split_scratch,
    stride_scalars,
)
from ...runtime.device import WARP_SIZE, GPULimits
from ...runtime.jit import Element, Kernel, KernelInstance, input_element, instance_sizes
from ...runtime.launch import launch_kernel
from ...terms.edge_data import BoundEdges
from ..data import Fused3SData
from ..edges.features import pack_features
from ..edges.forward import TERM_DEFAULTS, term_scalars
from ..edges.slot_order import in_slot_order
from ..planning.schedule import ScheduleForm
from ..score_values import MOST_TILE_VALUES, VALUES, Members, contiguous, product_unit
from ..shapes import COMMON_DIM, EXPRESSION, KEY_FEATURES, SLICE, TILE, VALUE_FEATURES, tile_columns
from ..tuning import GROUP_WIDTH, WARP_COLUMNS, tuning_for

LEAST_SCALE = 2.0**-120  # replaces a scale of 0: 0 * -infinity is NaN; exp(score * LEAST_SCALE) is 1
VALUE_BYTES = 4 * TILE[0] * TILE[1]  # shared memory per warp and edge value; cuda/tiles/tile_terms.cuh
PACK_FEATURES = KernelInstance("features/pack_features.cu", "pack_features")


class FusedArguments(NamedTuple):
    """Template arguments of cuda/tiles/forward.cu.

    Attributes:
        element: type of query, key and value.
        out_dtype: torch.float32 or the inputs' type.
        dim: dimensions of a head, an even number up to 256.
        heads: heads of a head group, which a block computes together (cuda/tiles/head_group.cuh).
        warps: warps per thread block.
        terms: bits of enum EdgeTerm (cuda/score/score_terms.cuh); with several heads a group a score term alone, see
            `folds_heads`; float32: dropout alone.
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
    items: int,
    heads: int = 1,
    terms: int = 0,
    dim_warps: int = 1,
    score: str | None = None,
) -> KernelInstance:
    """The instance of cuda/tiles/forward.cu for blocks of `items` work items; others as in `FusedArguments`."""
    check_out_dtype(out_dtype, element.dtype)
    arguments = FusedArguments(element, out_dtype, dim, heads, items * dim_warps, terms, dim_warps)
    return KernelInstance("tiles/forward.cu", "fused3s", arguments, score=score)


@lru_cache  # on small graphs the host time of a call counts
def choose_instance(
    element: Element,
    out_dtype: torch.dtype,
    dim: int,
    items: int,
    num_heads: int = 1,
    terms: int = 0,
    score: str | None = None,
    folds: bool = True,
) -> KernelInstance:
    """The instance for `num_heads` heads; `folds`: whether several may form a group."""
    heads = heads_of_group(num_heads, dim) if folds else 1
    is_shared = element.dtype == torch.float32 and heads == 1
    dim_warps = -(-SLICE * -(-dim // SLICE) // WARP_COLUMNS) if is_shared else 1
    return fused_instance(element, out_dtype, dim, items, heads, terms, dim_warps, score)


def heads_of_group(num_heads: int, dim: int) -> int:
    """Heads per head group: the fewest groups of at most GROUP_WIDTH columns, equal in size except the last."""
    width = SLICE // 2 if dim <= SLICE // 2 else SLICE * -(-dim // SLICE)
    num_groups = -(-num_heads // max(1, GROUP_WIDTH // width))
    return -(-num_heads // num_groups)


def forward_schedule(gpu: GPULimits, inputs: InputSpec, device_index: int | None, most_tiles: int) -> ScheduleForm:
    """Schedule of the forward pass for up to `most_tiles` KV tiles; the host knows only this bound."""
    small, large = _forward_schedules(gpu, inputs, device_index)
    return small if small.num_groups * most_tiles < gpu.num_sms * tuning_for(gpu).small_tiles_per_sm else large


@lru_cache  # uncached, these sizes would take a tenth of the time of a small plan
def _forward_schedules(
    gpu: GPULimits, inputs: InputSpec, device_index: int | None
) -> tuple[ScheduleForm, ScheduleForm]:
    """Schedules for a small graph and for any other."""
    tuning = tuning_for(gpu)
    dim = tile_columns(inputs.head_dim or COMMON_DIM)
    dtype, out_dtype = inputs.dtype or torch.float16, inputs.out_dtype
    if inputs.dtype is None or out_dtype is None:
        out_dtype = dtype
    check_out_dtype(out_dtype, dtype)
    element, num_heads = input_element(dtype), inputs.num_heads
    num_groups = -(-num_heads // heads_of_group(num_heads, dim))

    def instances_of(items: int, dim: int, out_dtype: torch.dtype) -> list[KernelInstance]:
        """Instances for heads of `dim` columns: without edge data, and those with the most shared memory."""
        instances = [choose_instance(element, out_dtype, dim, items, num_heads)]
        if inputs.edge_data and dtype != torch.float32:  # edge data of float32 runs edge by edge
            all_terms = EXPRESSION | KEY_FEATURES | VALUE_FEATURES
            instances.append(fused_instance(element, dtype, dim, items, terms=all_terms))
        return instances

    def form_of(items: int) -> ScheduleForm:
        """Blocks of `items` work items, or of fewer, which fit the GPU with these inputs and, in 16 bits, with heads of
        any width."""
        instances, widest = instances_of(items, dim, out_dtype), instances_of(items, MAX_DIM, dtype)
        if not inputs.head_dim:
            instances += widest
        if inputs.dtype is None:
            float_dim = dim if inputs.head_dim else MAX_DIM
            instances.append(choose_instance(Element.FLOAT, torch.float32, float_dim, items, num_heads))
        sizes = instance_sizes(tuple(instances), device_index)
        padded = () if dtype == torch.float32 else instance_sizes(tuple(widest), device_index)
        of_values = MOST_TILE_VALUES * VALUE_BYTES * items if inputs.edge_data else 0
        if items > 1 and any(each.shared_bytes + of_values > gpu.block_shared_bytes for each in (*sizes, *padded)):
            return form_of(items // 2)
        return ScheduleForm(num_groups, items, gpu.num_sms * sizes[0].resident_blocks(gpu.sm_shared_bytes) * items)

    large = tuning.few_warps if dim > tuning.wide_dim else tuning.warps
    if dtype == torch.float32:
        large = max(1, tuning.warps // choose_instance(element, dtype, dim, 1, num_heads).arguments.dim_warps)
    return form_of(tuning.warps), form_of(large)


def launch(instance: KernelInstance, data: Fused3SData, call: Call) -> torch.Tensor:
    """Run the kernel on torch's current stream, without waiting for it.

    The kernel reads `data` before griddepcontrol.wait, so its arrays must be complete on the device at launch.

    Args:
        instance: must match the dimension and types of the tensors and the work items of the schedule.
        data: A, on the tensors' GPU.
        call: query, key and value of fp16, bf16 or fp32, any row and head strides; edge data without types, in CSR
            order, with the terms of the instance.

    Returns:
        [num_rows, H, d] contiguous, of the instance's output type.

    Raises:
        ValueError: the instance does not match tensors or schedule.
    """
    query, key, value, scale, _, lse, edges = call
    element, out_dtype, dim, heads, warps, _, dim_warps = instance.arguments
    num_blocks, items, _ = data.work_items.shape
    if (warps // dim_warps, dim, element.dtype) != (items, query.shape[2], query.dtype):
        raise ValueError(
            f"instance: got {element.dtype}, d = {dim}, {warps // dim_warps} work items a block; the tensors have "
            f"{query.dtype}, d = {query.shape[2]}, and the schedule {items} work items"
        )
    itemsize = query.itemsize
    query, key, value = aligned_rows((query, key, value), load_bytes(dim, itemsize))
    num_rows, num_heads = query.shape[:2]
    num_groups = -(-num_heads // heads)
    output = torch.empty_like(query, dtype=out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    of_edges = {} if edges is None else _edge_tensors(instance.arguments, data, edges, num_heads)
    kernel, num_partials = planned_kernel(instance, query), data.num_splits * num_groups
    num_slots = 0 if data.slot_edges is None else data.slot_edges.numel()
    strides = query.stride(), key.stride(), value.stride()
    unit = product_unit(torch.float16, instance.arguments.terms)
    launch_kernel(
        kernel,
        (num_blocks, num_groups),
        WARP_SIZE * warps,
        {
            "kv_tiles": data.kv_tiles,
            "work_items": data.work_items,
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "lse": lse,
            **split_scratch(kernel, num_partials, num_partials * warps, query),
            "row_ids": data.row_ids,
            **of_edges,
        },
        _scalars(kernel, num_rows, num_slots, num_heads, scale, unit, itemsize, strides, term_scalars(edges)),
        overlaps=True,
    )
    return output


@lru_cache(1024)  # a model repeats the same arguments at every call
def _scalars(
    kernel: Kernel,
    num_rows: int,
    num_slots: int,
    num_heads: int,
    scale: float,
    unit: float,
    itemsize: int,
    strides: tuple[tuple[int, int, int], ...],
    terms: Members,
) -> bytes:
    """The scalars of struct Params."""
    return kernel.scalars(
        num_rows=num_rows,
        num_slots=num_slots,
        num_heads=num_heads,
        sign_bits=(0x80008000 if itemsize == 2 else 0x80000000) if scale < 0 else 0,
        product_scale=max(abs(scale) * unit, LEAST_SCALE),
        **stride_scalars(("query", "key", "value"), strides, itemsize),
        **(TERM_DEFAULTS | dict(terms)),
    )


def _edge_tensors(
    arguments: FusedArguments, data: Fused3SData, edges: BoundEdges, num_heads: int
) -> dict[str, torch.Tensor | None]:
    """Members of struct Params for edge data; queues the packing of feature weights."""
    tensors = contiguous(edges, *VALUES) | {"tile_slots": data.tile_slots, "slot_places": data.slot_places}
    if edges.edge_values is not None:
        tensors["edge_values"] = in_slot_order(edges.edge_values, data.slot_edges, dim=1)
    if edges.padded_features is not None:
        # As PackedWeights of cuda/tiles/tile_features.cuh.
        key_words, value_words = 256 * -(-arguments.dim // 32), 128 * -(-arguments.dim // SLICE)
        tensors["features"] = in_slot_order(edges.padded_features, data.slot_edges)
        tensors["feature_weights"] = pack_features(PACK_FEATURES, edges, num_heads, key_words, value_words)
    if edges.dropout is not None:
        tensors["dropout_seed"] = edges.dropout.seed
    return tensors
