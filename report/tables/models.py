"""Numbers of the end-to-end figures, as Markdown."""

import pandas as pd

from report.frames import JOINED, Panel, find_panel, joined, latest, model_panels, model_rows
from report.gather_model import ITEM_BYTES, PeakRates
from report.markdown import table
from report.paper import DGL, MODEL_SUBJECTS, model_ratios

HEAD = """# The whole model

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. Graph
Transformer of 10 blocks and one head; medians in ms of a forward pass, in brackets the share spent in attention, timed
in separate passes: where a slow host sets the pace, it can exceed the whole. Backends that compute in float32 run the
whole model in float32, the others in float16. A variant is an attention backend, how the non-attention layers are
computed and, with `+graph`, a CUDA graph. A cell without a time holds its status; `-` was not measured. `csr_unfused`
stands for DGL, which has no CUDA on PyPI.
"""
# The fused model over the paper's attention with plain modules, CUDA graphs on both, and over what users run.
COMPARED = [("fused3s fused+graph", "fused3s_paper plain+graph")]
COMPARED += [(f"fused3s {mode}", f"{base} plain") for base in DGL for mode in ("fused", "fused+graph")]
DENSE = """From the embedding to the readout without attention, of graphs of over 100,000 nodes: ms in all blocks,
and TB/s of the bytes that must be moved if each block is one kernel: 4 N d values for the first Q, K, V, then reading
the output of attention and h and writing the next h and Q, K, V, 6 N d per block and 3 N d in the last; in brackets the
share of the copy rate.
"""
COMPILED = """The same with torch.compile and with the fused kernel, each as a CUDA graph: ms of the whole model without
its attentions. Graphs whose attentions take over three quarters of either are left out: the rest is then a small
difference of two large times.
"""
DENSE_REGIONS = ("qkv", "out projection", "ffn", "norms", "dense")
DENSE_NODES = 100_000
MOST_ATTENTION = 0.75  # largest share of attention in a model whose other parts are compared
MEANS = """Geometric means over graphs on which both ran; in the last column each pair of a graph and a width counts.
"""


def end_to_end_tables(rows: pd.DataFrame) -> str:
    """Times of each panel, the paper's ratios beside ours, the non-attention layers and the accuracy of 16 bits."""
    machine, rows = rows, model_rows(rows)
    panels, attention = model_panels(rows), model_panels(rows, "attention")
    sections = [HEAD]
    for panel in panels:
        sections.append(f"## {panel.title[0].upper()}{panel.title[1:]}\n")
        sections.append(_times(panel, find_panel(attention, panel)))
    for device in sorted({*rows["device"]}):
        here = [panel for panel in panels if panel.device == device]
        sections += [f"## Speed-ups of the whole model, {device}\n", MEANS, _speedups(here)]
        sections += [f"## The paper's ratios beside ours, {device}\n", _ratios(here)]
    if dense := _dense(rows, machine):
        sections += ["## Non-attention layers\n", DENSE, dense]
    if compiled := _compiled(rows):
        sections += [COMPILED, compiled]
    if accuracy := _accuracy(rows):
        sections += ["## Accuracy of 16 bits against the model in float32\n", accuracy]
    return "\n".join(sections)


def _times(panel: Panel, attention: Panel | None) -> str:
    lines = []
    for variant in panel.series:
        cells = []
        for graph in panel.graphs:
            whole, status = panel.time(graph, variant), panel.status(graph, variant)
            inside = attention.time(graph, variant) if attention else None
            share = "" if whole is None or inside is None else f" ({inside / whole:.0%})"
            cells.append("-" if status is None else status if whole is None else f"{whole:.3f}{share}")
        lines.append([variant, *cells])
    return table(["variant", *(graph.label for graph in panel.graphs)], lines, 1)


def _speedups(panels: list[Panel]) -> str:
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


def _ratios(panels: list[Panel]) -> str:
    lines = []
    for ratio in model_ratios(panels):
        stated = [f"{ratio.stated[gpu]:g}x" if gpu in ratio.stated else "-" for gpu in ("H100", "A30")]
        ours = [ratio.ours.get(subject) for subject in MODEL_SUBJECTS]
        lines.append([ratio.label, *stated, *("-" if one is None else f"{one[0]:.2f}x (n = {one[1]})" for one in ours)])
    return table(["over", "the paper, H100", "the paper, A30", *(f"ours, {one}" for one in MODEL_SUBJECTS)], lines)


def _dense(rows: pd.DataFrame, machine: pd.DataFrame) -> str:
    """Rates of the non-attention layers; `machine` has the peak rates of the devices."""
    rows = rows[(rows["nodes"] > DENSE_NODES) & rows["region"].isin(DENSE_REGIONS) & rows["value"].notna()]
    rows = latest(rows, "device", "graph", "dim", "series", "region")
    lines = []
    for (device, _, _, dim, variant), regions in rows.groupby(["device", "dataset", "graph", "dim", "series"]):
        row, milliseconds = regions.iloc[0], regions["value"].sum()
        rate = (4 + 6 * row["blocks"] - 3) * row["nodes"] * dim * ITEM_BYTES[row["dtype"]] / milliseconds
        copy = PeakRates.of(machine, device).copy
        share = f" ({rate / copy:.0%})" if copy else ""
        rate = f"{rate / 1e9:.2f}{share}"
        lines.append([row["graph"].label, device, str(dim), variant, row["dtype"], f"{milliseconds:.3f}", rate])
    return table(["graph", "device", "d", "variant", "precision", "ms", "TB/s"], lines, 1) if lines else ""


def _compiled(rows: pd.DataFrame) -> str:
    variants = ["fused3s compiled+graph", "fused3s fused+graph"]
    rows = rows[(rows["metric"] == "time") & (rows["region"] == "none") & rows["series"].isin(variants)]
    rows = rows[(rows["nodes"] > DENSE_NODES) & rows["value"].notna()]
    rows = latest(rows, "device", "graph", "dim", "series", "scope")
    times = rows.pivot(index=["graph", "device", "dim"], columns=["scope", "series"], values="value")
    times = times.reindex(columns=pd.MultiIndex.from_product([["model", "attention"], variants])).dropna()
    times = times[(times["attention"] <= MOST_ATTENTION * times["model"]).all(axis=1)]
    outside = (times["model"] - times["attention"])[variants]
    lines = [
        [graph.label, device, str(dim), f"{compiled:.3f}", f"{fused:.3f}", f"{compiled / fused:.2f}x"]
        for (graph, device, dim), (compiled, fused) in sorted(
            zip(outside.index, outside.itertuples(index=False, name=None), strict=True),
            key=lambda line: (line[0][0].label, *line[0][1:]),
        )
    ]
    return table(["graph", "device", "d", "torch.compile", "fused", "faster"], lines, 1) if lines else ""


def _accuracy(rows: pd.DataFrame) -> str:
    key = ["dataset", "dim", "dtype", "backend"]
    rows = rows[rows["metric"].isin(["output_error", "argmax_agreement"]) & rows["value"].notna()]
    if rows.empty:
        return ""
    wide = latest(rows, *key, "metric").pivot(index=key, columns="metric", values="value")
    wide = wide.reindex(columns=["argmax_agreement", "output_error"])
    lines = []
    for (dataset, dim, dtype, backend), (agreement, error) in zip(
        wide.index, wide.itertuples(index=False, name=None), strict=True
    ):
        same = "-" if pd.isna(agreement) else f"{agreement:.2%}"
        lines.append([dataset, str(dim), dtype, backend, same, f"{error:.1e}"])
    return table(["graph", "d", "precision", "backend", "same largest output", "relative error"], lines, 1)
