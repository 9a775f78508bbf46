"""The dense block in training: cuda/dense_block.cu with stored activations, and cuda/dense_block_backward.cu.

packing = TrainingPacking(...)                          # once per model
packed = packing.pack(matrices, vectors)                # at each pass, since the weights change
h, qkv, kept = dense_block_forward(packed[i], attn_out, h)
grads, sums = dense_block_backward(packed[i], kept, grad, qkv_grad)
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from fused3s.backends.cuda import aligned_rows
from fused3s.runtime.device import gpu_limits
from fused3s.runtime.jit import KernelInstance, compile_ahead, get_kernel
from fused3s.runtime.launch import launch_kernel, next_waits
from fused3s.terms.dropout import Dropout

from .block import Kept, block_instance, dense_block_unavailable, dropout_rescale, run_dense_block
from .residual_norm import ColumnSums
from .weights import ARCH, backward_layout, block_threads, forward_layout, num_blocks, pack_tiles

SOURCE = Path(__file__).parent / "cuda" / "dense_block_backward.cu"
TRAINING_DIMS = (64, 96, 128)  # h1 in registers, dimensions in whole groups of 32


@lru_cache  # on small graphs the host time of a step counts
def backward_instance(dtype: torch.dtype, dim: int, has_next: bool) -> KernelInstance:
    """The instance of cuda/dense_block_backward.cu; arguments as in `BlockArguments`."""
    layout = backward_layout(dim, has_next)
    shape = (layout.shape.slice, layout.shape.consumers, layout.resident, layout.stages)
    return KernelInstance(SOURCE, "dense_block_backward", (dtype, dim, *shape, has_next), ARCH)


def training_block_unavailable(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the kernels cannot run such a model on `device`; None if they can."""
    if reason := dense_block_unavailable(device, dtype, dim):
        return reason
    return (
        None if dim in TRAINING_DIMS else f"it takes d = {', '.join(map(str, TRAINING_DIMS))}, and the model has {dim}"
    )


class PackedTrainingBlock(NamedTuple):
    """Weights of a block in the kernels' layout, for one pass.

    Attributes:
        dtype, has_next: of the instances.
        eps: of both norms.
        weights, transposed: [tiles, d * slice], for the forward and the backward kernel.
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
        if device.type == "cuda":
            instances = [block_instance(dtype, dim, has_next, keep=True) for has_next in self.has_next]
            instances += [backward_instance(dtype, dim, has_next) for has_next in self.has_next]
            compile_ahead(instances, device.index)

    def pack(
        self, matrices: Sequence[Sequence[torch.Tensor]], vectors: Sequence[Sequence[torch.Tensor]]
    ) -> list[PackedTrainingBlock]:
        """Queue the packing of the current weights on torch's current stream.

        The next kernel with programmatic dependent launch runs without overlap (`next_waits`), since the dense kernels
        read weights before griddepcontrol.wait.

        Args:
            matrices: of each block Wout [d, d], Wup [2d, d], Wdown [d, 2d] and, but in the last, Wqkv [3d, d] of the
                next block.
            vectors: of each block bout, weight and bias of norm 1, bup, bdown, weight and bias of norm 2.
        """
        flat = torch.cat([matrix.flatten() for block in matrices for matrix in block])
        packed = flat.index_select(0, self.index).split(self.sizes)
        of_blocks = torch.cat([vector for block in vectors for vector in block]).float().view(-1, 8 * self.dim)
        if of_blocks.is_cuda:
            next_waits(of_blocks.get_device())
        return [
            PackedTrainingBlock(self.dtype, has_next, self.eps, *parts)
            for has_next, *parts in zip(self.has_next, packed[::2], packed[1::2], of_blocks.unbind(), strict=True)
        ]


def _permutation(dim: int, has_next: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Indices into the concatenated matrices of a block, in the order of the forward and of the backward tiles; and the
    number of elements."""
    shapes = [(dim, dim), (2 * dim, dim), (dim, 2 * dim), *([(3 * dim, dim)] if has_next else [])]
    sizes = [rows * columns for rows, columns in shapes]
    parts = zip(torch.arange(sum(sizes)).split(sizes), shapes, strict=True)
    out, up, down, *qkv = (numbers.view(shape) for numbers, shape in parts)
    of_next = qkv[0] if has_next else None
    first = out.new_empty((dim, 0)) if of_next is None else of_next.t()
    forward = pack_tiles(forward_layout(dim, has_next), out, up, down, of_next)
    backward = pack_tiles(backward_layout(dim, has_next), first, down.t(), up.t(), out.t())
    return forward.flatten(), backward.flatten(), sum(sizes)


def dense_block_forward(
    packed: PackedTrainingBlock, attn_out: torch.Tensor, h: torch.Tensor, dropout: Dropout | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Kept | None]:
    """`dense_block.dense_block` with weights of a pass.

    Args:
        attn_out, h: [N, d].
        dropout: dropout of the hidden units, or None.
        keep: whether to store what the backward pass needs.

    Returns:
        Output of the block [N, d]; q, k, v of the next block [N, 3d] (None after the last); and the stored rows.
    """
    instance = block_instance(packed.dtype, packed.dim, packed.has_next, keep or dropout is not None)
    kept = None
    if instance.arguments.keep:
        num_rows, dim = h.shape
        rows = [h.new_empty((num_rows, columns)) for columns in (dim, 2 * dim, dim, dim)]
        kept = Kept(*rows, h.new_empty((2, num_rows, 2), dtype=torch.float32))
    found = run_dense_block(instance, packed.weights, packed.vectors, packed.eps, attn_out, h, kept, dropout)
    return *found, kept


class RowGradients(NamedTuple):
    """Gradients of a block's rows, [N, ...] in 16 bits.

    Attributes:
        sum1, sum2: [N, d], of the inputs of the norms; that of sum1 is also that of h.
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
        grad: [N, d], gradient of the block's output, without the part through q, k, v.
        qkv_grad: [N, 3d]; None after the last block.

    Returns:
        Gradients of the rows; and column sums in the order weight and bias of norm 2, bdown, bup [2d], weight and bias
        of norm 1, bout.
    """
    num_rows, dim = grad.shape
    grads = RowGradients(*(grad.new_empty((num_rows, columns)) for columns in (dim, 2 * dim, dim, dim)))
    blocks = num_blocks(num_rows, gpu_limits(grad.device).num_sms)
    sums = ColumnSums(num_rows, (dim, dim, dim, 2 * dim, dim, dim, dim), grad, blocks)
    if num_rows:
        inputs = [None if rows is None else aligned_rows([rows.contiguous()])[0] for rows in (grad, qkv_grad)]
        kernel = get_kernel(backward_instance(packed.dtype, dim, packed.has_next), grad.device.index)
        launch_kernel(
            kernel,
            (blocks,),
            block_threads(backward_layout(dim, packed.has_next).shape.consumers),
            {
                "grad": inputs[0],
                "qkv_grad": inputs[1],
                "sum1": kept.sum1,
                "hidden": kept.hidden,
                "sum2": kept.sum2,
                "statistics": kept.statistics,
                "weights": packed.transposed,
                "vectors": packed.vectors,
                "sum2_grad": grads.sum2,
                "hidden_grad": grads.hidden,
                "sum1_grad": grads.sum1,
                "attn_grad": grads.attn_out,
                "partial": sums.partial,
            },
            kernel.scalars(num_rows=num_rows, rescale=dropout_rescale(dropout)),
            overlaps=True,
        )
    return grads, sums
