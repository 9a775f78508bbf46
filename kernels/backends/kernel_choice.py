"""Which of its two kernels `fused3s` takes: over KV tiles on tensor cores, or edge by edge; by measurements in
kernels/NOTES.md.

The measure is the number of edges of a KV tile, which only the GPU knows. The host knows a bound: A has a KV tile for
each 16 of its rows, and for each 16 of its columns, that have edges. Where few have none, a KV tile has at most
16 * edges / max(rows, columns) edges. There is no such bound from below: the edges of a window may all have columns of
their own. Graphs with few edges a row, sampled ones among them, go edge by edge unasked: of the 14 graphs of the
benchmarks, those with under 16 have 12 to 23 edges a KV tile, and a wait for the GPU in every step costs more than the
slower kernel on a small graph of cliques.
"""

from dataclasses import dataclass
from functools import lru_cache

from ..tuning import ALWAYS, NEVER, EdgeLimit, Tuning
from .fused3s_shapes import DROPOUT, KEY_FEATURES, TYPES, VALUE_FEATURES


@dataclass(frozen=True)
class GraphSize:
    """Sizes that decide.

    Attributes:
        num_rows, num_cols: of A.
        num_edges: with repeated ones; for plans with room, as many as there is room for.
        num_tiles: KV tiles; None where the host did not ask the GPU.
    """

    num_rows: int
    num_cols: int
    num_edges: int
    num_tiles: int | None = None


def takes_edges(
    tuning: Tuning, size: GraphSize, num_heads: int, dim: int | None, terms: int = 0, backward: bool = False
) -> bool | None:
    """Whether a call goes edge by edge; None where that takes the number of KV tiles.

    Args:
        dim: columns of a head; None where not known: the call then goes over KV tiles.
        terms: bits of enum EdgeTerm.
        backward: of the backward pass, whose kernel over KV tiles has no term but dropout.
    """
    if terms & TYPES or (backward and terms & ~DROPOUT):
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
    elif num_heads == 1:
        limits = tuning.one_head
    else:
        limits = tuning.backward if backward else tuning.with_terms if terms else tuning.forward
    return next((limit for most_dim, limit in limits if dim is not None and dim <= most_dim), EdgeLimit(NEVER))
