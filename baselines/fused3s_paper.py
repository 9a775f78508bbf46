"""`fused3s_paper`: the paper's fused tensor-core kernel over BSB (Algorithms 1 and 2); see cuda/fused3s_paper.cu."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from kernels.backends.base import Call, InputSpec
from kernels.backends.cuda import TensorCoreBackend, check_out_dtype, checked_inputs
from kernels.formats.bsb import BSB, PAPER_TILE
from kernels.fragments import WARP_SIZE
from kernels.runtime.jit import cpp_name, get_kernel
from kernels.runtime.launch import launch_kernel, pack_scalars
from kernels.runtime.semaphores import semaphores

# Edge-parallel blocks: no fewer TCBs each, so that few windows are split; no more blocks, each with two partials. The
# fastest of nine pairs on an H200, whose 132 SMs take so many blocks in two rounds, at d > 128 in three.
LEAST_TCBS = 8
MOST_BLOCKS = 1056
MAX_ROW_BYTES = 2**31 - 1


@dataclass(frozen=True)
class PaperKernelSpec:
    """One instance of cuda/fused3s_paper.cu.

    Attributes:
        dtype: torch.float16 or torch.bfloat16, of query, key and value.
        out_dtype: torch.float32 or `dtype`.
        dim: dimensions of a head, a multiple of 8 up to 256.
        warps: warps of a thread block, TCBs of an iteration.
        reordered: walk the row windows by decreasing TCB count (paper, row-window reordering).
        permuted: wide loads of Q, K and V through register remapping (paper, data layout).
        split_rows: SDDMM shares out the dimensions of K to the warps instead of its TCBs (paper, warp partitioning).
        edge_parallel: blocks share out the TCBs evenly instead of the row windows (paper, edge-parallel fusion).
        clocked: record the SM and the clock of each block, see `launch`.

    Raises:
        ValueError: split_rows together with permuted, or edge_parallel with reordered.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    dim: int
    warps: int = 8
    reordered: bool = True
    permuted: bool = True
    split_rows: bool = False
    edge_parallel: bool = False
    clocked: bool = False

    source: ClassVar[Path] = Path(__file__).parent / "cuda" / "fused3s_paper.cu"

    def __post_init__(self) -> None:
        if self.split_rows and self.permuted:
            raise ValueError(
                "split_rows: got True with permuted=True; a permuted load feeds two k-steps, which two warps would "
                "need: set permuted=False"
            )
        if self.edge_parallel and self.reordered:
            raise ValueError(
                "edge_parallel: got True with reordered=True; its blocks take TCBs and not row windows, which have no "
                "order then: set reordered=False"
            )

    @property
    def name(self) -> str:
        switches = (self.warps, self.reordered, self.permuted, self.split_rows, self.edge_parallel, self.clocked)
        return cpp_name("fused3s_paper", self.dtype, self.out_dtype, self.dim, *switches)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: partial scores of split rows, [warps][splits][32] of 16 bytes."""
        if not self.split_rows:
            return 0
        all_steps = -(-self.dim // 16)
        steps = -(-all_steps // self.warps)  # of a warp
        return self.warps * -(-all_steps // steps) * WARP_SIZE * 16

    @property
    def partial_floats(self) -> int:
        """Floats of struct Partial of an edge-parallel block: O, maximum and sum, 16 dimensions a step."""
        return -(-self.dim // 16) * 16 * (16 + 2)

    def num_blocks(self, bsb: BSB) -> int:
        """Thread blocks of a head."""
        if not self.edge_parallel:
            return bsb.num_row_windows
        return max(1, -(-bsb.num_tcbs // tcbs_per_block(bsb.num_tcbs)))


def tcbs_per_block(num_tcbs: int) -> int:
    """TCBs of each edge-parallel block but the last."""
    return max(LEAST_TCBS, -(-num_tcbs // MOST_BLOCKS))


class Fused3SPaperBackend(TensorCoreBackend):
    name = "fused3s_paper"
    data_type = BSB
    summary = "the paper's fused tensor-core kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16 and bf16"

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> BSB:
        bsb = graph.to(device) if isinstance(graph, BSB) else BSB.from_graph(graph, device=device)
        if bsb.tile != PAPER_TILE:
            raise ValueError(f"graph: a BSB with tile {bsb.tile}; backend {self.name} needs tile {PAPER_TILE}")
        if inputs.dtype is not None and inputs.head_dim is not None:
            out_dtype = inputs.out_dtype or inputs.dtype
            check_out_dtype(out_dtype, inputs.dtype)
            get_kernel(PaperKernelSpec(inputs.dtype, out_dtype, inputs.head_dim), device.index)
        return bsb

    def attend(self, data: BSB, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, *_ = call
        spec = PaperKernelSpec(query.dtype, out_dtype, query.shape[-1])
        return launch(spec, data, query, key, value, scale)


def launch(
    spec: PaperKernelSpec,
    bsb: BSB,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    clocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one instance of the kernel on torch's current stream, without waiting for it.

    Args:
        spec: the instance; `spec.dim` and the types must be those of the tensors.
        bsb: A with tile (16, 8), on the tensors' GPU.
        query: [num_rows, H, d] fp16 or bf16, any row and head strides.
        key, value: [num_cols, H, d], as query.
        scale: factor of the scores.
        clocks: [H, spec.num_blocks(bsb), 3] int64, contiguous, on the GPU, for a clocked instance: the SM of each
            block, and the clock of the SM in cycles at the block's start and end.

    Returns:
        [num_rows, H, d] contiguous, of spec.out_dtype.

    Raises:
        ValueError: an output type other than float32 and the inputs' type, gradients are asked for, rows of key or
            value are 2 GiB or more apart, or `clocks` does not fit.
    """
    query, key, value = checked_inputs("fused3s_paper", spec.out_dtype, query, key, value)
    row_bytes = [_row_bytes(name, tensor) for name, tensor in (("key", key), ("value", value))]
    num_rows, num_heads = query.shape[:2]
    num_blocks = spec.num_blocks(bsb)
    _check_clocks(spec, clocks, (num_heads, num_blocks, 3), query.device)
    output = torch.empty(query.shape, dtype=spec.out_dtype, device=query.device)
    if output.numel() == 0:
        return output
    partial = arrived = None
    if spec.edge_parallel:
        # Scratch memory of this call alone: calls may run on several streams.
        partial = query.new_empty(2 * num_blocks * num_heads * spec.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_blocks * num_heads * spec.warps, query.device)
    strides = [*query.stride()[:2], key.stride(1), value.stride(1)]
    launch_kernel(
        get_kernel(spec, query.device.index),
        (num_blocks, num_heads),
        WARP_SIZE * spec.warps,
        (
            bsb.tcb_row_offset,
            bsb.col_sparse_to_dense,
            bsb.bitmap,
            bsb.row_window_order,
            query,
            key,
            value,
            output,
            clocks,
            partial,
            arrived,
        ),
        pack_scalars(
            *map(np.int64, strides),
            *map(np.int32, row_bytes),
            np.int32(num_rows),
            np.float32(scale * math.log2(math.e)),
            np.int32(bsb.num_row_windows),
            np.int32(bsb.num_tcbs),
            np.int32(tcbs_per_block(bsb.num_tcbs)),
        ),
        shared_bytes=spec.shared_bytes,
    )
    return output


def _row_bytes(name: str, tensor: torch.Tensor) -> int:
    """Row stride in bytes, which the kernel takes in 32 bits."""
    row_bytes = tensor.stride(0) * tensor.itemsize
    if row_bytes > MAX_ROW_BYTES:
        raise ValueError(
            f"{name}: got rows {row_bytes} bytes apart; at most {MAX_ROW_BYTES} are allowed: pass {name}.contiguous()"
        )
    return row_bytes


def _check_clocks(
    spec: PaperKernelSpec, clocks: torch.Tensor | None, shape: tuple[int, ...], device: torch.device
) -> None:
    if clocks is None:
        if spec.clocked:
            raise ValueError(f"clocks: got None; a clocked instance needs int64 {list(shape)}")
        return
    if not spec.clocked:
        raise ValueError("clocks: got a tensor, which only an instance with clocked=True fills")
    if (tuple(clocks.shape), clocks.dtype, clocks.device) != (shape, torch.int64, device) or not clocks.is_contiguous():
        raise ValueError(
            f"clocks: got {clocks.dtype} {list(clocks.shape)} with strides {clocks.stride()} on {clocks.device}; "
            f"contiguous int64 {list(shape)} on {device} is needed"
        )
