"""The backward pass of `fused3s` edge by edge; see cuda/fused3s_edges_backward.cu."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch

from ..edge_data import EdgeTerms
from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores
from .base import Gradients, Memory
from .cuda import LOAD_BYTES, aligned_rows
from .feature_products import FEATURES, add_features, project_query, weight_gradients
from .fused3s_backward import new_gradients
from .fused3s_data import Fused3SData
from .fused3s_edges import (
    LANE_DIMS,
    WARPS,
    contiguous,
    dropout_scalars,
    edge_kernel_scalars,
    edges_scalars,
    heads_of_lane_group,
    lanes_of_head,
    score_unit,
    terms_of,
    whole_rows,
)
from .fused3s_shapes import KEY_FEATURES, VALUE_FEATURES

NO_EDGE_TENSORS = (None,) * 14
FEATURE_LANES = 4  # of an item in `gradients_of_features`
TYPE_CHUNK = 1 << 22  # elements of [edges, H, d] at a time in `_type_gradient`


@dataclass(frozen=True)
class EdgeBackwardSpec:
    """One instance of cuda/fused3s_edges_backward.cu.

    Attributes:
        dtype: torch.float16, torch.bfloat16 or torch.float32, of query, key, value and their gradients.
        out_dtype: torch.float32 or `dtype`, of the output; None for the pass over columns.
        dim: dimensions of a head, an even number up to 256.
        heads: heads of a lane group, a power of two.
        terms: bits of enum EdgeTerm.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype | None
    dim: int
    heads: int
    terms: int = 0

    source: ClassVar[str] = "fused3s_edges_backward.cu"

    @property
    def over_columns(self) -> bool:
        return self.out_dtype is None

    @property
    def name(self) -> str:
        if self.over_columns:
            return cpp_name("gradients_over_columns", self.dtype, self.dim, self.heads, self.terms)
        return cpp_name("gradients_over_rows", self.dtype, self.out_dtype, self.dim, self.heads, self.terms)

    @cached_property
    def groups_per_block(self) -> int:
        return WARPS * WARP_SIZE // (self.heads * lanes_of_head(self.dim))

    @cached_property
    def partial_floats(self) -> int:
        """Floats of a partial: the sums of each lane in whole float4."""
        lane_features = max(1, FEATURES // lanes_of_head(self.dim))
        sums = LANE_DIMS + (LANE_DIMS if self.over_columns else 0)
        if not self.over_columns:
            sums += lane_features * sum(bool(self.terms & term) for term in (KEY_FEATURES, VALUE_FEATURES))
        return self.heads * lanes_of_head(self.dim) * -(-sums // 4) * 4

    @cached_property
    def copy_bytes(self) -> int:
        """Bytes of a load, which each row of a head must be aligned to."""
        return math.gcd(self.dim * self.dtype.itemsize, LOAD_BYTES)


@dataclass(frozen=True)
class FeatureGradientSpec:
    """One instance of `gradients_of_features`; `dtype`: of the features."""

    dtype: torch.dtype

    source: ClassVar[str] = "fused3s_edges_backward.cu"

    @property
    def name(self) -> str:
        return cpp_name("gradients_of_features", self.dtype)


def compile_edge_backward(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, device: torch.device
) -> None:
    for spec in _specs(dtype, out_dtype, dim, num_heads, 0):
        get_kernel(spec, device.index)


def launch_edge_backward(
    data: Fused3SData,
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    edges: EdgeTerms | None,
    wanted: frozenset[str],
    into: Memory | None = None,
) -> Gradients:
    """Run the kernels on torch's current stream, without waiting for them. The gradients are bitwise reproducible.

    Args:
        data: A, as for `launch_edge_kernel`, and A^T.
        grad_output: [num_rows, H, d] of the output's type, any strides; float32 is rounded to query's type.
        query: [num_rows, H, d] fp16, bf16 or float32, any row and head strides, d even.
        key, value: [num_cols, H, d], likewise.
        output: [num_rows, H, d], of query's type or float32.
        lse: [num_rows, H] float32.
        scale: factor of the scores.
        edges: terms of the scores and values, in CSR order.
        wanted: fields of `Gradients` to compute. `type_weight` takes plain torch, which is not made for speed.
        into: see `Backend.attend_backward`.
    """
    num_rows, num_heads, dim = query.shape
    over_rows, over_columns = _specs(query.dtype, output.dtype, dim, num_heads, terms_of(edges))
    if grad_output.dtype is not query.dtype:
        grad_output = grad_output.to(query.dtype)
    query, grad_output, key, value = [
        aligned_rows(tensor, over_rows.copy_bytes) for tensor in (query, grad_output, key, value)
    ]
    of_edges = None if edges is None else _EdgeTensors(data, query, grad_output, edges, wanted)
    row_state = query.new_empty((num_rows, num_heads, 2), dtype=torch.float32)
    of_columns = "key" in wanted or "value" in wanted
    grad_query, grad_key, grad_value = into or new_gradients(query, key, value)
    if into and edges is not None and edges.key_weight is not None:
        (grad_query,) = new_gradients(query)  # add_features takes contiguous rows
    scalars = edges_scalars(edges), dropout_scalars(None if edges is None else edges.dropout), scale
    _launch(
        over_rows,
        (data.row_items, data.row_parts),
        (data.indices, None),
        (query, grad_output, key, value),
        (output.contiguous(), lse.contiguous(), row_state, grad_query, None),
        NO_EDGE_TENSORS if of_edges is None else of_edges.for_rows,
        num_rows,
        *scalars,
    )
    if of_columns:
        _launch(
            over_columns,
            (data.column_items, data.column_parts),
            (data.column_rows, data.column_edges),
            (key, value, query, grad_output),
            (None, None, row_state, grad_key, grad_value),
            NO_EDGE_TENSORS if of_edges is None else of_edges.for_columns,
            num_rows,
            *scalars,
        )
    found = of_rows(grad_query, grad_key, grad_value, wanted)
    return found if of_edges is None else of_edges.gradients(found, query, key, grad_output)


def of_rows(
    query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, wanted: Collection[str]
) -> Gradients:
    """Gradients of the three, those that are wanted."""
    if "query" not in wanted:
        query = None
    return Gradients(query, key if "key" in wanted else None, value if "value" in wanted else None)


class _EdgeTensors:
    """Members of struct Params for edge data: what the passes read, and what the pass over rows writes."""

    def __init__(
        self,
        data: Fused3SData,
        query: torch.Tensor,
        grad_output: torch.Tensor,
        edges: EdgeTerms,
        wanted: frozenset[str],
    ) -> None:
        num_rows, num_heads, _ = query.shape
        num_edges = data.indices.numel()

        def of_edges(is_wanted: bool) -> torch.Tensor | None:
            return query.new_empty((num_edges, num_heads), dtype=torch.float32) if is_wanted else None

        self.data, self.edges, self.wanted = data, edges, wanted
        self.projected_query = self.projected_grad = self.key_sums = self.value_sums = None
        if edges.key_weight is not None:  # u = W^T q
            self.projected_query = project_query(query, edges.key_weight.contiguous())
            self.key_sums = query.new_empty((num_heads, num_rows, FEATURES))
        if edges.value_weight is not None:  # u' = W'^T dO
            self.projected_grad = project_query(grad_output, edges.value_weight.contiguous())
            self.value_sums = query.new_empty((num_heads, num_rows, FEATURES))
        of_features = "features" in wanted
        self.bias, self.multiplier = of_edges("bias" in wanted), of_edges("multiplier" in wanted)
        self.score_weights = of_edges("type_weight" in wanted or (of_features and edges.key_weight is not None))
        self.value_weights = of_edges(of_features and edges.value_weight is not None)
        features = None if edges.features is None else whole_rows(edges.features)
        seed = None if edges.dropout is None else edges.dropout.seed
        terms = contiguous(edges.bias, edges.multiplier, edges.types, edges.type_weight)
        read = (*terms, features, self.projected_query, self.projected_grad)
        sums = (self.key_sums, self.value_sums, self.bias, self.multiplier, self.score_weights, self.value_weights)
        self.for_rows, self.for_columns = (*read, *sums, seed), (*read, *(None,) * 6, seed)

    def gradients(
        self,
        of_rows: Gradients,
        query: torch.Tensor,
        key: torch.Tensor,
        grad_output: torch.Tensor,
    ) -> Gradients:
        """All that are wanted, with those of query, key and value; after the passes."""
        edges, wanted = self.edges, self.wanted
        if of_rows.query is not None and self.key_sums is not None:  # dq += W t
            add_features(of_rows.query, self.key_sums, edges.key_weight.contiguous())
        makers = {
            "bias": lambda: _for_heads(self.bias, edges.bias),
            "multiplier": lambda: _for_heads(self.multiplier, edges.multiplier),
            "features": lambda: _feature_gradient(
                *(self.data.row_items, edges.features, self.score_weights, self.projected_query),
                *(self.value_weights, self.projected_grad),
            ),
            "type_weight": lambda: _type_gradient(self.data, query, key, self.score_weights, edges),
        }
        found = {name: make() for name, make in makers.items() if name in wanted}
        products = {"key_weight": (query, self.key_sums), "value_weight": (grad_output, self.value_sums)}
        names = [name for name in products if name in wanted]
        if names:
            gradients = weight_gradients([products[name] for name in names], edges.features.shape[1])
            found.update(zip(names, gradients, strict=True))
        return of_rows._replace(**found)


def _launch(
    spec: EdgeBackwardSpec,
    work: tuple[torch.Tensor, torch.Tensor],
    edges_of_items: tuple[torch.Tensor, torch.Tensor | None],
    rows: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor | None, ...],
    edge_tensors: tuple[torch.Tensor | None, ...],
    num_rows: int,
    edges: tuple[int, int, float],
    dropout: tuple[int, float],
    scale: float,
) -> None:
    """One pass; the tuples of tensors are neighbouring members of struct Params.

    Args:
        work: items and parts.
        edges, dropout: from `edges_scalars` and `dropout_scalars`.
    """
    items, parts = work
    num_items, num_parts = items.shape[0], parts.shape[0]
    if not rows[0].numel():
        return
    num_heads = rows[0].shape[1]
    num_groups = -(-num_heads // spec.heads)
    partial = arrived = None
    if num_parts:
        partial = rows[0].new_empty(num_parts * num_groups * spec.partial_floats, dtype=torch.float32)
        arrived = semaphores(num_parts * num_groups, rows[0].device)
    launch_kernel(
        get_kernel(spec, rows[0].device.index),
        (-(-num_items // spec.groups_per_block), num_groups),
        WARPS * WARP_SIZE,
        (items, *edges_of_items, parts, *rows, *results, partial, arrived, *edge_tensors),
        edge_kernel_scalars(
            (num_rows, num_items, num_heads, results[3].stride(0) // spec.dim),
            edges,
            dropout,
            scale,
            score_unit(spec.dtype),
            spec.dtype.itemsize,
            *[tensor.stride() for tensor in rows],
        ),
        overlaps=True,
    )


def _for_heads(gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[nnz, H] float32 in the shape and type of `values`, [nnz, H] or [nnz, 1]."""
    if values.shape[1] == 1:
        gradient = gradient.sum(1, keepdim=True)
    return gradient.to(values.dtype)


def _feature_gradient(
    items: torch.Tensor,
    features: torch.Tensor,
    score_weights: torch.Tensor | None,
    projected_query: torch.Tensor | None,
    value_weights: torch.Tensor | None,
    projected_grad: torch.Tensor | None,
) -> torch.Tensor:
    """[nnz, r]: the sum over heads of `score_weights` u_i + `value_weights` u'_i."""
    num_edges, num_features = features.shape
    gradient = features.new_empty((num_edges, FEATURES))
    _, num_rows, _ = (projected_grad if projected_query is None else projected_query).shape
    num_heads = (value_weights if score_weights is None else score_weights).shape[1]
    num_items = items.shape[0]
    if num_edges:
        launch_kernel(
            get_kernel(FeatureGradientSpec(features.dtype), features.device.index),
            (-(-num_items * FEATURE_LANES // (WARPS * WARP_SIZE)),),
            WARPS * WARP_SIZE,
            (items, score_weights, projected_query, value_weights, projected_grad, gradient),
            pack_scalars(np.int32(num_rows), np.int32(num_items), np.int32(num_heads)),
            overlaps=True,
        )
    return gradient[:, :num_features]


def _type_gradient(
    data: Fused3SData, query: torch.Tensor, key: torch.Tensor, score_weights: torch.Tensor, edges: EdgeTerms
) -> torch.Tensor:
    """[T, H, d]: the sum over the edges of each type of `score_weights` [nnz, H] q_i * k_j.

    Chunks of the edges as matrix products with the one-hot types [T, edges]: no atomics, so bitwise reproducible.
    """
    num_types, num_heads, dim = edges.type_weight.shape
    num_edges = data.column_edges.numel()
    gradient = query.new_zeros((num_types, num_heads * dim), dtype=torch.float32)
    numbers = torch.arange(num_types, device=query.device)
    step = max(1, TYPE_CHUNK // (num_heads * dim))
    for first in range(0, num_edges, step):
        row, edge = data.column_rows[first : first + step], data.column_edges[first : first + step]
        place = torch.arange(first, first + len(edge), device=query.device)
        column = torch.searchsorted(data.column_offsets, place, right=True) - 1
        products = query[row].float() * key[column].float() * score_weights[edge, :, None]
        is_type = (edges.types[edge] == numbers[:, None]).float()
        gradient += is_type @ products.flatten(1)
    return gradient.view(num_types, num_heads, dim).to(query.dtype)


@lru_cache
def _specs(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, terms: int
) -> tuple[EdgeBackwardSpec, EdgeBackwardSpec]:
    """Instances of the pass over rows and of the pass over columns."""
    heads = heads_of_lane_group(num_heads, dim)
    return tuple(EdgeBackwardSpec(dtype, out, dim, heads, terms) for out in (out_dtype, None))
