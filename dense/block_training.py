"""The dense block of training: cuda/dense_block.cu, which keeps what its gradient needs, cuda/dense_block_backward.cu.

packing = TrainingPacking(...)                          # once for a model
packed = packing.pack(matrices, vectors)                # at each pass, since the weights change
h, qkv, kept = dense_block_forward(packed[i], attn_out, h)
grads, sums = dense_block_backward(packed[i], kept, grad, qkv_grad)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from kernels.backends.cuda import aligned_rows
from kernels.dropout import Dropout
from kernels.runtime.device import gpu_limits
from kernels.runtime.jit import cpp_name, get_kernel
from kernels.runtime.launch import launch_kernel, pack_scalars

from .block import DenseBlockSpec, Kept, dense_block_unavailable, dropout_rescale, run_dense_block
from .residual_norm import ColumnSums
from .weights import SHAPES, DenseSpec, Shape, pack_tiles

TRAINING_DIMS = (64, 96, 128)  # h1 in registers, dimensions in whole groups of 32


@dataclass(frozen=True)
class DenseBackwardSpec(DenseSpec):
    """One instance of cuda/dense_block_backward.cu."""

    source: ClassVar[Path] = Path(__file__).parent / "cuda" / "dense_block_backward.cu"
    WARP_SUMS: ClassVar[int] = 8

    @property
    def shape(self) -> Shape:
        # Three consumers have too few registers. Consumers of one ring wait for each other, so it holds half a round.
        return SHAPES[self.dim]._replace(consumers=2, stages=8 if self.dim == 128 else 0)

    @property
    def first(self) -> int:
        return 3 if self.has_next else 0

    @property
    def last(self) -> int:
        return 1

    @property
    def name(self) -> str:
        shape = self.shape
        template = (self.dim, shape.slice, shape.consumers, self.resident, self.stages, self.has_next)
        return cpp_name("dense_block_backward", self.dtype, *template)


def training_block_unavailable(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the kernels cannot run with such a model on `device`; None when they can."""
    if reason := dense_block_unavailable(device, dtype, dim):
        return reason
    return (
        None if dim in TRAINING_DIMS else f"it takes d = {', '.join(map(str, TRAINING_DIMS))}, and the model has {dim}"
    )


class PackedTrainingBlock(NamedTuple):
    """Weights of a block of one pass in the kernels' layout.

    Attributes:
        dtype, has_next: of the instances.
        eps: of both norms.
        weights, transposed: [tiles, d * slice] for the forward and for the backward kernel.
        vectors: [8 d] float32: biases and norms.
    """

    dtype: torch.dtype
    has_next: bool
    eps: float
    weights: torch.Tensor
    transposed: torch.Tensor
    vectors: torch.Tensor

    @property
    def dim(self) -> int:
        return len(self.vectors) // 8


class TrainingPacking:
    """Packs the weights of all blocks with a few kernels: a permutation of their elements.

    Args:
        dim: d, one of `TRAINING_DIMS`.
        dtype: of the matrices, torch.float16 or torch.bfloat16.
        blocks: at least one; the last has no next.
        eps: of all norms.
        device: of the weights.
    """

    def __init__(self, dim: int, dtype: torch.dtype, blocks: int, eps: float, device: torch.device) -> None:
        self.dim, self.dtype, self.eps = dim, dtype, eps
        self.has_next = [True] * (blocks - 1) + [False]
        parts, first = [], 0
        for has_next in self.has_next:
            forward, backward, elements = _permutation(dim, has_next)
            parts += [first + forward, first + backward]
            first += elements
        self.sizes = [len(part) for part in parts]
        self.index = torch.cat(parts).int().to(device)

    def pack(
        self, matrices: Sequence[Sequence[torch.Tensor]], vectors: Sequence[Sequence[torch.Tensor]]
    ) -> list[PackedTrainingBlock]:
        """The weights as they are now.

        A kernel that reads them may start before the one in front of it has ended. Two kernels that wait for each
        other, such as two products of torch, must therefore lie between this and `dense_block_forward`.

        Args:
            matrices: of each block Wout [d, d], Wup [2d, d], Wdown [d, 2d] and, but in the last, Wqkv [3d, d] of the
                next block.
            vectors: of each block bout, weight and bias of norm 1, bup, bdown, weight and bias of norm 2.
        """
        flat = torch.cat([matrix.flatten() for block in matrices for matrix in block])
        packed = flat.index_select(0, self.index).split(self.sizes)
        of_blocks = torch.cat([vector for block in vectors for vector in block]).float().view(-1, 8 * self.dim)
        return [
            PackedTrainingBlock(self.dtype, has_next, self.eps, *parts)
            for has_next, *parts in zip(self.has_next, packed[::2], packed[1::2], of_blocks.unbind(), strict=True)
        ]


def _permutation(dim: int, has_next: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Which element of a block's matrices, one after another, stands where in both kernels' tiles; their number."""
    shapes = [(dim, dim), (2 * dim, dim), (dim, 2 * dim), *([(3 * dim, dim)] if has_next else [])]
    sizes = [rows * columns for rows, columns in shapes]
    parts = zip(torch.arange(sum(sizes)).split(sizes), shapes, strict=True)
    out, up, down, *qkv = (numbers.view(shape) for numbers, shape in parts)
    of_next = qkv[0] if has_next else None
    first = out.new_empty((dim, 0)) if of_next is None else of_next.t()
    forward = pack_tiles(DenseBlockSpec(torch.float16, dim, has_next), out, up, down, of_next)
    backward = pack_tiles(DenseBackwardSpec(torch.float16, dim, has_next), first, down.t(), up.t(), out.t())
    return forward.flatten(), backward.flatten(), sum(sizes)


def dense_block_forward(
    packed: PackedTrainingBlock, attn_out: torch.Tensor, h: torch.Tensor, dropout: Dropout | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Kept | None]:
    """`dense_block.dense_block` with weights of a pass.

    Args:
        attn_out, h: [N, d].
        dropout: of the hidden units; None without.
        keep: whether the backward pass will run.

    Returns:
        Output of the block [N, d]; q, k, v of the next block [N, 3d], None after the last; and what was kept.
    """
    spec = _forward_spec(packed.dtype, packed.dim, packed.has_next, keep or dropout is not None)
    kept = None
    if spec.keep:
        num_rows, dim = h.shape
        rows = [h.new_empty((num_rows, columns)) for columns in (dim, 2 * dim, dim, dim)]
        kept = Kept(*rows, h.new_empty((2, num_rows, 2), dtype=torch.float32))
    found = run_dense_block(spec, packed.weights, packed.vectors, packed.eps, attn_out, h, kept, dropout)
    return *found, kept


class RowGradients(NamedTuple):
    """Gradients of a block's rows, [N, ...] in 16 bits.

    Attributes:
        sum1, sum2: [N, d], inputs of the norms. That of sum1 is that of h, too.
        hidden: [N, 2d], of the hidden units before ReLU.
        attn_out: [N, d].
    """

    sum2: torch.Tensor
    hidden: torch.Tensor
    sum1: torch.Tensor
    attn_out: torch.Tensor


def dense_block_backward(
    packed: PackedTrainingBlock,
    kept: Kept,
    grad: torch.Tensor,
    qkv_grad: torch.Tensor | None,
    dropout: Dropout | None = None,
) -> tuple[RowGradients, ColumnSums]:
    """Gradients of the rows, and column sums: gradients of biases and norms.

    Args:
        packed, kept, dropout: of the forward pass.
        grad: [N, d], of the block's output, without its part through q, k, v.
        qkv_grad: [N, 3d]; None after the last block.

    Returns:
        Gradients of the rows; and column sums in the order weight and bias of norm 2, bdown, bup [2d], weight and bias
        of norm 1, bout.
    """
    num_rows, dim = grad.shape
    grads = RowGradients(*(grad.new_empty((num_rows, columns)) for columns in (dim, 2 * dim, dim, dim)))
    spec = _backward_spec(packed.dtype, dim, packed.has_next)
    blocks = spec.grid(num_rows, gpu_limits(grad.device).num_sms)
    sums = ColumnSums(num_rows, (dim, dim, dim, 2 * dim, dim, dim, dim), grad, blocks)
    if num_rows:
        inputs = [None if rows is None else aligned_rows(rows.contiguous(), 16) for rows in (grad, qkv_grad)]
        launch_kernel(
            get_kernel(spec, grad.device.index),
            (blocks,),
            spec.threads,
            (
                *inputs,
                *(kept.sum1, kept.hidden, kept.sum2, kept.statistics, packed.transposed, packed.vectors),
                *grads,
                sums.partial,
            ),
            _scalars(num_rows, dropout_rescale(dropout)),
            shared_bytes=spec.shared_bytes,
            overlaps=True,
        )
    return grads, sums


# A step of a small graph takes as long as its launches: nothing is made twice.
@lru_cache
def _forward_spec(dtype: torch.dtype, dim: int, has_next: bool, keep: bool) -> DenseBlockSpec:
    return DenseBlockSpec(dtype, dim, has_next, keep)


@lru_cache
def _backward_spec(dtype: torch.dtype, dim: int, has_next: bool) -> DenseBackwardSpec:
    return DenseBackwardSpec(dtype, dim, has_next)


@lru_cache
def _scalars(num_rows: int, rescale: float) -> bytes:
    return pack_scalars(np.int32(num_rows), np.float32(rescale))
