"""Ours beside the paper, as Markdown: the geometric means that it states, and its published times over ours."""

from statistics import geometric_mean

import pandas as pd

from configs.bench_schema import VARIANTS
from report.frames import Graph, Panel, ablation, kernel_panels
from report.markdown import table
from report.paper import (
    DIM,
    GPUS,
    PUBLISHED_AS,
    SETS,
    published_ratio,
    published_speedup,
    published_times,
    stated_means,
)
from report.plots.style import in_order

RATIOS = """Above 1: ours is faster. `fused3s` stands beside the published Fused3S. `-`: not published; a word: the
status of ours.
"""

HEAD = f"""# Ours beside the paper

Drawn by `make reproduce-figures`. The paper's values are those of [results/paper](../paper/README.md): its captions and
text, and its authors' published kernel times at d = {DIM}, from which "published" means are computed over all sets on
which both kernels have a time. Ours are geometric means over distinct graphs on which both gave a correct output, at
the same d. Peptides-func and Peptides-struct are the same molecules: the paper counts both, here they count once.
"""


def paper_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with kernel times on the paper's graphs at its head dimension."""
    panels = [panel for panel in kernel_panels(rows) if panel.dim == DIM and panel.group in SETS]
    sections = [HEAD]
    for device in dict.fromkeys(panel.device for panel in panels):
        chosen = {panel.group: panel for panel in panels if panel.device == device}
        sections += [f"## Geometric means, {device}\n", _means(chosen)]
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
