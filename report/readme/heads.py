"""README: times by shape of heads, and with edge data."""

import pandas as pd

from report.frames import Graph
from report.head_shapes import (
    ANEMOI,
    CRASHES,
    EDGE_SHAPES,
    EDGES,
    NAMES,
    OURS,
    PYG,
    SHAPES,
    TURBO,
    Ratios,
    ShapeTimes,
    describe,
    one_head,
    one_head_words,
    published_on,
    ratios,
)
from report.readme.block import block, gpu

DATASET = "ogbn-arxiv"  # whose times are shown


def heads(rows: pd.DataFrame) -> str:
    """Time of each shape over one head of the same width, and milliseconds on one graph."""
    times, codes = ShapeTimes.of(rows, "heads"), published_on(gpu(rows))
    lines = []
    for shape in SHAPES:
        alone = one_head(shape)[0] == shape
        found = None if alone else times.over_one_head(OURS, shape)
        mean = worst = "-"
        if found:
            graph, slowest = found.worst()
            mean, worst = f"{found.mean:.2f} (n = {len(found.by_graph)})", f"{slowest:.2f} ({graph.label})"
        cells = [*(_on_dataset(times, series, shape) for series in (OURS, PYG)), _on_dataset(codes, TURBO, shape)]
        lines.append([str(shape), "-" if alone else one_head_words(shape), mean, worst, *cells])
    caption = (
        f"Heads x columns of a head on {gpu(rows)}: time of `fused3s` over that of one head of the same width, or over "
        "one call for each head where no head is so wide; geometric mean over n graphs, surrogates included, and the "
        "slowest of them. Then "
        f"ms on {DATASET}. `fused3s` has fp16 inputs and output, PyG computes in fp32; launches in a row, L2 warm, "
        "scores scaled by 1/sqrt(d). Turbo-GNN is the published code, measured at another time; it ends in a "
        f"segmentation fault for heads of {CRASHES} columns or fewer. `-` was not recorded. All graphs and shapes: "
        "[heads.md](results/figures/heads.md)."
    )
    columns = (f"{NAMES[name]}, ms" for name in (OURS, PYG, TURBO))
    return block(caption, ["shape", "compared with", "over one head", "worst", *columns], lines, 2)


def edges(rows: pd.DataFrame) -> str:
    """Time of each kind of edge data over none, and anemoi over ours."""
    times, codes = ShapeTimes.of(rows, "edges"), published_on(gpu(rows))
    lines = [
        [f"`{kind}` over none", *(describe(times.over_no_edges(OURS, shape, kind)) for shape in EDGE_SHAPES)]
        for kind in EDGES
    ]
    features = next(kind for kind in EDGES if kind.startswith("low_rank"))
    for words, theirs, kind in (
        ("published anemoi over ours", codes, "none"),
        ("backend `anemoi` over ours", times, features),
    ):
        cells = [
            describe(ratios(theirs.times(ANEMOI, shape, kind), times.times(OURS, shape, features)), Ratios.least)
            for shape in EDGE_SHAPES
        ]
        lines.append([f"{words}, `{features}`", *cells])
    apart = "the published code was" if times.of_one_commit(OURS, ANEMOI) else "the published code and the backend were"
    caption = (
        f"Edge data on {gpu(rows)}, by shape of heads: time of `fused3s` with it over the time without; geometric mean "
        "over n graphs, surrogates included, and the slowest of them. `bias` is one number an edge, `low_rank_R` "
        "features of R columns with a weight for keys and values, `types_T` one of T vectors an edge. The data is "
        "bound before timing. anemoi: its Triton forward with an edge tensor [nnz, H, d] over ours with features, and "
        f"the graph on which ours gains least; {apart} measured at another time. `-` was not recorded. "
        "All graphs: [edges.md](results/figures/edges.md)."
    )
    return block(caption, ["edge data", *map(str, EDGE_SHAPES)], lines, 1)


def _on_dataset(times: ShapeTimes, series: str, shape: tuple[int, int]) -> str:
    found: list[Graph] = [graph for graph in times.graphs if graph.dataset == DATASET and graph.real]
    return times.cell(found[-1], series, shape) if found else "-"
