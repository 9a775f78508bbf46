"""Training steps and accuracies, as Markdown."""

import pandas as pd

from report.head_shapes import Ratios, describe
from report.markdown import table
from report.training import BEST, CSR, MODES, OURS, PYG, StepTimes, inference_changes, scores

TITLE = """# Training

Drawn by `make reproduce-figures` from the CSVs under `results/`. A step is forward pass, backward pass and AdamW of the
10-block model on a whole graph: bf16 layers over float32 weights, times in ms, medians. Layers: plain (torch), compiled
(torch.compile) or fused (`models/fast_training.py`); "+graph": replayed as a CUDA graph. The same model with other
attention: `pyg` is the attention of PyG's TransformerConv, `csr_unfused` cuSPARSE. A time stands only where the
gradients of the QKV projections agree with float32; `wrong` ones do not. `-` was not measured.
"""
RATIOS = (  # others over ours
    ("PyG, plain, eager", PYG, ("plain", "eager")),
    ("PyG, compiled, eager", PYG, ("compiled", "eager")),
    ("PyG, plain+graph", PYG, ("plain", "cuda_graph")),
    ("PyG, fused+graph", PYG, BEST),
    ("cuSPARSE, fused+graph", CSR, BEST),
    ("ours, compiled+graph", OURS, ("compiled", "cuda_graph")),
)


def training_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with rows of the benchmarks `training` and `train`."""
    sections = [TITLE]
    for device, found in rows[rows["bench"].isin(("training", "train", "infer"))].groupby("device"):
        times = StepTimes.of(found)
        if not times.rows.empty:
            sections += [
                f"## Time of others over ours (fused+graph), {device}\n",
                table(["heads", *(name for name, *_ in RATIOS)], ratio_lines(times)),
            ]
            for heads in times.heads:
                words = "one head" if heads == 1 else f"{heads} heads"
                sections += [f"## Steps, {words}, {device}\n", _times(times, heads)]
        if lines := score_lines(found):
            sections += [f"## Test split, {device}\n", table(SCORE_HEAD, lines, 4)]
        if lines := change_lines(found):
            sections += [f"## The same weights in inference, {device}\n", table(CHANGE_HEAD, lines, 4)]
    return "\n".join(sections)


def ratio_lines(times: StepTimes) -> list[list[str]]:
    """A line per number of heads."""
    return [
        [str(heads), *(describe(times.over_ours(heads, backend, mode), Ratios.least) for _, backend, mode in RATIOS)]
        for heads in times.heads
    ]


def _times(times: StepTimes, heads: int) -> str:
    ways = [(backend, mode) for backend in (OURS, PYG, CSR) for mode in MODES]
    ways = [way for way in ways if any(times.cell(graph, heads, *way) != "-" for graph in times.graphs)]
    names = [f"{backend} {dense}{'+graph' * (launch == 'cuda_graph')}" for backend, (dense, launch) in ways]
    lines = [
        [graph.label, f"{graph.nnz:,}", *(times.cell(graph, heads, *way) for way in ways)] for graph in times.graphs
    ]
    return table(["graph", "edges", *names], lines, 1)


SCORE_HEAD = (
    *("data set", "model", "attention", "metric", "seeds", "mean", "standard error"),
    *("minus `reference`, float32", "the same, seed by seed"),
)


def score_lines(rows: pd.DataFrame) -> list[list[str]]:
    """A line per run of several seeds."""
    found, lines = scores(rows), []
    for run, score in sorted(found.items()):
        mean, exact, over = score.mean, found.get(run.in_float32), ("-", "-")
        if exact and run != run.in_float32:
            difference, error = score.minus(exact)
            same = score.minus_by_seed(exact)
            by_seed = "-" if same is None else f"{same.value:+z.4f} ± {same.error:.4f} (n = {same.seeds})"
            over = f"{difference:+z.4f} ± {error:.4f}", by_seed
        lines.append(
            [
                *(run.dataset, f"{run.blocks} blocks, d = {run.dim}", run.attention, score.metric),
                *(str(mean.seeds), f"{mean.value:.4f}", f"{mean.error:.4f}", *over),
            ]
        )
    return lines


CHANGE_HEAD = (
    *("data set", "trained with", "inference with", "metric", "seeds"),
    *("mean change", "standard error", "largest change"),
)


def change_lines(rows: pd.DataFrame) -> list[list[str]]:
    """A line per run of several seeds and attention of its inference."""
    return [
        [
            *(run.dataset, run.attention, attention, metric, str(mean.seeds)),
            *(f"{mean.value:+z.5f}", f"{mean.error:.5f}", f"{mean.largest:+z.5f}"),
        ]
        for (run, attention), (metric, mean) in sorted(inference_changes(rows).items())
    ]
