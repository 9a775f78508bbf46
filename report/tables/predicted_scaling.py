"""Predicted times of one graph on several GPUs, as Markdown, and their ratio to measured ones."""

from pathlib import Path

import pandas as pd

from bench.records import NONE
from configs.bench_schema import Shape
from report.frames import count, latest
from report.markdown import table
from report.parallel import PARTS
from report.predicted_scaling import (
    BLOCK,
    CASE,
    ITEM,
    SCHEMES,
    TENSORS,
    Predicted,
    inputs,
    predicted,
    predicted_over_measured,
    predicted_over_parts,
)

TITLE = """# Predicted: one graph on several GPUs

Predictions of a simulator (`scripts/predict_scaling.py`, `simulator/times.py`), not measurements. They rest on
kernel times that were recorded on one GPU, on sizes of partitions, and on rates of links that are inputs. Drawn by
`make reproduce-figures` from `results/predicted/scaling.csv`; ratios are computed here. fp16, forward pass.

Sizes are those of the largest part, and that over the mean. "METHOD of GRAPH": shares of the partition of that graph,
rows and edges of this one. "random": uniformly random columns, which no partition improves.

Times are in ms: attention of a block by scheme, and the block (attention and the fused layers around it) with its
fastest scheme. Speed-up: over the predicted time on one GPU, whether the graph fits there or not. GB: what the busiest
rank receives in scheme halo, and what it receives from one peer. GiB: h, Q, K, V and O of the largest part. `≤`: no
time of so few heads is recorded, and that of more heads was taken. `-`: not predicted (fewer heads than ranks, or
layers of an unrecorded width).
"""
LINKS = "Rates of the links: inputs, not measured.\n"
FITS = """Error of the fitted kernel times: each recorded graph, predicted from the others. A graph whose own time on
one GPU is recorded is scaled to it.
"""
MISSING = "-"
MEASURED = "Predicted over measured time (benchmark `parallel`); above 1 where the prediction is too long."
NOT_MEASURED = """No predicted case was run on several GPUs: no prediction of an exchange was checked. Runs on GPUs of
another kind: [parallel.md](parallel.md).
"""
ON_ONE_GPU = """The work of the slowest rank without the exchange, whose parts were timed on one GPU (benchmark
`parallel`): predicted time in ms, and over the measured one.
"""


def predicted_scaling_tables(rows: pd.DataFrame) -> str:
    """Sections for each device and graph; the title alone without predictions."""
    sections = [TITLE]
    graphs = predicted(rows)
    if not graphs:
        return TITLE
    sections += ["## Predicted against measured\n", against_measured(rows), *_against_parts(rows)]
    sections += ["## Inputs\n", LINKS, _links(rows)]
    sections += [FITS, _fits(rows)]
    for graph in graphs:
        words = f"{count(graph.nodes)} nodes, {count(graph.edges)} edges, {graph.device}"
        sections += [f"## Predicted: {graph.name}, {words}\n", sizes(graph)]
        for shape in graph.shapes:
            sections += [f"### Predicted: {graph.name}, {shape} (heads x columns)\n", times(graph, shape)]
    return "\n".join(sections)


def against_measured(rows: pd.DataFrame) -> str:
    """A line for each case that was predicted and measured, or a sentence that there is none."""
    found = predicted_over_measured(rows)
    if found.empty:
        return NOT_MEASURED
    columns = [name for name in CASE if name not in ("data_sha256", "dtype")]
    lines = [
        [
            *(str(getattr(row, name)) for name in columns),
            *(f"{row.predicted:.3f}", f"{row.measured:.3f}", f"{row.ratio:.2f}"),
        ]
        for row in found.itertuples()
    ]
    return f"{MEASURED}\n\n" + table([*columns, "predicted, ms", "measured, ms", "ratio"], lines, len(columns))


def _against_parts(rows: pd.DataFrame) -> list[str]:
    """A line for each partition whose parts were timed; nothing without one."""
    found = predicted_over_parts(rows)
    lines = []
    for key, parts in found.groupby(["dataset", "heads", "dim", "order", "ranks"], sort=False):
        dataset, heads, dim, order, ranks = key
        of_parts = parts.set_index("part")
        cells = [f"{of_parts['predicted']['sum']:.3f}", f"{of_parts['measured']['sum']:.3f}"]
        cells += [f"{of_parts['ratio'][part]:.2f}" if part in of_parts.index else MISSING for part in ("sum", *PARTS)]
        lines.append([dataset, str(Shape(heads, dim)), order, str(ranks), *cells])
    head = ["graph", "heads x columns", "partition", "ranks", "predicted, ms", "measured, ms", "ratio"]
    return [ON_ONE_GPU, table([*head, *(f"of {part}" for part in PARTS)], lines, 3)] if lines else []


def _links(rows: pd.DataFrame) -> str:
    """A line for each link and rate, with the configurations that have it."""
    latency = inputs(rows, "latency").set_index(["config", "link"])["value"]
    found: dict[tuple[str, ...], list[str]] = {}
    for row in inputs(rows, "bandwidth").itertuples():
        cells = row.link, row.reason, f"{row.value:g}", f"{latency[row.config, row.link]:g}"
        found.setdefault(cells, []).append(f"`{Path(row.config).name}`")
    lines = [[link, ", ".join(names), source, *rates] for (link, source, *rates), names in found.items()]
    return table(["link", "configurations", "source", "GB/s each way", "latency, us"], lines, 3)


def _fits(rows: pd.DataFrame) -> str:
    found = latest(inputs(rows, "fit_error"), "device", "heads", "dim", "region")
    largest = found[found["region"] == "largest"].set_index(["device", "heads", "dim"])["value"]
    lines = [
        [
            *(row.device, str(Shape(row.heads, row.dim)), str(row.graphs)),
            *(f"{row.value:.0%}", f"{largest[row.device, row.heads, row.dim]:.0%}"),
        ]
        for row in found[found["region"] == "median"].itertuples()
    ]
    return table(["device", "heads x columns", "graphs", "median error", "largest error"], lines, 2)


def sizes(graph: Predicted) -> str:
    """A line for each partition and number of ranks."""
    lines = []
    for partition in graph.partitions:
        for ranks in graph.ranks(partition):
            found = [graph.size(partition, ranks, metric) for metric in ("rows", "edges", "halo_rows")]
            cells = [cell for size in found for cell in (count(size.largest), f"{size.balance:.2f}")]
            lines.append([partition, str(ranks), *cells, f"{found[2].largest / graph.nodes:.1%}"])
    head = ["partition", "ranks", "rows", "over mean", "edges", "over mean", "halo rows", "over mean", "of all rows"]
    return table(head, lines, 1)


def times(graph: Predicted, shape: Shape) -> str:
    """A line for one GPU, and one for each partition, link and number of ranks."""
    head = ["partition", "link", "ranks", *SCHEMES, "block", "by", "speed-up", "GB", "GB of a peer", "GiB"]
    lines = []
    for partition in graph.partitions:
        lines.append(_one_rank(graph, partition, shape))
        for link in graph.links:
            for ranks in graph.ranks(partition):
                cells = [_ms(graph, partition, ranks, shape, scheme, link) for scheme in SCHEMES]
                if any(cell != MISSING for cell in cells):
                    cells += [*_block(graph, partition, ranks, shape, link), *_sizes(graph, partition, ranks, shape)]
                    lines.append([partition, link, str(ranks), *cells])
    return table(head, lines, 2)


def _one_rank(graph: Predicted, partition: str, shape: Shape) -> list[str]:
    attention = _ms(graph, partition, 1, shape)
    block = _ms(graph, partition, 1, shape, region=BLOCK)
    speedup = MISSING if block == MISSING else "1.00"
    gib = f"{_gib(graph.nodes, shape):.3g}"
    return [partition, MISSING, "1", attention, *[MISSING] * 2, block, MISSING, speedup, *[MISSING] * 2, gib]


def _block(graph: Predicted, partition: str, ranks: int, shape: Shape, link: str) -> list[str]:
    """Time, scheme and speed-up of the block with its fastest scheme."""
    found, one = graph.best(partition, ranks, shape, link, BLOCK), graph.ms(partition, 1, shape, region=BLOCK)
    if found is None or one is None:
        return [MISSING] * 3
    scheme, ms = found
    speedup = f"{'≥ ' * graph.is_bound(partition, ranks, shape, scheme)}{one / ms:.2f}"
    return [_ms(graph, partition, ranks, shape, scheme, link, BLOCK), scheme, speedup]


def _sizes(graph: Predicted, partition: str, ranks: int, shape: Shape) -> list[str]:
    """GB received, GB from a peer, and GiB of the tensors."""
    received = [graph.largest_bytes(partition, ranks, shape, "halo", where) for where in ("rank", "peer")]
    cells = [MISSING if one is None else f"{one / 1e9:.3g}" for one in received]
    return [*cells, f"{_gib(graph.size(partition, ranks, 'rows').largest, shape):.3g}"]


def _gib(rows: float, shape: Shape) -> float:
    return TENSORS * rows * shape.width * ITEM / 2**30


def _ms(
    graph: Predicted, partition: str, ranks: int, shape: Shape, scheme: str = NONE, link: str = NONE, region: str = NONE
) -> str:
    value = graph.ms(partition, ranks, shape, scheme, link, region)
    if value is None:
        return MISSING
    return "≤ " * graph.is_bound(partition, ranks, shape, scheme) + (f"{value:.3g}" if value < 100 else f"{value:.0f}")
