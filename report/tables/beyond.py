"""Our kernel beside the paper's in a few numbers, as Markdown: means, least ratios, gather model over time."""

import math
from dataclasses import replace
from statistics import geometric_mean

import pandas as pd

from configs.bench_schema import REORDERED
from report.frames import JOINED, PAPER_MODEL, Panel, Speedup, joined, kernel_panels, latest
from report.gather_model import PeakRates, achieved, model_over_time
from report.markdown import table
from report.plots.beyond import OURS, OUT_DTYPES, PAPER, whole_panels

HEAD = """# Beyond the paper

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. Geometric
means of the time of `fused3s_paper` over ours, over the n graphs on which both gave a correct output, and the least
ratio with its graph. "Real" leaves out synthetic and surrogate graphs. Over several d each pair of a graph and a d
counts. The rules that share out row windows were fitted on some of these graphs.
"""
MODEL = """Time of the gather model (report/gather_model.py: row windows in natural order, no reuse across windows) over
the measured time; above 100 % where windows share rows or find them in a cache. The last lines are over real graphs.
"""
COSTS = """Time to find the order (kernels/formats/row_order.py; once per graph, on the CPU), and the number of forward
passes of ten blocks after which it has paid off. In ms, with fp32 output.
"""
LEAST_SAVED = 0.01  # share of a time; less is noise
LEAST_GATHERED = 1e8  # bytes; below, the time is launches and latency
OUTPUTS = {  # output types of ours and of the paper's kernel
    "fp32": ("float32", "float32"),
    "fp16": ("float16", "float16"),
    f"fp16, `{PAPER}` fp32": ("float16", "float32"),
}
KINDS = ("all", "single", "batches")
Panels = dict[str, dict[int, Panel]]  # by output type and d


def beyond_tables(rows: pd.DataFrame) -> str:
    """Sections for each device on which the two kernels were timed."""
    by_device: dict[str, Panels] = {}
    for out_dtype in OUT_DTYPES:
        for panel in whole_panels(kernel_panels(rows, out_dtype)):
            by_device.setdefault(panel.device, {}).setdefault(out_dtype, {})[panel.dim] = panel
    cells, sections = achieved(rows), [HEAD]
    for device, panels in sorted(by_device.items()):
        if lines := _means(panels):
            dims, pool = (f"d = {dim}, real" for dim in _dims(panels)), " + ".join(map(str, JOINED))
            head = ["speed-up of", "output", "graphs", *dims, f"d = {pool}, real", "all graphs"]
            sections += [f"## Over `{PAPER}`, {device}\n", table(head, lines)]
        if lines := _order_costs(panels.get("float32", {}), rows[rows["device"] == device]):
            head = ["graph", "d", "order, s", "fused3s", REORDERED, "saved", "passes"]
            sections += [f"## Cost of the row order, {device}\n", COSTS, table(head, lines, 1)]
        rates = PeakRates.of(rows, device)
        if rates.complete and (lines := _model(panels, cells, rates)):
            kernels = [f"{name}, {words}" for words in OUT_DTYPES.values() for name in (*OURS, PAPER)]
            title = f"## Gather model over time, at least {LEAST_GATHERED / 1e9:g} GB gathered, {device}\n"
            sections += [title, MODEL, table(["graph", "d", "GB", *kernels], lines, 1)]
    return "\n".join(sections)


def _dims(panels: Panels) -> list[int]:
    return sorted({dim for by_dim in panels.values() for dim in by_dim})


def _means(panels: Panels) -> list[list[str]]:
    lines = []
    for subject in OURS:
        for output, (ours, theirs) in OUTPUTS.items():
            for kind in KINDS:
                found = {}
                for dim in panels.get(ours, {}).keys() & panels.get(theirs, {}).keys():
                    panel = _side_by_side(panels[ours][dim], panels[theirs][dim], kind)
                    if speedup := panel.speedup(subject, PAPER):
                        found[dim] = speedup
                if found:
                    real = {dim: speedup.real for dim, speedup in found.items() if speedup.real}
                    speedups = [*(real.get(dim) for dim in _dims(panels)), joined(real), joined(found)]
                    lines.append([subject, output, kind, *map(_describe, speedups)])
    return lines


def _side_by_side(ours: Panel, theirs: Panel, kind: str) -> Panel:
    """Our kernels of one panel and the paper's of another, on the graphs of one of KINDS."""
    rows = pd.concat([ours.only(OURS).rows, theirs.only([PAPER]).rows])
    if kind != "all":
        rows = rows[(rows["graphs"] > 1) == (kind == "batches")]
    return replace(ours, rows=rows)


def _describe(speedup: Speedup | None) -> str:
    """The mean with its least case: "2.40x (n = 14; least 1.44x, pubmed)"."""
    if speedup is None:
        return "-"
    graph, least = speedup.least
    return f"{speedup.mean:.2f}x (n = {len(speedup.ratios)}; least {least:.2f}x, {graph.dataset})"


def _model(panels: Panels, cells: pd.DataFrame, rates: PeakRates) -> list[list[str]]:
    columns = [(out_dtype, series) for out_dtype in OUT_DTYPES for series in (*OURS, PAPER)]
    found = pd.concat([panel.rows for by_dim in panels.values() for panel in by_dim.values()])
    cells = cells.loc[cells.index.intersection(found.index)]
    cells = cells[cells["gathered_bytes"] >= LEAST_GATHERED]
    if cells.empty:
        return []
    wide = cells.assign(share=model_over_time(cells, rates))
    wide = wide.pivot(index=["graph", "dim", "gathered_bytes"], columns=["out_dtype", "series"], values="share")
    wide = wide.reindex(columns=pd.MultiIndex.from_tuples(columns))
    lines = [
        [graph.label, str(dim), f"{gathered / 1e9:.2f}", *map(_percent, shares)]
        for (graph, dim, gathered), shares in zip(wide.index, wide.itertuples(index=False, name=None), strict=True)
    ]
    real = wide[[graph.real for graph, *_ in wide.index]]
    for name, summary in (("geometric mean", geometric_mean), ("least", min)):
        shares = [real[column].dropna() for column in columns]
        if any(map(len, shares)):
            lines.append([name, "", "", *("-" if some.empty else _percent(summary(some)) for some in shares)])
    return lines


def _order_costs(panels: dict[int, Panel], rows: pd.DataFrame) -> list[list[str]]:
    """Lines by graph and d, where the order saves time."""
    orders = rows[(rows["bench"] == "kernels") & (rows["metric"] == "order_time") & (rows["out_dtype"] == "float32")]
    orders = latest(orders[orders["order_found"] != "none"], "graph", "dim").set_index(["graph", "dim"])["value"]
    _, blocks = PAPER_MODEL
    lines = []
    for dim, panel in panels.items():
        for graph in panel.graphs:
            before, after = panel.time(graph, "fused3s"), panel.time(graph, REORDERED)
            if before is None or after is None or (graph, dim) not in orders.index:
                continue
            found_in, saved = orders[graph, dim], 1 - after / before
            if saved < LEAST_SAVED:
                continue
            passes = math.ceil(found_in / (blocks * (before - after)))
            times = [f"{x:.4f}" for x in (before, after)]
            cells = [graph.label, str(dim), f"{found_in / 1e3:.3f}", *times, f"{saved:.0%}", f"{passes:,}"]
            lines.append((graph, dim, cells))
    return [cells for *_, cells in sorted(lines)]


def _percent(share: float) -> str:
    return "-" if pd.isna(share) else f"{share:.0%}"
