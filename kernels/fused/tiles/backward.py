"""Gradients of `fused3s` over KV tiles: a row pass and a column pass; see cuda/tiles/backward.cu."""

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import torch

from ...backends.base import QKV, BackwardCall, Gradients
from ...backends.cuda import LOG2E, MAX_DIM, aligned_rows, load_bytes, planned_kernel, split_scratch, stride_scalars
from ...runtime.device import WARP_SIZE, GPULimits, gpu_limits
from ...runtime.jit import (
    ELEMENTS,
    Element,
    Kernel,
    KernelInstance,
    KernelSizes,
    input_element,
    instance_sizes,
)
from ...runtime.launch import launch_kernel
from ...terms.edge_data import BoundEdges
from ..data import Fused3SData
from ..edges.slot_order import in_slot_order
from ..planning.schedule import ScheduleForm
from ..score_values import (
    SCORE_DEFAULTS,
    VALUES,
    Members,
    contiguous,
    gradient_members,
    new_value_gradients,
    score_scalars,
    summed_gradients,
    terms_of,
)
from ..shapes import COMMON_DIM, tile_columns
from ..tuning import WARP_ROW_BYTES, tuning_for


class BackwardArguments(NamedTuple):
    """Template arguments of cuda/tiles/backward.cu.

    Attributes:
        element: type of inputs and gradients.
        dim: dimensions of a head, an even number up to 256.
        columns: True for the column pass (over A^T), False for the row pass.
        dim_warps: warps per team, which share the columns of a head; a work item goes to a team.
        warps: warps per thread block.
        terms: bits of DROPOUT and EXPRESSION; the latter in 16 bits alone.
    """

    element: Element
    dim: int
    columns: bool
    dim_warps: int
    warps: int
    terms: int


@lru_cache  # on small graphs the host time of a call counts
def backward_instance(
    element: Element, dim: int, columns: bool, teams: int, terms: int = 0, score: str | None = None
) -> KernelInstance:
    """The instance of cuda/tiles/backward.cu for blocks of `teams` teams; see `BackwardArguments`."""
    dim_warps = warps_of_team(element, dim)
    arguments = BackwardArguments(element, dim, columns, dim_warps, teams * dim_warps, terms)
    return KernelInstance("tiles/backward.cu", "fused3s_backward", arguments, score=score)


def warps_of_team(element: Element, dim: int) -> int:
    row_bytes = element.dtype.itemsize * dim
    return 1 if row_bytes <= WARP_ROW_BYTES else 2 if row_bytes <= 2 * WARP_ROW_BYTES else 4


def pass_schedules(
    device: torch.device, num_heads: int, head_dim: int | None, dtype: torch.dtype | None = None
) -> tuple[ScheduleForm, ScheduleForm]:
    """Schedules of the row pass and the column pass; dtype None means 16 bits."""
    return _pass_schedules(gpu_limits(device), num_heads, head_dim, dtype, device.index)


@lru_cache  # uncached, these sizes would take a tenth of the time of a small plan
def _pass_schedules(
    gpu: GPULimits, num_heads: int, head_dim: int | None, dtype: torch.dtype | None, device_index: int | None
) -> tuple[ScheduleForm, ScheduleForm]:
    tuning = tuning_for(gpu)
    element = ELEMENTS[dtype or torch.float16]  # float32: three TF32 terms, whatever the current precision
    dim = tile_columns(head_dim or COMMON_DIM)  # as launched: an odd width gets more columns
    # A plan made without dtype or head_dim must fit every later call; one of 16 bits also heads of MAX_DIM columns.
    widest = element if dtype else Element.FLOAT, tile_columns(head_dim or MAX_DIM)
    padded = [] if dtype == torch.float32 else [(element, MAX_DIM)]

    def form_of(teams: int, columns: bool) -> ScheduleForm:
        """Teams per block, and teams that the GPU runs at once."""

        def sizes_of(shapes: list[tuple[Element, int]]) -> tuple[KernelSizes, ...]:
            instances = [backward_instance(*shape, columns, teams) for shape in dict.fromkeys(shapes)]
            return instance_sizes(tuple(instances), device_index) if instances else ()

        sizes = sizes_of([(element, dim), widest])
        if teams > 1 and any(each.shared_bytes > gpu.block_shared_bytes for each in (*sizes, *sizes_of(padded))):
            return form_of(teams // 2, columns)
        resident_teams = gpu.num_sms * sizes[0].resident_blocks(gpu.sm_shared_bytes) * teams
        return ScheduleForm(num_heads, teams, resident_teams, columns)

    teams = tuning.teams if warps_of_team(element, dim) == 1 else tuning.few_teams
    return form_of(teams, False), form_of(teams, True)


def launch_backward(data: Fused3SData, given: BackwardCall) -> Gradients:
    """Queue both passes on torch's current stream; only the row pass if neither "key" nor "value" is wanted.

    Args:
        data: A with the arrays of the backward pass over KV tiles, on the tensors' GPU.
        given: query, key and value of fp16, bf16 or fp32, any row and head strides, d even; a dropout with the seed
            of the forward pass, no edge data but what `backward_fits_tiles` allows. fp32: TF32 terms by
            torch.get_float32_matmul_precision(), see `input_element`.
    """
    (query, key, value, scale, _, lse, edges), output, grad_output, wanted, into, grad_lse = given
    dropout = None if edges is None else edges.dropout
    num_rows, num_heads, dim = query.shape
    instances = pass_instances(data, input_element(query.dtype), dim, edges)
    if not wanted & {"key", "value", "column_values"}:
        del instances[1]
    itemsize = query.itemsize
    row_bytes = load_bytes(dim, itemsize)
    if grad_output.dtype is not query.dtype:
        grad_output = grad_output.to(query.dtype)
    inputs = query, key, value, grad_output, output.to(query.dtype).contiguous()
    query, key, value, grad_output, output = aligned_rows(inputs, row_bytes)
    grad_query, grad_key, grad_value = into or new_gradients(query, key, value)
    row_stats = query.new_empty((num_rows, num_heads, 2), dtype=torch.float32)
    num_slots = 0 if data.slot_edges is None else data.slot_edges.numel()
    sizes = data.size.num_rows, data.size.num_cols, num_slots, num_heads
    strides = query.stride(), key.stride(), value.stride(), grad_output.stride()
    mask = (0, 1.0) if dropout is None else (dropout.threshold, dropout.rescale)
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "grad_output": grad_output,
        "output": output,
        "lse": lse.contiguous(),
        "lse_gradient": None if grad_lse is None else grad_lse.contiguous(),
        "row_stats": row_stats,
        "grad_query": grad_query,
        "grad_key": grad_key,
        "grad_value": grad_value,
        "seed": None if dropout is None else dropout.seed,
    }
    of_values = {}
    if edges is not None and edges.score is not None:
        of_values = new_value_gradients(edges, query, data, wanted)
        if (of_edges := of_values.get("edge_values")) is not None:  # the kernel writes [H, nnz, n]
            of_values["edge_values"] = of_edges.view(num_heads, -1, of_edges.shape[2]).transpose(0, 1)
        tensors |= contiguous(edges, *VALUES) | gradient_members(of_values)
    passes = (
        (data.kv_tiles, data.row_work_items, data.row_splits, data.row_ids, grad_query),
        (data.column_tiles, data.column_work_items, data.column_splits, None, grad_key),
    )
    for instance, (kv_tiles, work_items, num_splits, row_ids, gradient) in zip(instances, passes, strict=False):
        if not gradient.numel():
            continue
        if edges is not None and edges.edge_values is not None:
            tensors |= _slots(data, edges.edge_values, instance.arguments.columns)
        kernel, warps = planned_kernel(instance, query), instance.arguments.warps
        num_partials = num_splits * num_heads
        launch_kernel(
            kernel,
            (work_items.shape[0], num_heads),
            WARP_SIZE * warps,
            {
                "kv_tiles": kv_tiles,
                "work_items": work_items,
                **tensors,
                **split_scratch(kernel, num_partials, num_partials * warps, query),
                "row_ids": row_ids,
            },
            _scalars(kernel, sizes, gradient.stride(0) // dim, scale, itemsize, strides, mask, score_scalars(edges)),
            overlaps=True,
        )
    found = wanted_of(grad_query, grad_key, grad_value, wanted)
    return found._replace(**summed_gradients(edges, of_values)) if of_values else found


def _slots(data: Fused3SData, edge_values: torch.Tensor, columns: bool) -> dict[str, torch.Tensor]:
    """Members of struct Params for values of edges, of one pass."""
    names = "tile_slots", "slot_edges", "slot_places"
    found = {name: getattr(data, f"column_{name}" if columns else name) for name in names}
    return found | {"edge_values": in_slot_order(edge_values, found["slot_edges"], dim=1, of_columns=columns)}


@lru_cache(1024)  # a model repeats the same arguments at every call
def _scalars(
    kernel: Kernel,
    sizes: tuple[int, int, int, int],
    gradient_heads: int,
    scale: float,
    itemsize: int,
    strides: tuple[tuple[int, int, int], ...],
    mask: tuple[int, float],
    terms: Members,
) -> bytes:
    """The scalars of struct Params; `mask`: (dropout threshold, factor of kept weights)."""
    return kernel.scalars(
        **dict(zip(("num_rows", "num_cols", "num_slots", "num_heads"), sizes, strict=True)),
        gradient_heads=gradient_heads,
        scale_log2e=scale * LOG2E,
        scale=scale,
        threshold=mask[0],
        rescale=mask[1],
        **(SCORE_DEFAULTS | dict(terms)),
        **stride_scalars(("query", "key", "value", "grad"), strides, itemsize),
    )


def wanted_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, wanted: Collection[str]) -> Gradients:
    """The wanted ones of the three gradients."""
    if wanted >= QKV:
        return Gradients(query, key, value)
    given = {"query": query, "key": key, "value": value}
    return Gradients(**{name: gradient for name, gradient in given.items() if name in wanted})


def new_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous memory for the gradients of tensors [.., H, d]."""
    return tuple([torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors])


def pass_instances(data: Fused3SData, element: Element, dim: int, edges: BoundEdges | None) -> list[KernelInstance]:
    """Instances of the row pass and of the column pass."""
    terms, score = terms_of(edges), None if edges is None else edges.score
    return [
        backward_instance(element, dim, False, data.row_work_items.shape[1], terms, score),
        backward_instance(element, dim, True, data.column_work_items.shape[1], terms, score),
    ]
