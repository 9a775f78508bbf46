"""Times of the backward pass by graph, as Markdown."""

import pandas as pd

from configs.bench_schema import Shape
from report.backward import ANEMOI, TURBO, TURBO_BEST, PassTimes, over_ours, published
from report.head_shapes import Ratios, describe
from report.markdown import table
from report.published_codes import DEVICE

TITLE = """# Backward pass

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. Times
are medians in ms of `fused3s` with fp16 inputs, launched back to back, the L2 cache warm, scores scaled by 1/sqrt(d);
CUDA graphs of both passes are replayed by turns. The backward pass is all kernels from the gradient of the output to
those of q, k and v; the forward pass writes the LSE. A time stands only where the gradients of every row have at most
twice the error of plain torch in fp16; another cell holds its status; `-` was not measured. Bound: bytes of the
backward pass over those of the forward pass (`bench/traffic.py`): gathers over the graph and over its transpose, and
rows of all tensors. Other codes: sums of kernel durations at another time ([results/paper](../paper/README.md));
"best" is the fastest of 16 settings a graph.
"""


def backward_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with rows of the benchmark `backward`."""
    sections = [TITLE]
    for device, found in rows[rows["bench"] == "backward"].groupby("device"):
        times = PassTimes.of(found)
        if not times.rows.empty:
            sections += [f"## Ratios, {device}\n", table(["shape", *RATIOS], ratio_lines(times, device))]
            sections += [
                part for shape in times.shapes for part in (f"## {shape}, {device}\n", _times(times, shape, device))
            ]
    return "\n".join(sections)


RATIOS = ("over forward", "bound", "over bound", "Turbo-GNN, best", "the same, hubs", "Turbo-GNN", "anemoi")


def ratio_lines(times: PassTimes, device: str) -> list[list[str]]:
    """A line per shape: ours over the forward pass, and others over ours."""
    return [
        [
            str(shape),
            *(describe(found(shape)) for found in (times.over_forward, times.bound, times.over_bound)),
            *(
                describe(over_ours(times, device, code, shape, hubs), Ratios.least)
                for code, hubs in ((TURBO_BEST, False), (TURBO_BEST, True), (TURBO, False), (ANEMOI, False))
            ),
        ]
        for shape in times.shapes
    ]


def _times(times: PassTimes, shape: Shape, device: str) -> str:
    """A line per graph."""
    measured, bound = times.over_forward(shape), times.bound(shape)
    codes = {}
    if device == DEVICE:
        for code in (TURBO_BEST, TURBO, ANEMOI):
            codes[code] = {graph.sha256: ms for graph, ms in published(code, shape).items()}
    codes = {code: found for code, found in codes.items() if found}
    lines = []
    for graph in times.graphs:
        cells = [times.cell(graph, shape, region) for region in ("forward", "backward")]
        for found in (measured, bound):
            ratio = found.by_graph.get(graph) if found else None
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        for found in codes.values():
            ms = found.get(graph.sha256)
            cells.append("-" if ms is None else f"{ms:.4f}")
        lines.append([graph.label, f"{graph.nnz:,}", *cells])
    head = ["graph", "edges", "forward", "backward", "over forward", "bound", *codes]
    return table(head, lines, 1)
