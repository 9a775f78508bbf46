"""The choice between the two kernels of `fused3s`: over KV tiles on tensor cores, or edge by edge. kernels/NOTES.md has
the measurements.

The criterion is the number of edges per KV tile, which only the GPU knows. The host knows an upper bound: A has at
least one KV tile for every 16 rows, and for every 16 columns, with edges; if few rows and columns are empty, a KV tile
has at most 16 * edges / max(rows, columns) edges. There is no lower bound: all edges of a window may have distinct
columns. Graphs with few edges per row, such as sampled ones, go edge by edge without a count: reading the count would
wait for the GPU in every step, which costs more than the slower kernel does on a small graph of cliques.
"""

from functools import lru_cache
from typing import NamedTuple

from .shapes import DROPOUT, EXPRESSION, KEY_FEATURES, VALUE_FEATURES
from .tuning import ALWAYS, NEVER, EdgeLimit, Tuning


class GraphSize(NamedTuple):
    """Sizes of a graph that decide between the kernels.

    Attributes:
        num_rows, num_cols: of A.
        num_edges: with repeated edges; of a `PlanRoom`, its capacity.
        num_tiles: KV tiles; None if the host has not read it from the GPU.
    """

    num_rows: int
    num_cols: int
    num_edges: int
    num_tiles: int | None = None


def goes_edge_by_edge(
    tuning: Tuning, size: GraphSize, num_heads: int, dim: int | None, terms: int = 0, backward: bool = False
) -> bool | None:
    """Whether a call goes edge by edge; None if that depends on the number of KV tiles.

    Args:
        dim: columns of a head; None if unknown: the call then goes over KV tiles.
        terms: bits of enum EdgeTerm.
        backward: decide for the backward pass; with EXPRESSION, for one that reads a value of each edge.
    """
    if backward and terms & ~(DROPOUT | EXPRESSION):
        return True
    limit = _limit(tuning, num_heads, dim, terms, backward)
    if limit.tile_edges == ALWAYS:
        return True
    if limit.tile_edges == NEVER or size.num_edges < limit.least_row_edges * size.num_rows:
        return False
    if size.num_edges < limit.uncounted_row_edges * size.num_rows:
        return True
    if size.num_tiles is not None:
        return size.num_edges < limit.tile_edges * size.num_tiles
    most_tile_edges = 16 * size.num_edges / max(1, size.num_rows, size.num_cols)
    return True if most_tile_edges < limit.tile_edges else None


@lru_cache
def _limit(tuning: Tuning, num_heads: int, dim: int | None, terms: int, backward: bool) -> EdgeLimit:
    if terms & (KEY_FEATURES | VALUE_FEATURES):
        limits = tuning.with_features if num_heads > 1 else tuning.one_head_with_features
    elif backward and terms & EXPRESSION:
        limits = tuning.backward_with_values
    elif num_heads == 1:
        limits = tuning.one_head
    else:
        limits = tuning.backward if backward else tuning.with_terms if terms else tuning.forward
    return next((limit for most_dim, limit in limits if dim is not None and dim <= most_dim), EdgeLimit(NEVER))
