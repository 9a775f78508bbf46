"""`fused3s`: the fast fused kernel; see cuda/fused3s.cu and formats/schedule.py."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from ..formats.bsb import BSB
from ..formats.schedule import Schedule, SplitHeuristic, make_kv_tiles, make_schedule
from ..fragments import WARP_SIZE
from ..runtime.device import gpu_limits
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores
from .base import InputSpec
from .cuda import MAX_DIM, TensorCoreBackend, check_out_dtype, checked_inputs

TILE = (16, 16)
WARPS = 4
FEW_WARPS = 2  # for wide heads: the rings of four warps leave a block alone on its SM, or do not fit it at all
WIDE_DIM = 192  # heads wider than this take FEW_WARPS where the graph has work for all SMs
RESERVED_BYTES = 1024  # of an SM's shared memory, for each block
SMALL_TILES_PER_SM = 12  # a graph with fewer KV tiles cannot give every warp of the GPU one
COMMON_DIM = 128  # head dimension of a schedule made before it is known
LEAST_SCALE = 2.0**-120  # in place of 0, which times -infinity is NaN; any score times it has the exponential 1
# As in cuda/fused3s.cu:
STAGES = 2
RECORDS = 4
SLOT_BYTES = 128


@dataclass(frozen=True)
class FusedKernelSpec:
    """One instance of cuda/fused3s.cu.

    Attributes:
        dtype: torch.float16 or torch.bfloat16, of query, key and value.
        out_dtype: torch.float32 or `dtype`.
        dim: dimensions of a head, a multiple of 8 up to 256.
        warps: warps of a thread block.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    dim: int
    warps: int = WARPS

    source: ClassVar[str] = "fused3s.cu"

    @property
    def name(self) -> str:
        return cpp_name("fused3s", self.dtype, self.out_dtype, self.dim, self.warps)

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the warps' rings, as struct Stage has them."""
        key_pitch, value_pitch = 64 * -(-self.dim // 32), 32 * -(-self.dim // 16)
        stage = 16 * (key_pitch + value_pitch)
        return self.warps * (STAGES * stage + RECORDS * SLOT_BYTES)

    @cached_property
    def partial_floats(self) -> int:
        """Floats of struct Partial: O, maximum and sum, 16 dimensions a step."""
        return -(-self.dim // 16) * 16 * (16 + 2)

    def blocks_per_sm(self, sm_shared_bytes: int) -> int:
        """Blocks that run on an SM at once; the registers are those that the kernel's launch bounds leave."""
        max_warps = 16 if self.dim <= 64 else 12 if self.dim <= 128 else 8
        return max(1, min(sm_shared_bytes // (self.shared_bytes + RESERVED_BYTES), max_warps // self.warps))


@dataclass(frozen=True, eq=False)
class Fused3SData:
    """A graph as cuda/fused3s.cu reads it.

    Attributes:
        kv_tiles: [num_tiles + 2, 24] int32, see `make_kv_tiles`; the same for every schedule.
        tile_offset: [num_row_windows + 1] int32, first KV tile of each window.
        row_ids: [16 num_row_windows] int32, row of query and output of each row of the windows, num_rows where there is
            none; None where rows have their own order.
        schedule: the work items.
    """

    kv_tiles: torch.Tensor
    tile_offset: torch.Tensor
    row_ids: torch.Tensor | None
    schedule: Schedule


class Fused3SBackend(TensorCoreBackend):
    name = "fused3s"
    summary = "the fast fused kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16 and bf16"
    data_type = Fused3SData
    writes_lse = True
    reorders = True

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> Fused3SData:
        bsb = BSB.from_graph(graph, TILE, device)
        row_ids = None
        if perm is not None:
            row_ids = perm.new_full((bsb.num_row_windows * TILE[0],), len(perm))  # no row pads the last window
            row_ids[: len(perm)] = perm
            row_ids = row_ids.to(device)
        kv_tiles = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap)
        schedule = _schedule(kv_tiles, bsb.tcb_row_offset, device, inputs)
        return Fused3SData(kv_tiles, bsb.tcb_row_offset, row_ids, schedule)

    def rebuild(self, data: Fused3SData, device: torch.device, inputs: InputSpec) -> Fused3SData:
        return replace(data, schedule=_schedule(data.kv_tiles, data.tile_offset, device, inputs))

    def describe(self, data: Fused3SData) -> str:
        by_warp, by_block, split = data.schedule.windows
        return (
            f"{data.tile_offset.numel() - 1} row windows, {data.kv_tiles.shape[0] - 2} KV tiles of 16 keys\n  "
            f"windows by one warp {by_warp}, by one block {by_block}, by several blocks {split} "
            f"({data.schedule.num_splits} splits)\n  "
            f"{data.schedule.num_blocks} blocks of {data.schedule.warps} warps a head; {data.schedule.heuristic}"
        )

    def attend(
        self,
        data: Fused3SData,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec = kernel_spec(query.dtype, out_dtype, query.shape[-1], data.schedule.warps)
        return launch(spec, data, query, key, value, scale, lse)


@lru_cache  # on small graphs a call takes as long as its launch: no spec is made twice
def kernel_spec(dtype: torch.dtype, out_dtype: torch.dtype, dim: int, warps: int) -> FusedKernelSpec:
    return FusedKernelSpec(dtype, out_dtype, dim, warps)


def _schedule(kv_tiles: torch.Tensor, tile_offset: torch.Tensor, device: torch.device, inputs: InputSpec) -> Schedule:
    """Schedule for `inputs`, whose kernel is compiled where their type is known."""
    gpu = gpu_limits(device)
    dim = inputs.head_dim or COMMON_DIM
    dtype = inputs.dtype or torch.float16
    is_small = inputs.num_heads * (kv_tiles.shape[0] - 2) < gpu.num_sms * SMALL_TILES_PER_SM
    spec = FusedKernelSpec(
        dtype, inputs.out_dtype or dtype, dim, FEW_WARPS if dim > WIDE_DIM and not is_small else WARPS
    )
    # Where the head dimension is not known, the plan must run with the widest.
    if replace(spec, dim=inputs.head_dim or MAX_DIM).shared_bytes > gpu.block_shared_bytes:
        spec = replace(spec, warps=FEW_WARPS)
    if inputs.dtype is not None and inputs.head_dim is not None:
        check_out_dtype(spec.out_dtype, dtype)
        get_kernel(spec, device.index)
    resident_warps = gpu.num_sms * spec.blocks_per_sm(gpu.sm_shared_bytes) * spec.warps
    heuristic = SplitHeuristic.of(tile_offset.diff(), spec.warps, resident_warps, inputs.num_heads)
    return make_schedule(kv_tiles, tile_offset, spec.warps, heuristic)


def launch(
    spec: FusedKernelSpec,
    data: Fused3SData,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel on torch's current stream, without waiting for it.

    The kernel reads `data` before griddepcontrol.wait: its arrays must be complete on the device, not only queued.

    Args:
        spec: the instance; its dimension, types and warps must be those of the tensors and of the schedule.
        data: A, on the tensors' GPU.
        query: [num_rows, H, d] fp16 or bf16, any row and head strides.
        key, value: [num_cols, H, d], likewise.
        scale: factor of the scores.
        lse: [num_rows, H] float32 contiguous, filled with the log of each row's sum of exp(scale * score), -inf for a
            row without an edge; None: not wanted.

    Returns:
        [num_rows, H, d] contiguous, of spec.out_dtype.

    Raises:
        ValueError: the instance does not fit the tensors or the schedule, or gradients are asked for.
    """
    schedule = data.schedule
    if (spec.warps, spec.dim, spec.dtype) != (schedule.warps, query.shape[2], query.dtype):
        raise ValueError(
            f"spec: got {spec.dtype}, d = {spec.dim}, {spec.warps} warps; the tensors have {query.dtype}, "
            f"d = {query.shape[2]}, and the schedule {schedule.warps} warps"
        )
    query, key, value = checked_inputs("fused3s", spec.out_dtype, query, key, value)
    num_rows, num_heads = query.shape[:2]
    output = torch.empty_like(query, dtype=spec.out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    partial = arrived = None
    if num_partials := schedule.num_splits * num_heads:
        # Scratch memory of this call alone: plans may run on several streams.
        partial = query.new_empty(num_partials * spec.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_partials * spec.warps, query.device)
    launch_kernel(
        get_kernel(spec, query.device.index),
        (schedule.num_blocks, num_heads),
        WARP_SIZE * spec.warps,
        (data.kv_tiles, schedule.work_items, query, key, value, output, lse, partial, arrived, data.row_ids),
        _scalars(num_rows, scale, query.itemsize, query.stride(), key.stride(), value.stride()),
        shared_bytes=spec.shared_bytes,
        overlaps=True,
    )
    return output


@lru_cache  # a model calls with the same ones again and again, and packing them takes as long as half a launch
def _scalars(num_rows: int, scale: float, itemsize: int, *strides: tuple[int, int, int]) -> bytes:
    return pack_scalars(
        *(np.int64(head) for _, head, _ in strides),
        *(np.int32(row * itemsize) for row, _, _ in strides),
        np.int32(num_rows),
        np.uint32(0x80008000 if scale < 0 else 0),
        np.float32(max(abs(scale) * math.log2(math.e), LEAST_SCALE)),
    )
