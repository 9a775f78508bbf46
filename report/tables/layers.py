"""Training steps of PyG's layer and of ours, with what the GPU did, as Markdown."""

import pandas as pd

from bench.records import NONE
from report.layers import CAPTURED, METRICS, OURS, PRECISIONS, PYG, LayerTimes, words_of
from report.markdown import table

TITLE = """# Training steps with our layer in place of PyG's

Drawn by `make reproduce-figures` from the CSVs under `results/`. A step is forward pass, loss, backward pass and fused
AdamW; ms by the wall clock, medians of rows of steps of all layers by turns, with 10th and 90th percentile. GPU busy,
kernels and waits of the host are of one traced step, the mean over the batches. Rows and edges: of a step. Error: the
worst row of the first layer's output against PyG's layer in float64 with the same weights (one CUDA graph: of the whole
model's output). A time of ours stands only where it is within the bounds of `bench/layers.py`.
"""
HEAD = (
    *("workload", "layer", "rows", "edges", "ms", "p10 to p90", "PyG over it", "GPU busy, ms", "kernels", "waits"),
    *("error", "notes"),
)
NAMES = {PYG: "PyG", OURS: "ours", CAPTURED: "ours, one CUDA graph"}


def layers_tables(rows: pd.DataFrame) -> str:
    """A section for each precision, of the GPU recorded last."""
    times = LayerTimes.of(rows)
    sections = [TITLE]
    for precision, words in PRECISIONS.items():
        if lines := _lines(times, precision):
            sections += [f"## {words}, {times.device}\n", table(HEAD, lines, 2)]
    return "\n".join(sections)


def _lines(times: LayerTimes, precision: tuple[str, str]) -> list[list[str]]:
    lines = []
    for workload in times.workloads:
        for layer, name in NAMES.items():
            found = {metric: times.row(workload, precision, layer, metric) for metric in METRICS}
            time, ratio = found["time"], times.ratio(workload, precision, layer)
            if time is None:
                continue
            lines.append(
                [
                    *(words_of(workload), name, f"{time.nodes:,}", f"{time.nnz:,}"),
                    times.cell(workload, precision, layer),
                    "-" if pd.isna(time.value) else f"{time.p10:.2f} to {time.p90:.2f}",
                    "-" if ratio is None or layer == PYG else f"{ratio:.2f}",
                    *(
                        _number(found[metric], form)
                        for metric, form in zip(METRICS[1:], (".2f", ".0f", ".1f"), strict=True)
                    ),
                    "-" if pd.isna(time.relative_error) else f"{time.relative_error:.1e}",
                    time.note if time.reason == NONE else time.reason,
                ]
            )
    return lines


def _number(row, form: str) -> str:
    return "-" if row is None or pd.isna(row.value) else f"{row.value:{form}}"
