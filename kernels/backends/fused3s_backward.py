"""Gradients of `fused3s` over KV tiles: a row pass and a column pass; see cuda/fused3s_backward.cu."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn import functional

from ..dropout import Dropout
from ..formats.gpu_schedule import BlockShape, ScheduleInputs, most_tiles_of
from ..formats.schedule import Schedule
from ..formats.torch_plan import tiles_of_csr
from ..formats.transpose import transpose_csr
from ..fragments import WARP_SIZE
from ..runtime.device import GPULimits, gpu_limits
from ..runtime.jit import ELEMENTS, Element, KernelInstance, get_kernel, input_element, instance_sizes
from ..runtime.launch import launch_kernel
from ..runtime.semaphores import semaphores
from .base import Memory
from .cuda import LOG2E, MAX_DIM, aligned_rows, load_bytes
from .fused3s_edges import DROPOUT
from .fused3s_shapes import COMMON_DIM

TEAMS = 4
FEW_TEAMS = 2  # for heads that several warps share: a block of eight is alone on its SM
WARP_ROW_BYTES = 256  # of a row in one warp: wider heads are shared by two warps or four
GRADIENTS = frozenset(("query", "key", "value"))


class BackwardArguments(NamedTuple):
    """Template arguments of cuda/fused3s_backward.cu.

    Attributes:
        element: of the inputs and gradients.
        dim: dimensions of a head, an even number up to 256.
        columns: the column pass, over A^T; else the row pass.
        dim_warps: warps of a team, each with its part of the columns; a work item goes to a team.
        warps: of a thread block.
        terms: DROPOUT or 0.
    """

    element: Element
    dim: int
    columns: bool
    dim_warps: int
    warps: int
    terms: int


@lru_cache  # on small graphs a call takes as long as its launches: no instance is made twice
def backward_instance(element: Element, dim: int, columns: bool, teams: int = TEAMS, terms: int = 0) -> KernelInstance:
    """The instance of cuda/fused3s_backward.cu for blocks of `teams` teams; the others as in `BackwardArguments`."""
    dim_warps = warps_of_team(element, dim)
    arguments = BackwardArguments(element, dim, columns, dim_warps, teams * dim_warps, terms)
    return KernelInstance("fused3s_backward.cu", "fused3s_backward", arguments)


def warps_of_team(element: Element, dim: int) -> int:
    row_bytes = element.dtype.itemsize * dim
    return 1 if row_bytes <= WARP_ROW_BYTES else 2 if row_bytes <= 2 * WARP_ROW_BYTES else 4


@dataclass(frozen=True, eq=False)
class PassData:
    """A, or A^T, as one pass reads it.

    Attributes:
        kv_tiles: [num_tiles + 2, 24] int32, see `make_kv_tiles`.
        tile_offset: [num_windows + 1] int32, first KV tile of each window.
        row_ids: [16 num_windows] int32, row of each row of the windows, as in `Fused3SData`; None: in their own order.
        schedule: the work items, one a team of warps.
    """

    kv_tiles: torch.Tensor
    tile_offset: torch.Tensor
    row_ids: torch.Tensor | None
    schedule: Schedule


@dataclass(frozen=True, eq=False)
class BackwardData:
    """A graph as cuda/fused3s_backward.cu reads it.

    Attributes:
        by_row: A, for the row pass; its KV tiles are those of the forward pass.
        by_column: A^T, whose rows are in their own order.
        num_rows, num_cols: shape of A.
    """

    by_row: PassData
    by_column: PassData
    num_rows: int
    num_cols: int


def build_backward_data(
    kv_tiles: torch.Tensor,
    tile_offset: torch.Tensor,
    row_ids: torch.Tensor | None,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    num_cols: int,
    num_heads: int = 1,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
) -> BackwardData:
    """Format and schedules of both passes, by torch.

    Args:
        kv_tiles, tile_offset, row_ids: of the forward pass (`Fused3SData`).
        indptr: [num_rows + 1] int64, indices [nnz] int32: CSR pattern of A in the forward pass's order of rows, columns
            ascending.
        num_cols: columns of A.
        num_heads, head_dim, dtype: of the inputs; None where not known.
    """
    num_rows, num_edges = len(indptr) - 1, indices.numel()
    transposed = transpose_csr(indptr, indices, num_cols, row_ids)
    of_rows, of_columns = pass_inputs(kv_tiles.device, num_heads, head_dim, dtype)
    column_tiles, column_offset = tiles_of_csr(transposed.indptr, transposed.indices, num_rows)
    by_row = of_rows.schedule_by_torch(kv_tiles, tile_offset, most_tiles_of(num_edges, num_rows))
    by_column = of_columns.schedule_by_torch(column_tiles, column_offset, most_tiles_of(num_edges, num_cols))
    return BackwardData(
        PassData(kv_tiles, tile_offset, row_ids, by_row),
        PassData(column_tiles, column_offset, None, by_column),
        num_rows,
        num_cols,
    )


def pass_inputs(
    device: torch.device, num_heads: int, head_dim: int | None, dtype: torch.dtype | None = None
) -> tuple[ScheduleInputs, ScheduleInputs]:
    """What the schedules of row pass and column pass depend on besides the graph; dtype None: 16 bits."""
    return _pass_inputs(gpu_limits(device), num_heads, head_dim, dtype, device.index)


@lru_cache  # of a plan on a small graph these sizes would take a tenth of the time
def _pass_inputs(
    gpu: GPULimits, num_heads: int, head_dim: int | None, dtype: torch.dtype | None, device_index: int | None
) -> tuple[ScheduleInputs, ScheduleInputs]:
    element = ELEMENTS[dtype or torch.float16]  # float32: three terms, whatever the precision is now
    dim, teams = head_dim or COMMON_DIM, TEAMS
    if warps_of_team(element, dim) > 1:
        teams = FEW_TEAMS
    # The plan must run with all inputs that it leaves open.
    widest = element if dtype else Element.FLOAT, head_dim or MAX_DIM

    def shape_of(teams: int, columns: bool) -> BlockShape:
        """Teams of a block, and teams that the GPU runs at once."""
        instances = [backward_instance(*each, columns, teams) for each in dict.fromkeys([(element, dim), widest])]
        sizes = instance_sizes(tuple(instances), device_index)
        if teams > 1 and sizes[-1].shared_bytes > gpu.block_shared_bytes:
            return shape_of(teams // 2, columns)
        return BlockShape(teams, gpu.num_sms * sizes[0].resident_blocks(gpu.sm_shared_bytes) * teams)

    return tuple(ScheduleInputs.of_one_shape(num_heads, shape_of(teams, columns)) for columns in (False, True))


def compile_backward(data: BackwardData, dtype: torch.dtype, dim: int, device: torch.device) -> None:
    """Compile both passes without dropout."""
    for instance in _instances(data, input_element(dtype), dim + dim % 2 * (-dim % 8), None):
        get_kernel(instance, device.index)


def launch_backward(
    data: BackwardData,
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    dropout: Dropout | None = None,
    wanted: Collection[str] = GRADIENTS,
    into: Memory | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run both passes on torch's current stream, without waiting for them.

    Args:
        data: A, on the tensors' GPU.
        grad_output: [num_rows, H, d] fp16, bf16 or fp32, any strides.
        query: [num_rows, H, d] fp16, bf16 or fp32, any row and head strides. fp32: products in TF32 terms by
            torch.get_float32_matmul_precision(), see `input_element`.
        key, value: [num_cols, H, d], likewise.
        output: [num_rows, H, d] of the forward pass, fp16, bf16 or fp32.
        lse: [num_rows, H] float32 contiguous, of the forward pass.
        scale: factor of the scores.
        dropout: of the weights, with the seed of the forward pass.
        wanted: names of the gradients that are needed; without "key" and "value" only the row pass runs.
        into: see `Backend.attend_backward`.

    Returns:
        Gradients of query, key and value, of their type; None for key and value where the column pass does not run.
    """
    num_rows, num_heads, dim = query.shape
    if dim % 2:  # as in the forward pass
        padded = (functional.pad(each, (0, -dim % 8)) for each in (grad_output, query, key, value, output))
        grad_output, query, key, value, output = padded
        grads = launch_backward(data, grad_output, query, key, value, output, lse, scale, dropout, wanted)
        return tuple(None if grad is None else grad[..., :dim].contiguous() for grad in grads)
    instances = _instances(data, input_element(query.dtype), dim, dropout)
    if "key" not in wanted and "value" not in wanted:
        del instances[1]
    itemsize = query.itemsize
    row_bytes = load_bytes(dim, itemsize)
    query, key, value = aligned_rows(query, row_bytes), aligned_rows(key, row_bytes), aligned_rows(value, row_bytes)
    grad_output = aligned_rows(grad_output.to(query.dtype), row_bytes)
    output = aligned_rows(output.to(query.dtype).contiguous(), row_bytes)
    grad_query, grad_key, grad_value = into or new_gradients(query, key, value)
    row_stats = query.new_empty((num_rows, num_heads, 2), dtype=torch.float32)
    (query_row, query_head, _), (key_row, key_head, _) = query.stride(), key.stride()
    (value_row, value_head, _), (grad_row, grad_head, _) = value.stride(), grad_output.stride()
    scalars = {
        "query_head_stride": query_head,
        "key_head_stride": key_head,
        "value_head_stride": value_head,
        "grad_head_stride": grad_head,
        "query_row_bytes": query_row * itemsize,
        "key_row_bytes": key_row * itemsize,
        "value_row_bytes": value_row * itemsize,
        "grad_row_bytes": grad_row * itemsize,
        "num_rows": data.num_rows,
        "num_cols": data.num_cols,
        "num_heads": num_heads,
        "scale_log2e": scale * LOG2E,
        "scale": scale,
        "threshold": 0 if dropout is None else dropout.threshold,
        "rescale": 1.0 if dropout is None else 1 / (1 - dropout.rate),
    }
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "grad_output": grad_output,
        "output": output,
        "lse": lse,
        "row_stats": row_stats,
        "grad_query": grad_query,
        "grad_key": grad_key,
        "grad_value": grad_value,
        "seed": None if dropout is None else dropout.seed,
    }
    for instance, of_pass, gradient in zip(
        instances, (data.by_row, data.by_column), (grad_query, grad_key), strict=False
    ):
        schedule = of_pass.schedule
        if not schedule.num_blocks or not num_heads:
            continue
        kernel, warps = get_kernel(instance, query.device.index), instance.arguments.warps
        partial = arrived = None
        if num_partials := schedule.num_splits * num_heads:
            partial = query.new_empty(num_partials * kernel.sizes.partial_floats, dtype=torch.float32)
            arrived = semaphores(num_partials * warps, query.device)
        launch_kernel(
            kernel,
            (schedule.num_blocks, num_heads),
            WARP_SIZE * warps,
            {
                "kv_tiles": of_pass.kv_tiles,
                "work_items": schedule.work_items,
                **tensors,
                "partial": partial,
                "semaphores": arrived,
                "row_ids": of_pass.row_ids,
            },
            kernel.scalars(gradient_heads=gradient.stride(0) // dim, **scalars),
            overlaps=True,
        )
    return (grad_query, grad_key, grad_value) if len(instances) > 1 else (grad_query, None, None)


def new_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Memory for the gradients of tensors [.., H, d], contiguous."""
    return tuple([torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors])


def _instances(data: BackwardData, element: Element, dim: int, dropout: Dropout | None) -> list[KernelInstance]:
    """Instances of the row pass and of the column pass."""
    terms = 0 if dropout is None else DROPOUT
    return [
        backward_instance(element, dim, False, data.by_row.schedule.warps, terms),
        backward_instance(element, dim, True, data.by_column.schedule.warps, terms),
    ]
