"""The numbers behind the kernel figures, as Markdown."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from bench.records import Row
from configs.bench_schema import VARIANTS
from report.kernel_frames import SUBJECTS, Panel, ablation, baselines, kernel_panels
from report.roofline import Achieved, Ceilings, achieved

HEAD = """# Attention kernels

Drawn by `make reproduce-figures` from the CSVs under `results/`; a speed-up is computed here and stored nowhere. Times
are medians in ms, the format built, L2 warm, output fp32. A speed-up is a geometric mean over the n distinct graphs on
which both back ends gave a right output; below 1 is slower. A cell without a time says why; `-` was not measured.
"""

RATES = """TB/s of the rows that must be gathered and copied, TFLOP/s (4 d a score), and share of the gather floor
(report/roofline.py) in the time."""


def kernel_tables(rows: Sequence[Row]) -> str:
    """Times, rates, speed-ups and ablation of each panel."""
    sections = [HEAD]
    rates = {found.row: found for found in achieved(rows)}
    for panel in kernel_panels(rows):
        sections.append(f"## {panel.title[0].upper()}{panel.title[1:]}\n")
        sections.append(_times(panel))
        sections += _rates(panel, rates, Ceilings.of(rows, panel.device))
        if lines := [*_speedups(panel), *_steps(panel)]:
            sections.append(table(["back end", "over", "speed-up", "lowest", "highest"], lines))
    return "\n".join(sections)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """In Markdown; numbers to the right in tables by graph or by variant."""
    rule = ["---", *["---:"] * (len(head) - 1)] if head[0] in ("graph", "variant") else ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)) + "\n"


def _times(panel: Panel) -> str:
    head = ["graph", "edges", *(f"{backend} ({panel.dtype(backend)})" for backend in panel.backends)]
    lines = []
    for graph in panel.graphs:
        rows = [panel.rows.get((graph, backend)) for backend in panel.backends]
        cells = ["-" if row is None else f"{row.value:.4f}" if row.status == "ok" else row.status for row in rows]
        lines.append([graph.label, f"{graph.nnz:,}", *cells])
    return table(head, lines)


def _rates(panel: Panel, rates: Mapping[Row, Achieved], ceilings: Ceilings) -> list[str]:
    """What the times mean on this machine; nothing where no cell has its bytes beside the time."""
    known = ceilings.copy is not None and bool(ceilings.gather)
    found = {key: rates[row] for key, row in panel.rows.items() if row in rates}
    backends = [backend for backend in panel.backends if any(name == backend for _, name in found)]
    lines = []
    for graph in panel.graphs:
        cells = []
        for backend in backends:
            one = found.get((graph, backend))
            share = f"{one.share(ceilings):.0%}" if one and known else "-"
            cells.append(f"{one.tb_per_s:.2f}, {one.tflop_per_s:.2f}, {share}" if one else "-")
        lines.append([graph.label, *cells])
    if not backends:
        return []
    words = RATES if known else f"{RATES} The ceilings of the {panel.device} are not recorded: scripts/roofline.py."
    return [f"{words}\n", table(["graph", *backends], lines)]


def _speedups(panel: Panel) -> list[list[str]]:
    measured = panel.only(set(panel.backends) - VARIANTS.keys())
    pairs = [(subject, baseline) for subject in SUBJECTS for baseline in baselines(measured, subject)]
    return [line for pair in pairs if (line := _line(measured, *pair))]


def _steps(panel: Panel) -> list[list[str]]:
    """Each variant of the ablation over the one before it."""
    variants = ablation(panel)
    return [line for before, variant in pairwise(VARIANTS) if (line := _line(variants, variant, before))]


def _line(panel: Panel, subject: str, baseline: str) -> list[str] | None:
    speedup = panel.speedup(subject, baseline)
    if speedup is None:
        return None
    ratios = speedup.ratios.values()
    return [subject, baseline, speedup.describe(), f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"]
