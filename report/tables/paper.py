"""Ours beside the paper, as Markdown: the geometric means that it states, and its published times over ours."""

from statistics import geometric_mean

import pandas as pd

from configs.bench_schema import VARIANTS
from report.frames import Graph, Panel, ablation, kernel_panels, latest
from report.markdown import table
from report.paper import (
    DIM,
    GPUS,
    PUBLISHED_AS,
    SETS,
    published_ratio,
    published_sm_active,
    published_speedup,
    published_times,
    reordering_gains,
    stated_means,
)
from report.plots.sm_activity import SIDES
from report.plots.style import in_order
from report.published_codes import DEVICE
from report.tables.published_codes import bandwidth_tables, code_tables

RATIOS = """Above 1: ours is faster. `fused3s` stands beside the published Fused3S. `-`: not published; a word: the
status of ours.
"""

REORDERING = """Time of `F3S_splitC` over that of `F3S_reorderRW`. The paper says "1.18x on about half of the single
graph datasets" and does not name them.
"""
SM_ACTIVE = """Mean of the active times of all SMs over the longest: 1 is perfect balance. The A30's values follow from
the times that the authors publish with their code; ours count cycles. The windows of a synthetic graph are in random
order, so that "without reordering" is not the original's order there.
"""

HEAD = f"""# Ours beside the paper

Drawn by `make reproduce-figures`. The paper's values are those of [results/paper](../paper/README.md): its captions and
text, and its authors' published kernel times at d = {DIM}, from which "published" means are computed over all sets on
which both kernels have a time. Ours are geometric means over distinct graphs on which both gave a correct output, at
the same d. Peptides-func and Peptides-struct are the same molecules: the paper counts both, here they count once.
"""


def paper_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with kernel times on the paper's graphs at its head dimension."""
    panels = [p for p in kernel_panels(rows) if p.of_paper and p.dim == DIM and p.group in SETS]
    sections = [HEAD]
    for device in dict.fromkeys(panel.device for panel in panels):
        chosen = {panel.group: panel for panel in panels if panel.device == device}
        sections += [f"## Geometric means, {device}\n", _means(chosen)]
        if device == DEVICE:
            sections += code_tables(rows)
        sections += bandwidth_tables(rows, device, [*chosen.values()])
        sections += _reordering(chosen)
        sections += _sm_active(rows, device)
        for gpu in GPUS.values():
            sections += [f"## Published times on {gpu} over ours on {device}\n", RATIOS, _ratios(gpu, chosen)]
    return "\n".join(sections)


def _means(panels: dict[str, Panel]) -> str:
    columns = [name for gpu, published in GPUS.items() for name in (f"paper, {gpu}", f"published, {published}")]
    stated: dict[tuple[str, str, str], dict[str, str]] = {}
    for mean in stated_means():
        for gpu in GPUS:
            if gpu in mean.gpu and mean.group in SETS:
                stated.setdefault((mean.group, mean.subject, mean.baseline), {})[gpu] = mean.describe()
    lines = []
    for (group, subject, baseline), by_gpu in stated.items():
        cells = [group, subject, baseline]
        for gpu, published in GPUS.items():
            mean, count = published_speedup(published, group, subject, baseline)
            cells += [by_gpu.get(gpu, "-"), f"{mean:.2f}x (n = {count})"]
        panel = panels.get(group)
        for ours in (subject, "fused3s" if subject == "fused3s_paper" else None):
            measured = ablation(panel) if panel and ours in VARIANTS else panel
            speedup = measured and ours and measured.speedup(ours, baseline)
            cells.append(speedup.describe() if speedup else "-")
        lines.append(cells)
    return table(["graphs", "speed-up of", "over", *columns, "ours", "ours, `fused3s`"], lines)


def _reordering(panels: dict[str, Panel]) -> list[str]:
    """Gains of row-window reordering on the single graphs; nothing without ours."""
    panel = panels.get("single")
    ours = panel and ablation(panel).speedup("F3S_reorderRW", "F3S_splitC")
    if not ours:
        return []
    columns = [reordering_gains(gpu) for gpu in GPUS.values()]
    columns.append({graph.dataset: ratio for graph, ratio in ours.ratios.items()})
    real = {graph.dataset for graph in ours.ratios if graph.real}
    lines = []
    for graph in panel.graphs:
        cells = [f"{column[graph.dataset]:.2f}" if graph.dataset in column else "-" for column in columns]
        lines.append([graph.label, f"{graph.nnz:,}", *cells])
    kinds = {
        "mean, all graphs": lambda name, gain: True,
        "mean, graphs on which it gains": lambda name, gain: gain > 1,
        "mean, real graphs": lambda name, gain: name in real,
    }
    for label, kept in kinds.items():
        found = [[gain for name, gain in column.items() if kept(name, gain)] for column in columns]
        lines.append([label, "", *(f"{geometric_mean(one):.2f}x (n = {len(one)})" if one else "-" for one in found)])
    head = ["graph", "edges", *(f"published, {gpu}" for gpu in GPUS.values()), f"ours, {panel.device}"]
    return [f"## Row-window reordering, d = {DIM}\n", REORDERING, table(head, lines, 1)]


def _sm_active(rows: pd.DataFrame, device: str) -> list[str]:
    """Mean over longest active time of the SMs beside the authors' values; nothing without ours."""
    published = published_sm_active()
    rows = rows[(rows["metric"] == "sm_active_share") & (rows["device"] == device) & (rows["status"] == "ok")]
    shares = latest(rows[rows["out_dtype"] == "float32"], "dim", "graph", "series")
    lines = []
    for (dim, graph), found in shares.groupby(["dim", "graph"]):
        ours = found.set_index("series")["value"]
        theirs = published.loc[graph.dataset] if graph.dataset in published.index else {}
        cells = [f"{values[side]:.3f}" if side in values else "-" for values in (theirs, ours) for side in SIDES]
        lines.append([graph.label, str(dim), *cells])
    head = ["graph", "d", *(f"{where}, {words}" for where in ("A30", device) for words in SIDES.values())]
    return ["## Active time of the SMs\n", SM_ACTIVE, table(head, lines, 1)] if lines else []


def _ratios(gpu: str, panels: dict[str, Panel]) -> str:
    measured = {backend for panel in panels.values() for backend in panel.series}
    backends = in_order(measured & PUBLISHED_AS.keys())
    lines, means = [], {backend: [] for backend in backends}
    for panel in panels.values():
        for graph in panel.graphs:
            cells = []
            for backend in backends:
                ratio = published_ratio(gpu, graph.dataset, backend, panel.time(graph, backend))
                if ratio is not None:
                    means[backend].append(ratio)
                cells.append(_cell(gpu, panel, graph, backend) if ratio is None else f"{ratio:.2f}")
            lines.append([graph.label, f"{graph.nnz:,}", *cells])
    every = [f"{geometric_mean(found):.2f} (n = {len(found)})" if found else "-" for found in means.values()]
    return table(["graph", "edges", *backends], [*lines, ["geometric mean", "", *every]], 1)


def _cell(gpu: str, panel: Panel, graph: Graph, backend: str) -> str:
    """Reason for a missing ratio."""
    if (graph.dataset, PUBLISHED_AS[backend]) not in published_times(gpu):
        return "-"
    return panel.status(graph, backend) or "not run"
