"""The backward pass of `fused3s` edge by edge; see cuda/edges/backward.cu."""

from functools import lru_cache
from operator import is_

import torch

from ...backends.base import BackwardCall, Gradients
from ...backends.cuda import aligned_rows, split_scratch, stride_scalars
from ...runtime.device import WARP_SIZE
from ...runtime.jit import Kernel, KernelInstance, get_kernel
from ...runtime.launch import launch_kernel
from ...terms.edge_data import BoundEdges
from ...terms.score_source import count_values, uses_score
from ..data import Fused3SData
from ..score_values import Members, gradient_members, is_wide, new_value_gradients, summed_gradients, terms_of
from ..shapes import ADDITIVE, DROPOUT, EXPRESSION, GIVEN_WEIGHTS, KEY_FACTOR, TYPES, WIDE_FACTORS
from ..tiles.backward import new_gradients, wanted_of
from .added_features import added_gradients, with_added_features
from .features import FEATURES, add_features, project_query, weight_gradients
from .forward import (
    TERM_DEFAULTS,
    WARPS,
    edge_tensors,
    heads_of_lane_group,
    lane_alignment,
    term_scalars,
    unpacked_lanes,
)
from .wide_features import WideGradients

SOURCE = "edges/backward.cu"
FEATURE_LANES = 4  # lanes per item in `gradients_of_features`
BY_ROW = ("own_first", "own_second", "gathered_first", "gathered_second")  # tensors [.., H, d] of struct Params
FACTORS = frozenset(("type_weight", "key_factor"))  # at most one of them is given
ADDED = frozenset(("key_weight", "padded_features"))  # of additive attention
FACTOR_CHUNK = 1 << 22  # elements of [edges, H, d] per chunk in `_factor_gradients`


@lru_cache  # on small graphs the host time of a call counts
def edge_backward_instances(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, num_heads: int, terms: int, score: str | None = None
) -> tuple[KernelInstance, KernelInstance]:
    """Instances of the pass over rows and of the pass over columns for heads of `edge_columns`; `terms`: bits of enum
    EdgeTerm."""
    heads = heads_of_lane_group(num_heads, dim, dtype)
    of_columns, column_score = _given_terms(terms, score) if _num_weights(terms, score) else (terms, score)
    return (
        KernelInstance(SOURCE, "gradients_over_rows", (dtype, out_dtype, dim, heads, terms), score=score),
        KernelInstance(SOURCE, "gradients_over_columns", (dtype, dim, heads, of_columns), score=column_score),
    )


@lru_cache
def _num_weights(terms: int, score: str | None) -> int:
    """Weights per edge and head that the pass over rows writes for the pass over columns (kWeights of
    cuda/edges/backward.cu); 0 without edge data."""
    values = {"edge": 0, "column": 0} if score is None else count_values(score)
    has_edge_data = terms & ~(DROPOUT | EXPRESSION | ADDITIVE) > 0 or values["edge"] > 0
    return 2 + values["column"] if has_edge_data else 0


def _given_terms(terms: int, score: str | None) -> tuple[int, str | None]:
    """Terms and expression of the pass over columns that reads weights: those that multiply rows of Q, and an
    expression if its columns have values or it needs no q."""
    terms = terms & (TYPES | ADDITIVE | KEY_FACTOR | WIDE_FACTORS) | GIVEN_WEIGHTS
    if score is None or (uses_score(score) and not count_values(score)["column"]):
        return terms, None
    return terms | EXPRESSION, score


@lru_cache
def features_instance(dtype: torch.dtype) -> KernelInstance:
    return KernelInstance(SOURCE, "gradients_of_features", (dtype,))


def launch_edge_backward(data: Fused3SData, given: BackwardCall) -> Gradients:
    """Queue the kernels on torch's current stream. The gradients are bitwise reproducible.

    Args:
        data: A with the arrays of both edge-by-edge passes, on the tensors' GPU.
        given: query, key and value of fp16, bf16 or float32, any row and head strides; edge data in CSR order. The
            output has query's type or float32, and a gradient of float32 is rounded to query's type. `takes_columns`
            holds. Gradients of `type_weight` and `key_factor` use plain torch and are not optimised.
    """
    (query, key, value, scale, _, lse, edges), output, grad_output, wanted, into, grad_lse = given
    edges = with_added_features(edges)
    num_rows, num_heads, dim = query.shape
    terms, score = (0, None) if edges is None else (terms_of(edges), edges.score)
    over_rows, over_columns = edge_backward_instances(query.dtype, output.dtype, dim, num_heads, terms, score)
    if grad_output.dtype is not query.dtype:
        grad_output = grad_output.to(query.dtype)
    alignment = lane_alignment(num_heads, dim, query.dtype)
    query, grad_output, key, value = aligned_rows((query, grad_output, key, value), *alignment)
    num_weights = _num_weights(terms, score)
    if num_weights:
        to_columns = {"edge_weights": data.new_of_edges(query, (num_heads, num_weights), torch.float32)}
    else:
        to_columns = {"row_state": query.new_empty((num_rows, num_heads, 2), dtype=torch.float32)}
    of_edges = None if edges is None else _EdgeTensors(data, query, grad_output, edges, wanted)
    if into is not None and not all(map(is_, into, aligned_rows(into, *alignment))):
        into = None
    grad_query, grad_key, grad_value = into or new_gradients(query, key, value)
    adds = edges is not None and edges.key_weight is not None and not is_wide(edges)
    if into and adds and query.dtype != torch.float32:
        (grad_query,) = new_gradients(query)  # add_features needs contiguous rows of 16 bits
    scalars = num_rows, num_heads, scale, () if edges is None else term_scalars(edges)
    _launch(
        over_rows,
        {
            "items": data.row_items,
            "parts": data.row_parts,
            "indices": data.indices,
            "own_first": query,
            "own_second": grad_output,
            "gathered_first": key,
            "gathered_second": value,
            "output": output.contiguous(),
            "lse": lse.contiguous(),
            "lse_gradient": None if grad_lse is None else grad_lse.contiguous(),
            "first_gradient": grad_query,
            **to_columns,
            **({} if of_edges is None else of_edges.for_rows),
        },
        scalars,
    )
    if "key" in wanted or "value" in wanted or "column_values" in wanted:
        _launch(
            over_columns,
            {
                "items": data.column_items,
                "parts": data.column_parts,
                "indices": data.column_rows,
                "edges": data.column_edges,
                "own_first": key,
                "own_second": value,
                "gathered_first": query,
                "gathered_second": grad_output,
                "first_gradient": grad_key,
                "second_gradient": grad_value,
                **to_columns,
                **({} if of_edges is None else of_edges.for_columns),
            },
            scalars,
        )
    found = wanted_of(grad_query, grad_key, grad_value, wanted)
    if of_edges is None:
        return found
    return of_edges.gradients(found, query, key, grad_output, to_columns.get("edge_weights"))


class _EdgeTensors:
    """Members of struct Params for edge data: inputs of both passes, outputs of the row pass."""

    def __init__(
        self,
        data: Fused3SData,
        query: torch.Tensor,
        grad_output: torch.Tensor,
        edges: BoundEdges,
        wanted: frozenset[str],
    ) -> None:
        num_rows, num_heads, _ = query.shape

        self.data, self.edges, self.wanted = data, edges, wanted
        self.of_values = new_value_gradients(edges, query, data, wanted)
        self.projected_query = self.projected_grad = self.key_sums = self.value_sums = self.of_additive = None
        self.wide = WideGradients(data, query, grad_output, edges) if is_wide(edges) else None
        if self.wide is None and edges.key_weight is not None:  # u = W^T q
            self.projected_query = project_query(query, edges.key_weight.contiguous())
            self.key_sums = query.new_empty((num_heads, num_rows, FEATURES))
        if self.wide is None and edges.value_weight is not None:  # u' = W'^T dO
            self.projected_grad = project_query(grad_output, edges.value_weight.contiguous())
            self.value_sums = query.new_empty((num_heads, num_rows, FEATURES))
        self.adds = edges.additive_weight is not None and edges.key_factor is not None
        self.wants_added = self.adds and bool(wanted & ADDED)
        self.for_columns = edge_tensors(edges)
        if "additive_weight" in wanted:
            shape = num_rows, num_heads, query.shape[2]
            self.of_additive = query.new_empty(shape, dtype=torch.float32)
        self.signs = None
        if self.wants_added:  # a byte of each lane
            self.heads = heads_of_lane_group(num_heads, query.shape[2], query.dtype)
            lanes = -(-num_heads // self.heads) * self.heads * unpacked_lanes(query.shape[2])
            self.signs = data.new_of_edges(query, (lanes,), torch.uint8)
        if (of_columns := self.of_values.get("column_values")) is not None:
            self.for_columns["column_value_gradients"] = of_columns
        self.for_rows = {
            **self.for_columns,
            **({} if self.wide is None else self.wide.products),
            "projected_query": self.projected_query,
            "projected_grad": self.projected_grad,
            **gradient_members(self.of_values),
            "key_feature_sums": self.key_sums,
            "value_feature_sums": self.value_sums,
            "additive_gradients": self.of_additive,
            "signs": self.signs,
        }

    def gradients(
        self,
        of_rows: Gradients,
        query: torch.Tensor,
        key: torch.Tensor,
        grad_output: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> Gradients:
        """All wanted gradients, given those of query, key and value; called after both passes.

        Args:
            weights: edge_weights of struct Params, or None without edge data.
        """
        edges, wanted = self.edges, self.wanted
        found = {}
        if self.wide is not None:
            of_sides = {"key_weight": weights[..., 0], "value_weight": weights[..., 1]}
            found |= self.wide.gradients(of_rows.query, of_sides, wanted)
        elif "padded_features" in wanted:
            found["padded_features"] = _feature_gradient(
                self.data, edges.padded_features, weights, self.projected_query, self.projected_grad
            )
        if of_rows.query is not None and self.key_sums is not None:  # dq += W t
            add_features(of_rows.query, self.key_sums, edges.key_weight.contiguous())
        if not self.adds and (wanted & FACTORS or ("padded_features" in wanted and edges.key_factor is not None)):
            of_factor, of_features = _factor_gradients(self.data, query, key, weights[..., 0], edges)
            if "padded_features" in wanted and of_features is not None:
                found["padded_features"] += of_features
            found |= dict.fromkeys(wanted & FACTORS, of_factor)
        if self.wants_added:
            added = added_gradients(self.data, edges, self.heads, weights, self.signs, wanted)
            if "padded_features" in found:  # those of value_weight
                added["padded_features"] += found["padded_features"]
            found |= added
        if self.of_additive is not None:
            found["additive_weight"] = self.of_additive.sum(0).to(query.dtype)
        found.update(summed_gradients(edges, self.of_values))
        products = {"key_weight": (query, self.key_sums), "value_weight": (grad_output, self.value_sums)}
        names = [name for name in products if name in wanted - found.keys() and self.wide is None]
        if names:
            gradients = weight_gradients([products[name] for name in names], edges.num_features)
            found.update(zip(names, gradients, strict=True))
        return of_rows._replace(**found)


def _launch(instance: KernelInstance, tensors: dict[str, torch.Tensor | None], scalars: dict[str, float]) -> None:
    """Launch one pass; computes the members of struct Params that follow from others."""
    num_items, num_parts = tensors["items"].shape[0], tensors["parts"].shape[0]
    own, gradient = tensors["own_first"], tensors["first_gradient"]
    if not own.numel():  # a graph without rows was planned as one row
        return
    _, num_heads, dim = own.shape
    kernel = get_kernel(instance, own.device.index)
    num_groups = -(-num_heads // heads_of_lane_group(num_heads, dim, own.dtype))
    num_partials = num_parts * num_groups
    strides = tuple(map(torch.Tensor.stride, map(tensors.__getitem__, BY_ROW)))
    launch_kernel(
        kernel,
        (-(-num_items // kernel.sizes.block_items), num_groups),
        WARPS * WARP_SIZE,
        {**tensors, **split_scratch(kernel, num_partials, num_partials, own)},
        _scalars(kernel, num_items, gradient.stride(0) // dim, own.itemsize, strides, *scalars),
        overlaps=True,
    )


@lru_cache(1024)  # a model repeats the same arguments at every call
def _scalars(
    kernel: Kernel,
    num_items: int,
    gradient_heads: int,
    itemsize: int,
    strides: tuple[tuple[int, int, int], ...],
    num_rows: int,
    num_heads: int,
    scale: float,
    terms: Members,
) -> bytes:
    """The scalars of struct Params; `strides`: of the tensors in BY_ROW."""
    sizes = {"num_rows": num_rows, "num_items": num_items, "num_heads": num_heads, "gradient_heads": gradient_heads}
    of_strides = stride_scalars(BY_ROW, strides, itemsize)
    return kernel.scalars(**sizes, scale=scale, **of_strides, **(TERM_DEFAULTS | dict(terms)))


def _feature_gradient(
    data: Fused3SData,
    features: torch.Tensor,
    weights: torch.Tensor,
    projected_query: torch.Tensor | None,
    projected_grad: torch.Tensor | None,
) -> torch.Tensor:
    """[nnz, 16]: the sum over heads of weights[..., 0] u_i + weights[..., 1] u'_i."""
    if projected_query is projected_grad is None:
        return torch.zeros_like(features)
    gradient = data.new_of_edges(features, (FEATURES,), features.dtype)
    _, num_rows, _ = (projected_grad if projected_query is None else projected_query).shape
    _, num_heads, num_weights = weights.shape
    num_items = len(data.row_items)
    if len(gradient):
        kernel = get_kernel(features_instance(features.dtype), features.device.index)
        launch_kernel(
            kernel,
            (-(-num_items * FEATURE_LANES // (WARPS * WARP_SIZE)),),
            WARPS * WARP_SIZE,
            {
                "items": data.row_items,
                "edge_weights": weights,
                "projected_query": projected_query,
                "projected_grad": projected_grad,
                "gradient": gradient,
            },
            kernel.scalars(num_rows=num_rows, num_items=num_items, num_heads=num_heads, num_weights=num_weights),
            overlaps=True,
        )
    return gradient


def _factor_gradients(
    data: Fused3SData, query: torch.Tensor, key: torch.Tensor, score_weights: torch.Tensor, edges: BoundEdges
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of type_weight [T, H, d], or of key_factor [r, H, d] and of its features [nnz, 16].

    That of a factor is the sum over its edges of `score_weights` [nnz, H] q_i * k_j, with features times the feature.
    Computed in chunks as products with one-hot types, or features, [T or r, edges]: without atomics, so bitwise
    reproducible.
    """
    factor = edges.type_weight if edges.key_factor is None else edges.key_factor
    num_factors, num_heads, dim = factor.shape
    num_edges = data.column_edges.numel()
    gradient = query.new_zeros((num_factors, num_heads * dim), dtype=torch.float32)
    of_features = None if edges.key_factor is None else torch.zeros_like(edges.padded_features)
    numbers = torch.arange(num_factors, device=query.device)
    step = max(1, FACTOR_CHUNK // (num_heads * dim))
    for first in range(0, num_edges, step):
        row, edge = data.column_rows[first : first + step], data.column_edges[first : first + step]
        place = torch.arange(first, first + len(edge), device=query.device)
        column = torch.searchsorted(data.column_offsets, place, right=True) - 1
        weights = score_weights[edge, :, None]
        if data.has_room:  # behind the last edge: edge 0, with weight 0
            column, weights = column.clamp(max=len(key) - 1), weights.where((column < len(key))[:, None, None], 0)
        products = (query[row].float() * key[column].float() * weights).flatten(1)
        if of_features is None:
            amounts = (edges.types[edge] == numbers[:, None]).float()
        else:
            amounts = edges.features[edge].float().t()
            found = products @ factor.float().flatten(1).t()
            of_features[:, :num_factors].index_add_(0, edge, found.to(of_features.dtype))
        gradient += amounts @ products
    return gradient.view(num_factors, num_heads, dim).to(query.dtype), of_features
