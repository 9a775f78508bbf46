"""README: times of attention kernels on each graph, and speed-ups over the paper's kernel."""

from dataclasses import replace

import pandas as pd

from configs.bench_schema import REORDERED, Shape
from report.frames import POOLED, PRECISIONS, Panel, Speedup, kernel_panels
from report.head_shapes import ShapeTimes
from report.plots.style import DISTURBED
from report.readme.block import block, gpu

DIM, DIMS = 128, (64, 128, 256)
PAPER, OURS = "fused3s_paper", ("fused3s", REORDERED)
HEADS = Shape(8, 16)  # the column of several heads
SHOWN = ("dfgnn_tiling", "flashsparse_stable", PAPER, *OURS)
LAUNCHES = {  # launch and L2 of a row, in words
    ("back_to_back", "warm"): "in a row, L2 warm",
    ("isolated", "warm"): "one at a time, L2 warm",
    ("isolated", "cold"): "one at a time, L2 cold",
}
OUTPUTS = (("float32", "float32"), ("float16", "float32"))  # of ours and of the paper's
EMPTY = r"an empty kernel takes ([\d.]+) us"  # in the note of an isolated launch


def panels_by_dim(
    rows: pd.DataFrame, out_dtype: str, launch: str = "back_to_back", l2: str = "warm"
) -> dict[int, Panel]:
    """The POOLED graphs of one device, by head dimension."""
    found: dict[int, list[Panel]] = {}
    for panel in kernel_panels(rows, out_dtype, launch, l2):
        if panel.of_paper and panel.group in POOLED:
            found.setdefault(panel.dim, []).append(panel)
    return {dim: replace(some[0], rows=pd.concat([one.rows for one in some])) for dim, some in found.items()}


def times(rows: pd.DataFrame) -> str:
    """Milliseconds on every graph read from files."""
    panel, several = panels_by_dim(rows, "float32").get(DIM), ShapeTimes.of(rows, "heads")
    lines = _time_lines(panel, several) if panel else []
    of_heads = f"`{HEADS}` has fp16 output and scores scaled by 1/sqrt(d). " if several.graphs else ""
    caption = (
        f"ms on {gpu(rows)}, medians, d = {DIM}, one head, unscaled scores, fp32 output; launches in a row (CUDA "
        "graph of up to ten), L2 warm. Graphs read from files; synthetic graphs are in "
        f'[kernels.md](results/figures/kernels.md). {of_heads}"Times faster" compares `fused3s` with `{PAPER}`; '
        '"error" is that of the worst row of `fused3s` against float64.'
    )
    head = ["graph", "nodes", "edges", *(f"`{name}`" for name in SHOWN), "times faster", "error"]
    head = [name.replace(f"`{REORDERED}`", "`fused3s`, reordered") for name in head]
    if several.graphs:
        head.insert(-2, f"`fused3s`, {HEADS}")
    return block(caption, head, lines, 1)


def _time_lines(panel: Panel, several: ShapeTimes) -> list[list[str]]:
    """Single graphs, then batches, by number of edges; surrogates last. Graphs of equal edges stand once.

    Args:
        several: times of several heads; their column is left out if none was recorded.
    """
    of_heads = {graph.sha256: several.cell(graph, "fused3s", HEADS) for graph in several.graphs}
    first = panel.rows.drop_duplicates("graph").set_index("graph")
    graphs = {graph.sha256: graph for graph in reversed(panel.graphs) if not graph.synthetic}.values()
    errors = panel.pivot("relative_error")
    lines = []
    for graph in sorted(graphs, key=lambda one: (one.surrogate, first.at[one, "graphs"] > 1, one)):
        ratio, time = panel.ratio(graph, "fused3s", PAPER), panel.time(graph, "fused3s")
        lines.append(
            [
                name(graph.label, first.at[graph, "graphs"]),
                f"{first.at[graph, 'nodes']:,}",
                f"{graph.nnz:,}",
                *(cell(panel, graph, series, 4) for series in SHOWN),
                *([of_heads.get(graph.sha256, "-")] if of_heads else []),
                "-" if ratio is None else f"{ratio:.2f}",
                "-" if time is None else f"{errors.at[graph, 'fused3s']:.1e}",
            ]
        )
    return lines


def name(label: str, graphs: int) -> str:
    """A graph, or the number of graphs of a batch and its name."""
    return label if graphs == 1 else f"{graphs:,} × {label}"


def cell(panel: Panel, graph: object, series: str, digits: int) -> str:
    """A time, the status of a failed cell, or "-"; a disturbed time is marked."""
    time = panel.time(graph, series)
    if time is None:
        return panel.status(graph, series) or "-"
    return f"{DISTURBED if panel.is_disturbed(graph, series) else ''}{time:.{digits}f}"


def speedups(rows: pd.DataFrame) -> str:
    """Geometric means by output type, launch and head dimension, over real graphs and over all."""
    by_launch = {launch: {one: panels_by_dim(rows, one, *launch) for one in OUTPUTS[-1]} for launch in LAUNCHES}
    empty = rows["note"].str.extract(EMPTY, expand=False).dropna().astype(float)
    overhead = f", {empty.median():.1f} µs," if len(empty) else ""
    lines = []
    for subject in OURS:
        for launch, panels in by_launch.items():
            for ours, theirs in OUTPUTS:
                cells = [means(speedup(panels[ours].get(dim), panels[theirs].get(dim), subject)) for dim in DIMS]
                output = " over ".join(dict.fromkeys((PRECISIONS[ours], PRECISIONS[theirs])))
                lines.append([f"`{subject}`", output, LAUNCHES[launch], *cells])
    caption = (
        f"Times faster than `{PAPER}` on {gpu(rows)}: geometric means over real graphs / over all, with the number "
        'of graphs. "All" adds the surrogate and the synthetic graphs. "fp16 over fp32" compares our fp16 output '
        f"with its fp32 output. A launch one at a time includes the time of an empty kernel{overhead} on both sides."
    )
    return block(caption, ["kernel", "output", "launches", *(f"d = {dim}" for dim in DIMS)], lines)


def speedup(ours: Panel | None, theirs: Panel | None, subject: str) -> Speedup | None:
    """Of our kernel in one panel over the paper's in another; None if no graph has both."""
    if ours is None or theirs is None:
        return None
    both = replace(ours, rows=pd.concat([ours.only([subject]).rows, theirs.only([PAPER]).rows]))
    return both.speedup(subject, PAPER)


def means(found: Speedup | None) -> str:
    """Means over real graphs and over all: "3.08 (13) / 2.71 (28)"."""
    both = (found and found.real, found)
    return "-" if found is None else " / ".join(f"{one.mean:.2f} ({len(one.ratios)})" if one else "-" for one in both)
