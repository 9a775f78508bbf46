"""The kernel of `fused3s` for narrow heads on sparse graphs and for edge data; see cuda/edges/forward.cu."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch.nn import functional

from ...backends.base import Call
from ...backends.cuda import aligned_rows, check_out_dtype, load_bytes, split_scratch, stride_scalars
from ...runtime.device import WARP_SIZE, GPULimits, gpu_limits
from ...runtime.jit import Kernel, KernelInstance, get_kernel
from ...runtime.launch import launch_kernel
from ...terms.edge_data import BoundEdges
from ..data import Fused3SData
from ..score_values import (
    SCORE_DEFAULTS,
    VALUES,
    Members,
    contiguous,
    is_wide,
    product_unit,
    score_scalars,
    terms_of,
)
from ..shapes import KEY_FEATURES, VALUE_FEATURES, WIDE_KEYS, WIDE_VALUES
from ..tuning import MOST_LANES, tuning_for
from .added_features import with_added_features
from .features import (
    FEATURES,
    PACK_PAIR_FEATURES,
    PAIR_WORDS,
    add_features,
    pack_features,
    project_query,
)
from .wide_features import Side, add_feature_sums, feature_products

# As in cuda/edges/lane_group.cuh:
WARPS = 4
LANE_DIMS = 8
TERM_DEFAULTS = {  # scalars of struct Params without edge data
    **{"dropout_threshold": 0, "dropout_rescale": 1.0},
    **SCORE_DEFAULTS,
}


def is_packed(dim: int, dtype: torch.dtype) -> bool:
    """Whether a lane has a whole head, which may start inside of an aligned block (LaneGroup::kIsPacked)."""
    return dtype != torch.float32 and 1 < dim < 15 and (dim % 2 == 1 or (dim > 8 and dim % 8 > 0))


def edge_columns(num_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Columns of a head in the edge-by-edge kernels: `dim`, or a multiple of 8 if an odd `dim` is padded. Without a
    padding an even number of heads lies side by side, so that each row starts at a multiple of 4 bytes."""
    is_taken = dim % 2 == 0 or (num_heads % 2 == 0 and is_packed(dim, dtype))
    return dim if is_taken else dim + -dim % 8


def takes_columns(call: Call) -> bool:
    """Whether the edge-by-edge kernels take the heads of a call without padding. Products of features do not take odd
    heads."""
    _, num_heads, dim = call.query.shape
    if dim % 2 and call.edges is not None and call.edges.padded_features is not None:
        return False
    return edge_columns(num_heads, dim, call.query.dtype) == dim


def lanes_of_head(dim: int, dtype: torch.dtype) -> int:
    return 1 if is_packed(dim, dtype) else unpacked_lanes(dim)


def unpacked_lanes(dim: int) -> int:
    return 1 << (-(-dim // LANE_DIMS) - 1).bit_length()


@lru_cache
def heads_of_lane_group(num_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Heads per lane group, a power of two: the fewest idle heads, then the most heads that fit MOST_LANES lanes."""
    most = max(1, MOST_LANES // lanes_of_head(dim, dtype))
    candidates = [1 << bit for bit in range(most.bit_length()) if 1 << bit < 2 * num_heads]
    return min(candidates, key=lambda heads: (-(-num_heads // heads) * heads, -heads))


def takes_pairs(num_heads: int, dim: int, dtype: torch.dtype, terms: int) -> bool:
    """Whether tensor cores compute the products of features (cuda/edges/pair_features.cuh)."""
    has_features, heads = terms & (KEY_FEATURES | VALUE_FEATURES) > 0, heads_of_lane_group(num_heads, dim, dtype)
    return has_features and dtype != torch.float32 and 8 < dim <= 16 and heads in (4, 8)


@lru_cache
def lane_alignment(num_heads: int, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """How the edge-by-edge kernels load rows: arguments of `aligned_rows`."""
    if not is_packed(dim, dtype):
        return load_bytes(dim, dtype.itemsize), 0
    return load_bytes(heads_of_lane_group(num_heads, dim, dtype) * dim, dtype.itemsize, most=8), dim


def part_edges_for_heads(num_edges: int, device: torch.device, num_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Most edges per item: about one item for each lane group that is resident at once."""
    gpu = gpu_limits(device)
    groups, passes = _resident_groups(gpu, num_heads, edge_columns(num_heads, dim, dtype), dtype)
    tuning = tuning_for(gpu)
    return min(max(num_edges * passes // groups, tuning.least_part_edges), tuning.most_part_edges)


@lru_cache
def _resident_groups(gpu: GPULimits, num_heads: int, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(lane groups resident at once, lane groups per row for all heads)."""
    heads = heads_of_lane_group(num_heads, dim, dtype)
    lanes = heads * lanes_of_head(dim, dtype)
    return gpu.num_sms * tuning_for(gpu).edge_warps * WARP_SIZE // lanes, -(-num_heads // heads)


@lru_cache  # a model repeats the same arguments at every call
def edge_instance(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, terms: int, score: str | None = None
) -> KernelInstance:
    """The instance of cuda/edges/forward.cu for heads of `edge_columns`; `terms`: bits of enum EdgeTerm."""
    check_out_dtype(out_dtype, dtype)
    arguments = dtype, out_dtype, dim, heads_of_lane_group(num_heads, dim, dtype), terms
    return KernelInstance("edges/forward.cu", "fused3s_edges", arguments, score=score)


def launch_edge_kernel(data: Fused3SData, call: Call) -> torch.Tensor:
    """Queue the kernel on torch's current stream.

    Args:
        data: A, on the tensors' GPU.
        call: query, key and value of fp16, bf16 or float32, any row and head strides; edge data in CSR order.
            `takes_columns` holds.

    Returns:
        [num_rows, H, d] contiguous, of `call.out_dtype`.
    """
    query, key, value, scale, out_dtype, lse, edges = call
    edges = with_added_features(edges)
    num_rows, num_heads, dim = query.shape
    dtype, score, terms, scalars, of_edges = query.dtype, None, 0, (), {}
    if edges is not None:
        score, terms, scalars, of_edges = edges.score, terms_of(edges), term_scalars(edges), edge_tensors(edges)
    instance = edge_instance(dtype, out_dtype, dim, num_heads, terms, score)
    query, key, value = aligned_rows((query, key, value), *lane_alignment(num_heads, dim, dtype))
    output = torch.empty_like(query, dtype=out_dtype, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    kernel, feature_sums, scores = get_kernel(instance, query.device.index), None, None
    num_groups = -(-num_heads // heads_of_lane_group(num_heads, dim, dtype))
    num_items, num_partials = data.row_items.shape[0], data.row_parts.shape[0] * num_groups
    if edges is not None and takes_pairs(num_heads, dim, dtype, terms):
        of_edges["feature_weights"] = pack_features(PACK_PAIR_FEATURES, edges, num_heads, PAIR_WORDS, PAIR_WORDS)
    elif edges is not None and is_wide(edges):
        if terms & WIDE_KEYS:
            (scores,) = feature_products(data, of_edges["features"], [Side(query, edges.key_weight.contiguous())])
        elif terms & WIDE_VALUES:
            scores = data.new_of_edges(query, (num_heads,), torch.float32)
        of_edges["edge_scores"] = scores
        if lse is None:  # the sums of features read it
            lse = query.new_empty((num_rows, num_heads), dtype=torch.float32)
    elif edges is not None:
        if edges.key_weight is not None:  # u = W^T q
            of_edges["projected"] = project_query(query, edges.key_weight.contiguous())
        if edges.value_weight is not None:
            of_edges["feature_sums"] = feature_sums = query.new_empty((num_heads, num_rows, FEATURES))
    sizes = num_rows, num_items, num_heads, scale * product_unit(dtype, terms), dtype.itemsize
    strides = query.stride(), key.stride(), value.stride()
    launch_kernel(
        kernel,
        (-(-num_items // kernel.sizes.block_items), num_groups),
        WARPS * WARP_SIZE,
        {
            "items": data.row_items,
            "indices": data.indices,
            "parts": data.row_parts,
            "query": query,
            "key": key,
            "value": value,
            "output": output,
            "lse": lse,
            **split_scratch(kernel, num_partials, num_partials, query),
            **of_edges,
        },
        _scalars(kernel, *sizes, strides, scalars),
        overlaps=True,
    )
    if feature_sums is not None:  # O += W' s
        add_features(output, feature_sums, edges.value_weight.contiguous())
    elif terms & WIDE_VALUES:
        add_feature_sums(output, data, edges, scores, lse)
    return output


@lru_cache(1024)  # a model repeats the same arguments at every call
def _scalars(
    kernel: Kernel,
    num_rows: int,
    num_items: int,
    num_heads: int,
    scale: float,
    itemsize: int,
    strides: tuple[tuple[int, int, int], ...],
    terms: Members,
) -> bytes:
    """The scalars of struct Params."""
    sizes = {"num_rows": num_rows, "num_items": num_items, "num_heads": num_heads}
    of_strides = stride_scalars(("query", "key", "value"), strides, itemsize)
    return kernel.scalars(**sizes, scale=scale, **of_strides, **(TERM_DEFAULTS | dict(terms)))


def term_scalars(edges: BoundEdges | None) -> Members:
    """Scalars of struct Params other than TERM_DEFAULTS: DropoutParams, score terms. Few, since every launch hashes
    them."""
    if edges is None:
        return ()
    scalars: dict[str, float] = {}
    if edges.dropout is not None:
        scalars["dropout_threshold"] = edges.dropout.threshold
        scalars["dropout_rescale"] = edges.dropout.rescale
    return *scalars.items(), *score_scalars(edges)


def edge_tensors(edges: BoundEdges | None) -> dict[str, torch.Tensor | None]:
    """Pointers of struct Params of both edge kernels: edge data, and the seed of the dropout."""
    if edges is None:
        return {}
    tensors = contiguous(edges, "types", "type_weight", "key_factor", "additive_weight", *VALUES)
    if edges.features is not None:
        tensors["features"] = edges.padded_features.contiguous()
    if edges.dropout is not None:
        tensors["dropout_seed"] = edges.dropout.seed
    return tensors


def padded_call(call: Call) -> Call:
    """The call with an odd number of columns padded by zeros to whole 16 bytes."""
    columns = -call.query.shape[2] % 8
    query, key, value = (functional.pad(each, (0, columns)) for each in call[:3])
    edges = None if call.edges is None else pad_weights(call.edges, columns)
    return call._replace(query=query, key=key, value=value, edges=edges)


def pad_weights(edges: BoundEdges, columns: int) -> BoundEdges:
    """The weights with `columns` zero columns appended to each head."""
    pads = dict.fromkeys(("type_weight", "key_factor", "additive_weight"), (0, columns))
    pads |= dict.fromkeys(("key_weight", "value_weight"), (0, 0, 0, columns))
    weights = {name: getattr(edges, name) for name in pads}
    return replace(
        edges, **{name: functional.pad(weight, pads[name]) for name, weight in weights.items() if weight is not None}
    )
