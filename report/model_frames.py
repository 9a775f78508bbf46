"""Recorded times of whole forward passes as panels (one device, one kind of graphs, one width).

A panel's "back end" is a variant: an attention back end and the mode in which the model around it was run, such as
"fused3s fused+graph".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.records import Row
from report.kernel_frames import Graph, Group, Panel
from report.means import geometric_mean
from report.paper import stated_means

CONFIGS = "end_to_end"  # folder of the configurations whose rows these are
PAPER_MODEL = (1, 10)  # heads and blocks
GRAPH = "+graph"
# What the model was published with; `csr_unfused` stands in for it where DGL has no CUDA.
BASELINES = ("dgl", "csr_unfused")


def mode_of(row: Row) -> str:
    """How the model of a row was run, such as "plain" or "fused+graph"."""
    return row.note.partition(";")[0]


def variant_of(row: Row) -> str:
    return f"{row.backend} {mode_of(row)}"


def end_to_end_rows(rows: Iterable[Row]) -> list[Row]:
    """Those of `scripts/bench_end_to_end.py`, of the paper's model."""
    return [row for row in rows if Path(row.config).parent.name == CONFIGS and (row.heads, row.blocks) == PAPER_MODEL]


def end_to_end_panels(rows: Iterable[Row], scope: str = "model", metric: str = "time") -> list[Panel]:
    """Panels of one metric among `end_to_end_rows`; of several rows for one bar the last counts."""
    panels: dict[tuple[Group, str, int], dict[tuple[Graph, str], Row]] = {}
    for row in end_to_end_rows(rows):
        if (row.scope, row.metric) == (scope, metric):
            group: Group = "single" if row.graphs == 1 else "batched"
            graph = Graph.of(row)
            panels.setdefault((group, row.device, row.dim), {})[graph, variant_of(row)] = row
    keys = sorted(panels, key=lambda key: (key[1], ("single", "batched").index(key[0]), key[2]))
    return [Panel(device, group, dim, "any", panels[group, device, dim]) for group, device, dim in keys]


def find_panel(panels: Iterable[Panel], like: Panel) -> Panel | None:
    """The panel of the same device, group and width, such as that of another metric."""
    wanted = (like.device, like.group, like.dim)
    return next((panel for panel in panels if (panel.device, panel.group, panel.dim) == wanted), None)


def baseline_of(panel: Panel, captured: bool) -> str | None:
    """The variant that speed-ups are over: the first of BASELINES with a time, captured as the others are if it can."""
    modes = ("plain+graph", "plain") if captured else ("plain",)
    for backend in BASELINES:
        for mode in modes:
            if any(panel.time(graph, f"{backend} {mode}") is not None for graph in panel.graphs):
                return f"{backend} {mode}"
    return None


@dataclass(frozen=True)
class BesidePaper:
    """A ratio that the paper states for its kernel, and ours over the same baseline, plain modules, eager.

    Attributes:
        baseline: the paper's, in our names.
        measured: the back end that stands for it in our runs.
        stated: by the paper's GPU.
        ours: geometric mean and number of (graph, width) pairs, by subject.
    """

    baseline: str
    measured: str
    stated: dict[str, float]
    ours: dict[str, tuple[float, int]]


def beside_paper(rows: Sequence[Row], device: str) -> list[BesidePaper]:
    """The paper's end-to-end ratios beside ours over all graphs and widths of a device."""
    panels = [panel for panel in end_to_end_panels(rows) if panel.device == device]
    stated: dict[str, dict[str, float]] = {}
    for mean in stated_means():
        if mean.group == "model":
            stated.setdefault(mean.baseline, {})[mean.gpu] = mean.low
    found = []
    for baseline, by_gpu in stated.items():
        stands_in = BASELINES if baseline == "dgl" else (baseline,)
        for measured in stands_in:
            ours = {}
            for subject in ("fused3s_paper plain", "fused3s plain", "fused3s fused+graph"):
                speedups = [panel.speedup(subject, f"{measured} plain") for panel in panels]
                ratios = [ratio for speedup in speedups if speedup for ratio in speedup.ratios.values()]
                if ratios:
                    ours[subject] = geometric_mean(ratios), len(ratios)
            if ours:
                found.append(BesidePaper(baseline, measured, by_gpu, ours))
                break
    return found
