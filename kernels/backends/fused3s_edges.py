"""The kernel of `fused3s` for narrow heads on sparse graphs and for edge data; see cuda/fused3s_edges.cu."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn import functional

from ..edge_data import BoundEdges
from ..formats.row_items import RowItems, make_row_items
from ..fragments import WARP_SIZE
from ..runtime.device import GPULimits, gpu_limits
from ..runtime.jit import KernelInstance, get_kernel
from ..runtime.launch import launch_kernel
from ..runtime.semaphores import semaphores
from .cuda import LOG2E, checked_inputs, load_bytes
from .feature_products import FEATURES, add_features, project_query

# As in cuda/score_terms.cuh and cuda/lane_group.cuh:
WARPS = 4
LANE_DIMS = 8
BIAS, MULTIPLIER, TYPES, CLAMP, KEY_FEATURES, VALUE_FEATURES, DROPOUT = 1, 2, 4, 8, 16, 32, 64

MOST_LANES = 16  # of a group, unless one head needs more: K and V of wider groups would leave L2 (kernels/NOTES.md)
RESIDENT_WARPS = 24  # per SM, about what the registers allow
LEAST_PART_EDGES, MOST_PART_EDGES = 16, 64
NO_TERMS = {"bias_heads": 1, "multiplier_heads": 1, "dropout_threshold": 0, "dropout_rescale": 1.0}


@dataclass(frozen=True, eq=False)
class EdgeKernelData:
    """A graph as cuda/fused3s_edges.cu reads it.

    Attributes:
        indices: [nnz] int32, key of each edge, rows and columns ascending.
        work: the items.
    """

    indices: torch.Tensor
    work: RowItems


def lanes_of_head(dim: int) -> int:
    return 1 << (-(-dim // LANE_DIMS) - 1).bit_length()


@lru_cache
def heads_of_lane_group(num_heads: int, dim: int) -> int:
    """Heads of a lane group, a power of two: as few idle heads as possible, then as many as MOST_LANES lanes hold."""
    most = max(1, MOST_LANES // lanes_of_head(dim))
    candidates = [1 << bit for bit in range(most.bit_length()) if 1 << bit < 2 * num_heads]
    return min(candidates, key=lambda heads: (-(-num_heads // heads) * heads, -heads))


def build_edge_kernel_data(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    row_ids: torch.Tensor | None,
    device: torch.device,
    num_heads: int,
    dim: int,
) -> EdgeKernelData:
    """Items of a CSR pattern (`formats.edges.canonical_csr`) for such heads, by torch."""
    return EdgeKernelData(indices, items_for_heads(indptr, indices.numel(), row_ids, device, num_heads, dim))


def items_for_heads(
    indptr: torch.Tensor,
    num_edges: int,
    row_ids: torch.Tensor | None,
    device: torch.device,
    num_heads: int,
    dim: int,
) -> RowItems:
    """Items of a CSR pattern for such heads, by torch."""
    return make_row_items(indptr, row_ids, part_edges_for_heads(num_edges, device, num_heads, dim))


def part_edges_for_heads(num_edges: int, device: torch.device, num_heads: int, dim: int) -> int:
    """Most edges of an item: about as many items as lane groups for such heads are resident at once."""
    groups, passes = _resident_groups(gpu_limits(device), num_heads, dim)
    return min(max(num_edges * passes // groups, LEAST_PART_EDGES), MOST_PART_EDGES)


@lru_cache
def _resident_groups(gpu: GPULimits, num_heads: int, dim: int) -> tuple[int, int]:
    """Lane groups that are resident at once, and how many of them a row takes for all its heads."""
    heads = heads_of_lane_group(num_heads, dim)
    return gpu.num_sms * RESIDENT_WARPS * WARP_SIZE // (heads * lanes_of_head(dim)), -(-num_heads // heads)


@lru_cache  # a model calls with the same ones again and again
def edge_instance(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, terms: int = 0
) -> KernelInstance:
    """The instance of cuda/fused3s_edges.cu for heads of an even `dim`; `terms`: bits of enum EdgeTerm."""
    arguments = dtype, out_dtype, dim, heads_of_lane_group(num_heads, dim), terms
    return KernelInstance("fused3s_edges.cu", "fused3s_edges", arguments)


def compile_edge_kernel(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, device: torch.device
) -> None:
    get_kernel(edge_instance(dtype, out_dtype, dim, num_heads), device.index)


def launch_edge_kernel(
    data: EdgeKernelData,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out_dtype: torch.dtype,
    lse: torch.Tensor | None = None,
    edges: BoundEdges | None = None,
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
    instance = edge_instance(query.dtype, out_dtype, dim, num_heads, terms_of(edges))
    itemsize, unit = query.itemsize, score_unit(query.dtype)
    query, key, value = checked_inputs("fused3s", out_dtype, query, key, value, row_bytes=load_bytes(dim, itemsize))
    output = torch.empty_like(query, dtype=out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    kernel = get_kernel(instance, query.device.index)
    num_groups = -(-num_heads // heads_of_lane_group(num_heads, dim))
    num_items, num_parts = data.work.items.shape[0], data.work.parts.shape[0]
    partial = arrived = feature_sums = None
    if num_parts:
        partial = query.new_empty(num_parts * num_groups * kernel.sizes.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_parts * num_groups, query.device)
    of_edges = edge_tensors(edges)
    if edges is not None:
        if edges.key_weight is not None:  # u = W^T q
            of_edges["projected"] = project_query(query, edges.key_weight.contiguous())
        if edges.value_weight is not None:
            of_edges["feature_sums"] = feature_sums = query.new_empty((num_heads, num_rows, FEATURES))
    (query_row, query_head, _), (key_row, key_head, _), (value_row, value_head, _) = (
        query.stride(),
        key.stride(),
        value.stride(),
    )
    launch_kernel(
        kernel,
        (-(-num_items // kernel.sizes.block_items), num_groups),
        WARPS * WARP_SIZE,
        {
            "items": data.work.items,
            "indices": data.indices,
            "parts": data.work.parts,
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "lse": lse,
            "partial": partial,
            "semaphores": arrived,
            **of_edges,
        },
        kernel.scalars(
            query_head_stride=query_head,
            key_head_stride=key_head,
            value_head_stride=value_head,
            query_row_bytes=query_row * itemsize,
            key_row_bytes=key_row * itemsize,
            value_row_bytes=value_row * itemsize,
            num_rows=num_rows,
            num_items=num_items,
            num_heads=num_heads,
            scale=scale * unit,
            clamp=0.0 if edges is None or edges.clamp is None else edges.clamp * unit,
            **term_scalars(edges),
        ),
        overlaps=True,
    )
    if feature_sums is not None:  # O += W' s
        add_features(output, feature_sums, edges.value_weight.contiguous())
    return output


def terms_of(edges: BoundEdges | None) -> int:
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


def term_scalars(edges: BoundEdges | None) -> dict[str, float]:
    """Members of struct Params: heads of bias and multiplier, 1 or H, and those of struct DropoutParams."""
    if edges is None:
        return NO_TERMS
    scalars = dict(NO_TERMS)
    if edges.bias is not None:
        scalars["bias_heads"] = edges.bias.shape[1]
    if edges.multiplier is not None:
        scalars["multiplier_heads"] = edges.multiplier.shape[1]
    if edges.dropout is not None:
        scalars["dropout_threshold"] = edges.dropout.threshold
        scalars["dropout_rescale"] = 1 / (1 - edges.dropout.rate)
    return scalars


def edge_tensors(edges: BoundEdges | None) -> dict[str, torch.Tensor | None]:
    """Members of struct Params of both edge kernels: edge data that they read as it is, and the dropout's seed."""
    if edges is None:
        return {}
    names = ("bias", "multiplier", "types", "type_weight")
    tensors = dict(zip(names, contiguous(*[getattr(edges, name) for name in names]), strict=True))
    if edges.features is not None:
        tensors["features"] = edges.padded_features.contiguous()
    if edges.dropout is not None:
        tensors["dropout_seed"] = edges.dropout.seed
    return tensors


def score_unit(dtype: torch.dtype) -> float:
    """kScoreUnit of cuda/score_terms.cuh."""
    return 1.0 if dtype == torch.float32 else LOG2E


def contiguous(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors as the kernels take those of edge data, which have no strides."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def pad_weights(edges: BoundEdges, columns: int) -> BoundEdges:
    """The terms for heads with `columns` more dimensions, which are zero."""
    pads = {"type_weight": (0, columns), "key_weight": (0, 0, 0, columns), "value_weight": (0, 0, 0, columns)}
    weights = {name: getattr(edges, name) for name in pads}
    return replace(
        edges, **{name: functional.pad(weight, pads[name]) for name, weight in weights.items() if weight is not None}
    )
