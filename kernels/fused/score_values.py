"""Score terms for the kernels of `fused3s`: bits of terms, members of struct Params, gradients of values."""

from functools import lru_cache

import torch

from ..backends.cuda import LOG2E
from ..terms.edge_data import FEATURE_STEP, VALUES, BoundEdges
from ..terms.score_source import uses_score
from ..terms.score_term import MOST_NUMBERS
from .data import Fused3SData
from .shapes import (
    ADDITIVE,
    DROPOUT,
    EXPRESSION,
    KEY_FACTOR,
    KEY_FEATURES,
    TYPES,
    VALUE_FEATURES,
    WIDE_FACTORS,
    WIDE_KEYS,
    WIDE_VALUES,
)

Members = tuple[tuple[str, float], ...]  # (name, value) of scalars of struct Params; hashable
# Fields of BoundEdges, and the bit of each in enum EdgeTerm.
_FIELD_BITS = (
    *(("types", TYPES), ("dropout", DROPOUT), ("score", EXPRESSION), ("additive_weight", ADDITIVE)),
    ("key_factor", KEY_FACTOR),
)
_FEATURE_BITS = ("key_weight", KEY_FEATURES), ("value_weight", VALUE_FEATURES)
_WIDE_BITS = ("key_weight", WIDE_KEYS), ("value_weight", WIDE_VALUES), ("key_factor", WIDE_FACTORS)
SCORE_DEFAULTS: dict[str, float] = {  # members of cuda/score/score_term_params.cuh without a score term
    **{name.replace("values", "value_heads"): 1 for name in VALUES},
    **{f"score_number_{i}": 0.0 for i in range(MOST_NUMBERS)},
    "additive_slope": 0.0,
    "num_factors": 0,
}
MOST_TILE_VALUES = 2  # values of an edge in KV tiles; plans reserve their shared memory
MOST_VALUE_SUMS = 4  # as kMostValueSums of cuda/tiles/sum_splits.cuh


def terms_of(edges: BoundEdges | None) -> int:
    """Bits of enum EdgeTerm."""
    if edges is None:
        return 0
    terms = 0
    for name, bit in (*_FIELD_BITS, *(_WIDE_BITS if is_wide(edges) else _FEATURE_BITS)):
        if getattr(edges, name) is not None:
            terms |= bit
    return terms


def is_wide(edges: BoundEdges) -> bool:
    """Whether the features have more columns than the attention kernels take (edges/wide_features.py)."""
    return edges.num_features > FEATURE_STEP


@lru_cache
def product_unit(dtype: torch.dtype, terms: int) -> float:
    """kProductUnit of cuda/score/score_terms.cuh."""
    return 1.0 if dtype == torch.float32 or terms & EXPRESSION else LOG2E


def score_scalars(edges: BoundEdges | None) -> Members:
    """Members of cuda/score/score_term_params.cuh other than SCORE_DEFAULTS: heads of values (1 or H), and numbers."""
    if edges is None:
        return ()
    scalars: dict[str, float] = {}
    if edges.additive_weight is not None:
        scalars["additive_slope"] = edges.additive_slope
    if edges.key_factor is not None:
        scalars["num_factors"] = edges.num_features
    if edges.score is not None:
        given = {name: values for name in VALUES if (values := getattr(edges, name)) is not None}
        scalars |= {name.replace("values", "value_heads"): values.shape[1] for name, values in given.items()}
        scalars |= {f"score_number_{i}": number for i, number in enumerate(edges.score_numbers)}
    return tuple(scalars.items())


def forward_fits_tiles(edges: BoundEdges | None, dtype: torch.dtype) -> bool:
    """Whether the forward kernel over KV tiles takes the terms of a call: dropout; in 16 bits a score term and up to
    16 features. Not for expressions without s: this kernel would gather K for nothing."""
    terms = terms_of(edges)
    if not terms & ~DROPOUT:
        return True
    if terms & (TYPES | ADDITIVE | KEY_FACTOR | WIDE_KEYS | WIDE_VALUES) or dtype == torch.float32:
        return False
    of_edges = 0 if edges.edge_values is None else edges.edge_values.shape[2]
    return edges.score is None or (uses_score(edges.score) and of_edges <= MOST_TILE_VALUES)


def folds_heads(edges: BoundEdges | None) -> bool:
    """Whether the forward kernel over KV tiles computes several heads at a time: without edge data, or with only a
    score term of at most one value, of an edge or shared by all heads: more take too many registers."""
    terms = terms_of(edges)
    if not terms:
        return True
    if terms != EXPRESSION:
        return False
    given = [each for name in VALUES if (each := getattr(edges, name)) is not None]
    return not given or [tuple(each.shape[1:]) for each in given] == [(1, 1)] or _is_one_edge_value(given, edges)


def _is_one_edge_value(given: list[torch.Tensor], edges: BoundEdges) -> bool:
    """Whether the only value of a score term is one of each edge, or of each edge and head: a bias, say."""
    return len(given) == 1 and given[0] is edges.edge_values and given[0].shape[2] == 1


def backward_fits_tiles(edges: BoundEdges | None, dtype: torch.dtype) -> bool:
    """Whether the backward kernel over KV tiles takes the terms of a call: dropout; in 16 bits also a score term whose
    values are of rows, columns and heads, or one of an edge: more take too many registers."""
    terms = terms_of(edges)
    if not terms & ~DROPOUT:
        return True
    if terms & ~(DROPOUT | EXPRESSION) or dtype == torch.float32:
        return False
    if edges.score is None:
        return True
    if not uses_score(edges.score):
        return False
    if edges.edge_values is not None:
        return _is_one_edge_value([each for name in VALUES if (each := getattr(edges, name)) is not None], edges)
    sizes = [0 if (each := getattr(edges, name)) is None else each.shape[2] for name in VALUES]
    of_rows, of_columns, _, of_heads = sizes
    return max(of_rows + of_heads, of_columns) <= MOST_VALUE_SUMS


def require_edge_arrays(items: torch.Tensor | None) -> None:
    """Raise a ValueError if a plan lacks the arrays of the edge-by-edge kernels."""
    if items is None:
        raise ValueError(
            "edges: this call runs edge by edge (float32 with a score term, a term that reads no score, types, "
            "key_factor, more than 16 features or additive attention), and this plan has no arrays for it; make it "
            "with plan_attention(..., edge_data=True)"
        )


def new_value_gradients(
    edges: BoundEdges, query: torch.Tensor, data: Fused3SData, wanted: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Memory [length, H, n] float32 for the wanted gradients of values, by name; those of heads for each row."""
    num_rows, num_heads = query.shape[:2]
    lengths = {"row_values": num_rows, "column_values": data.size.num_cols, "head_values": num_rows}
    found = {}
    for name in (each for each in VALUES if each in wanted):
        columns = num_heads, getattr(edges, name).shape[2]
        if name == "edge_values":
            found[name] = data.new_of_edges(query, columns, torch.float32)
        else:
            found[name] = query.new_empty((lengths[name], *columns), dtype=torch.float32)
    return found


def gradient_members(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pointers of struct Params for `new_value_gradients`."""
    return {name.replace("values", "value_gradients"): gradient for name, gradient in gradients.items()}


def summed_gradients(edges: BoundEdges, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of values in the shapes and types of the values."""
    if (of_heads := gradients.get("head_values")) is not None:
        gradients = gradients | {"head_values": of_heads.sum(0, keepdim=True)}
    return {name: for_heads(gradient, getattr(edges, name)) for name, gradient in gradients.items()}


def for_heads(gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`gradient` [n, H, ..] float32, summed to the shape [n, H, ..] or [n, 1, ..] of `values` and cast to its type."""
    if values.shape[1] == 1 < gradient.shape[1]:
        gradient = gradient.sum(1, keepdim=True)
    return gradient.to(values.dtype)


def contiguous(edges: BoundEdges, *names: str) -> dict[str, torch.Tensor | None]:
    """Fields by name, contiguous: the kernels take edge data without strides."""
    found = {}
    for name in names:
        tensor = getattr(edges, name)
        found[name] = None if tensor is None else tensor.contiguous()
    return found
