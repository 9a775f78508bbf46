"""The layers between the GEMMs of a training step, with their gradients; see cuda/residual_norm.cu.

All functions only queue work on torch's current stream. Rows are fp16 or bf16, contiguous; sums are in float32 and
deterministic.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fused3s.runtime.device import WARP_SIZE, gpu_limits
from fused3s.runtime.jit import KernelInstance, get_kernel
from fused3s.runtime.launch import launch_kernel

SOURCE = Path(__file__).parent / "cuda" / "residual_norm.cu"
# As in cuda/residual_norm.cu:
WARPS = 8
CHUNK = 8  # elements
SUM_COLUMNS, SUM_SLICES = 32, 32
MOST_COLUMNS = 1024

PARTIAL_ROWS = 32  # least rows per block of the backward kernels
RESIDENT_BLOCKS = 3  # per SM


@lru_cache  # on small graphs the host time of a step counts
def rows_instance(function: str, *arguments: torch.dtype | int) -> KernelInstance:
    """An instance of cuda/residual_norm.cu.

    Args:
        function: "residual_norm", "residual_norm_backward", "relu_backward" (dtype, columns), "sum_partials" (dtype).
        arguments: torch.float16 or torch.bfloat16; columns of a row, a multiple of 8 up to 1024, of norms up to 512.
    """
    return KernelInstance(SOURCE, function, arguments)


def launch_rows(
    instance: KernelInstance, tensors: dict[str, torch.Tensor | None], num_blocks: int | None = None, **scalars: Any
) -> None:
    """Queue a kernel on rows in the lanes of warps (cuda/row_lanes.cuh), by default with a block for each
    `block_items` of its `num_rows`."""
    kernel = get_kernel(instance, next(iter(tensors.values())).device.index)
    blocks = -(-scalars["num_rows"] // kernel.sizes.block_items) if num_blocks is None else num_blocks
    launch_kernel(kernel, (blocks,), WARPS * WARP_SIZE, tensors, kernel.scalars(**scalars), overlaps=True)


class ColumnSums:
    """Column sums of a backward pass; each kernel writes its part.

    Args:
        num_rows: rows that are summed.
        columns: widths of the sums, in the order in which they are written.
        like: a tensor of the rows' type and device.
        num_blocks: blocks of the kernels that write; None for those of this module.
    """

    def __init__(
        self, num_rows: int, columns: tuple[int, ...], like: torch.Tensor, num_blocks: int | None = None
    ) -> None:
        self.columns, self.dtype, self.written = columns, like.dtype, 0
        most = gpu_limits(like.device).num_sms * RESIDENT_BLOCKS
        self.num_blocks = max(1, min(-(-num_rows // PARTIAL_ROWS), most)) if num_blocks is None else num_blocks
        self.partial = like.new_empty((self.num_blocks, sum(columns)), dtype=torch.float32)

    def scalars(self, width: int) -> dict[str, int]:
        """Scalars of a kernel's struct: columns of `partial`, and the first of the next `width` columns."""
        first, self.written = self.written, self.written + width
        return {"partial_columns": self.partial.shape[1], "first_column": first}

    def total(self) -> tuple[torch.Tensor, ...]:
        """The sums, [columns] each, parts of one tensor."""
        num_partials, num_columns = self.partial.shape
        total = self.partial.new_empty(num_columns, dtype=self.dtype)
        kernel = get_kernel(rows_instance("sum_partials", self.dtype), total.device.index)
        launch_kernel(
            kernel,
            (-(-num_columns // SUM_COLUMNS),),
            SUM_COLUMNS * SUM_SLICES,
            {"partial": self.partial, "total": total},
            kernel.scalars(num_partials=num_partials, num_columns=num_columns),
            overlaps=True,
        )
        return total.split(self.columns)


def residual_norm(
    residual: torch.Tensor,
    addend: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """LayerNorm of `residual` + `addend`.

    Args:
        residual, addend: [N, d].
        weight, bias: [d].
        epsilon: added to the variance.
        keep: whether the backward pass will run.

    Returns:
        The norm [N, d]; with `keep` also the sum [N, d] and the mean and 1 / standard deviation of its rows, [N, 2]
        float32.
    """
    num_rows, columns = residual.shape
    output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    total = torch.empty_like(residual, memory_format=torch.contiguous_format) if keep else None
    statistics = residual.new_empty((num_rows, 2), dtype=torch.float32) if keep else None
    if num_rows:
        tensors = {"residual": residual, "addend": addend, "weight": weight, "bias": bias, "output": output}
        tensors |= {"sum": total, "statistics": statistics}
        instance = rows_instance("residual_norm", residual.dtype, columns)
        launch_rows(instance, tensors, num_rows=num_rows, epsilon=epsilon)
    return output, total, statistics


def residual_norm_backward(
    first_grad: torch.Tensor,
    second_grad: torch.Tensor | None,
    total: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor,
    sums: ColumnSums,
) -> torch.Tensor:
    """Gradient of the sum in `residual_norm`, [N, d]; column sums: gradients of weight and bias, and of that gradient.

    Args:
        first_grad, second_grad: [N, d]; their sum is the gradient of the norm; None for zero.
        total, statistics: results of `residual_norm` with `keep`.
    """
    num_rows, columns = total.shape
    grad = torch.empty_like(total, memory_format=torch.contiguous_format)
    tensors = {"first_grad": first_grad, "second_grad": second_grad, "sum": total, "statistics": statistics}
    tensors |= {"weight": weight, "sum_grad": grad, "partial": sums.partial}
    instance = rows_instance("residual_norm_backward", total.dtype, columns)
    launch_rows(instance, tensors, sums.num_blocks, num_rows=num_rows, **sums.scalars(3 * columns))
    return grad


def relu_backward_(grad: torch.Tensor, activation: torch.Tensor | None, rescale: float, sums: ColumnSums) -> None:
    """Gradient of ReLU and of the dropout after it, in place, and its column sums.

    Args:
        grad: [N, columns], gradient of the output; overwritten by that of the input.
        activation: [N, columns], the output; None: only the column sums of `grad`.
        rescale: 1 / (1 - rate) of the dropout.
    """
    num_rows, columns = grad.shape
    tensors = {"grad": grad, "activation": activation, "partial": sums.partial}
    scalars = {"num_rows": num_rows, "rescale": rescale} | sums.scalars(columns)
    launch_rows(rows_instance("relu_backward", grad.dtype, columns), tensors, sums.num_blocks, **scalars)
