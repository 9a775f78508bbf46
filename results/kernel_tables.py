"""The numbers behind the kernel figures, as Markdown."""

from collections.abc import Sequence

from configs.bench_schema import VARIANTS
from results.kernel_times import SUBJECTS, Panel, baselines

HEAD = """# Attention kernels

Drawn by `make reproduce-figures` from the CSVs under `results/`; a speed-up is computed here and stored nowhere. Times
are medians in ms, the format built, L2 warm. A speed-up is a geometric mean over the n distinct graphs on which both
back ends gave a right output; below 1 is slower. A cell without a time says why; `-` was not measured.
"""


def kernel_tables(panels: Sequence[Panel]) -> str:
    """Times, speed-ups and ablation of each panel."""
    sections = [HEAD]
    for panel in panels:
        sections.append(f"## {panel.title[0].upper()}{panel.title[1:]}\n")
        sections.append(_times(panel))
        if lines := [*_speedups(panel), *_steps(panel)]:
            sections.append(_table(["back end", "over", "speed-up", "lowest", "highest"], lines))
    return "\n".join(sections)


def _times(panel: Panel) -> str:
    head = ["graph", "edges", *(f"{backend} ({panel.dtype(backend)})" for backend in panel.backends)]
    lines = []
    for graph in panel.graphs:
        rows = [panel.rows.get((graph, backend)) for backend in panel.backends]
        cells = ["-" if row is None else f"{row.value:.4f}" if row.status == "ok" else row.status for row in rows]
        lines.append([graph.label, f"{graph.nnz:,}", *cells])
    return _table(head, lines)


def _speedups(panel: Panel) -> list[list[str]]:
    measured = panel.only(set(panel.backends) - VARIANTS.keys())
    pairs = [(subject, baseline) for subject in SUBJECTS for baseline in baselines(measured, subject)]
    return [line for pair in pairs if (line := _line(measured, *pair))]


def _steps(panel: Panel) -> list[list[str]]:
    """Each variant of the ablation over the one before it."""
    variants = list(VARIANTS)
    return [line for pair in zip(variants[1:], variants, strict=False) if (line := _line(panel, *pair))]


def _line(panel: Panel, subject: str, baseline: str) -> list[str] | None:
    speedup = panel.speedup(subject, baseline)
    if speedup is None:
        return None
    ratios = speedup.ratios.values()
    return [subject, baseline, speedup.describe(), f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)] if head[0] == "graph" else ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)) + "\n"
