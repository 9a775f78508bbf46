"""`fused3s`: the same attention at the rate of its gathers; see cuda/fused3s.cu and kernels/schedule.py."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from kernels.backends.base import AttentionFunction
from kernels.backends.cuda import MAX_DIM
from kernels.backends.tensor_core import TensorCoreBackend, checked_inputs
from kernels.bsb import BSB
from kernels.fragments import WARP_SIZE
from kernels.jit import cpp_name, get_kernel
from kernels.launch import launch_kernel
from kernels.schedule import Balance, Schedule, make_schedule

TILE = (16, 16)
WARPS = 4
FEW_WARPS = 2  # where the rings of four warps are more than a block gets
SM_SHARED_BYTES = 228 * 1024  # of an SM of compute capability 9.0
MAX_BLOCKS_PER_SM = 4  # what registers allow at d = 64 and below


@dataclass(frozen=True)
class FusedKernelSpec:
    """One instance of cuda/fused3s.cu.

    Attributes:
        dtype: torch.float16 or torch.bfloat16, of query, key and value.
        out_dtype: torch.float32 or `dtype`.
        dim: dimensions of a head, a multiple of 8 up to 256.
        warps: warps of a thread block.
        stages: chunks in a warp's ring.
        cache_l1: gather through L1 (cp.async.ca), on Hopper the faster way out of L2; see `goes_through_l1`.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    dim: int
    warps: int = WARPS
    stages: int = 2
    cache_l1: bool = True

    source: ClassVar[str] = "fused3s.cu"

    @property
    def name(self) -> str:
        return cpp_name("fused3s", self.dtype, self.out_dtype, self.dim, self.warps, self.stages, self.cache_l1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the warps' rings, as struct Stage has them."""
        key_pitch, value_pitch = 64 * -(-self.dim // 32), 16 * (2 * -(-self.dim // 16) + 1)
        return self.warps * self.stages * (16 * (key_pitch + value_pitch) + 32 + 16)


@dataclass(frozen=True)
class MergeKernelSpec:
    """The merge kernel of cuda/fused3s.cu."""

    out_dtype: torch.dtype
    dim: int
    warps: int = WARPS

    source: ClassVar[str] = "fused3s.cu"

    @property
    def name(self) -> str:
        return cpp_name("fused3s_merge", self.out_dtype, self.dim, self.warps)


class Fused3SBackend(TensorCoreBackend):
    name = "fused3s"
    summary = "the fast fused kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16 and bf16"

    def prepare(
        self, graph: Any, device: torch.device, dtype: torch.dtype | None, head_dim: int | None
    ) -> AttentionFunction:
        bsb = BSB.from_graph(graph, TILE, device)
        gpu = torch.cuda.get_device_properties(device)
        balance = Balance.of(bsb.num_tcbs, gpu.multi_processor_count)

        def spec_of(dtype: torch.dtype, out_dtype: torch.dtype, dim: int) -> FusedKernelSpec:
            through_l1 = goes_through_l1(bsb.shape[1], dim, gpu.L2_cache_size)
            spec = FusedKernelSpec(dtype, out_dtype, dim, cache_l1=through_l1)
            fits = spec.shared_bytes <= gpu.shared_memory_per_block_optin
            return spec if fits else replace(spec, warps=FEW_WARPS)

        # GPUs that offer a block 99 KiB run wide heads with fewer warps; the others never need that schedule.
        widest = FusedKernelSpec(torch.float16, torch.float32, MAX_DIM)
        narrow = widest.shared_bytes > gpu.shared_memory_per_block_optin
        schedules = {
            warps: make_schedule(bsb, warps, balance) for warps in ((WARPS, FEW_WARPS) if narrow else (WARPS,))
        }
        if dtype is not None and head_dim is not None:
            spec = spec_of(dtype, dtype, head_dim)
            get_kernel(spec, device.index)
            if schedules[spec.warps].num_slots:
                get_kernel(MergeKernelSpec(dtype, head_dim, spec.warps), device.index)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, out_dtype: torch.dtype
        ) -> torch.Tensor:
            spec = spec_of(query.dtype, out_dtype, query.shape[-1])
            return launch(spec, bsb, schedules[spec.warps], query, key, value, scale)

        return attend


def goes_through_l1(num_cols: int, head_dim: int, l2_bytes: int) -> bool:
    """Whether to gather a head's K and V, [num_cols, head_dim] in 16 bits each, through L1.

    On Hopper that is faster than past L1, except for rows that come from device memory while the rings leave little of
    L1: then requests wait for lines of L1.
    """
    spec = FusedKernelSpec(torch.float16, torch.float16, head_dim)
    block_bytes = spec.shared_bytes + 1024  # 1 KiB a block is reserved
    blocks = min(SM_SHARED_BYTES // block_bytes, MAX_BLOCKS_PER_SM)
    l1_is_small = SM_SHARED_BYTES - blocks * block_bytes < 64 * 1024
    return not l1_is_small or 4 * num_cols * head_dim <= l2_bytes


def launch(
    spec: FusedKernelSpec,
    bsb: BSB,
    schedule: Schedule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Run the kernel, and the merge kernel where windows are cut, on torch's current stream, without waiting.

    Args:
        spec: the instance; its dimension and types must be those of the tensors.
        bsb: A with tile (16, 16), on the tensors' GPU.
        schedule: of `bsb`, for `spec.warps` warps.
        query: [num_rows, H, d] fp16 or bf16, any row and head strides.
        key, value: [num_cols, H, d], likewise.
        scale: factor of the scores.

    Returns:
        [num_rows, H, d] contiguous, of spec.out_dtype.

    Raises:
        ValueError: an output type other than float32 and the inputs' type, or gradients are asked for.
    """
    query, key, value = checked_inputs("fused3s", spec.out_dtype, query, key, value)
    num_rows, num_heads = query.shape[:2]
    output = torch.empty(query.shape, dtype=spec.out_dtype, device=query.device)
    if output.numel() == 0:
        return output
    # O, maximum and sum of a part, as struct Partial has them. A call has its own: plans may run on several streams.
    part_floats = 16 * (16 * -(-spec.dim // 16) + 2)
    partial = torch.empty(schedule.num_slots * num_heads * part_floats, dtype=torch.float32, device=query.device)
    head_strides = [np.int64(tensor.stride(1)) for tensor in (query, key, value)]
    row_bytes = [np.int32(tensor.stride(0) * tensor.itemsize) for tensor in (query, key, value)]
    launch_kernel(
        get_kernel(spec, query.device.index),
        (schedule.num_blocks, num_heads),
        WARP_SIZE * spec.warps,
        (
            bsb.col_sparse_to_dense,
            bsb.bitmap,
            schedule.chunk_window,
            schedule.warp_range,
            schedule.block_slot,
            query,
            key,
            value,
            output,
            partial,
            bsb.tcb_row_offset,
        ),
        (*head_strides, *row_bytes, np.int32(num_rows), np.float32(scale * math.log2(math.e))),
        shared_bytes=spec.shared_bytes,
    )
    if schedule.num_slots:
        launch_kernel(
            get_kernel(MergeKernelSpec(spec.out_dtype, spec.dim, spec.warps), query.device.index),
            (schedule.cut_window.numel(), num_heads),
            WARP_SIZE * spec.warps,
            (schedule.cut_window, schedule.cut_slot, partial, output),
            (np.int32(num_rows),),
        )
    return output
