"""Rows between attention and the exchange of several ranks: `pack_rows` and `combine_rows_`; see cuda/rank_rows.cu.

On GPUs each is one kernel, queued on torch's current stream; elsewhere, plain torch.
"""

import math
from functools import cache, lru_cache
from pathlib import Path

import torch

from fused3s.runtime.device import cuda_unavailable
from fused3s.runtime.jit import ELEMENTS, KernelInstance, get_kernel
from fused3s.runtime.launch import launch_kernel

SOURCE = Path(__file__).parent / "cuda" / "rank_rows.cu"
# As in cuda/rank_rows.cu:
THREADS = 256
PACK_BATCH, COMBINE_BATCH = 4, 2
CHUNK_BYTES = 16  # most of a load


@lru_cache  # on small graphs the host time of a call counts
def rows_instance(function: str, *arguments: torch.dtype | int) -> KernelInstance:
    """An instance of cuda/rank_rows.cu: "pack_rows" (chunk_bytes), "combine_rows" (dtype of the outputs, chunk_bytes).
    chunk_bytes: of a load, a power of two from an element up to 16, to pack from 1."""
    return KernelInstance(SOURCE, function, arguments)


def pack_rows(key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[s, 2, H, d]: the rows `rows` of key and value, side by side.

    Args:
        key, value: [n, H, d] of one type, any strides; heads that do not lie side by side are copied first.
        rows: [s] int64, contiguous, below n (not checked); a row may stand there several times.

    Raises:
        ValueError: key and value disagree in shape or type.
    """
    if key.dim() != 3 or key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"key, value: got {list(key.shape)} {key.dtype} and {list(value.shape)} {value.dtype}; "
            "[n, H, d] of one type is needed"
        )
    _, num_heads, dim = key.shape
    packed = key.new_empty((len(rows), 2, num_heads, dim))
    if packed.numel() == 0:
        return packed
    if not runs_kernels(key.device):
        torch.index_select(key, 0, rows, out=packed[:, 0])
        torch.index_select(value, 0, rows, out=packed[:, 1])
        return packed
    key, value = _whole_rows(key), _whole_rows(value)
    row_bytes = num_heads * dim * key.itemsize
    strides = key.stride(0) * key.itemsize, value.stride(0) * key.itemsize
    addresses = key.data_ptr(), value.data_ptr(), packed.data_ptr()
    chunk_bytes = math.gcd(CHUNK_BYTES, row_bytes, *strides, *addresses)
    row_chunks, instance = row_bytes // chunk_bytes, rows_instance("pack_rows", chunk_bytes)
    tensors = {"packed": packed, "key": key, "value": value, "rows": rows}
    scalars = {"key_stride": strides[0], "value_stride": strides[1], "row_chunks": row_chunks}
    _launch(instance, 2 * len(rows), THREADS * PACK_BATCH // row_chunks, tensors, scalars)
    return packed


def combine_rows_(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Attention over two sets of columns, from the attention over each: the combine of split-KV, in place.

    All tensors are contiguous. The arithmetic is float32 (float64 for outputs of that type), rounded once. Where one
    set is empty the result is the other output exactly.

    Args:
        output, lse: [n, H, d] and [n, H] float32 over the first set; afterwards over both. Rows without an edge have an
            lse of -inf and an output of 0.
        other, other_lse: over the second set, of the same types.
    """
    if output.numel() == 0:
        return
    if output.dtype not in ELEMENTS or not runs_kernels(output.device):
        _combine_by_torch(output, lse, other, other_lse)
        return
    head_bytes = output.shape[2] * output.itemsize
    chunk_bytes = math.gcd(CHUNK_BYTES, head_bytes, output.data_ptr(), other.data_ptr())
    head_chunks = head_bytes // chunk_bytes
    tensors = {"output": output, "lse": lse, "other_output": other, "other_lse": other_lse}
    instance = rows_instance("combine_rows", output.dtype, chunk_bytes)
    _launch(instance, lse.numel(), THREADS * COMBINE_BATCH // head_chunks, tensors, {"head_chunks": head_chunks})


def _launch(
    instance: KernelInstance,
    num_segments: int,
    block_segments: int,
    tensors: dict[str, torch.Tensor],
    scalars: dict[str, int],
) -> None:
    """Launch blocks of so many segments, of one at least."""
    kernel, block_segments = get_kernel(instance, next(iter(tensors.values())).device.index), max(1, block_segments)
    scalars = kernel.scalars(num_segments=num_segments, block_segments=block_segments, **scalars)
    launch_kernel(kernel, (-(-num_segments // block_segments),), THREADS, tensors, scalars, overlaps=True)


def _combine_by_torch(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    wide = torch.promote_types(output.dtype, torch.float32)
    difference = (lse - other_lse)[..., None].to(wide)  # NaN where both are -inf: 0 and 0 may have any weights
    weight, other_weight = (torch.sigmoid(each).nan_to_num_(0.0) for each in (difference, -difference))
    output.copy_(weight * output.to(wide) + other_weight * other.to(wide))
    torch.logaddexp(lse, other_lse, out=lse)


@cache
def runs_kernels(device: torch.device) -> bool:
    return cuda_unavailable(device) is None


def _whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[n, H, d] whose heads lie side by side, with any stride of rows; a copy if they do not."""
    _, num_heads, dim = tensor.shape
    _, head_stride, stride = tensor.stride()
    return tensor if stride == 1 and (head_stride == dim or num_heads == 1) else tensor.contiguous()
