"""README: the whole model, the like-for-like ratios that its headline is made of, and the accuracy of 16 bits."""

from statistics import geometric_mean

import pandas as pd

from bench.records import HOST_BOUND
from report.frames import JOINED, PRECISIONS, ModelRun, latest, model_panels, paper_model_rows, run_speedup
from report.plots.style import DISTURBED
from report.plots.waterfall import STEPS
from report.readme.block import block, gpu
from report.readme.kernels import cell, means, name

DIM = 128
BASELINES = ("csr_unfused", "dfgnn_tiling", "flashsparse_stable", "fused3s_paper")
SHOWN = (
    *(ModelRun(backend) for backend in ("csr_unfused", "pyg", *BASELINES[1:], "fused3s")),
    ModelRun("fused3s", "fused"),
    *(ModelRun(backend, launch="cuda_graph") for backend in (*BASELINES, "fused3s")),
    ModelRun("fused3s", "compiled", "cuda_graph"),
    ModelRun("fused3s", "fused", "cuda_graph"),
)
WORDS = {
    "plain": "",
    "compiled": ", torch.compile",
    "fused": ", fused dense block",
    "eager": ", eager",
    "cuda_graph": ", CUDA graph",
}
WEIGHTS = "The weights are random, not trained: this is no accuracy of a trained model."


def times(rows: pd.DataFrame) -> str:
    """Milliseconds of a forward pass, everything outside attention in fp16."""
    return _times(rows, "float16")


def times_fp32(rows: pd.DataFrame) -> str:
    """The same with everything outside attention in fp32, as published."""
    return _times(rows, "float32")


def _times(rows: pd.DataFrame, dtype: str) -> str:
    panels = [one for one in model_panels(rows) if (one.dim, one.precision, one.of_paper) == (DIM, dtype, True)]
    caption = (
        f"ms per forward pass on {gpu(rows)}, medians; 10 blocks, d = {DIM}, one head. The model outside attention "
        f"computes in {PRECISIONS[dtype]} for all backends. Graphs read from files. `{DISTURBED}` marks a time that "
        f"the host disturbed or set (eager, at least {HOST_BOUND} times its CUDA graph): it is in no mean."
    )
    shown = [run for run in SHOWN if dtype == "float16" or run.dense == "plain"]
    head, lines = ["attention and mode"], [[_words(run)] for run in shown]
    for panel in panels:
        graphs = {graph.sha256: graph for graph in reversed(panel.graphs) if not graph.synthetic}.values()
        sizes = panel.rows.drop_duplicates("graph").set_index("graph")["graphs"]
        for graph in sorted(graphs, key=lambda one: (one.surrogate, one)):
            head.append(name(graph.label, sizes[graph]))
            for line, run in zip(lines, shown, strict=True):
                line.append(cell(panel, graph, run.series, 3))
    return block(caption, head, lines, 1)


def _words(run: ModelRun) -> str:
    return f"`{run.backend}`{WORDS[run.launch]}{WORDS[run.dense]}"


def ratios(rows: pd.DataFrame) -> str:
    """Speed-ups with one thing changed at a time, and the headline."""
    graph = {"launch": "cuda_graph"}
    kinds = [  # words, scope, how ours and the baseline run
        ("attention alone, CUDA graph on both sides", "attention", graph, graph),
        ("whole model, other attention only, CUDA graph on both sides", "model", graph, graph),
        ("whole model, other attention only, eager on both sides", "model", {}, {}),
        ("whole model, fused dense block, CUDA graph on both sides", "model", {"dense": "fused", **graph}, graph),
        ("whole model, fused dense block, eager on both sides", "model", {"dense": "fused"}, {}),
        ("fused dense block in a CUDA graph over eager", "model", {"dense": "fused", **graph}, {}),
        ("the same over eager and fp32", "model", {"dense": "fused", **graph}, {"dtype": "float32"}),
    ]
    lines = []
    for words, scope, ours, theirs in kinds:
        for group in ("single", "batched"):
            cells = []
            for baseline in BASELINES:
                found = run_speedup(rows, ModelRun("fused3s", **ours), ModelRun(baseline, **theirs), scope, group=group)
                cells.append(means(found))
            lines.append([words, group, *cells])
    caption = (
        f"Times faster than each baseline on {gpu(rows)}, fp16 model unless stated; geometric means over pairs of a "
        f"graph and a d of {_dims()}, of real graphs / of all (with surrogate and synthetic graphs), with the number "
        "of pairs. Times that the host disturbed or set are left out."
    )
    return block(caption, ["compared", "graphs", *(f"over `{one}`" for one in BASELINES)], lines)


def _dims() -> str:
    *dims, last = JOINED
    return f"{', '.join(map(str, dims))} and {last}"


def waterfall(rows: pd.DataFrame) -> str:
    """Mean factor of each change from the baseline as users run it to our fastest model."""
    lines = []
    for group in ("single", "batched"):
        of_group = rows[(rows["graphs"] > 1) == (group == "batched")]
        for words, kept in (("real graphs", lambda graph: graph.real), ("all", lambda graph: True)):
            complete = _complete(of_group[of_group["graph"].map(kept).astype(bool)])
            cells = ["-"] * len(STEPS)
            if len(complete):
                factors = complete.shift(axis=1).div(complete).iloc[:, 1:].apply(geometric_mean)
                whole = geometric_mean(complete.iloc[:, 0] / complete.iloc[:, -1])
                cells = [*(f"{factor:.2f}" for factor in factors), f"{whole:.2f}"]
            lines.append([f"{group}, {words} (n = {len(complete)})", *cells])
    first, *changes = STEPS
    caption = (
        "From `csr_unfused` (in the place of DGL) in an eager fp32 model to our fastest: how much faster each "
        f"change makes the one before it. Geometric means over pairs of a graph and a d of {_dims()} that ran and "
        f"were undisturbed in all {len(STEPS)} runs."
    )
    return block(caption, ["graphs", *changes, f"all changes, over {first}"], lines, 1)


def _complete(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of STEPS (columns) by d and graph, where all ran undisturbed. Graphs of equal edges stand once."""
    runs = (run.times(rows, "model", JOINED) for run in STEPS.values())
    columns = [run.loc[run["disturbed"] != "yes", "value"] for run in runs]
    found = pd.concat(columns, axis=1, keys=STEPS, join="inner")
    edges = [(dim, graph.sha256) for dim, graph in found.index]
    return found[~pd.Series(edges, found.index, dtype=object).duplicated()]


def accuracy(rows: pd.DataFrame) -> str:
    """Least agreement of the largest outputs with the model in fp32, and largest error, by precision."""
    rows = paper_model_rows(rows)
    rows = rows[rows["metric"].isin(["argmax_agreement", "output_error"]) & rows["value"].notna()]
    rows = latest(rows, "graph", "dim", "dtype", "backend", "metric")
    lines = []
    for dtype in ("float16", "bfloat16"):
        same, error = (
            rows.loc[(rows["dtype"] == dtype) & (rows["metric"] == metric), "value"]
            for metric in ("argmax_agreement", "output_error")
        )
        least = f"{same.min():.2%} (n = {len(same)})" if len(same) else "-"
        largest = f"{error.max():.1e} (n = {len(error)})" if len(error) else "-"
        lines.append([PRECISIONS[dtype], least, largest])
    caption = f"Against the same model in fp32, over all graphs (with surrogate and synthetic ones) and d. {WEIGHTS}"
    head = [
        "precision",
        "least share of rows with the same largest output (untrained weights)",
        "largest relative error",
    ]
    return block(caption, head, lines, 1)
