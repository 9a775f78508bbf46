"""`flashsparse_naive` and `flashsparse_stable`: SDDMM, softmax and SpMM unfused on tensor cores, the paper's baselines.

Method: Shi et al., "FlashSparse: Minimizing Computation Redundancy for Fast Sparse Matrix Multiplications on Tensor
Cores" (PPoPP 2025): 8 x 1 vectors through swap and transpose, and long row windows cut into parts of at most 32 blocks
for load balance. The softmax around it is the Fused3S paper's: naive, exp(s) / sum exp(s), or stable, with each row's
maximum subtracted. Re-implemented from these descriptions; see cuda/flashsparse.cu.

S is materialised in float32 and the weights in the inputs' type, 6 bytes for each of the 128 slots of an 8 x 16 block,
so memory grows with the graph as the paper reports.

Differences from the published code:

* A slot without an edge counts as -inf. The published softmax gives it exp(0) = 1 and adds it to the row's sum.
* Products, scores and exponentials are float32 (published: float16 throughout, so that exp overflows above 11). naive
  still overflows above 88, see `attention`.
* The stable softmax is two kernels like the naive one: the sum of a part is kept relative to the part's own maximum, so
  that the maximum needs no pass of its own. The paper's stable variant calls a framework's softmax instead.
* Outputs of the parts of a long window are added in a fixed order by a kernel of its own instead of by atomics: the
  bits are the same every time, and the output needs no zeros first.
* SDDMM loads 16 bytes a lane, and its grid has no empty blocks; rows past the last multiple of 8 are not dropped; the
  format is built on the GPU.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused3s.backends.base import Call, InputSpec
from fused3s.backends.cuda import LOG2E, aligned_rows, check_out_dtype, refuse_gradients
from fused3s.runtime.device import WARP_SIZE
from fused3s.runtime.jit import KernelInstance, get_kernel
from fused3s.runtime.launch import launch_kernel

from .bsb import BSB
from .tensor_core import TensorCoreBackend

TILE = (8, 16)
TCBS_PER_PART = 32
WARPS = 4  # of a block of any of the kernels
DIMS_PER_WARP = 16  # of SpMM
SOURCE = Path(__file__).parent / "cuda" / "flashsparse.cu"


@dataclass(frozen=True, eq=False)
class Parts:
    """Row windows cut into parts of at most 32 TCBs; names and shapes are those in cuda/flashsparse.cu.

    Attributes:
        num_slots: parts of windows that have more than one.
    """

    tcb_window: torch.Tensor
    part_tcb: torch.Tensor
    part_window: torch.Tensor
    part_slot: torch.Tensor
    window_part: torch.Tensor
    split_window: torch.Tensor
    num_slots: int

    @classmethod
    def of(cls, bsb: BSB) -> "Parts":
        """Cut the windows of a matrix; an empty window has one empty part, which writes its zeros."""
        offset = bsb.tcb_row_offset.long()
        windows = torch.arange(bsb.num_row_windows, device=bsb.device)
        tcbs = offset.diff()
        parts = ((tcbs + TCBS_PER_PART - 1) // TCBS_PER_PART).clamp(min=1)
        window_part = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
        part_window = torch.repeat_interleave(windows, parts)
        nth = torch.arange(part_window.numel(), device=bsb.device) - window_part[part_window]
        part_tcb = torch.cat([offset[part_window] + nth * TCBS_PER_PART, offset[-1:]])
        is_split = parts[part_window] > 1
        part_slot = torch.where(is_split, is_split.cumsum(0) - 1, -1)
        return cls(
            tcb_window=torch.repeat_interleave(windows, tcbs).int(),
            part_tcb=part_tcb.int(),
            part_window=part_window.int(),
            part_slot=part_slot.int(),
            window_part=window_part.int(),
            split_window=torch.nonzero(parts > 1).flatten().int(),
            num_slots=int(is_split.sum()),
        )


@dataclass(frozen=True, eq=False)
class FlashSparseData:
    """A with tile (8, 16), and the parts of its windows."""

    bsb: BSB
    parts: Parts


@dataclass(frozen=True)
class Kernels:
    """The five instances for one type of inputs, type of output, head dimension and softmax."""

    sddmm: KernelInstance
    statistics: KernelInstance
    normalise: KernelInstance
    spmm: KernelInstance
    merge: KernelInstance

    @classmethod
    def of(cls, dtype: torch.dtype, out_dtype: torch.dtype, head_dim: int, stable: bool) -> "Kernels":
        def instance(kernel: str, *arguments: torch.dtype | bool | int) -> KernelInstance:
            return KernelInstance(SOURCE, f"flashsparse_{kernel}", arguments)

        return cls(
            sddmm=instance("sddmm", dtype, head_dim),
            statistics=instance("statistics", stable),
            normalise=instance("normalise", dtype, stable),
            spmm=instance("spmm", dtype, out_dtype, head_dim),
            merge=instance("merge", out_dtype, head_dim),
        )

    def all(self) -> list[KernelInstance]:
        return [self.sddmm, self.statistics, self.normalise, self.spmm, self.merge]


class FlashSparseBackend(TensorCoreBackend):
    """Either backend; `stable` selects the softmax."""

    data_type = FlashSparseData

    def __init__(self, stable: bool) -> None:
        softmax = "stable" if stable else "naive"
        self.name = f"flashsparse_{softmax}"
        self.summary = f"FlashSparse's unfused tensor-core kernels with a {softmax} softmax; NVIDIA GPU, fp16 and bf16"
        self.stable = stable

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> FlashSparseData:
        bsb = BSB.from_graph(graph, TILE, device)
        if inputs.dtype is not None and inputs.head_dim is not None:
            out_dtype = inputs.out_dtype or inputs.dtype
            check_out_dtype(out_dtype, inputs.dtype)
            for instance in Kernels.of(inputs.dtype, out_dtype, inputs.head_dim, self.stable).all():
                get_kernel(instance, device.index)
        return FlashSparseData(bsb, Parts.of(bsb))

    def attend(self, data: FlashSparseData, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, *_ = call
        check_out_dtype(out_dtype, query.dtype)
        refuse_gradients(self.name, query, key, value)
        (query, key), (value,) = aligned_rows((query, key), 16), aligned_rows((value,), 4)
        kernels = Kernels.of(query.dtype, out_dtype, query.shape[-1], self.stable)
        return run(kernels, data, query, key, value, scale)


def run(
    kernels: Kernels,
    data: FlashSparseData,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Queue the kernels on torch's current stream, without waiting for them.

    Args:
        kernels: the instances; their types and head dimension must be those of the tensors.
        data: A, on the tensors' GPU.
        query: [num_rows, H, d], rows 16-byte aligned; key: [num_cols, H, d], as query; value: 4-byte aligned.
        scale: factor of the scores.

    Returns:
        [num_rows, H, d] contiguous, of the instances' output type.
    """
    device, bsb, parts = query.device, data.bsb, data.parts
    num_rows, num_heads, dim = query.shape
    out_dtype = kernels.merge.arguments[0]
    output = torch.empty(query.shape, dtype=out_dtype, device=device)
    if output.numel() == 0:
        return output
    num_tcbs, num_parts, num_slots = bsb.num_tcbs, parts.part_window.numel(), parts.num_slots
    score = torch.empty((num_heads, num_tcbs, *TILE), dtype=torch.float32, device=device)
    prob = torch.empty((num_heads, num_tcbs, *TILE), dtype=query.dtype, device=device)
    part_max, part_sum = (
        torch.empty((num_heads, num_parts, TILE[0]), dtype=torch.float32, device=device) for _ in range(2)
    )
    partial = torch.empty((num_heads, num_slots, TILE[0], dim), dtype=torch.float32, device=device)

    def launch(instance: KernelInstance, grid: tuple[int, ...], tensors: dict, **scalars: float) -> None:
        kernel = get_kernel(instance, device.index)
        launch_kernel(kernel, grid, WARP_SIZE * WARPS, tensors, kernel.scalars(**scalars))

    part_tcb, part_window, window_part = parts.part_tcb, parts.part_window, parts.window_part
    part_sizes = {"num_parts": num_parts, "num_tcbs": num_tcbs}
    if num_tcbs:
        launch(
            kernels.sddmm,
            (-(-num_tcbs // WARPS), num_heads),
            {
                "tcb_window": parts.tcb_window,
                "col_sparse_to_dense": bsb.col_sparse_to_dense,
                "bitmap": bsb.bitmap,
                "query": query,
                "key": key,
                "score": score,
            },
            query_row_stride=query.stride(0),
            query_head_stride=query.stride(1),
            key_row_stride=key.stride(0),
            key_head_stride=key.stride(1),
            num_rows=num_rows,
            num_tcbs=num_tcbs,
            scale_log2e=scale * LOG2E,
        )
        part_grid = (-(-num_parts // WARPS), num_heads)
        of_parts = {"part_max": part_max, "part_sum": part_sum}
        launch(kernels.statistics, part_grid, {"part_tcb": part_tcb, "score": score, **of_parts}, **part_sizes)
        launch(
            kernels.normalise,
            part_grid,
            {
                "part_tcb": part_tcb,
                "part_window": part_window,
                "window_part": window_part,
                "score": score,
                **of_parts,
                "prob": prob,
            },
            **part_sizes,
        )
    launch(
        kernels.spmm,
        (num_parts, -(-dim // (DIMS_PER_WARP * WARPS)), num_heads),
        {
            "part_tcb": part_tcb,
            "part_window": part_window,
            "part_slot": parts.part_slot,
            "col_sparse_to_dense": bsb.col_sparse_to_dense,
            "prob": prob,
            "value": value,
            "output": output,
            "partial": partial,
        },
        value_row_stride=value.stride(0),
        value_head_stride=value.stride(1),
        num_rows=num_rows,
        num_tcbs=num_tcbs,
        num_slots=num_slots,
    )
    if num_slots:
        launch(
            kernels.merge,
            (parts.split_window.numel(), num_heads),
            {
                "split_window": parts.split_window,
                "window_part": window_part,
                "part_slot": parts.part_slot,
                "partial": partial,
                "output": output,
            },
            num_rows=num_rows,
            num_slots=num_slots,
        )
    return output


BACKENDS = (FlashSparseBackend(stable=False), FlashSparseBackend(stable=True))
