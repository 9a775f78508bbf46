"""Gradients of `fused3s` over KV tiles: a row pass and a column pass; see cuda/fused3s_backward.cu."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional

from ..dropout import Dropout
from ..formats.gpu_schedule import BlockShape, ScheduleInputs, most_tiles_of
from ..formats.schedule import Schedule
from ..formats.torch_plan import tiles_of_csr
from ..formats.transpose import transpose_csr
from ..fragments import WARP_SIZE
from ..runtime.device import GPULimits, gpu_limits
from ..runtime.jit import ELEMENTS, Element, cpp_name, get_kernel, input_element
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores
from .base import Memory
from .cuda import LOAD_BYTES, MAX_DIM, aligned_rows
from .fused3s_edges import DROPOUT
from .fused3s_shapes import COMMON_DIM, RECORDS, RESERVED_BYTES, SLICE, SLOT_BYTES, STAGES

TEAMS = 4
FEW_TEAMS = 2  # for heads that several warps share: a block of eight is alone on its SM
WARP_ROW_BYTES = 256  # of a row in one warp: wider heads are shared by two warps or four
# As in cuda/team.cuh and cuda/fused3s_backward.cu:
TEAM_BYTES = {1: 0, 2: 4 * 2048, 4: 5 * 2048}  # of struct TeamMemory, by warps
STATS_BYTES = 128  # of a stage: struct RowStats of 16 rows
GRADIENTS = frozenset(("query", "key", "value"))


@dataclass(frozen=True)
class BackwardKernelSpec:
    """One instance of cuda/fused3s_backward.cu.

    Attributes:
        element: of the inputs and gradients.
        dim: dimensions of a head, an even number up to 256.
        columns: the column pass, over A^T; else the row pass.
        teams: teams of warps of a thread block, each with its own work item.
        terms: DROPOUT or 0.
    """

    element: Element
    dim: int
    columns: bool
    teams: int = TEAMS
    terms: int = 0

    source: ClassVar[str] = "fused3s_backward.cu"

    @property
    def name(self) -> str:
        return cpp_name(
            "fused3s_backward", self.element, self.dim, self.columns, self.dim_warps, self.warps, self.terms
        )

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of a cp.async, which each row of a head must be aligned to."""
        return math.gcd(self.itemsize * self.dim, LOAD_BYTES)

    @cached_property
    def itemsize(self) -> int:
        return self.element.dtype.itemsize

    @cached_property
    def dim_warps(self) -> int:
        """Warps of a team, each with its part of the columns."""
        row_bytes = self.itemsize * self.dim
        return 1 if row_bytes <= WARP_ROW_BYTES else 2 if row_bytes <= 2 * WARP_ROW_BYTES else 4

    @cached_property
    def warps(self) -> int:
        """Warps of a thread block."""
        return self.teams * self.dim_warps

    @cached_property
    def slices(self) -> int:
        """Slices of 16 columns of a warp."""
        return -(-self.dim // (SLICE * self.dim_warps))

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: struct BackwardMemory, and TeamMemory of each team."""
        whole_lines = 4 if self.itemsize == 4 and self.slices == 3 else self.slices
        stage = 2 * 16 * self.itemsize * SLICE * whole_lines + STATS_BYTES
        records = RECORDS * SLOT_BYTES  # of a warp; those of all begin at a multiple
        ring = -(-self.warps * STAGES * stage // records) * records
        return ring + self.warps * records + self.teams * TEAM_BYTES[self.dim_warps]

    @cached_property
    def partial_floats(self) -> int:
        """Floats of struct GradientPartial."""
        return (2 if self.columns else 1) * self.dim_warps * self.slices * 16 * SLICE

    def blocks_per_sm(self, gpu: GPULimits) -> int:
        """Blocks that run on an SM at once; warps by registers are max_backward_warps of the kernel."""
        width = SLICE * self.slices
        if self.itemsize == 4:
            one_term = self.element is Element.TF32
            max_warps = 16 if width <= 16 else 12 if width <= 32 or (one_term and not self.columns) else 8
        elif width <= 64:
            max_warps = 12 if self.columns else 16
        else:
            is_tight = self.terms or gpu.capability != (9, 0)
            max_warps = 8 if self.columns or self.dim_warps > 1 or (is_tight and self.dim > 112) else 12
        return max(1, min(gpu.sm_shared_bytes // (self.shared_bytes + RESERVED_BYTES), max_warps // self.warps))


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
    return _pass_inputs(gpu_limits(device), num_heads, head_dim, dtype)


@lru_cache  # of a plan on a small graph these sizes would take a tenth of the time
def _pass_inputs(
    gpu: GPULimits, num_heads: int, head_dim: int | None, dtype: torch.dtype | None
) -> tuple[ScheduleInputs, ScheduleInputs]:
    return tuple(
        ScheduleInputs.of_one_shape(num_heads, _teams(gpu, head_dim, dtype, columns)) for columns in (False, True)
    )


def _teams(gpu: GPULimits, head_dim: int | None, dtype: torch.dtype | None, columns: bool) -> BlockShape:
    """Teams of a block, and teams that the GPU runs at once."""
    element = ELEMENTS[dtype or torch.float16]  # float32: three terms, whatever the precision is now
    spec = BackwardKernelSpec(element, head_dim or COMMON_DIM, columns)
    if spec.dim_warps > 1:
        spec = replace(spec, teams=FEW_TEAMS)
    # The plan must run with all inputs that it leaves open.
    widest = replace(spec, dim=head_dim or MAX_DIM, element=element if dtype else Element.FLOAT)
    while spec.teams > 1 and replace(widest, teams=spec.teams).shared_bytes > gpu.block_shared_bytes:
        spec = replace(spec, teams=spec.teams // 2)
    return BlockShape(spec.teams, gpu.num_sms * spec.blocks_per_sm(gpu) * spec.teams)


def compile_backward(data: BackwardData, dtype: torch.dtype, dim: int, device: torch.device) -> None:
    """Compile both passes without dropout."""
    for spec in _specs(data, input_element(dtype), dim + dim % 2 * (-dim % 8), None):
        get_kernel(spec, device.index)


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
    specs = _specs(data, input_element(query.dtype), dim, dropout)[: 2 if {"key", "value"} & set(wanted) else 1]
    query, key, value = (aligned_rows(each, specs[0].copy_bytes) for each in (query, key, value))
    grad_output = aligned_rows(grad_output.to(query.dtype), specs[0].copy_bytes)
    output = aligned_rows(output.to(query.dtype).contiguous(), specs[0].copy_bytes)
    grad_query, grad_key, grad_value = into or new_gradients(query, key, value)
    row_stats = query.new_empty((num_rows, num_heads, 2), dtype=torch.float32)
    sizes = data.num_rows, data.num_cols, num_heads
    factors = 0, 1.0
    if dropout is not None:
        factors = dropout.threshold, 1 / (1 - dropout.rate)
    strides = [each.stride() for each in (query, key, value, grad_output)]
    for spec, of_pass in zip(specs, (data.by_row, data.by_column), strict=False):
        schedule, pitch = of_pass.schedule, (grad_query if of_pass is data.by_row else grad_key).stride(0)
        if not schedule.num_blocks or not num_heads:
            continue
        partial = arrived = None
        if num_partials := schedule.num_splits * num_heads:
            partial = query.new_empty(num_partials * spec.partial_floats, dtype=torch.float32)
            arrived = semaphores(num_partials * spec.warps, query.device)
        launch_kernel(
            get_kernel(spec, query.device.index),
            (schedule.num_blocks, num_heads),
            WARP_SIZE * spec.warps,
            (
                *(of_pass.kv_tiles, schedule.work_items, query, key, value, grad_output, output, lse, row_stats),
                *(grad_query, grad_key, grad_value, partial, arrived, of_pass.row_ids),
                None if dropout is None else dropout.seed,
            ),
            _scalars(*sizes, pitch // dim, scale, query.itemsize, *factors, *strides),
            shared_bytes=spec.shared_bytes,
            overlaps=True,
        )
    return (grad_query, grad_key, grad_value) if len(specs) > 1 else (grad_query, None, None)


def new_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Memory for the gradients of tensors [.., H, d], contiguous."""
    return tuple([torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors])


def _specs(data: BackwardData, element: Element, dim: int, dropout: Dropout | None) -> list[BackwardKernelSpec]:
    """Instances of the row pass and of the column pass."""
    terms = 0 if dropout is None else DROPOUT
    return [
        _spec(element, dim, columns, of_pass.schedule.warps, terms)
        for columns, of_pass in ((False, data.by_row), (True, data.by_column))
    ]


@lru_cache  # on small graphs a call takes as long as its launches: no spec is made twice
def _spec(element: Element, dim: int, columns: bool, teams: int, terms: int) -> BackwardKernelSpec:
    return BackwardKernelSpec(element, dim, columns, teams, terms)


@lru_cache  # packing them takes as long as half a launch
def _scalars(
    num_rows: int,
    num_cols: int,
    num_heads: int,
    gradient_heads: int,
    scale: float,
    itemsize: int,
    threshold: int,
    rescale: float,
    *strides: tuple[int, int, int],
) -> bytes:
    return pack_scalars(
        *(np.int64(head) for _, head, _ in strides),
        *(np.int32(row * itemsize) for row, _, _ in strides),
        *(np.int32(number) for number in (num_rows, num_cols, num_heads, gradient_heads)),
        np.float32(scale * math.log2(math.e)),
        np.float32(scale),
        np.uint32(threshold),
        np.float32(rescale),
    )
