"""Recorded peak rates of a machine, and the gather model over the times of recorded kernels."""

import pandas as pd
from matplotlib.figure import Figure

from configs.bench_schema import SWITCHES
from report.gather_model import PeakRates, achieved, machine_rates, model_over_time
from report.plots import style


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Peak rates of each device, and a figure per head dimension of the kernels timed there."""
    figures, machine, cells = {}, machine_rates(rows), achieved(rows)
    cells = cells[(cells["out_dtype"] == "float32") & ~cells["series"].isin(list(SWITCHES))]
    for device, rates in machine.groupby("device"):
        peak, slug = PeakRates.of(rows, device), style.slug(device)
        if not peak.complete:
            continue
        figures[f"peak-rates_{slug}"] = draw_peak_rates(rates, peak)
        for dim, found in cells[cells["device"] == device].groupby("dim"):
            figures[f"gather-model_{slug}_d{dim}"] = draw_model(found, peak)
    return figures


def draw_peak_rates(rates: pd.DataFrame, peak: PeakRates) -> Figure:
    """Rates of the gathers by working set, one line per load path and head dimension, and of the copy."""
    figure, axes = style.new_figure(height=3.2)
    gathers = rates[rates["backend"] == "gather"].sort_values("working_set")
    dims = sorted({*gathers["dim"]})
    for (dim, path), line in gathers.groupby(["dim", "variant"]):
        dash, colour = "-" if path == "cp_async" else "--", style.PALETTE[dims.index(dim)]
        axes.plot(line["working_set"] / 2**20, line["rate"] / 1e9, dash, color=colour, marker=".")
        axes.lines[-1].set_label(f"d = {dim}, {path}")
    axes.axhline(peak.copy / 1e9, color="black", linewidth=0.8, linestyle=":", label="copy, read and written")
    style.log_axis(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K and V together (MiB)")
    axes.set_ylabel("TB/s")
    axes.grid()
    tensor_cores = "" if peak.mma is None else f"; mma.sync m16n8k16: {peak.mma / 1e9:.0f} TFLOP/s"
    style.legend_above(axes, f"Gathers of random K and V rows, fp16, {peak.device}{tensor_cores}")
    return figure


def draw_model(cells: pd.DataFrame, peak: PeakRates) -> Figure:
    """Gather model over time of each backend on each graph."""
    cells = cells.assign(share=model_over_time(cells, peak))
    shares = cells.pivot(index="graph", columns="series", values="share")
    figure, axes = style.new_figure(max(style.WIDTH, 1 + 0.3 * len(shares)), 4.6)
    for series in style.in_order(shares.columns):
        places = [place for place, share in enumerate(shares[series]) if pd.notna(share)]
        colour = style.color_of(series)
        axes.plot(places, shares[series].dropna(), "o", color=colour, mec="black", mew=0.3, label=series)
    axes.axhline(1, color="black", linewidth=0.6)
    style.log_axis(axes.yaxis)
    style.name_ticks(axes, [graph.tick for graph in shares.index])
    axes.set_ylabel("gather model / time\n(above 1: rows shared or cached)")
    title = f"Gather model (no reuse across row windows) over time, {peak.device}, d = {cells['dim'].iloc[0]}"
    style.legend_above(axes, title)
    return figure
