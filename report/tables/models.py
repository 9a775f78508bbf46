"""The numbers behind the end-to-end figures, as Markdown."""

from collections.abc import Sequence

import torch

from bench.records import Row
from report.kernel_frames import JOINED, Graph, Panel, joined
from report.model_frames import BASELINES, beside_paper, end_to_end_panels, end_to_end_rows, find_panel, variant_of
from report.roofline import Ceilings
from report.tables.kernels import table

HEAD = """# The whole model

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. Graph
Transformer of 10 blocks and one head; medians in ms of a forward pass, in brackets the share spent in attention, timed
in passes of its own: where a slow host sets the pace, it can come to more than the whole. Back ends that compute in
float32 run the whole model in float32, the others in float16. A variant is an attention back end, the way to compute
the dense part and, with `+graph`, a CUDA graph. A cell without a time says why; `-` was not measured. `csr_unfused`
stands in for DGL, which has no CUDA on PyPI.
"""
# The fused model over the paper's attention with plain modules, CUDA graphs on both, and over what users run.
COMPARED = [("fused3s fused+graph", "fused3s_paper plain+graph")]
COMPARED += [(f"fused3s {mode}", f"{base} plain") for base in BASELINES for mode in ("fused", "fused+graph")]
DENSE = """From the embedding to the readout without attention, of graphs of over 100,000 nodes: ms in all blocks,
and TB/s of the bytes that must be moved, had each block one kernel: 4 N d values for the first Q, K, V, then reading
attention's output and h and writing the next h and Q, K, V, 6 N d a block and 3 N d in the last; in brackets the share
of the copy rate.
"""
COMPILED = """The same with torch.compile and with the fused kernel, each as a CUDA graph: ms of the whole model without
its attentions. Left out are graphs whose attentions take over three quarters of either: what is left is then the small
difference of two large times.
"""
DENSE_REGIONS = ("qkv", "out projection", "ffn", "norms", "dense")
DENSE_NODES = 100_000
MOST_ATTENTION = 0.75  # of a model whose other parts are compared
MEANS = """Geometric means over graphs on which both ran; in the last column each pair of a graph and a width counts.
"""


def end_to_end_tables(rows: Sequence[Row]) -> str:
    """Times of each panel, the paper's ratios beside ours, the dense part and the accuracy of 16 bits."""
    machine, rows = rows, end_to_end_rows(rows)
    attention = end_to_end_panels(rows, "attention")
    sections = [HEAD]
    for panel in end_to_end_panels(rows):
        sections.append(f"## {panel.title[0].upper()}{panel.title[1:]}\n")
        sections.append(_times(panel, find_panel(attention, panel)))
    for device in sorted({row.device for row in rows}):
        sections += [f"## Speed-ups of the whole model, {device}\n", MEANS, _speedups(rows, device)]
        sections.append(f"## The paper's ratios beside ours, {device}\n")
        sections.append(_ratios(rows, device))
    if dense := _dense(rows, machine):
        sections += ["## The dense part\n", DENSE, dense]
    if compiled := _compiled(rows):
        sections += [COMPILED, compiled]
    if accuracy := _accuracy(rows):
        sections += ["## Accuracy of 16 bits against the model in float32\n", accuracy]
    return "\n".join(sections)


def _times(panel: Panel, attention: Panel | None) -> str:
    lines = []
    for variant in panel.backends:
        cells = []
        for graph in panel.graphs:
            whole, status = panel.time(graph, variant), panel.status(graph, variant)
            inside = attention.time(graph, variant) if attention else None
            share = "" if whole is None or inside is None else f" ({inside / whole:.0%})"
            cells.append("-" if status is None else status if whole is None else f"{whole:.3f}{share}")
        lines.append([variant, *cells])
    return table(["variant", *(graph.label for graph in panel.graphs)], lines)


def _speedups(rows: Sequence[Row], device: str) -> str:
    panels = [panel for panel in end_to_end_panels(rows) if panel.device == device]
    dims = sorted({panel.dim for panel in panels})
    lines = []
    for group in dict.fromkeys(panel.group for panel in panels):
        for subject, baseline in COMPARED:
            by_dim = {panel.dim: panel.speedup(subject, baseline) for panel in panels if panel.group == group}
            found = {dim: speedup for dim, speedup in by_dim.items() if speedup}
            if found:
                speedups = [*(found.get(dim) for dim in dims), joined(found)]
                lines.append([group, subject, baseline, *(one.describe() if one else "-" for one in speedups)])
    head = ["graphs", "speed-up of", "over", *(f"d = {dim}" for dim in dims), f"d = {' and '.join(map(str, JOINED))}"]
    return table(head, lines)


def _ratios(rows: Sequence[Row], device: str) -> str:
    subjects = ("fused3s_paper plain", "fused3s plain", "fused3s fused+graph")
    lines = []
    for ratio in beside_paper(rows, device):
        over = ratio.baseline if ratio.baseline == ratio.measured else f"{ratio.baseline} (ours: {ratio.measured})"
        stated = [f"{ratio.stated[gpu]:g}x" if gpu in ratio.stated else "-" for gpu in ("H100", "A30")]
        ours = [ratio.ours.get(subject) for subject in subjects]
        lines.append([over, *stated, *("-" if mean is None else f"{mean[0]:.2f}x (n = {mean[1]})" for mean in ours)])
    return table(["over", "the paper, H100", "the paper, A30", *(f"ours, {subject}" for subject in subjects)], lines)


def _dense(rows: Sequence[Row], machine: Sequence[Row]) -> str:
    """`machine`: rows with the device's ceilings among them."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        region = row.metric.removeprefix("time in ")
        if row.nodes > DENSE_NODES and row.value is not None and region in DENSE_REGIONS:
            key = (row.device, row.dataset, row.data_source == "synthetic", row.dim, variant_of(row))
            found.setdefault(key, {})[region] = row
    lines = []
    for (device, dataset, synthetic, dim, variant), regions in sorted(found.items()):
        row = next(iter(regions.values()))
        values = (4 + 6 * row.blocks - 3) * row.nodes * dim
        milliseconds = sum(region.value for region in regions.values())
        rate = values * getattr(torch, row.dtype).itemsize / milliseconds
        copy = Ceilings.of(machine, device).copy
        share = f" ({rate / copy:.0%})" if copy else ""
        label = f"{dataset} (synthetic)" if synthetic else dataset
        lines.append([label, device, str(dim), variant, row.dtype, f"{milliseconds:.3f}", f"{rate / 1e9:.2f}{share}"])
    return table(["graph", "device", "d", "variant", "precision", "ms", "TB/s"], lines) if lines else ""


def _compiled(rows: Sequence[Row]) -> str:
    found: dict[tuple, dict[tuple[str, str], float]] = {}
    for row in rows:
        if row.nodes > DENSE_NODES and row.metric == "time" and row.value is not None:
            key = (Graph.of(row).label, row.device, row.dim)
            found.setdefault(key, {})[variant_of(row), row.scope] = row.value
    lines = []
    for (graph, device, dim), times in sorted(found.items()):
        variants = ("fused3s compiled+graph", "fused3s fused+graph")
        if not all((variant, scope) in times for variant in variants for scope in ("model", "attention")):
            continue
        if all(times[variant, "attention"] <= MOST_ATTENTION * times[variant, "model"] for variant in variants):
            compiled, fused = (times[variant, "model"] - times[variant, "attention"] for variant in variants)
            lines.append([graph, device, str(dim), f"{compiled:.3f}", f"{fused:.3f}", f"{compiled / fused:.2f}x"])
    return table(["graph", "device", "d", "torch.compile", "fused", "faster"], lines) if lines else ""


def _accuracy(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, int, str, str], dict[str, float]] = {}
    for row in rows:
        if row.metric in ("output_error", "argmax_agreement") and row.value is not None:
            found.setdefault((row.dataset, row.dim, row.dtype, row.backend), {})[row.metric] = row.value
    lines = []
    for (dataset, dim, dtype, backend), values in sorted(found.items()):
        same = values.get("argmax_agreement")
        agreement = "-" if same is None else f"{same:.2%}"
        lines.append([dataset, str(dim), dtype, backend, agreement, f"{values['output_error']:.1e}"])
    head = ["graph", "d", "precision", "back end", "same largest output", "relative error"]
    return table(head, lines) if lines else ""
