"""Beyond the paper: `fused3s` and `fused3s+reorder` against the paper's kernel on every graph, fp32 and fp16 output."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from configs.bench_schema import REORDERED
from report.frames import POOLED, Panel, kernel_panels
from report.plots import style
from report.plots.bars import SpeedupBars, draw_rows

OURS, PAPER = ("fused3s", REORDERED), "fused3s_paper"
FP16_SHADE = -0.4
OUT_DTYPES = {"float32": "fp32 output", "float16": "fp16 output"}


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device on which both kernels were timed, with a row per head dimension."""
    by_device: dict[str, dict[int, list[SpeedupBars]]] = {}
    kinds = [(out_dtype, subject) for out_dtype in OUT_DTYPES for subject in OURS]
    for out_dtype, subject in kinds:
        shade = style.shaded(style.color_of(subject), FP16_SHADE if out_dtype == "float16" else 0)
        for panel in whole_panels(kernel_panels(rows, out_dtype)):
            if speedup := panel.speedup(subject, PAPER):
                label = f"{subject}, {OUT_DTYPES[out_dtype]}: {speedup.beside_real()}"
                series = SpeedupBars(panel, subject, PAPER, subject, label, shade)
                by_device.setdefault(panel.device, {}).setdefault(panel.dim, []).append(series)
    return {f"beyond-the-paper_{style.slug(device)}": _draw(device, by_device[device]) for device in sorted(by_device)}


def whole_panels(panels: Sequence[Panel], series: Collection[str] = (*OURS, PAPER)) -> list[Panel]:
    """Panels of some series on all POOLED groups of graphs, one per device, head dimension and number of heads."""
    whole: dict[tuple[str, int, int], Panel] = {}
    for panel in panels:
        if panel.group not in POOLED:
            continue
        panel = panel.only(series)
        key = panel.device, panel.dim, panel.heads
        before = whole.setdefault(key, panel)
        if panel is not before:
            whole[key] = replace(before, rows=pd.concat([before.rows, panel.rows]))
    return list(whole.values())


def _draw(device: str, by_dim: dict[int, list[SpeedupBars]]) -> Figure:
    graphs = {graph for series in by_dim.values() for one in series for graph in one.panel.graphs}
    rows = {f"d = {dim}": by_dim[dim] for dim in sorted(by_dim)}
    title = f"Speed-up over {PAPER} with the same output type, {device}"
    return draw_rows(rows, sorted(graphs), title)
