"""Residual with batch norm in training, and its gradient; see cuda/batch_norm.cu.

All functions only queue work on torch's current stream. There is at least one row; rows are fp16 or bf16, contiguous;
statistics, weights and sums are float32 and deterministic.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fused3s.runtime.device import gpu_limits
from fused3s.runtime.jit import KernelInstance
from fused3s.runtime.semaphores import semaphores

from .residual_norm import CHUNK, MOST_COLUMNS, launch_rows

SOURCE = Path(__file__).parent / "cuda" / "batch_norm.cu"
PARTIAL_ROWS = 64  # least rows per block of a sum: the last-arriving block merges all partials


@lru_cache  # on small graphs the host time of a step counts
def batch_norm_instance(function: str, dtype: torch.dtype, columns: int) -> KernelInstance:
    """An instance of cuda/batch_norm.cu.

    Args:
        function: "batch_norm_statistics", "batch_norm", "batch_norm_sums", "batch_norm_gradient".
        columns: of a row, a multiple of 8 up to 512.
    """
    return KernelInstance(SOURCE, function, (dtype, columns))


def runs_kernels(x: Tensor) -> bool:
    """Whether the kernels can run on rows [N, d] and may: torch.compile cannot trace them."""
    is_16_bit = x.dtype in (torch.float16, torch.bfloat16)
    fits = x.dim() == 2 and len(x) > 0 and x.shape[1] % CHUNK == 0 and x.shape[1] <= MOST_COLUMNS // 2
    return x.is_cuda and is_16_bit and fits and not torch.compiler.is_compiling()


class BatchNormFunction(torch.autograd.Function):
    """(x [N, d], weight [d], bias [d], norm, row_weights) -> batch norm [N, d], as `residual_batch_norm`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm1d, row_weights: Tensor | None
    ) -> Tensor:
        output, x, statistics = residual_batch_norm(x.contiguous(), None, norm, row_weights)
        ctx.save_for_backward(x, statistics, weight, row_weights)
        ctx.epsilon = norm.eps
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, statistics, weight, row_weights = ctx.saved_tensors
        needs, options = ctx.needs_input_grad[0], (ctx.epsilon, row_weights)
        of_x, sums = residual_batch_norm_backward(grad.contiguous(), None, x, statistics, weight, *options, needs)
        return of_x, *sums, None, None


def residual_batch_norm(
    residual: Tensor, addend: Tensor | None, norm: nn.BatchNorm1d, row_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm of `residual` + `addend` by the statistics of the real rows; updates the running ones.

    Args:
        residual, addend: [N, d]; None for a zero addend.
        norm: with momentum; its weights and running statistics are float32.
        row_weights: see `models.batch_norm.BatchNorm`.

    Returns:
        The norm [N, d], the sum [N, d], and mean and variance of its columns, [2, d] float32.
    """
    num_rows, columns = residual.shape
    total = None if addend is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    blocks = _num_blocks(num_rows, residual.device)
    statistics = residual.new_empty((2, columns), dtype=torch.float32)
    tensors = {
        "residual": residual,
        "addend": addend,
        "row_weights": row_weights,
        "sum": total,
        "partial": residual.new_empty((blocks, 2 * columns + 4), dtype=torch.float32),
        "statistics": statistics,
        "running_mean": norm.running_mean,
        "running_variance": norm.running_var,
        "num_batches": norm.num_batches_tracked,
        "semaphore": semaphores(1, residual.device),
    }
    instance = batch_norm_instance("batch_norm_statistics", residual.dtype, columns)
    launch_rows(instance, tensors, blocks, num_rows=num_rows, momentum=norm.momentum)
    total = residual if total is None else total
    return apply_batch_norm(total, None, norm, *statistics), total, statistics


def apply_batch_norm(
    residual: Tensor, addend: Tensor | None, norm: nn.BatchNorm1d, mean: Tensor, variance: Tensor
) -> Tensor:
    """(`residual` + `addend` - mean) / sqrt(variance + epsilon) * weight + bias, [N, d]; None for a zero addend."""
    num_rows, columns = residual.shape
    output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    tensors = {"residual": residual, "addend": addend, "mean": mean, "variance": variance}
    tensors |= {"weight": norm.weight, "bias": norm.bias, "output": output}
    launch_rows(
        batch_norm_instance("batch_norm", residual.dtype, columns), tensors, num_rows=num_rows, epsilon=norm.eps
    )
    return output


def residual_batch_norm_backward(
    first_grad: Tensor,
    second_grad: Tensor | None,
    total: Tensor,
    statistics: Tensor,
    weight: Tensor,
    epsilon: float,
    row_weights: Tensor | None,
    with_rows: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """Gradient of the sum in `residual_batch_norm`, [N, d], and those of weight and bias, [2, d] float32.

    The columns of the former add up to 0: a bias in front of a batch norm has no gradient.

    Args:
        first_grad, second_grad: [N, d]; their sum is the gradient of the norm; None for zero.
        total, statistics: results of `residual_batch_norm`.
        with_rows: False: None instead of the former.
    """
    num_rows, columns = total.shape
    grad = torch.empty_like(total, memory_format=torch.contiguous_format) if with_rows else None
    sums = total.new_empty((2, columns), dtype=torch.float32)
    blocks = _num_blocks(num_rows, total.device)
    tensors = {
        "first_grad": first_grad,
        "second_grad": second_grad,
        "sum": total,
        "statistics": statistics,
        "row_weights": row_weights,
        "weight": weight,
        "partial": total.new_empty((blocks, 2, columns), dtype=torch.float32),
        "total": sums,
        "sum_grad": grad,
        "semaphore": semaphores(1, total.device),
    }
    for function, grid in (("batch_norm_sums", blocks), ("batch_norm_gradient", None))[: 1 + with_rows]:
        instance = batch_norm_instance(function, total.dtype, columns)
        launch_rows(instance, tensors, grid, num_rows=num_rows, epsilon=epsilon)
    return grad, sums


def _num_blocks(num_rows: int, device: torch.device) -> int:
    return min(-(-num_rows // PARTIAL_ROWS), gpu_limits(device).num_sms)
