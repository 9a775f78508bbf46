"""Numbers of the end-to-end figures, as Markdown."""

import pandas as pd

from bench.records import HOST_BOUND, NONE
from report.frames import (
    JOINED,
    PRECISIONS,
    ModelRun,
    Panel,
    Speedup,
    find_panel,
    joined,
    latest,
    model_panels,
    model_rows,
    paper_model_rows,
    run_speedups,
)
from report.gather_model import ITEM_BYTES, PeakRates
from report.markdown import table
from report.paper import DGL, MODEL_SUBJECTS, model_ratios
from report.plots.style import DISTURBED

HEAD = f"""# The whole model

Drawn by `make reproduce-figures` from the CSVs under `results/`; a ratio is computed here and stored nowhere. Graph
Transformer; medians in ms of a forward pass, in brackets the share spent in attention, timed in separate passes: where
a slow host sets the pace, it can exceed the whole. "fp16 model" and "fp32 model" are the type outside attention, the
same for all backends; a backend that computes in another type gets its inputs cast, within its time. A variant is an
attention backend, how the non-attention layers are computed and, with `+graph`, a CUDA graph. A cell without a time
holds its status; `-` was not measured. `{DISTURBED}` marks a time that the host disturbed or set (eager, at least
{HOST_BOUND} times its CUDA graph): it depends on the host, and is in no mean.
`csr_unfused` stands for DGL, which has no CUDA on PyPI.
"""
MEANS = """Geometric means over the graphs on which both ran; "real" leaves out synthetic and surrogate graphs. In the
last two columns each pair of a graph and a d counts. "Disturbed" graphs were measured and are not among the n.
"""
MADE_OF = f"""A headline ratio multiplies four changes: precision, launch, fused layers and attention. The lines below
it take them away one by one.
{MEANS}"""
OURS = ModelRun("fused3s", "fused", "cuda_graph")
COMPARED_WITH = (*DGL, "pyg", "dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable", "fused3s_paper")
LAUNCHES = {"cuda_graph": "CUDA graphs on both sides", "eager": "eager on both sides"}
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
ACCURACY = """The weights are random, not trained: this is no accuracy of a trained model.
"""
MOST_ATTENTION = 0.75  # largest share of attention in a model whose other parts are compared


def end_to_end_tables(rows: pd.DataFrame) -> str:
    """Times of each panel, what headline ratios are made of, the paper's ratios, the other layers, the accuracy."""
    machine, paper_model, rows = rows, paper_model_rows(rows), model_rows(rows)
    panels, attention = model_panels(rows), model_panels(rows, "attention")
    sections = [HEAD]
    for device in sorted({*paper_model["device"]}):
        here = paper_model[paper_model["device"] == device]
        if parts := _made_of(here):
            sections += [f"## What a headline ratio is made of, {device}\n", MADE_OF, *parts]
        ratios = _ratios([panel for panel in panels if panel.device == device and panel.of_paper])
        sections += [f"## The paper's ratios beside ours, {device}\n", *ratios]
    for panel in panels:
        sections.append(f"## {panel.title[0].upper()}{panel.title[1:]}\n")
        sections.append(_times(panel, find_panel(attention, panel)))
        sections += [f"Rows of {panel.commits} commits.\n"] * (panel.commits > 1)
    if dense := _dense(paper_model, machine):
        sections += ["## Non-attention layers\n", DENSE, dense]
    if compiled := _compiled(paper_model):
        sections += [COMPILED, compiled]
    if accuracy := _accuracy(paper_model):
        sections += ["## Accuracy of 16 bits against the model in float32\n", ACCURACY, accuracy]
    return "\n".join(sections)


def comparisons(baseline: str) -> dict[str, tuple[ModelRun, ModelRun, str]]:
    """Our run, that of `baseline` and the scope of each ratio, from the headline to attention alone."""
    found = {
        "headline: fp16, fused, CUDA graph over fp32, eager": (OURS, ModelRun(baseline, dtype="float32"), "model"),
        "the same over fp16, eager": (OURS, ModelRun(baseline), "model"),
        "fused layers in ours, CUDA graphs on both sides": (OURS, ModelRun(baseline, launch="cuda_graph"), "model"),
    }
    for scope, words in (("model", "plain layers"), ("attention", "attention alone")):
        for launch, sides in LAUNCHES.items():
            runs = ModelRun("fused3s", launch=launch), ModelRun(baseline, launch=launch)
            found[f"{words}, {sides}"] = (*runs, scope)
    return found


def _made_of(rows: pd.DataFrame) -> list[str]:
    """A table per baseline; `rows` of one device."""
    sections, dims = [], sorted({*rows["dim"]})
    rows = rows[(rows["metric"] == "time") & (rows["region"] == NONE)]
    groups = {"single": rows[rows["graphs"] == 1], "batched": rows[rows["graphs"] > 1]}
    for baseline in COMPARED_WITH:
        lines = []
        for group, some in groups.items():
            for words, (ours, theirs, scope) in comparisons(baseline).items():
                if found := run_speedups(some, ours, theirs, scope, dims):
                    real = {dim: speedup.real for dim, speedup in found.items() if speedup.real}
                    cells = [*(real.get(dim) for dim in dims), joined(real), joined(found)]
                    lines.append([group, words, *map(_describe, cells)])
        if lines:
            pool = " + ".join(map(str, JOINED))
            head = ["graphs", "compared", *(f"d = {dim}, real" for dim in dims), f"d = {pool}, real", "all graphs"]
            sections += [f"### `fused3s` over `{baseline}`\n", table(head, lines)]
    return sections


def _describe(speedup: Speedup | None) -> str:
    return speedup.describe() if speedup else "-"


def _times(panel: Panel, attention: Panel | None) -> str:
    lines = []
    for variant in panel.series:
        cells = []
        for graph in panel.graphs:
            whole, status = panel.time(graph, variant), panel.status(graph, variant)
            inside = attention.time(graph, variant) if attention else None
            share = "" if whole is None or inside is None else f" ({inside / whole:.0%})"
            mark = DISTURBED * panel.is_disturbed(graph, variant)
            cells.append("-" if status is None else status if whole is None else f"{mark}{whole:.3f}{share}")
        lines.append([variant, *cells])
    return table(["variant", *(graph.label for graph in panel.graphs)], lines, 1)


def _ratios(panels: list[Panel]) -> list[str]:
    """Tables of the paper's end-to-end ratios beside ours, float32 models as in the paper first."""
    sections = []
    for precision in sorted({panel.precision for panel in panels}, reverse=True):
        some = [panel for panel in panels if panel.precision == precision]
        real = {ratio.baseline: ratio for ratio in model_ratios(panel.real for panel in some)}
        lines = []
        for ratio in model_ratios(some):
            stated = [f"{ratio.stated[gpu]:g}x" if gpu in ratio.stated else "-" for gpu in ("H100", "A30")]
            ours = []
            for subject in MODEL_SUBJECTS:
                of_real = real[ratio.baseline].ours.get(subject) if ratio.baseline in real else None
                ours += [_mean(of_real), _mean(ratio.ours.get(subject))]
            lines.append([ratio.label, *stated, *ours])
        if lines:
            dims = ", ".join(map(str, sorted({panel.dim for panel in some})))
            sections += [f"{PRECISIONS.get(precision, precision)} model, over eager baselines, d = {dims}:\n"]
            subjects = (f"{subject}, {graphs}" for subject in MODEL_SUBJECTS for graphs in ("real", "all graphs"))
            sections += [table(["over", "the paper, H100", "the paper, A30", *subjects], lines, 1)]
    return sections


def _mean(ours: tuple[float, int] | None) -> str:
    return "-" if ours is None else f"{ours[0]:.2f}x (n = {ours[1]})"


def _dense(rows: pd.DataFrame, machine: pd.DataFrame) -> str:
    """Rates of the non-attention layers; `machine` has the peak rates of the devices."""
    rows = rows[(rows["nodes"] > DENSE_NODES) & rows["region"].isin(DENSE_REGIONS) & rows["value"].notna()]
    rows = latest(rows, "device", "graph", "dim", "series", "dtype", "region")
    lines, copies = [], {device: PeakRates.of(machine, device).copy for device in {*rows["device"]}}
    cells = rows.groupby(["device", "dataset", "graph", "dim", "series", "dtype"])
    for (device, _, _, dim, variant, _), regions in cells:
        row, milliseconds = regions.iloc[0], regions["value"].sum()
        rate = (4 + 6 * row["blocks"] - 3) * row["nodes"] * dim * ITEM_BYTES[row["dtype"]] / milliseconds
        copy = copies[device]
        share = f" ({rate / copy:.0%})" if copy else ""
        rate = f"{rate / 1e9:.2f}{share}"
        lines.append([row["graph"].label, device, str(dim), variant, row["dtype"], f"{milliseconds:.3f}", rate])
    return table(["graph", "device", "d", "variant", "precision", "ms", "TB/s"], lines, 1) if lines else ""


def _compiled(rows: pd.DataFrame) -> str:
    variants = ["fused3s compiled+graph", "fused3s fused+graph"]
    rows = rows[(rows["metric"] == "time") & (rows["region"] == "none") & rows["series"].isin(variants)]
    rows = rows[(rows["nodes"] > DENSE_NODES) & rows["value"].notna()]
    rows = latest(rows[rows["dtype"] == "float16"], "device", "graph", "dim", "series", "scope")
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
