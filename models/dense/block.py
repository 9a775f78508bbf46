"""The dense block: everything between two attentions of a Graph Transformer in one kernel; see cuda/dense_block.cu.

packed = pack_block(...)                    # once per set of weights
h, qkv = dense_block(packed, attn_out, h)   # any number of times
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from fused3s.backends.cuda import HALF_TYPES, aligned_rows, refuse_gradients
from fused3s.runtime.device import cuda_unavailable, gpu_limits
from fused3s.runtime.jit import KernelInstance, get_kernel
from fused3s.runtime.launch import launch_kernel
from fused3s.terms.dropout import Dropout

from .weights import ARCH, CAPABILITY, DIMS, WIDTHS, block_threads, forward_layout, num_blocks, pack_tiles

SOURCE = Path(__file__).parent / "cuda" / "dense_block.cu"


class BlockArguments(NamedTuple):
    """Template arguments of cuda/dense_block.cu.

    Attributes:
        dtype: torch.float16 or torch.bfloat16; all tensors have it except the float32 vectors.
        dim: d, one of `DIMS`.
        slice, consumers, shared_h1, cluster: see `Shape`.
        resident, stages: see `DenseLayout`.
        has_next: whether the projection of a next block is one of the products.
        keep: whether to store what the backward pass needs.
    """

    dtype: torch.dtype
    dim: int
    slice: int
    consumers: int
    shared_h1: bool
    cluster: int
    resident: int
    stages: int
    has_next: bool
    keep: bool


@lru_cache  # on small graphs the host time of a step counts
def block_instance(dtype: torch.dtype, dim: int, has_next: bool, keep: bool = False) -> KernelInstance:
    """The instance of cuda/dense_block.cu; arguments as in `BlockArguments`."""
    layout = forward_layout(dim, has_next)
    width, consumers, _, shared_h1, cluster = layout.shape
    shape = (width, consumers, shared_h1, cluster, layout.resident, layout.stages)
    return KernelInstance(SOURCE, "dense_block", BlockArguments(dtype, dim, *shape, has_next, keep), ARCH)


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """Copies of the weights of a block in the kernel's layout.

    Attributes:
        instance: the kernel that reads them.
        weights: [tiles, d * slice] 16-bit, tiles in the order of use, swizzled as in shared memory.
        vectors: [8 d] float32: biases and norms.
        eps: epsilon of both norms.
    """

    instance: KernelInstance
    weights: torch.Tensor
    vectors: torch.Tensor
    eps: float


def dense_block_unavailable(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the kernel cannot run such a model on `device`; None if it can."""
    if reason := cuda_unavailable(device):
        return reason
    if dtype not in HALF_TYPES:
        return f"it takes float16 and bfloat16, and the model has {dtype}"
    if dim not in DIMS:
        return f"it takes d = {WIDTHS}, and the model has {dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return f"{found}; it is written for {CAPABILITY[0]}.{CAPABILITY[1]} (H100, H200)"
    return None


def pack_block(
    out_w: torch.Tensor,
    out_b: torch.Tensor,
    norm1_w: torch.Tensor,
    norm1_b: torch.Tensor,
    up_w: torch.Tensor,
    up_b: torch.Tensor,
    down_w: torch.Tensor,
    down_b: torch.Tensor,
    norm2_w: torch.Tensor,
    norm2_b: torch.Tensor,
    next_qkv_w: torch.Tensor | None,
    eps: float,
) -> PackedBlock:
    """Pack the weights of a block (in the layout of torch.nn.Linear); compile the kernel if they are on a GPU.

    Args:
        out_w, out_b: [d, d], [d]: output projection of the attention.
        norm1_w, norm1_b: [d]: LayerNorm after the attention.
        up_w, up_b: [2d, d], [2d]: first layer of the FFN.
        down_w, down_b: [d, 2d], [d]: second layer of the FFN.
        norm2_w, norm2_b: [d]: LayerNorm after the FFN.
        next_qkv_w: [3d, d]: projections of the next block; None for the last block.
        eps: epsilon of both norms.

    Raises:
        ValueError: shapes, types or devices disagree, d is not in `DIMS`, or the type is not float16 or bfloat16.
    """
    dim = out_w.shape[0]
    if dim not in DIMS or out_w.dtype not in HALF_TYPES:
        raise ValueError(
            f"out_w: got {out_w.dtype} with d = {dim}; the kernel takes float16 and bfloat16, d = {WIDTHS}: "
            "ask dense_block_unavailable first"
        )
    weights = {"out_w": (out_w, (dim, dim)), "up_w": (up_w, (2 * dim, dim)), "down_w": (down_w, (dim, 2 * dim))}
    if next_qkv_w is not None:
        weights["next_qkv_w"] = (next_qkv_w, (3 * dim, dim))
    vectors = {"out_b": out_b, "norm1_w": norm1_w, "norm1_b": norm1_b, "up_b": up_b, "down_b": down_b}
    vectors |= {"norm2_w": norm2_w, "norm2_b": norm2_b}
    shapes = weights | {name: (vector, ((2 if name == "up_b" else 1) * dim,)) for name, vector in vectors.items()}
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or tensor.dtype != out_w.dtype or tensor.device != out_w.device:
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; "
                f"with this out_w it must be {shape}, {out_w.dtype} on {out_w.device}"
            )
    has_next = next_qkv_w is not None
    packed = PackedBlock(
        block_instance(out_w.dtype, dim, has_next),
        pack_tiles(forward_layout(dim, has_next), out_w, up_w, down_w, next_qkv_w),
        torch.cat(list(vectors.values())).float(),
        eps,
    )
    if out_w.device.type == "cuda":
        get_kernel(packed.instance, out_w.device.index)
        # The kernel reads weights before griddepcontrol.wait, so they must be complete.
        torch.cuda.current_stream(out_w.device).synchronize()
    return packed


def dense_block(
    packed: PackedBlock, attn_out: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queue the kernel on torch's current stream.

    GEMMs, norms, biases and residuals are computed in float32. The operands of the next GEMM and the results are
    rounded to the inputs' type.

    Args:
        packed: weights on the tensors' GPU.
        attn_out: [N, d], output of the attention, of the type of the weights.
        h: [N, d], input of the block.

    Returns:
        Output of the block [N, d], and q, k, v of the next block [N, 3d] (None after the last block).

    Raises:
        ValueError: shape, type or device do not match the weights, or an input requires a gradient.
    """
    device, dtype, dim = packed.weights.device, packed.instance.arguments.dtype, packed.instance.arguments.dim
    shape = (*h.shape[:1], dim)
    for name, tensor in {"attn_out": attn_out, "h": h}.items():
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_cuda:
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; these weights need "
                f"{shape}, {dtype} on {device}, which must be a GPU"
            )
    refuse_gradients("dense_block", attn_out, h)
    return run_dense_block(packed.instance, packed.weights, packed.vectors, packed.eps, attn_out, h)


class Kept(NamedTuple):
    """Rows that the forward kernel stores for the backward kernel; 16-bit except the statistics.

    Attributes:
        h1: [N, d], output of norm 1.
        hidden: [N, 2d], after ReLU and dropout.
        sum1, sum2: [N, d], inputs of the norms.
        statistics: [2, N, 2] float32, mean and 1 / standard deviation of the rows of sum1 and sum2.
    """

    h1: torch.Tensor
    hidden: torch.Tensor
    sum1: torch.Tensor
    sum2: torch.Tensor
    statistics: torch.Tensor


def run_dense_block(
    instance: KernelInstance,
    weights: torch.Tensor,
    vectors: torch.Tensor,
    eps: float,
    attn_out: torch.Tensor,
    h: torch.Tensor,
    kept: Kept | None = None,
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`dense_block` without its checks.

    Args:
        weights, vectors: as in `PackedBlock`.
        kept: written by instances with `keep`.
        dropout: dropout of the hidden units, mask by row, unit and head 0 (cuda/dropout.cuh); only with `keep`.
    """
    num_rows, arguments = len(h), instance.arguments
    h_next = torch.empty_like(h, memory_format=torch.contiguous_format)
    qkv = h.new_empty((num_rows, 3 * arguments.dim)) if arguments.has_next else None
    if num_rows:
        kernel = get_kernel(instance, h.device.index)
        attn_out, h = aligned_rows((attn_out.contiguous(), h.contiguous()))
        launch_kernel(
            kernel,
            (num_blocks(num_rows, gpu_limits(h.device).num_sms, arguments.cluster),),
            block_threads(arguments.consumers),
            {
                "attn_out": attn_out,
                "h": h,
                "weights": weights,
                "vectors": vectors,
                "h_next": h_next,
                "qkv": qkv,
                **({} if kept is None else kept._asdict()),
                "dropout_seed": None if dropout is None else dropout.seed,
            },
            kernel.scalars(
                dropout_threshold=0 if dropout is None else dropout.threshold,
                dropout_rescale=dropout_rescale(dropout),
                num_rows=num_rows,
                eps=eps,
            ),
            overlaps=True,
        )
    return h_next, qkv


def dropout_rescale(dropout: Dropout | None) -> float:
    """Factor of kept elements, 1 / (1 - rate)."""
    return 1.0 if dropout is None else 1 / (1 - dropout.rate)
