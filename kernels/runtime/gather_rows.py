"""Rows of a matrix in another order; on GPUs by one kernel, since torch.index_select is slow for short rows."""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..torch_side.torch_private import dispatch_modes, is_traced, is_transformed
from .device import cuda_unavailable
from .jit import KernelInstance, get_kernel
from .launch import launch_kernel

THREADS, BATCH = 256, 4  # as in cuda/gather_rows.cu
CHUNK_BYTES = 16  # most of a load
PLAIN = (Tensor, torch.nn.Parameter)


def gather_rows(rows: Tensor, places: Tensor, columns: int | None = None) -> Tensor:
    """rows[places] with zeros behind each row, [m, columns]; differentiable.

    Args:
        rows: [n, c], float; without `columns` [n, ..].
        places: [m] int32 or int64, below n (not checked).
        columns: c or more.
    """
    if not _runs_kernel(rows, places, columns):
        found = rows.index_select(0, places)
        padding = 0 if columns is None else columns - rows.shape[1]
        return functional.pad(found, (0, padding)) if padding else found
    if rows.requires_grad and torch.is_grad_enabled():
        return _Gather.apply(rows, places, columns)
    return launch_gather(rows, places, columns)


def _runs_kernel(rows: Tensor, places: Tensor, columns: int | None) -> bool:
    # First what has no memory, or no size that is known: traced tensors, and subclasses that wrap others.
    if is_traced(rows) or type(rows) not in PLAIN or type(places) is not Tensor or dispatch_modes() or is_transformed():
        return False
    is_slow = columns is not None or rows.shape[1:].numel() * rows.itemsize >= CHUNK_BYTES  # by torch.index_select
    has_rows = rows.is_cuda and places.device == rows.device and rows.numel() > 0 and places.numel() > 0
    return is_slow and has_rows and cuda_unavailable(rows.device) is None


def add_to_rows(gradient: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient of `rows` of a shape, from that of `gather_rows`.

    Rows of a place that occurs again are added: behind the last edge of a plan with room, the order of edges names edge
    0, and the gradient is 0.
    """
    return gradient.new_zeros(shape).index_add_(0, places, gradient[:, : shape[1]] if len(shape) > 1 else gradient)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, columns: int | None) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = rows.shape
        return launch_gather(rows, places, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return add_to_rows(gradient, places, ctx.shape), None, None


@lru_cache
def gather_instance(chunk_bytes: int, is_long: bool) -> KernelInstance:
    return KernelInstance("gather_rows.cu", "gather_rows", (chunk_bytes, is_long))


def launch_gather(rows: Tensor, places: Tensor, columns: int | None = None) -> Tensor:
    """`gather_rows` by its kernel; no size is 0."""
    shape = rows.shape[1:] if columns is None else (columns,)
    out = rows.new_empty((places.shape[0], *shape))
    rows, places = rows.flatten(1) if rows.dim() > 1 else rows[:, None], places.contiguous()
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    row_bytes, out_bytes = rows.shape[1] * rows.itemsize, math.prod(shape) * rows.itemsize
    stride = rows.stride(0) * rows.itemsize
    chunk_bytes = math.gcd(CHUNK_BYTES, row_bytes, out_bytes, stride, rows.data_ptr(), out.data_ptr())
    out_chunks = out_bytes // chunk_bytes
    block_rows = max(1, THREADS * BATCH // out_chunks)
    kernel = get_kernel(gather_instance(chunk_bytes, places.dtype == torch.int64), rows.device.index)
    launch_kernel(
        kernel,
        (-(-len(places) // block_rows),),
        THREADS,
        {"out": out, "rows": rows, "places": places},
        kernel.scalars(
            row_stride=stride,
            num_rows=len(places),
            row_chunks=row_bytes // chunk_bytes,
            out_chunks=out_chunks,
            block_rows=block_rows,
        ),
        overlaps=True,
    )
    return out
