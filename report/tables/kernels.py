"""Numbers of the kernel figures, as Markdown."""

from itertools import pairwise

import pandas as pd

from configs.bench_schema import VARIANTS
from report.frames import SUBJECTS, Panel, ablation, baselines, kernel_panels
from report.gather_model import PeakRates, achieved, model_over_time
from report.markdown import table

HEAD = """# Attention kernels

Drawn by `make reproduce-figures` from the CSVs under `results/`; a speed-up is computed here and stored nowhere. Times
are medians in ms, the format built, L2 warm, output fp32. A speed-up is a geometric mean over the n distinct graphs on
which both backends gave a correct output; below 1 is slower. A cell without a time holds its status; `-` was not
measured.
"""

RATES = """TB/s of the rows that the gather model gathers and copies (no reuse across row windows:
report/gather_model.py), TFLOP/s (4 d per score), and the time of the gather model over the measured time."""


def kernel_tables(rows: pd.DataFrame) -> str:
    """Times, rates, speed-ups and ablation of each panel."""
    sections, cells = [HEAD], achieved(rows)
    for panel in kernel_panels(rows):
        sections += [f"## {panel.title[0].upper()}{panel.title[1:]}\n", _times(panel)]
        sections += _rates(panel, cells, PeakRates.of(rows, panel.device))
        if lines := [*_speedups(panel), *_steps(panel)]:
            sections.append(table(["backend", "over", "speed-up", "lowest", "highest"], lines))
    return "\n".join(sections)


def _times(panel: Panel) -> str:
    head = ["graph", "edges", *(f"{series} ({panel.dtype(series)})" for series in panel.series)]
    lines = []
    for graph in panel.graphs:
        cells = []
        for series in panel.series:
            time, status = panel.time(graph, series), panel.status(graph, series)
            cells.append(f"{time:.4f}" if time is not None else status or "-")
        lines.append([graph.label, f"{graph.nnz:,}", *cells])
    return table(head, lines, 1)


def _rates(panel: Panel, cells: pd.DataFrame, rates: PeakRates) -> list[str]:
    """Rates of the times; nothing if no cell has its bytes."""
    cells = cells.loc[cells.index.intersection(panel.rows.index)]
    if cells.empty:
        return []
    over_time = model_over_time(cells, rates) if rates.complete else pd.Series(dtype=float)
    texts = {
        (cell.graph, cell.series): f"{cell.tb_per_s:.2f}, {cell.tflop_per_s:.2f}, "
        + (f"{over_time[cell.Index]:.0%}" if rates.complete else "-")
        for cell in cells.itertuples()
    }
    series = sorted({*cells["series"]})
    lines = [[graph.label, *(texts.get((graph, name), "-") for name in series)] for graph in panel.graphs]
    missing = f" Peak rates of the {panel.device} are not recorded: scripts/peak_rates.py."
    return [RATES + ("" if rates.complete else missing) + "\n", table(["graph", *series], lines, 1)]


def _speedups(panel: Panel) -> list[list[str]]:
    measured = panel.only(set(panel.series) - VARIANTS.keys())
    pairs = [(subject, baseline) for subject in SUBJECTS for baseline in baselines(measured, subject)]
    return [line for pair in pairs if (line := _line(measured, *pair))]


def _steps(panel: Panel) -> list[list[str]]:
    """Speed-up of each variant of the ablation over the one before."""
    variants = ablation(panel)
    return [line for before, variant in pairwise(VARIANTS) if (line := _line(variants, variant, before))]


def _line(panel: Panel, subject: str, baseline: str) -> list[str] | None:
    speedup = panel.speedup(subject, baseline)
    if speedup is None:
        return None
    ratios = speedup.ratios.values()
    return [subject, baseline, speedup.describe(), f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"]
