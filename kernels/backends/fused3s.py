"""`fused3s`: the same attention at the rate of its gathers; see cuda/fused3s.cu and kernels/formats/schedule.py."""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from ..formats.bsb import BSB
from ..formats.csr import CSRPattern
from ..formats.schedule import Balance, Schedule, make_schedule
from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel, pack_scalars
from .base import AttentionFunction, ReorderingBackend
from .tensor_core import TensorCoreBackend, checked_inputs

TILE = (16, 16)
WARPS = 4
FEW_WARPS = 2  # for wide heads: the rings of four warps leave a block alone on its SM, or do not fit it at all
WIDE_DIM = 192  # heads wider than this take FEW_WARPS where the graph has work for all SMs
SM_SHARED_BYTES = 228 * 1024  # of an SM of compute capability 9.0
RESERVED_BYTES = 1024  # of it, for each block
SMALL_CHUNKS_PER_SM = 12  # a graph with fewer cannot give every warp of the GPU a chunk
COMMON_DIM = 128  # what a plan is made for before it is known
LEAST_SCALE = 2.0**-120  # in place of 0, which times -infinity is NaN; any score times it has the exponential 1
# Of a warp, as in cuda/fused3s.cu:
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

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that run on an SM at once; the registers are those that the kernel's launch bounds leave."""
        max_warps = 16 if self.dim <= 64 else 12 if self.dim <= 128 else 8
        return max(1, min(SM_SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES), max_warps // self.warps))


class Fused3SBackend(TensorCoreBackend, ReorderingBackend):
    name = "fused3s"
    summary = "the fast fused kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16 and bf16"
    writes_lse = True

    def prepare(
        self, graph: Any, device: torch.device, dtype: torch.dtype | None, head_dim: int | None
    ) -> AttentionFunction:
        return plan_launches(BSB.from_graph(graph, TILE, device), None, device, dtype, head_dim)

    def prepare_reordered(
        self,
        graph: CSRPattern,
        perm: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None,
        head_dim: int | None,
    ) -> AttentionFunction:
        bsb = BSB.from_graph(graph, TILE, device)
        row_ids = perm.new_full((bsb.num_row_windows * TILE[0],), len(perm))  # what pads the last window is no row
        row_ids[: len(perm)] = perm
        return plan_launches(bsb, row_ids.to(device), device, dtype, head_dim)


def plan_launches(
    bsb: BSB,
    row_ids: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype | None,
    head_dim: int | None,
) -> AttentionFunction:
    """Schedule a BSB with tile (16, 16) on a GPU; the function that launches the kernels on it.

    Args:
        bsb: A, on `device`; its row i is row row_ids[i] of query and output.
        row_ids: [16 * num_row_windows] int32 on `device`, or None where the rows have their own order.
        dtype, head_dim: where known, the kernels are compiled and scheduled for them now.
    """
    gpu = torch.cuda.get_device_properties(device)
    num_sms = gpu.multi_processor_count
    is_small = bsb.num_tcbs < num_sms * SMALL_CHUNKS_PER_SM
    counts = bsb.tcb_row_offset.diff()

    @cache  # large graphs have the same for every dimension
    def schedule_with(warps: int, balance: Balance) -> Schedule:
        return make_schedule(bsb, warps, balance)

    @cache
    def schedule_of(warps: int, warps_per_sm: int) -> Schedule:
        return schedule_with(warps, Balance.of(counts, warps, num_sms * warps_per_sm))

    @cache  # looked up at every call, which on a small graph takes no longer than its launch
    def kernel_of(dtype: torch.dtype, out_dtype: torch.dtype, dim: int) -> tuple[FusedKernelSpec, Schedule]:
        warps = FEW_WARPS if dim > WIDE_DIM and not is_small else WARPS
        spec = FusedKernelSpec(dtype, out_dtype, dim, warps)
        if spec.shared_bytes > gpu.shared_memory_per_block_optin:
            spec = replace(spec, warps=FEW_WARPS)
        return spec, schedule_of(spec.warps, spec.blocks_per_sm * spec.warps)

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec, schedule = kernel_of(query.dtype, out_dtype, query.shape[-1])
        return launch(spec, schedule, query, key, value, scale, row_ids=row_ids, lse=lse)

    spec, _ = kernel_of(dtype or torch.float16, dtype or torch.float16, head_dim or COMMON_DIM)
    if dtype is not None and head_dim is not None:
        get_kernel(spec, device.index)
    return attend


def launch(
    spec: FusedKernelSpec,
    schedule: Schedule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    row_ids: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel on torch's current stream, without waiting.

    A kernel that overlaps reads `schedule` and `row_ids` before its turn: they must be there, not only queued.

    Args:
        spec: the instance; its dimension and types must be those of the tensors.
        schedule: of A, for `spec.warps` warps, on the tensors' GPU.
        query: [num_rows, H, d] fp16 or bf16, any row and head strides.
        key, value: [num_cols, H, d], likewise.
        scale: factor of the scores.
        row_ids: see `plan_launches`.
        lse: [num_rows, H] float32 contiguous, filled with the log of each row's sum of exp(scale * score), -inf for a
            row without an edge; None: not wanted.

    Returns:
        [num_rows, H, d] contiguous, of spec.out_dtype.

    Raises:
        ValueError: an output type other than float32 and the inputs' type, or gradients are asked for.
    """
    query, key, value = checked_inputs("fused3s", spec.out_dtype, query, key, value)
    num_rows, num_heads = query.shape[:2]
    output = torch.empty_like(query, dtype=spec.out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    partial = arrived = None
    if num_parts := schedule.num_slots * num_heads:
        # What the pieces of cut windows come to. A call has its own: plans may run on several streams.
        part_floats = -(-spec.dim // 16) * 16 * (16 + 2)  # struct Partial: O, maximum and sum, 16 dimensions a step
        partial = query.new_empty(num_parts * part_floats, dtype=torch.float32)
        arrived = schedule.arrived.of_call(num_parts * spec.warps)
    launch_kernel(
        get_kernel(spec, query.device.index),
        (schedule.num_blocks, num_heads),
        WARP_SIZE * spec.warps,
        (schedule.chunks, schedule.warp_jobs, query, key, value, output, lse, partial, arrived, row_ids),
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
