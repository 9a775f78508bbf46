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
from ..formats.schedule import ScheduleForm
from ..fragments import WARP_SIZE
from ..runtime.device import GPULimits, gpu_limits
from ..runtime.jit import ELEMENTS, Element, cpp_name, get_kernel, input_element
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores
from ..tuning import tuning_for
from .base import Memory
from .cuda import LOAD_BYTES, MAX_DIM, aligned_rows
from .fused3s_data import Fused3SData
from .fused3s_shapes import COMMON_DIM, DROPOUT, RECORDS, RESERVED_BYTES, SLICE, SLOT_BYTES, STAGES

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
    teams: int = 4
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


def pass_schedules(
    device: torch.device, num_heads: int, head_dim: int | None, dtype: torch.dtype | None = None
) -> tuple[ScheduleForm, ScheduleForm]:
    """Schedules of row pass and column pass; dtype None: 16 bits."""
    return _pass_schedules(gpu_limits(device), num_heads, head_dim, dtype)


@lru_cache  # of a plan on a small graph these sizes would take a tenth of the time
def _pass_schedules(
    gpu: GPULimits, num_heads: int, head_dim: int | None, dtype: torch.dtype | None
) -> tuple[ScheduleForm, ScheduleForm]:
    return tuple(_pass_schedule(gpu, num_heads, head_dim, dtype, columns) for columns in (False, True))


def _pass_schedule(
    gpu: GPULimits, num_heads: int, head_dim: int | None, dtype: torch.dtype | None, columns: bool
) -> ScheduleForm:
    """Teams of a block, and teams that the GPU runs at once."""
    tuning = tuning_for(gpu)
    element = ELEMENTS[dtype or torch.float16]  # float32: three terms, whatever the precision is now
    spec = BackwardKernelSpec(element, head_dim or COMMON_DIM, columns, tuning.teams)
    if spec.dim_warps > 1:
        spec = replace(spec, teams=tuning.few_teams)
    # The plan must run with all inputs that it leaves open.
    widest = replace(spec, dim=head_dim or MAX_DIM, element=element if dtype else Element.FLOAT)
    while spec.teams > 1 and replace(widest, teams=spec.teams).shared_bytes > gpu.block_shared_bytes:
        spec = replace(spec, teams=spec.teams // 2)
    return ScheduleForm(num_heads, spec.teams, gpu.num_sms * spec.blocks_per_sm(gpu) * spec.teams, columns)


def compile_backward(data: Fused3SData, dtype: torch.dtype, dim: int, device: torch.device) -> None:
    """Compile both passes without dropout."""
    for spec in _specs(data, input_element(dtype), dim + dim % 2 * (-dim % 8), None):
        get_kernel(spec, device.index)


def launch_backward(
    data: Fused3SData,
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
        data: with what the backward pass over KV tiles reads, on the tensors' GPU.
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
    passes = (
        (data.kv_tiles, data.row_work_items, data.row_splits, data.row_ids, grad_query),
        (data.column_tiles, data.column_work_items, data.column_splits, None, grad_key),
    )
    for spec, (kv_tiles, work_items, num_splits, row_ids, gradient) in zip(specs, passes, strict=False):
        if not gradient.numel():
            continue
        partial = arrived = None
        if num_partials := num_splits * num_heads:
            partial = query.new_empty(num_partials * spec.partial_floats, dtype=torch.float32)
            arrived = semaphores(num_partials * spec.warps, query.device)
        launch_kernel(
            get_kernel(spec, query.device.index),
            (work_items.shape[0], num_heads),
            WARP_SIZE * spec.warps,
            (
                *(kv_tiles, work_items, query, key, value, grad_output, output, lse, row_stats),
                *(grad_query, grad_key, grad_value, partial, arrived, row_ids),
                None if dropout is None else dropout.seed,
            ),
            _scalars(*sizes, gradient.stride(0) // dim, scale, query.itemsize, *factors, *strides),
            shared_bytes=spec.shared_bytes,
            overlaps=True,
        )
    return (grad_query, grad_key, grad_value) if len(specs) > 1 else (grad_query, None, None)


def new_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Memory for the gradients of tensors [.., H, d], contiguous."""
    return tuple([torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors])


def _specs(data: Fused3SData, element: Element, dim: int, dropout: Dropout | None) -> list[BackwardKernelSpec]:
    """Instances of the row pass and of the column pass."""
    terms = 0 if dropout is None else DROPOUT
    return [
        _spec(element, dim, columns, work_items.shape[1], terms)
        for columns, work_items in ((False, data.row_work_items), (True, data.column_work_items))
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
