"""Edge features of more than 16 columns: products before and behind the edge-by-edge kernels, which take one number per
edge and head of them (cuda/features/wide_features.cu). Products of s with a weight are GEMMs of torch.

    x_ij = <u_i, a_ij>      u = W^T q, W'^T dO      before both passes
    s_i  = sum_j w_ij a_ij  W s is added to the output or to dq; dW = sum_i q_i s_i^T
    da_ij = sum w_ij u_i    over sides and heads

A side is a weight: W with the rows of q, or W' with those of dO. All is computed for MOST_COLUMNS columns or fewer at a
time: u and s take [H, N, columns] each, and no tensor of edges has H d columns.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ...backends.cuda import split_scratch
from ...runtime.device import WARP_SIZE
from ...runtime.jit import KernelInstance, get_kernel
from ...runtime.launch import launch_kernel
from ...terms.dropout import Dropout
from ...terms.edge_data import BoundEdges
from ..data import Fused3SData
from ..score_values import contiguous
from .features import add_product, project_query, weight_gradients

SOURCE = "features/wide_features.cu"
MOST_COLUMNS, LEAST_COLUMNS = 128, 32  # of a launch
SMALL_PROJECTION = 1 << 22  # elements of u that no graph saves by launches of fewer columns
GRADIENT_COLUMNS = 64  # of a block of feature_gradients
TILE_CHANNELS, MOST_TILES = 8, 2  # of a warp: columns of mma.m16n8k8; a channel is a head of a side
WARPS = 4  # as in cuda/edges/lane_group.cuh


class Side(NamedTuple):
    """rows [N, H, d] of q or dO, as `project_query` takes them; weight [H, d, r] of their type, contiguous."""

    rows: torch.Tensor
    weight: torch.Tensor


@lru_cache
def wide_instance(function: str, dtype: torch.dtype, columns: int, channels: int) -> KernelInstance:
    """An instance of "feature_products", "feature_sums" or "feature_gradients"; `channels`: heads of all sides."""
    most_columns = max(LEAST_COLUMNS, 1 << (columns - 1).bit_length())
    if function == "feature_gradients":
        return KernelInstance(SOURCE, function, (dtype, min(most_columns, GRADIENT_COLUMNS)))
    return KernelInstance(SOURCE, function, (dtype, most_columns, _tiles(channels)))


def _tiles(channels: int) -> int:
    return min(-(-channels // TILE_CHANNELS), MOST_TILES)


def feature_products(data: Fused3SData, features: torch.Tensor, sides: Sequence[Side]) -> list[torch.Tensor]:
    """<u_i, a_ij> of each side, [nnz, H] float32; u = weight^T rows.

    Args:
        data: A, with the arrays of the edge-by-edge kernels.
        features: [nnz, `padded_columns(r)`] of the sides' type, contiguous.
    """
    num_heads = sides[0].rows.shape[1]
    products = [data.new_of_edges(features, (num_heads,), torch.float32) for _ in sides]
    for columns in _chunks(features, sides[0].rows):
        tensors = _by_side("projected", [_project(side, columns) for side in sides]) | _by_side("products", products)
        _launch(data, "feature_products", features, columns, num_heads, len(sides), tensors, adds=columns.start > 0)
    return products


def add_feature_sums(
    output: torch.Tensor, data: Fused3SData, edges: BoundEdges, scores: torch.Tensor, lse: torch.Tensor
) -> None:
    """output[i] += W' sum_j D_ij p_ij a_ij, with p_ij = exp(score_ij - lse_i) and the dropout of the call.

    Args:
        output: [N, H, d]; updated in place.
        scores: [nnz, H] float32, times kScoreUnit, as the forward kernel writes them.
        lse: [N, H] float32.
    """
    features, weight = edges.padded_features.contiguous(), edges.value_weight
    for columns in _chunks(features, output):
        (sums,) = _feature_sums(data, features, columns, [scores], output, lse, edges)
        add_product(output, sums, weight[..., columns])


def feature_sums(
    data: Fused3SData, features: torch.Tensor, weights: Sequence[torch.Tensor], rows: torch.Tensor
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """sum_j w_ij a_ij of each side, [H, N, columns] of their type, for slices of the columns of the features.

    Args:
        weights: w of each side, [nnz, H] float32; the neighbours in memory may be a stride apart.
        rows: [N, H, d], for the sizes.
    """
    for columns in _chunks(features, rows):
        yield columns, _feature_sums(data, features, columns, weights, rows)


def feature_gradients(
    data: Fused3SData, features: torch.Tensor, sides: Sequence[Side], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """[nnz, columns of `features`], of its type: sum over sides and heads of w_ij u_i."""
    gradient = data.new_of_edges(features, features.shape[1:], features.dtype)
    num_heads = sides[0].rows.shape[1]
    for columns in _chunks(features, sides[0].rows):
        tensors = _by_side("projected", [_project(side, columns) for side in sides]) | _by_side("weights", weights)
        tensors["gradient"] = gradient[:, columns]
        _launch(data, "feature_gradients", features, columns, num_heads, len(sides), tensors)
    return gradient


class WideGradients:
    """Wide features in the backward pass.

    Attributes:
        products: members of struct Params of cuda/edges/backward.cu.
    """

    def __init__(self, data: Fused3SData, query: torch.Tensor, grad_output: torch.Tensor, edges: BoundEdges) -> None:
        self._data, self._features = data, edges.padded_features.contiguous()
        weights, rows = contiguous(edges, "key_weight", "value_weight"), (query, grad_output)
        self._sides = {
            name: Side(each, weight)
            for each, (name, weight) in zip(rows, weights.items(), strict=True)
            if weight is not None
        }
        self.products: dict[str, torch.Tensor] = {}
        if self._sides:
            found = feature_products(data, self._features, [*self._sides.values()])
            names = {"key_weight": "key_products", "value_weight": "grad_products"}
            self.products = {names[name]: each for name, each in zip(self._sides, found, strict=True)}

    def gradients(
        self, grad_query: torch.Tensor | None, weights: dict[str, torch.Tensor], wanted: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """The wanted gradients of features and weights; adds W t to that of q.

        Args:
            grad_query: [N, H, d], or None.
            weights: by weight, what the row pass wrote for each edge: scale * ds, D p, as `feature_sums` takes them.
        """
        of_weights = [name for name in self._sides if name in wanted]
        found: list[list[torch.Tensor]] = []
        names = [name for name in self._sides if name in wanted or (name == "key_weight" and grad_query is not None)]
        if names:
            rows, weight = self._sides[names[0]]
            of_names = [weights[name] for name in names]
            for columns, of_columns in feature_sums(self._data, self._features, of_names, rows):
                sums = dict(zip(names, of_columns, strict=True))
                if "key_weight" in sums and grad_query is not None:
                    add_product(grad_query, sums["key_weight"], self._sides["key_weight"].weight[..., columns])
                if of_weights:
                    products = [(self._sides[name].rows, sums[name]) for name in of_weights]
                    found.append(weight_gradients(products, min(columns.stop, weight.shape[2]) - columns.start))
        gradients = {
            name: parts[0] if len(parts) == 1 else torch.cat(parts, 2)
            for name, parts in zip(of_weights, zip(*found, strict=True), strict=True)
        }
        if "padded_features" in wanted:
            gradients["padded_features"] = self._of_features(weights)
        return gradients

    def _of_features(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self._sides:
            return torch.zeros_like(self._features)
        of_sides = [weights[name] for name in self._sides]
        return feature_gradients(self._data, self._features, [*self._sides.values()], of_sides)


def _chunks(features: torch.Tensor, rows: torch.Tensor) -> Iterator[slice]:
    """Columns of each launch: as many as leave u of `rows` [N, H, d] no larger than the features."""
    (num_rows, num_heads, _), width, step = rows.shape, features.shape[1], MOST_COLUMNS
    while step > LEAST_COLUMNS and num_rows * num_heads * step > max(features.numel(), SMALL_PROJECTION):
        step //= 2
    return (slice(first, min(first + step, width)) for first in range(0, width, step))


def _project(side: Side, columns: slice) -> torch.Tensor:
    return project_query(side.rows, side.weight[..., columns], columns.stop - columns.start)


def _feature_sums(
    data: Fused3SData,
    features: torch.Tensor,
    columns: slice,
    weights: Sequence[torch.Tensor],
    rows: torch.Tensor,
    lse: torch.Tensor | None = None,
    edges: BoundEdges | None = None,
) -> list[torch.Tensor]:
    """[H, N, columns] of each side; with `lse` the weights are scores, and the dropout is that of `edges`."""
    num_rows, num_heads, _ = rows.shape
    shape = num_heads, num_rows, columns.stop - columns.start
    sums = [features.new_empty(shape) for _ in weights]
    tensors = _by_side("weights", weights) | _by_side("sums", sums) | {"lse": lse}
    dropout = None if edges is None else edges.dropout
    if dropout is not None:
        tensors |= {"dropout_seed": dropout.seed, "indices": data.indices}
    _launch(data, "feature_sums", features, columns, num_heads, len(weights), tensors, dropout=dropout)
    return sums


def _by_side(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}_{side}": tensor for side, tensor in enumerate(tensors)}


def _launch(
    data: Fused3SData,
    function: str,
    features: torch.Tensor,
    columns: slice,
    num_heads: int,
    sides: int,
    tensors: dict[str, torch.Tensor | None],
    adds: bool = False,
    dropout: Dropout | None = None,
) -> None:
    """Queue an instance of `wide_instance` for these columns on torch's current stream."""
    num_items, num_rows = data.row_items.shape[0], data.size.num_rows
    if not (num_items and num_rows):
        return
    width, channels = columns.stop - columns.start, sides * num_heads
    kernel = get_kernel(wide_instance(function, features.dtype, width, channels), features.device.index)
    by_column = function == "feature_gradients"
    groups = -(-width // GRADIENT_COLUMNS) if by_column else -(-channels // (TILE_CHANNELS * _tiles(channels)))
    if function == "feature_sums":
        num_partials = data.row_parts.shape[0] * groups
        tensors = tensors | split_scratch(kernel, num_partials, num_partials, features) | {"parts": data.row_parts}
    launch_kernel(
        kernel,
        (-(-num_items // kernel.sizes.block_items), groups),
        WARPS * WARP_SIZE,
        {"items": data.row_items, "features": features[:, columns], **tensors},
        kernel.scalars(
            dropout_threshold=0 if dropout is None else dropout.threshold,
            dropout_rescale=1.0 if dropout is None else dropout.rescale,
            feature_stride=features.stride(0),
            weight_stride=1 if (weights := tensors.get("weights_0")) is None else weights.stride(1),
            columns=width,
            num_rows=num_rows,
            num_items=num_items,
            num_heads=num_heads,
            num_channels=channels,
            adds=int(adds),
        ),
        overlaps=True,
    )
