"""Numbers of the kernel figures, as Markdown: one file per question."""

from collections.abc import Callable
from itertools import pairwise

import pandas as pd

from configs.bench_schema import SWITCHES, VARIANTS
from report.frames import PRECISIONS, SUBJECTS, Graph, Panel, Speedup, ablation, baselines, kernel_panels, latest
from report.gather_model import PeakRates, achieved, model_over_time
from report.markdown import table
from report.plots.style import DISTURBED, in_order

DRAWN = """Drawn by `make reproduce-figures` from the CSVs under `results/`; what is computed here is stored nowhere. A
cell without a number holds its status; `-` was not measured. Inputs are fp16 except where a column says fp32.
"""
TIMES = f"""# Attention kernels: times and speed-ups

{DRAWN}Times are medians in ms, the format built, the L2 cache warm, output fp32; up to ten launches in a row, which may
overlap. Other launches: [kernels-launches.md](kernels-launches.md); memory: [kernels-memory.md](kernels-memory.md);
rates and the gather model: [kernels-rates.md](kernels-rates.md). A speed-up is a geometric mean over the n distinct
graphs on which both backends gave a correct output; below 1 is slower. "Real" leaves out synthetic and surrogate
graphs.
"""
LAUNCHES = f"""# Attention kernels: launched one at a time

{DRAWN}Times are medians in ms of one launch with the GPU idle before it, output fp32. With a cold L2 the cache is
evicted before each launch. Every time includes what a launch without work takes (in the notes of the rows).
"""
MEMORY = f"""# Attention kernels: memory

{DRAWN}MiB of GPU memory at the peak of one run: inputs, sparse format, output and what the backend allocates between
them, output fp32.
"""
RATES = f"""# Attention kernels: rates

{DRAWN}Each cell: TB/s of the bytes that the gather model gathers and copies (no reuse across row windows:
report/gather_model.py), TFLOP/s (4 d per score), and the time of the gather model over the measured time. Launched back
to back, L2 warm, output fp32.
"""
ERRORS = """Largest relative error of an output row against float64, over all graphs and output types, and its graph.
"""
SPEEDUP_HEAD = ["backend", "over", "real graphs", "all graphs", "lowest", "highest"]
ISOLATED = {"warm": "L2 warm", "cold": "L2 cold"}


def kernel_tables(rows: pd.DataFrame) -> str:
    """Speed-ups, times and ablation of each panel, and the worst errors of each device."""
    sections = [TIMES]
    for panel in kernel_panels(rows):
        measured = panel.only(set(panel.series) - SWITCHES.keys())
        lines = _speedups(measured)
        if measured.series or lines:
            sections += [_heading(panel), *([table(SPEEDUP_HEAD, lines)] if lines else []), _times(measured)]
    for panel in kernel_panels(rows):
        if lines := _steps(panel):
            sections += [_heading(panel, "Ablation of the paper's kernel: "), table(SPEEDUP_HEAD, lines)]
            sections += [_times(ablation(panel))]
    for device, lines in _errors(rows).items():
        sections += [f"## Largest errors, {device}\n", ERRORS, lines]
    return "\n".join(sections)


def launch_tables(rows: pd.DataFrame) -> str:
    """Times of isolated launches of each panel, L2 warm and cold, and of calls that build their format."""
    sections = [LAUNCHES]
    for l2, words in ISOLATED.items():
        for panel in kernel_panels(rows, launch="isolated", l2=l2):
            panel = panel.only(set(panel.series) - SWITCHES.keys())
            if panel.series:
                lines = _speedups(panel, ("fused3s",))
                sections += [_heading(panel, f"{words}: "), *([table(SPEEDUP_HEAD, lines)] if lines else [])]
                sections += [_times(panel)]
    for panel in kernel_panels(rows, launch="none", l2="none", plan="rebuilt"):
        sections += [_heading(panel, "Format built within each call: "), _times(panel)]
    return "\n".join(sections)


def memory_tables(rows: pd.DataFrame) -> str:
    """Peak memory of each panel."""
    peaks = rows[(rows["bench"] == "kernels") & (rows["metric"] == "peak_memory") & (rows["out_dtype"] == "float32")]
    peaks = latest(peaks, "device", "heads", "dim", "graph", "series")
    found = {(cell.device, cell.heads, cell.dim, cell.graph, cell.series): cell.value for cell in peaks.itertuples()}
    sections = [MEMORY]
    for panel in kernel_panels(rows):
        panel = panel.only(set(panel.series) - SWITCHES.keys())

        def cell(graph: Graph, series: str, panel: Panel = panel) -> str:
            value = found.get((panel.device, panel.heads, panel.dim, graph, series))
            status = panel.status(graph, series)
            failed = status not in (None, "ok")
            return f"{value:,.1f}" if value is not None else status if failed else "-"

        if any(key[:3] == (panel.device, panel.heads, panel.dim) for key in found) and panel.series:
            sections += [_heading(panel), _by_graph(panel, cell)]
    return "\n".join(sections)


def rate_tables(rows: pd.DataFrame) -> str:
    """Rates of the times of each panel, and the gather model over them."""
    sections, cells = [RATES], achieved(rows)
    for panel in kernel_panels(rows):
        here = cells.loc[cells.index.intersection(panel.rows.index)]
        if not here.empty:
            sections += [_heading(panel), *_rates(panel, here, PeakRates.of(rows, panel.device))]
    return "\n".join(sections)


def _heading(panel: Panel, words: str = "") -> str:
    title = words + panel.title
    commits = f" (rows of {panel.commits} commits)" if panel.commits > 1 else ""
    return f"## {title[0].upper()}{title[1:]}{commits}\n"


def _by_graph(panel: Panel, cell: Callable[[Graph, str], str]) -> str:
    """A line per graph and a column per series, from `cell(graph, series)`."""
    series = in_order(panel.series)
    kinds = {name: panel.dtype(name) for name in series}
    names = [name if kinds[name] == "float16" else f"{name} ({PRECISIONS[kinds[name]]})" for name in series]
    lines = [[graph.label, f"{graph.nnz:,}", *(cell(graph, name) for name in series)] for graph in panel.graphs]
    return table(["graph", "edges", *names], lines, 1)


def _times(panel: Panel) -> str:
    def cell(graph: Graph, series: str) -> str:
        time, status = panel.time(graph, series), panel.status(graph, series)
        mark = DISTURBED * panel.is_disturbed(graph, series)
        return f"{mark}{time:.4f}" if time is not None else status or "-"

    return _by_graph(panel, cell)


def _rates(panel: Panel, cells: pd.DataFrame, rates: PeakRates) -> list[str]:
    over_time = model_over_time(cells, rates) if rates.complete else pd.Series(dtype=float)
    texts = {
        (cell.graph, cell.series): f"{cell.tb_per_s:.2f}, {cell.tflop_per_s:.2f}, "
        + (f"{over_time[cell.Index]:.0%}" if rates.complete else "-")
        for cell in cells.itertuples()
    }
    series = in_order({*cells["series"]} - SWITCHES.keys())
    lines = [[graph.label, *(texts.get((graph, name), "-") for name in series)] for graph in panel.graphs]
    missing = f"Peak rates of the {panel.device} are not recorded: scripts/peak_rates.py.\n"
    return [*([] if rates.complete else [missing]), table(["graph", *series], lines, 1)]


def _errors(rows: pd.DataFrame) -> dict[str, str]:
    """By device, a table of the largest error of each series by head dimension."""
    rows = rows[(rows["bench"] == "kernels") & (rows["metric"] == "time") & rows["relative_error"].notna()]
    tables = {}
    for device, found in rows.groupby("device"):
        found = latest(found, "dim", "heads", "graph", "series", "dtype", "out_dtype", "launch", "plan", "l2")
        worst = found.loc[found.groupby(["series", "dim"])["relative_error"].idxmax()].set_index(["series", "dim"])
        dims = sorted({*found["dim"]})
        lines = []
        for series in in_order({*found["series"]}):
            cells = []
            for dim in dims:
                known = (series, dim) in worst.index
                row = worst.loc[series, dim] if known else None
                wrong = ", wrong" if known and row["status"] == "wrong" else ""
                cells.append(f"{row['relative_error']:.1e}{wrong}: {row['graph'].label}" if known else "-")
            lines.append([series, *cells])
        tables[device] = table(["backend", *(f"d = {dim}" for dim in dims)], lines, 1)
    return tables


def _speedups(panel: Panel, subjects: tuple[str, ...] = SUBJECTS) -> list[list[str]]:
    pairs = [(subject, baseline) for subject in subjects for baseline in in_order(baselines(panel, subject))]
    return [line for pair in pairs if (line := _line(panel, *pair))]


def _steps(panel: Panel) -> list[list[str]]:
    """Speed-up of each variant of the ablation over the one before."""
    variants = ablation(panel)
    return [line for before, variant in pairwise(VARIANTS) if (line := _line(variants, variant, before))]


def _line(panel: Panel, subject: str, baseline: str) -> list[str] | None:
    speedup = panel.speedup(subject, baseline)
    if speedup is None:
        return None
    ratios = speedup.ratios.values()
    means = [_describe(speedup.real), _describe(speedup)]
    return [subject, baseline, *means, f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"]


def _describe(speedup: Speedup | None) -> str:
    return speedup.describe() if speedup else "-"
