"""Our kernel beside the paper's in a few numbers, as Markdown: the means, the least ratios and the shares of the floor
that the figure "beyond the paper" shows graph by graph."""

import math
from collections.abc import Sequence
from dataclasses import replace

from bench.records import Row
from configs.bench_schema import REORDERED
from report.kernel_frames import JOINED, Panel, Speedup, joined, kernel_panels
from report.means import geometric_mean
from report.model_frames import PAPER_MODEL
from report.plots.beyond import OURS, OUT_DTYPES, PAPER, whole_panels
from report.roofline import Achieved, Ceilings, achieved
from report.tables.kernels import table

HEAD = f"""# Beyond the paper

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. Geometric
means of the time of `{PAPER}` over ours, over the n real graphs (no synthetic stand-in) on which both gave a right
output, and the least ratio with its graph. Over several d each pair of a graph and a d counts.
"""
SHARES = """The gather floor (report/roofline.py: windows of 16 rows in the natural order) over time; above 100 % where
windows share rows or find them in a cache. The last lines are over the real graphs.
"""
COSTS = """Finding the order (kernels/formats/row_order.py; once a graph, on the CPU), and after how many forward passes
of ten blocks it has paid for itself. In ms, with fp32 output.
"""
LEAST_SAVED = 0.01  # of a time; less is noise
LEAST_GATHERED = 1e8  # bytes; below, launches and latency are what a time is made of
OUTPUTS = {  # of ours, and of the paper's kernel
    "fp32": ("float32", "float32"),
    "fp16": ("float16", "float16"),
    f"fp16, `{PAPER}` fp32": ("float16", "float32"),
}
KINDS = ("all", "single", "batches")
Panels = dict[str, dict[int, Panel]]  # by type of the output and d


def beyond_tables(rows: Sequence[Row]) -> str:
    """For each device on which the two kernels were timed."""
    by_device: dict[str, Panels] = {}
    for out_dtype in OUT_DTYPES:
        for panel in whole_panels(kernel_panels(rows, out_dtype)):
            by_device.setdefault(panel.device, {}).setdefault(out_dtype, {})[panel.dim] = panel
    rates = {found.row: found for found in achieved(rows)}
    found = (row for row in rows if row.scope == "kernel" and row.metric == "order_time")
    orders = {_cell(row): row.value for row in found if not row.note.startswith("none;")}  # none: rows as they were
    sections = [HEAD]
    for device, panels in sorted(by_device.items()):
        if lines := _means(panels):
            dims = [f"d = {dim}" for dim in _dims(panels)]
            head = ["speed-up of", "output", "graphs", *dims, f"d = {' and '.join(map(str, JOINED))}"]
            sections += [f"## Over `{PAPER}`, {device}\n", table(head, lines)]
        if lines := _order_costs(panels.get("float32", {}), orders):
            head = ["graph", "d", "order, s", "fused3s", REORDERED, "saved", "passes"]
            sections += [f"## What the order of rows costs, {device}\n", COSTS, table(head, lines)]
        ceilings = Ceilings.of(rows, device)
        if ceilings.copy and ceilings.gather and (lines := _shares(panels, rates, ceilings)):
            kernels = [f"{name}, {words}" for words in OUT_DTYPES.values() for name in (*OURS, PAPER)]
            title = f"## Share of the floor with at least {LEAST_GATHERED / 1e9:g} GB gathered, {device}\n"
            sections += [title, SHARES, table(["graph", "d", "GB", *kernels], lines)]
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
                    speedups = [*(found.get(dim) for dim in _dims(panels)), joined(found)]
                    lines.append([subject, output, kind, *map(_describe, speedups)])
    return lines


def _side_by_side(ours: Panel, theirs: Panel, kind: str) -> Panel:
    """Our kernels of one panel and the paper's of another, on real graphs, or on the batches among them, or others."""
    rows = ours.only(OURS).rows | theirs.only((PAPER,)).rows
    kept = {
        (graph, backend): row
        for (graph, backend), row in rows.items()
        if not graph.synthetic and (kind == "all" or (kind == "batches") == (row.graphs > 1))
    }
    return replace(ours, rows=kept)


def _describe(speedup: Speedup | None) -> str:
    """Such as "2.40x (n = 14; least 1.44x, pubmed)"."""
    if speedup is None:
        return "-"
    graph, least = speedup.least
    return f"{speedup.mean:.2f}x (n = {len(speedup.ratios)}; least {least:.2f}x, {graph.dataset})"


def _shares(panels: Panels, rates: dict[Row, Achieved], ceilings: Ceilings) -> list[list[str]]:
    columns = [(out_dtype, backend) for out_dtype in OUT_DTYPES for backend in (*OURS, PAPER)]
    shares: dict[tuple, dict[tuple[str, str], float]] = {}
    for out_dtype, by_dim in panels.items():
        for dim, panel in by_dim.items():
            for (graph, backend), row in panel.rows.items():
                one = rates.get(row)
                if one and one.gathered >= LEAST_GATHERED:
                    shares.setdefault((graph, dim, one.gathered), {})[out_dtype, backend] = one.share(ceilings)
    lines = [
        [graph.label, str(dim), f"{gathered / 1e9:.2f}", *(_percent(found.get(column)) for column in columns)]
        for (graph, dim, gathered), found in sorted(shares.items(), key=lambda item: (item[0][0].order, item[0][1]))
    ]
    for name, summary in (("geometric mean", geometric_mean), ("least", min)):
        real = [[found[c] for key, found in shares.items() if c in found and not key[0].synthetic] for c in columns]
        if any(real):
            lines.append([name, "", "", *(_percent(summary(found) if found else None) for found in real)])
    return lines


def _cell(row: Row) -> tuple:
    """What the rows of one cell share."""
    return row.device, row.dataset, row.data_sha256, row.dim, row.out_dtype, row.backend


def _order_costs(panels: dict[int, Panel], orders: dict[tuple, float]) -> list[list[str]]:
    """By graph and d, where reordered rows save time."""
    _, blocks = PAPER_MODEL
    lines = []
    for dim, panel in panels.items():
        for graph in panel.graphs:
            before, after = panel.time(graph, "fused3s"), panel.time(graph, REORDERED)
            if before is None or after is None:
                continue
            found_in, saved = orders.get(_cell(panel.rows[graph, REORDERED])), 1 - after / before
            if found_in is None or saved < LEAST_SAVED:
                continue
            passes = math.ceil(found_in / (blocks * (before - after)))
            times = [f"{x:.4f}" for x in (before, after)]
            cells = [graph.label, str(dim), f"{found_in / 1e3:.3f}", *times, f"{saved:.0%}", f"{passes:,}"]
            lines.append((graph.order, dim, cells))
    return [cells for *_, cells in sorted(lines)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
