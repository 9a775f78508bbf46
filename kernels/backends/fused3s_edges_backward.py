"""The backward pass of `fused3s` edge by edge; see cuda/fused3s_edges_backward.cu."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch

from ..edge_data import BoundEdges
from ..formats.row_items import RowItems
from ..formats.transpose import TransposedCSR, transpose_csr
from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel, pack_scalars
from ..runtime.semaphores import semaphores
from .base import Gradients, Memory
from .cuda import LOAD_BYTES, aligned_rows
from .feature_products import FEATURES, add_features, project_query, weight_gradients
from .fused3s_backward import new_gradients
from .fused3s_edges import (
    KEY_FEATURES,
    LANE_DIMS,
    VALUE_FEATURES,
    WARPS,
    EdgeKernelData,
    contiguous,
    dropout_scalars,
    edge_kernel_scalars,
    edges_scalars,
    heads_of_lane_group,
    items_for_heads,
    lanes_of_head,
    score_unit,
    terms_of,
)

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


@dataclass(frozen=True, eq=False)
class EdgeBackwardData:
    """What the backward pass reads beside `EdgeKernelData`.

    Attributes:
        transposed: A^T, with the places of the edges in the CSR that edge data is bound to.
        work: its items.
    """

    transposed: TransposedCSR
    work: RowItems


def build_edge_backward_data(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    num_cols: int,
    device: torch.device,
    num_heads: int,
    dim: int,
    row_ids: torch.Tensor | None = None,
) -> EdgeBackwardData:
    """A^T of the CSR pattern that `build_edge_kernel_data` takes, for the same heads, by torch."""
    transposed = transpose_csr(indptr, indices, num_cols, row_ids)
    work = items_for_heads(transposed.indptr, indices.numel(), None, device, num_heads, dim)
    return EdgeBackwardData(transposed, work)


def compile_edge_backward(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, device: torch.device
) -> None:
    for spec in _specs(dtype, out_dtype, dim, num_heads, 0):
        get_kernel(spec, device.index)


def launch_edge_backward(
    forward_data: EdgeKernelData,
    data: EdgeBackwardData,
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    edges: BoundEdges | None,
    wanted: frozenset[str],
    into: Memory | None = None,
) -> Gradients:
    """Run the kernels on torch's current stream, without waiting for them. The gradients are bitwise reproducible.

    Args:
        forward_data: A, as for `launch_edge_kernel`.
        data: A^T of the same pattern.
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
    of_edges = None if edges is None else _EdgeTensors(forward_data, query, grad_output, edges, wanted)
    row_state = query.new_empty((num_rows, num_heads, 2), dtype=torch.float32)
    of_columns = "key" in wanted or "value" in wanted
    grad_query, grad_key, grad_value = into or new_gradients(query, key, value)
    if into and edges is not None and edges.key_weight is not None:
        (grad_query,) = new_gradients(query)  # add_features takes contiguous rows
    scalars = edges_scalars(edges), dropout_scalars(None if edges is None else edges.dropout), scale
    _launch(
        over_rows,
        forward_data.work,
        (forward_data.indices, None),
        (query, grad_output, key, value),
        (output.contiguous(), lse.contiguous(), row_state, grad_query, None),
        NO_EDGE_TENSORS if of_edges is None else of_edges.for_rows,
        num_rows,
        *scalars,
    )
    if of_columns:
        _launch(
            over_columns,
            data.work,
            (data.transposed.indices, data.transposed.edge),
            (key, value, query, grad_output),
            (None, None, row_state, grad_key, grad_value),
            NO_EDGE_TENSORS if of_edges is None else of_edges.for_columns,
            num_rows,
            *scalars,
        )
    found = of_rows(grad_query, grad_key, grad_value, wanted)
    return found if of_edges is None else of_edges.gradients(found, data.transposed, query, key, grad_output)


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
        forward_data: EdgeKernelData,
        query: torch.Tensor,
        grad_output: torch.Tensor,
        edges: BoundEdges,
        wanted: frozenset[str],
    ) -> None:
        num_rows, num_heads, _ = query.shape
        num_edges = forward_data.indices.numel()

        def of_edges(is_wanted: bool) -> torch.Tensor | None:
            return query.new_empty((num_edges, num_heads), dtype=torch.float32) if is_wanted else None

        self.work, self.edges, self.wanted = forward_data.work, edges, wanted
        self.projected_query = self.projected_grad = self.key_sums = self.value_sums = None
        if edges.key_weight is not None:  # u = W^T q
            self.projected_query = project_query(query, edges.key_weight.contiguous())
            self.key_sums = query.new_empty((num_heads, num_rows, FEATURES))
        if edges.value_weight is not None:  # u' = W'^T dO
            self.projected_grad = project_query(grad_output, edges.value_weight.contiguous())
            self.value_sums = query.new_empty((num_heads, num_rows, FEATURES))
        of_features = "padded_features" in wanted
        self.bias, self.multiplier = of_edges("bias" in wanted), of_edges("multiplier" in wanted)
        self.score_weights = of_edges("type_weight" in wanted or (of_features and edges.key_weight is not None))
        self.value_weights = of_edges(of_features and edges.value_weight is not None)
        seed = None if edges.dropout is None else edges.dropout.seed
        terms = contiguous(edges.bias, edges.multiplier, edges.types, edges.type_weight, edges.padded_features)
        read = (*terms, self.projected_query, self.projected_grad)
        sums = (self.key_sums, self.value_sums, self.bias, self.multiplier, self.score_weights, self.value_weights)
        self.for_rows, self.for_columns = (*read, *sums, seed), (*read, *(None,) * 6, seed)

    def gradients(
        self,
        of_rows: Gradients,
        transposed: TransposedCSR,
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
            "padded_features": lambda: _feature_gradient(
                *(self.work, edges.padded_features, self.score_weights, self.projected_query),
                *(self.value_weights, self.projected_grad),
            ),
            "type_weight": lambda: _type_gradient(transposed, query, key, self.score_weights, edges),
        }
        found = {name: make() for name, make in makers.items() if name in wanted}
        products = {"key_weight": (query, self.key_sums), "value_weight": (grad_output, self.value_sums)}
        names = [name for name in products if name in wanted]
        if names:
            gradients = weight_gradients([products[name] for name in names], edges.num_features)
            found.update(zip(names, gradients, strict=True))
        return of_rows._replace(**found)


def _launch(
    spec: EdgeBackwardSpec,
    work: RowItems,
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
        edges, dropout: from `edges_scalars` and `dropout_scalars`.
    """
    num_items, num_parts = work.items.shape[0], work.parts.shape[0]
    if num_items == 0:
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
        (work.items, *edges_of_items, work.parts, *rows, *results, partial, arrived, *edge_tensors),
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
    work: RowItems,
    features: torch.Tensor,
    score_weights: torch.Tensor | None,
    projected_query: torch.Tensor | None,
    value_weights: torch.Tensor | None,
    projected_grad: torch.Tensor | None,
) -> torch.Tensor:
    """[nnz, 16]: the sum over heads of `score_weights` u_i + `value_weights` u'_i."""
    num_edges = len(features)
    gradient = features.new_empty((num_edges, FEATURES))
    _, num_rows, _ = (projected_grad if projected_query is None else projected_query).shape
    num_heads = (value_weights if score_weights is None else score_weights).shape[1]
    num_items = work.items.shape[0]
    if num_edges:
        launch_kernel(
            get_kernel(FeatureGradientSpec(features.dtype), features.device.index),
            (-(-num_items * FEATURE_LANES // (WARPS * WARP_SIZE)),),
            WARPS * WARP_SIZE,
            (work.items, score_weights, projected_query, value_weights, projected_grad, gradient),
            pack_scalars(np.int32(num_rows), np.int32(num_items), np.int32(num_heads)),
            overlaps=True,
        )
    return gradient


def _type_gradient(
    transposed: TransposedCSR, query: torch.Tensor, key: torch.Tensor, score_weights: torch.Tensor, edges: BoundEdges
) -> torch.Tensor:
    """[T, H, d]: the sum over the edges of each type of `score_weights` [nnz, H] q_i * k_j.

    Chunks of the edges as matrix products with the one-hot types [T, edges]: no atomics, so bitwise reproducible.
    """
    num_types, num_heads, dim = edges.type_weight.shape
    num_edges = transposed.edge.numel()
    gradient = query.new_zeros((num_types, num_heads * dim), dtype=torch.float32)
    numbers = torch.arange(num_types, device=query.device)
    step = max(1, TYPE_CHUNK // (num_heads * dim))
    for first in range(0, num_edges, step):
        row, edge = transposed.indices[first : first + step], transposed.edge[first : first + step]
        place = torch.arange(first, first + len(edge), device=query.device)
        column = torch.searchsorted(transposed.indptr, place, right=True) - 1
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
