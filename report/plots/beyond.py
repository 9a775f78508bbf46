"""Beyond the paper: our kernel `fused3s`, in the natural and in a found order of rows, against the paper's, on every
graph, with fp32 and with fp16 output."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from bench.records import Row
from configs.bench_schema import REORDERED
from report.kernel_frames import Panel, kernel_panels
from report.plots import style
from report.plots.bars import Series, draw_rows

OURS, PAPER = ("fused3s", REORDERED), "fused3s_paper"
OUT_DTYPES = {"float32": "fp32 output", "float16": "fp16 output"}


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """A figure for each device on which both kernels were timed, a row for each head dimension."""
    by_device: dict[str, dict[int, list[Series]]] = {}
    kinds = [(out_dtype, subject) for out_dtype in OUT_DTYPES for subject in OURS]
    for shade, (out_dtype, subject) in zip(style.SERIES, kinds, strict=False):
        for panel in whole_panels(kernel_panels(rows, out_dtype)):
            if speedup := panel.speedup(subject, PAPER):
                label = f"{subject}, {OUT_DTYPES[out_dtype]}: {speedup.describe()}"
                series = Series(panel, subject, PAPER, shade, label)
                by_device.setdefault(panel.device, {}).setdefault(panel.dim, []).append(series)
    return {f"beyond-the-paper_{style.slug(device)}": _draw(device, by_device[device]) for device in sorted(by_device)}


def whole_panels(panels: Sequence[Panel]) -> list[Panel]:
    """The two kernels of all groups of graphs, a panel for each device and head dimension."""
    whole: dict[tuple[str, int], Panel] = {}
    for panel in panels:
        panel = panel.only((*OURS, PAPER))
        before = whole.setdefault((panel.device, panel.dim), panel)
        whole[panel.device, panel.dim] = replace(before, rows=before.rows | panel.rows)
    return list(whole.values())


def _draw(device: str, by_dim: dict[int, list[Series]]) -> Figure:
    graphs = {graph for series in by_dim.values() for one in series for graph in one.panel.graphs}
    rows = {f"d = {dim}": by_dim[dim] for dim in sorted(by_dim)}
    title = f"Speed-up over {PAPER} with the same output type, {device}"
    return draw_rows(rows, sorted(graphs, key=lambda graph: graph.order), title)
