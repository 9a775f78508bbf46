"""The kernel of `fused3s` for narrow heads on sparse graphs and for edge data; see cuda/fused3s_edges.cu."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional

from ..dropout import Dropout
from ..edge_data import EdgeTerms
from ..fragments import WARP_SIZE
from ..runtime.device import GPULimits, gpu_limits
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores
from ..tuning import MOST_LANES, tuning_for
from .cuda import LOAD_BYTES, checked_inputs
from .feature_products import FEATURES, add_features, project_query
from .fused3s_data import Fused3SData
from .fused3s_shapes import BIAS, CLAMP, DROPOUT, KEY_FEATURES, MULTIPLIER, TYPES, VALUE_FEATURES

# As in cuda/lane_group.cuh:
WARPS = 4
LANE_DIMS = 8

NO_EDGE_TENSORS = (None,) * 8


@dataclass(frozen=True)
class EdgeKernelSpec:
    """One instance of cuda/fused3s_edges.cu.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or torch.float32, of query, key and value.
        out_dtype: torch.float32 or `dtype`.
        dim: dimensions of a head, an even number up to 256.
        heads: heads of a lane group, a power of two.
        terms: bits of enum EdgeTerm.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    dim: int
    heads: int
    terms: int = 0

    source: ClassVar[str] = "fused3s_edges.cu"

    @property
    def name(self) -> str:
        return cpp_name("fused3s_edges", self.dtype, self.out_dtype, self.dim, self.heads, self.terms)

    @property
    def lanes(self) -> int:
        """Lanes of a group."""
        return self.heads * lanes_of_head(self.dim)

    @cached_property
    def groups_per_block(self) -> int:
        return WARPS * WARP_SIZE // self.lanes

    @cached_property
    def partial_floats(self) -> int:
        """Floats of a partial: O, maximum, sum and features of each lane, in whole float4."""
        features = max(1, FEATURES // lanes_of_head(self.dim)) if self.terms & VALUE_FEATURES else 0
        return self.lanes * -(-(LANE_DIMS + 2 + features) // 4) * 4

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of a load, which each row of a head must be aligned to."""
        return math.gcd(self.dim * self.dtype.itemsize, LOAD_BYTES)


def lanes_of_head(dim: int) -> int:
    return 1 << (-(-dim // LANE_DIMS) - 1).bit_length()


def heads_of_lane_group(num_heads: int, dim: int) -> int:
    """Heads of a lane group, a power of two: as few idle heads as possible, then as many as MOST_LANES lanes hold."""
    most = max(1, MOST_LANES // lanes_of_head(dim))
    candidates = [1 << bit for bit in range(most.bit_length()) if 1 << bit < 2 * num_heads]
    return min(candidates, key=lambda heads: (-(-num_heads // heads) * heads, -heads))


def part_edges_for_heads(num_edges: int, device: torch.device, num_heads: int, dim: int) -> int:
    """Most edges of an item: about as many items as lane groups for such heads are resident at once."""
    gpu = gpu_limits(device)
    groups, passes = _resident_groups(gpu, num_heads, dim)
    tuning = tuning_for(gpu)
    return min(max(num_edges * passes // groups, tuning.least_part_edges), tuning.most_part_edges)


@lru_cache
def _resident_groups(gpu: GPULimits, num_heads: int, dim: int) -> tuple[int, int]:
    """Lane groups that are resident at once, and how many of them a row takes for all its heads."""
    heads = heads_of_lane_group(num_heads, dim)
    return gpu.num_sms * tuning_for(gpu).edge_warps * WARP_SIZE // (heads * lanes_of_head(dim)), -(-num_heads // heads)


def compile_edge_kernel(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, device: torch.device
) -> None:
    get_kernel(_spec(dtype, out_dtype, dim, num_heads, 0), device.index)


def launch_edge_kernel(
    data: Fused3SData,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out_dtype: torch.dtype,
    lse: torch.Tensor | None = None,
    edges: EdgeTerms | None = None,
) -> torch.Tensor:
    """Run the kernel on torch's current stream, without waiting for it.

    Args:
        data: A, on the tensors' GPU.
        query: [num_rows, H, d] fp16, bf16 or float32, any row and head strides, d even.
        key, value: [num_cols, H, d], likewise.
        scale: factor of the scores.
        lse: [num_rows, H] float32 contiguous, see `fused3s.launch`.
        edges: terms of the scores and values, in CSR order.

    Returns:
        [num_rows, H, d] contiguous, of `out_dtype`.
    """
    num_rows, num_heads, dim = query.shape
    spec = _spec(query.dtype, out_dtype, dim, num_heads, terms_of(edges))
    query, key, value = checked_inputs("fused3s", out_dtype, query, key, value, row_bytes=spec.copy_bytes)
    output = torch.empty_like(query, dtype=out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    num_groups = -(-num_heads // spec.heads)
    num_items, num_parts = data.row_items.shape[0], data.row_parts.shape[0]
    partial = arrived = None
    if num_parts:
        partial = query.new_empty(num_parts * num_groups * spec.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_parts * num_groups, query.device)
    of_edges, feature_sums = NO_EDGE_TENSORS, None
    if edges is not None:
        features = None if edges.features is None else whole_rows(edges.features)
        projected = None
        if edges.key_weight is not None:  # u = W^T q
            projected = project_query(query, edges.key_weight.contiguous())
        if edges.value_weight is not None:
            feature_sums = query.new_empty((num_heads, num_rows, FEATURES))
        seed = None if edges.dropout is None else edges.dropout.seed
        tensors = contiguous(edges.bias, edges.multiplier, edges.types, edges.type_weight)
        of_edges = (*tensors, features, projected, feature_sums, seed)
    launch_kernel(
        get_kernel(spec, query.device.index),
        (-(-num_items // spec.groups_per_block), num_groups),
        WARPS * WARP_SIZE,
        (
            *(data.row_items, data.indices, data.row_parts, query, key, value, output, lse, partial, arrived),
            *of_edges,
        ),
        edge_kernel_scalars(
            (num_rows, num_items, num_heads),
            edges_scalars(edges),
            dropout_scalars(None if edges is None else edges.dropout),
            scale * score_unit(query.dtype),
            score_unit(query.dtype),
            query.itemsize,
            query.stride(),
            key.stride(),
            value.stride(),
        ),
        overlaps=True,
    )
    if feature_sums is not None:  # O += W' s
        add_features(output, feature_sums, edges.value_weight.contiguous())
    return output


def terms_of(edges: EdgeTerms | None) -> int:
    """Bits of enum EdgeTerm."""
    if edges is None:
        return 0
    given = {
        BIAS: edges.bias,
        MULTIPLIER: edges.multiplier,
        TYPES: edges.types,
        CLAMP: edges.clamp,
        KEY_FEATURES: edges.key_weight,
        VALUE_FEATURES: edges.value_weight,
        DROPOUT: edges.dropout,
    }
    return sum(term for term, value in given.items() if value is not None)


def edges_scalars(edges: EdgeTerms | None) -> tuple[int, int, float]:
    """Heads of bias and multiplier, 1 or H, and the clamp."""
    if edges is None:
        return 1, 1, 0.0
    heads = (1 if values is None else values.shape[1] for values in (edges.bias, edges.multiplier))
    return *heads, edges.clamp or 0.0


def score_unit(dtype: torch.dtype) -> float:
    """kScoreUnit of cuda/score_terms.cuh."""
    return 1.0 if dtype == torch.float32 else math.log2(math.e)


def dropout_scalars(dropout: Dropout | None) -> tuple[int, float]:
    """Members of struct DropoutParams behind the seed: threshold, and factor of the weights that are kept."""
    return (0, 1.0) if dropout is None else (dropout.threshold, 1 / (1 - dropout.rate))


def contiguous(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors as the kernels take those of edge data, which have no strides."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def whole_rows(features: torch.Tensor) -> torch.Tensor:
    """[nnz, r] -> [nnz, 16]: the rows of `EdgeTerms.features` that are padded with zeros, or a padded copy."""
    num_edges, num_features = features.shape
    end = features.storage_offset() + num_edges * FEATURES
    if features.stride() == (FEATURES, 1) and end * features.itemsize <= features.untyped_storage().nbytes():
        return features.as_strided((num_edges, FEATURES), (FEATURES, 1))
    return functional.pad(features, (0, FEATURES - num_features))


def pad_weights(edges: EdgeTerms, columns: int) -> EdgeTerms:
    """The terms for heads with `columns` more dimensions, which are zero."""
    pads = {"type_weight": (0, columns), "key_weight": (0, 0, 0, columns), "value_weight": (0, 0, 0, columns)}
    weights = {name: getattr(edges, name) for name in pads}
    return replace(
        edges, **{name: functional.pad(weight, pads[name]) for name, weight in weights.items() if weight is not None}
    )


@lru_cache
def _spec(dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, terms: int) -> EdgeKernelSpec:
    return EdgeKernelSpec(dtype, out_dtype, dim, heads_of_lane_group(num_heads, dim), terms)


@lru_cache  # a model calls with the same ones again and again, and packing them takes as long as half a launch
def edge_kernel_scalars(
    sizes: tuple[int, ...],
    edges: tuple[int, int, float],
    dropout: tuple[int, float],
    scale: float,
    unit: float,
    itemsize: int,
    *strides: tuple[int, int, int],
) -> bytes:
    """Scalars of cuda/fused3s_edges.cu and cuda/fused3s_edges_backward.cu.

    Args:
        sizes: the members from num_rows on, in front of the heads of bias and multiplier.
        edges, dropout: from `edges_scalars` and `dropout_scalars`.
        scale: as the kernel has it.
        unit: from `score_unit`.
        strides: in elements, of the tensors by row.
    """
    bias_heads, multiplier_heads, clamp = edges
    threshold, rescale = dropout
    return pack_scalars(
        *(np.uint32(threshold), np.float32(rescale)),
        *(np.int64(head) for _, head, _ in strides),
        *(np.int32(row * itemsize) for row, _, _ in strides),
        *(np.int32(number) for number in (*sizes, bias_heads, multiplier_heads)),
        *(np.float32(scale), np.float32(clamp * unit)),
    )
