"""`fused3s_paper`: the paper's fused tensor-core kernel over BSB (Algorithms 1 and 2); see cuda/fused3s_paper.cu."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from fused3s.backends.base import Call, InputSpec
from fused3s.backends.cuda import LOG2E, aligned_rows, check_out_dtype, refuse_gradients
from fused3s.runtime.device import WARP_SIZE
from fused3s.runtime.jit import KernelInstance, get_kernel
from fused3s.runtime.launch import launch_kernel
from fused3s.runtime.semaphores import semaphores

from .bsb import BSB
from .tensor_core import TensorCoreBackend

# Edge-parallel blocks: no fewer TCBs each, so that few windows are split; no more blocks, each with two partials. The
# fastest of nine pairs (kernels/NOTES.md): 132 SMs take MOST_BLOCKS in two rounds, at d > 128 in three.
LEAST_TCBS = 8
MOST_BLOCKS = 1056
MAX_ROW_BYTES = 2**31 - 1
SOURCE = Path(__file__).parent / "cuda" / "fused3s_paper.cu"


class PaperArguments(NamedTuple):
    """Template arguments of cuda/fused3s_paper.cu.

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

    def num_blocks(self, bsb: BSB) -> int:
        """Thread blocks of a head."""
        if not self.edge_parallel:
            return bsb.num_row_windows
        return max(1, -(-bsb.num_tcbs // tcbs_per_block(bsb.num_tcbs)))


def paper_instance(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, warps: int = 8, **switches: bool
) -> KernelInstance:
    """The instance of cuda/fused3s_paper.cu; arguments as in `PaperArguments`.

    Raises:
        ValueError: split_rows together with permuted, or edge_parallel with reordered.
    """
    arguments = PaperArguments(dtype, out_dtype, dim, warps, **switches)
    if arguments.split_rows and arguments.permuted:
        raise ValueError(
            "split_rows: got True with permuted=True; a permuted load feeds two k-steps, which two warps would "
            "need: set permuted=False"
        )
    if arguments.edge_parallel and arguments.reordered:
        raise ValueError(
            "edge_parallel: got True with reordered=True; its blocks take TCBs and not row windows, which have no "
            "order then: set reordered=False"
        )
    return KernelInstance(SOURCE, "fused3s_paper", arguments)


def tcbs_per_block(num_tcbs: int) -> int:
    """TCBs of each edge-parallel block but the last."""
    return max(LEAST_TCBS, -(-num_tcbs // MOST_BLOCKS))


class Fused3SPaperBackend(TensorCoreBackend):
    name = "fused3s_paper"
    data_type = BSB
    summary = "the paper's fused tensor-core kernel; NVIDIA GPU of compute capability 8.0 or higher, fp16 and bf16"

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> BSB:
        bsb = BSB.from_graph(graph, device=device)
        if inputs.dtype is not None and inputs.head_dim is not None:
            out_dtype = inputs.out_dtype or inputs.dtype
            check_out_dtype(out_dtype, inputs.dtype)
            get_kernel(paper_instance(inputs.dtype, out_dtype, inputs.head_dim), device.index)
        return bsb

    def attend(self, data: BSB, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, *_ = call
        return launch(paper_instance(query.dtype, out_dtype, query.shape[-1]), data, query, key, value, scale)


def launch(
    instance: KernelInstance,
    bsb: BSB,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    clocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one instance of the kernel on torch's current stream, without waiting for it.

    Args:
        instance: from `paper_instance`; its dimension and types must be those of the tensors.
        bsb: A with tile (16, 8), on the tensors' GPU.
        query: [num_rows, H, d] fp16 or bf16, any row and head strides.
        key, value: [num_cols, H, d], as query.
        scale: factor of the scores.
        clocks: [H, instance.arguments.num_blocks(bsb), 3] int64, contiguous, on the GPU, for a clocked instance: the SM
            of each block, and the clock of the SM in cycles at the block's start and end.

    Returns:
        [num_rows, H, d] contiguous, of the instance's output type.

    Raises:
        ValueError: an output type other than float32 and the inputs' type, gradients are asked for, rows of key or
            value are 2 GiB or more apart, or `clocks` does not fit.
    """
    arguments = instance.arguments
    check_out_dtype(arguments.out_dtype, query.dtype)
    refuse_gradients("fused3s_paper", query, key, value)
    query, key, value = aligned_rows((query, key, value))
    key_row_bytes, value_row_bytes = _row_bytes("key", key), _row_bytes("value", value)
    num_rows, num_heads = query.shape[:2]
    num_blocks = arguments.num_blocks(bsb)
    _check_clocks(arguments.clocked, clocks, (num_heads, num_blocks, 3), query.device)
    output = torch.empty(query.shape, dtype=arguments.out_dtype, device=query.device)
    if output.numel() == 0:
        return output
    kernel = get_kernel(instance, query.device.index)
    partial = arrived = None
    if arguments.edge_parallel:
        # Scratch memory of this call alone: calls may run on several streams.
        partial = query.new_empty(2 * num_blocks * num_heads * kernel.sizes.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_blocks * num_heads * arguments.warps, query.device)
    launch_kernel(
        kernel,
        (num_blocks, num_heads),
        WARP_SIZE * arguments.warps,
        {
            "tcb_row_offset": bsb.tcb_row_offset,
            "col_sparse_to_dense": bsb.col_sparse_to_dense,
            "bitmap": bsb.bitmap,
            "row_window_order": bsb.row_window_order,
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "clocks": clocks,
            "partial": partial,
            "semaphores": arrived,
        },
        kernel.scalars(
            query_row_stride=query.stride(0),
            query_head_stride=query.stride(1),
            key_head_stride=key.stride(1),
            value_head_stride=value.stride(1),
            key_row_bytes=key_row_bytes,
            value_row_bytes=value_row_bytes,
            num_rows=num_rows,
            scale_log2e=scale * LOG2E,
            num_row_windows=bsb.num_row_windows,
            num_tcbs=bsb.num_tcbs,
            tcbs_per_block=tcbs_per_block(bsb.num_tcbs),
        ),
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


def _check_clocks(clocked: bool, clocks: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if clocks is None:
        if clocked:
            raise ValueError(f"clocks: got None; a clocked instance needs int64 {list(shape)}")
        return
    if not clocked:
        raise ValueError("clocks: got a tensor, which only an instance with clocked=True fills")
    if (tuple(clocks.shape), clocks.dtype, clocks.device) != (shape, torch.int64, device) or not clocks.is_contiguous():
        raise ValueError(
            f"clocks: got {clocks.dtype} {list(clocks.shape)} with strides {clocks.stride()} on {clocks.device}; "
            f"contiguous int64 {list(shape)} on {device} is needed"
        )


BACKENDS = (Fused3SPaperBackend(),)
