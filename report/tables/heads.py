"""Times by shape of heads and by kind of edge data, as Markdown."""

import pandas as pd

from configs.bench_schema import NO_EDGES
from report.frames import PRECISIONS
from report.head_shapes import (
    ANEMOI,
    NAMES,
    OURS,
    TURBO,
    Ratios,
    ShapeTimes,
    describe,
    one_head,
    one_head_words,
    published_on,
    ratios,
)
from report.markdown import table
from report.plots.style import in_order

HEADS = """# Shapes of heads

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. A shape
is heads x columns of a head. Times are medians in ms, launched back to back, the L2 cache warm, scores scaled by
1/sqrt(d), the output in the input's type. A cell without a number holds its status; `-` was not measured. Turbo-GNN:
the published code, sums of kernel durations at another time ([results/paper](../paper/README.md)); it ends in a
segmentation fault for heads of 16 columns or fewer.
"""
EDGES = """# Edge data

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. Kinds of
edge data: a bias for all heads or for each, features of R columns with a weight for keys and values (`low_rank_R`), T
types with a vector each (`types_T`). The data is random and bound to the plan before timing. Times are medians in ms,
launched back to back, the L2 cache warm, scores scaled by 1/sqrt(d), the output in the input's type.
"""
OVER_ONE_HEAD = """Time over that of one head of the same width, or, where no head is so wide, over that of one call for
each head. Geometric mean over n graphs, surrogates included, and the slowest graph; below 1 is faster than one head.
"""
OVER_NONE = """Time with edge data over the time without: geometric mean over n graphs, surrogates included, and the
slowest graph.
"""
OVER_OURS = """Time of anemoi's Triton forward, which reads an edge tensor [nnz, H, d], over that of `fused3s` with
features: geometric mean over n graphs, surrogates included, and the graph on which `fused3s` gains least.
"""
APART = "The backend `anemoi` was measured at another commit than `fused3s`.\n"


def heads_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with rows of the benchmark `heads`."""
    sections = [HEADS]
    for device, found in rows[rows["bench"] == "heads"].groupby("device"):
        times, codes = ShapeTimes.of(found, "heads"), published_on(device)
        if times.rows.empty:
            continue
        shapes = [shape for shape in times.shapes if one_head(shape)[0] != shape]
        head = ["shape", "over", *(_name(times, series) for series in in_order(times.series)), NAMES[TURBO]]
        lines = [
            [
                str(shape),
                one_head_words(shape),
                *(describe(times.over_one_head(series, shape)) for series in in_order(times.series)),
                describe(codes.over_one_head(TURBO, shape)),
            ]
            for shape in shapes
        ]
        sections += [f"## Time over one head, {device}\n", OVER_ONE_HEAD, table(head, lines)]
        for series in in_order(times.series):
            sections += [f"## Times of {_name(times, series)}, {device}\n", _times(times, series, NO_EDGES)]
        if set(codes.rows["graph"]) & set(times.graphs):
            sections += [f"## Times of {NAMES[TURBO]}, {device}\n", _times(codes, TURBO, NO_EDGES)]
    return "\n".join(sections)


def edges_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with rows of the benchmark `edges`."""
    sections = [EDGES]
    for device, found in rows[rows["bench"] == "edges"].groupby("device"):
        times, codes = ShapeTimes.of(found, "edges"), published_on(device)
        if times.rows.empty:
            continue
        for series in in_order(times.series):
            lines = []
            for kind in times.kinds:
                found = [times.over_no_edges(series, shape, kind) for shape in times.shapes]
                lines += [[f"`{kind}`", *map(describe, found)]] if any(found) else []
            title = f"## Time over no edge data, {_name(times, series)}, {device}\n"
            if lines:
                sections += [title, OVER_NONE, table(["edge data", *map(str, times.shapes)], lines)]
        if lines := anemoi_lines(times, codes):
            head = ["edge data", "shape", "published code", "backend `anemoi`"]
            text = OVER_OURS if times.of_one_commit(OURS, ANEMOI) else f"{OVER_OURS}{APART}"
            sections += [f"## anemoi over `fused3s`, {device}\n", text, table(head, lines)]
        for series in in_order(times.series):
            for kind in times.rows.loc[times.rows["series"] == series, "edges"].unique():
                title = f"## Times of {_name(times, series)}, edge data {kind}, {device}\n"
                sections += [title, _times(times, series, kind)]
    return "\n".join(sections)


def anemoi_lines(times: ShapeTimes, codes: ShapeTimes) -> list[list[str]]:
    """Lines by kind of features and shape, where `fused3s` and one form of anemoi have times."""
    lines = []
    for kind in (kind for kind in times.kinds if kind.startswith("low_rank")):
        for shape in times.shapes:
            ours = times.times(OURS, shape, kind)
            found = [ratios(one, ours) for one in (codes.times(ANEMOI, shape), times.times(ANEMOI, shape, kind))]
            if any(found):
                lines.append([f"`{kind}`", str(shape), *(describe(one, Ratios.least) for one in found)])
    return lines


def _times(times: ShapeTimes, series: str, edges: str) -> str:
    """A line per graph and a column per shape."""
    own = ShapeTimes(times.rows[(times.rows["series"] == series) & (times.rows["edges"] == edges)])
    lines = [
        [graph.label, f"{graph.nnz:,}", *(own.cell(graph, series, shape, edges) for shape in own.shapes)]
        for graph in own.graphs
    ]
    return table(["graph", "edges", *map(str, own.shapes)], lines, 1)


def _name(times: ShapeTimes, series: str) -> str:
    """A series with the type that it computes in: "`pyg` (fp32)"."""
    dtype = times.rows.loc[times.rows["series"] == series, "dtype"].iloc[0]
    return f"`{series}` ({PRECISIONS[dtype]})"
