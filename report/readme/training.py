"""README: training steps beside other attention, and test scores."""

import pandas as pd

from report.readme.block import block, gpu
from report.tables.training import RATIOS, SCORE_HEAD, ratio_lines, score_lines
from report.training import BEST, OURS, StepTimes

SHOWN = ("cora", "ogbn-arxiv")


def steps(rows: pd.DataFrame) -> str:
    """Our times on two graphs and others' over ours."""
    times = StepTimes.of(rows)
    caption = (
        f"A training step of the 10-block model (d = 128, bf16 layers over float32 weights) on {gpu(rows)}: `fused3s` "
        "with fused layers as a CUDA graph, in ms on two graphs; then the time of the same model run in other ways "
        "over ours, geometric mean over n graphs, and the graph on which ours gains least. `pyg` is the attention of "
        "PyG's TransformerConv. All times: [training.md](results/figures/training.md)."
    )
    lines = []
    for line in ratio_lines(times):
        found = times.times(int(line[0]), OURS, BEST)
        ms = {graph.dataset: f"{value:.2f}" for graph, value in found.items()}
        lines.append([line[0], *(ms.get(name, "-") for name in SHOWN), *line[1:]])
    return block(caption, ["heads", *(f"ms, {name}" for name in SHOWN), *(name for name, *_ in RATIOS)], lines, 1)


def scores(rows: pd.DataFrame) -> str:
    """Test scores over seeds."""
    caption = f"The metric on the test split over seeds, on {gpu(rows)}, with the standard error of the mean."
    return block(caption, SCORE_HEAD, score_lines(rows), 3)
