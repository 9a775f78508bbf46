"""Products with the weights of low-rank edge features, around the kernel of `fused3s`.

cuda/feature_products.cu        16-bit tensors
cuda/feature_products_float.cu  float32
cuda/weight_gradient.cuh        what their gradients of the weights share
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..fragments import WARP_SIZE
from ..runtime.device import gpu_limits
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores

# As in cuda/feature_rows.cuh:
WARPS = 8
ROWS_PER_TILE = 16
FEATURES = 16
QUAD_LANES = 4
CHUNK_BYTES = 16


@dataclass(frozen=True)
class ProjectQuerySpec:
    """One instance of `project_query`.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or torch.float32, of query and weight.
        dim: dimensions of a head, an even number up to 256.
    """

    dtype: torch.dtype
    dim: int

    @property
    def source(self) -> str:
        return source_of(self.dtype)

    @property
    def name(self) -> str:
        if self.dtype == torch.float32:
            return cpp_name("project_query_float", self.dim)
        return cpp_name("project_query", self.dtype, self.dim)

    @property
    def heads(self) -> int:
        """Heads of a block."""
        return heads_of_quad(self.dim * self.dtype.itemsize)


@dataclass(frozen=True)
class AddFeaturesSpec:
    """One instance of `add_features`.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or torch.float32, of feature sums and weight.
        out_dtype: torch.float32 or `dtype`.
        dim: dimensions of a head, an even number up to 256.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    dim: int

    @property
    def source(self) -> str:
        return source_of(self.dtype)

    @property
    def name(self) -> str:
        if self.dtype == torch.float32:
            return cpp_name("add_features_float", self.dim)
        return cpp_name("add_features", self.dtype, self.out_dtype, self.dim)

    @property
    def heads(self) -> int:
        """Heads of a block."""
        return heads_of_quad(self.dim * self.out_dtype.itemsize)


@dataclass(frozen=True)
class WeightGradientSpec:
    """One instance of `weight_gradient`.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or torch.float32, of rows, feature sums and gradient.
        dim: dimensions of a head, an even number up to 256.
    """

    dtype: torch.dtype
    dim: int

    @property
    def source(self) -> str:
        return source_of(self.dtype)

    @property
    def name(self) -> str:
        if self.dtype == torch.float32:
            return cpp_name("weight_gradient_float", self.dim)
        return cpp_name("weight_gradient", self.dtype, self.dim)

    @property
    def slice_dims(self) -> int:
        """Dimensions of a block."""
        return 16 if self.dim <= 16 else 32 if self.dim <= 32 else 64

    @property
    def slices(self) -> int:
        """Blocks that share out the dimensions of a head."""
        return -(-self.dim // self.slice_dims)


def source_of(dtype: torch.dtype) -> str:
    return "feature_products_float.cu" if dtype == torch.float32 else "feature_products.cu"


def heads_of_quad(head_bytes: int) -> int:
    chunks = -(-head_bytes // CHUNK_BYTES)
    return max(1, QUAD_LANES // chunks)


def project_query(query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """u[h, n, c] = sum_d query[n, h, d] weight[h, d, c], queued on torch's current stream.

    Args:
        query: [N, H, d] fp16, bf16 or float32, any row and head strides, d even up to 256; rows aligned to 16 bytes,
            or to 4 where their size is no multiple of 16.
        weight: [H, d, r] of query's type, contiguous, r <= 16.

    Returns:
        [H, N, 16] float32, zero from column r on.
    """
    num_rows, num_heads, dim = query.shape
    projected = query.new_empty((num_heads, num_rows, FEATURES), dtype=torch.float32)
    if projected.numel() == 0:
        return projected
    spec = _project_spec(query.dtype, dim)
    row_stride, head_stride, _ = query.stride()
    launch_kernel(
        get_kernel(spec, query.device.index),
        _grid(num_rows, num_heads, spec, query.device),
        WARPS * WARP_SIZE,
        (query, weight, projected),
        _project_scalars(head_stride, row_stride * query.itemsize, num_rows, num_heads, weight.shape[2]),
        overlaps=True,
    )
    return projected


def add_features(output: torch.Tensor, feature_sums: torch.Tensor, weight: torch.Tensor) -> None:
    """output[n, h, d] += sum_c weight[h, d, c] feature_sums[h, n, c], queued on torch's current stream.

    The sum is in float32 and rounded once.

    Args:
        output: [N, H, d] contiguous, float32 or of `weight`'s type, d even up to 256; updated in place.
        feature_sums: [H, N, 16] fp16, bf16 or float32, contiguous, finite; columns from r on do not count.
        weight: [H, d, r] of the same type, contiguous, r <= 16.
    """
    num_rows, num_heads, dim = output.shape
    if output.numel() == 0:
        return
    spec = _add_spec(weight.dtype, output.dtype, dim)
    launch_kernel(
        get_kernel(spec, output.device.index),
        _grid(num_rows, num_heads, spec, output.device),
        WARPS * WARP_SIZE,
        (output, feature_sums, weight),
        _add_scalars(num_rows, num_heads, weight.shape[2]),
        overlaps=True,
    )


def weight_gradients(products: Sequence[tuple[torch.Tensor, torch.Tensor]], num_features: int) -> list[torch.Tensor]:
    """sum_n rows[n, h, d] feature_sums[h, n, c] of one or two products, queued as one launch on torch's current stream.

    The sums are in float32 and rounded once; the same inputs give the same bits.

    Args:
        products: pairs of the same shapes and type:
            rows [N, H, d] fp16, bf16 or float32, any row and head strides, d even up to 256; rows of a head aligned to
            16 bytes, or to the largest power of two that divides their size.
            feature_sums [H, N, 16] of the same type, contiguous; columns from r on do not count.
        num_features: r, 1 to 16.

    Returns:
        [H, d, r] of each product, of its type, contiguous.
    """
    rows, _ = products[0]
    num_rows, num_heads, dim = rows.shape
    shape = (num_heads, dim, num_features)
    if num_rows == 0:
        return [rows.new_zeros(shape) for _ in products]
    gradients = [rows.new_empty(shape) for _ in products]
    spec = _gradient_spec(rows.dtype, dim)
    groups = num_heads * spec.slices
    row_blocks = _row_blocks(num_rows, groups * len(products), spec.dtype, rows.device)
    partial = arrived = None
    if row_blocks > 1:
        num_sums = groups * len(products)
        partial = rows.new_empty(num_sums * row_blocks * spec.slice_dims * FEATURES, dtype=torch.float32)
        arrived = semaphores(num_sums, rows.device)
    absent = (None,) * (2 - len(products))
    strides = tuple(number for rows, _ in products for number in rows.stride()[:2])
    launch_kernel(
        get_kernel(spec, rows.device.index),
        (groups, row_blocks, len(products)),
        WARPS * WARP_SIZE,
        (
            *(*(rows for rows, _ in products), *absent),
            *(*(feature_sums for _, feature_sums in products), *absent),
            *(*gradients, *absent),
            *(partial, arrived),
        ),
        _gradient_scalars(strides, spec.dtype.itemsize, num_rows, num_features),
        overlaps=True,
    )
    return gradients


def _grid(
    num_rows: int, num_heads: int, spec: ProjectQuerySpec | AddFeaturesSpec, device: torch.device
) -> tuple[int, int]:
    """Head groups, and row blocks."""
    groups = -(-num_heads // spec.heads)
    return groups, _row_blocks(num_rows, groups, spec.dtype, device)


def _row_blocks(num_rows: int, groups: int, dtype: torch.dtype, device: torch.device) -> int:
    """Blocks that share out the rows of each of `groups`: as many as are resident at once, or as have rows."""
    blocks_per_sm = 2 if dtype == torch.float32 else 3  # kMinBlocks
    resident = max(1, gpu_limits(device).num_sms * blocks_per_sm // groups)
    return min(-(-num_rows // (WARPS * ROWS_PER_TILE)), resident)


@lru_cache
def _project_spec(dtype: torch.dtype, dim: int) -> ProjectQuerySpec:
    return ProjectQuerySpec(dtype, dim)


@lru_cache
def _add_spec(dtype: torch.dtype, out_dtype: torch.dtype, dim: int) -> AddFeaturesSpec:
    return AddFeaturesSpec(dtype, out_dtype, dim)


@lru_cache
def _gradient_spec(dtype: torch.dtype, dim: int) -> WeightGradientSpec:
    return WeightGradientSpec(dtype, dim)


@lru_cache
def _project_scalars(head_stride: int, row_bytes: int, *numbers: int) -> bytes:
    return pack_scalars(np.int64(head_stride), np.int32(row_bytes), *map(np.int32, numbers))


@lru_cache
def _add_scalars(*numbers: int) -> bytes:
    return pack_scalars(*map(np.int32, numbers))


@lru_cache
def _gradient_scalars(strides: tuple[int, ...], itemsize: int, num_rows: int, num_features: int) -> bytes:
    """`strides`: of rows and heads of each product, elements."""
    row_strides, head_strides = (*strides[::2], 0)[:2], (*strides[1::2], 0)[:2]
    row_bytes = [stride * itemsize for stride in row_strides]
    return pack_scalars(*map(np.int64, head_strides), *map(np.int32, (*row_bytes, num_rows, num_features)))
