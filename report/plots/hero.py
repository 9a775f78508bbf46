"""Chart of the README: kernels against the paper's algorithm on real graphs, at one head dimension."""

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from report.frames import SURROGATES, Panel, kernel_panels
from report.plots import style
from report.plots.beyond import whole_panels

DIM = 128
BASELINE = "fused3s_paper"
BARS = {
    "pyg": "PyG",
    "dfgnn_tiling": "DF-GNN",
    "flashsparse_stable": "FlashSparse",
    "fused3s": "fused3s",
}


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device on which `fused3s` and the baseline were timed on a real graph."""
    figures = {}
    for panel in whole_panels(kernel_panels(rows), (*BARS, BASELINE)):
        real = (panel.rows["data_source"] != "synthetic") & ~panel.rows["dataset"].isin(SURROGATES)
        panel = replace(panel, rows=panel.rows[real])
        if panel.dim == DIM and panel.speedup("fused3s", BASELINE):
            figures[f"hero_{style.slug(panel.device)}"] = draw_panel(panel)
    return figures


def draw_panel(panel: Panel) -> Figure:
    """Speed-ups over the baseline with their range from p10 to p90, and their geometric means."""
    p10, p90 = (panel.rows.pivot(index="graph", columns="series", values=name) for name in ("p10", "p90"))
    base = panel.times[BASELINE][[*panel.speedup("fused3s", BASELINE).ratios]]  # distinct graphs
    figure, axes = style.new_figure(style.MAX_WIDTH, 3.8)
    for nth, (series, name) in enumerate(BARS.items()):
        speedup = panel.speedup(series, BASELINE)
        if not speedup:
            continue
        places, heights = [style.bar_x(len(base), nth, len(BARS))], [speedup.mean]
        for group, graph in enumerate(base.index):
            x, ratio = style.bar_x(group, nth, len(BARS)), speedup.ratios.get(graph)
            if ratio is None:
                style.write_missing(axes, x, panel.status(graph, series))
                continue
            low, high = (base[graph] / table.at[graph, series] for table in (p90, p10))
            axes.errorbar(x, ratio, [[ratio - low], [high - ratio]], ecolor="black", elinewidth=0.6)
            places.append(x)
            heights.append(ratio)
        label = f"{name}: {speedup.mean:.2f}x (n = {len(speedup.ratios)})"
        tops = [height - 1 for height in heights]
        axes.bar(places, tops, style.GROUP_WIDTH / len(BARS), 1, color=style.colour(series), label=label)
        if series == "fused3s":
            for x, height in zip(places, heights, strict=True):
                axes.text(x, height * 1.06, f"{height:.1f}x", ha="center", va="bottom", size=7, weight="bold")
    axes.axhline(1, color="black", linewidth=1, label=f"{BASELINE} (the paper's kernel, re-implemented): 1")
    axes.axvline(len(base) - 0.5, color="black", linewidth=0.4)
    style.log_axis(axes.yaxis, "x")
    style.name_ticks(axes, [*(graph.tick for graph in base.index), "geometric mean"])
    axes.margins(y=0.1)
    axes.set_ylabel(f"speed-up over {BASELINE}")
    style.legend_above(axes, f"Sparse attention on real graphs, {panel.device}, d = {panel.dim}, fp32 output")
    return figure
