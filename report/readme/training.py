"""README: training steps beside other attention, and test scores in training and inference."""

import pandas as pd

from report.readme.block import block, gpu
from report.tables.training import CHANGE_HEAD, RATIOS, SCORE_HEAD, change_lines, ratio_lines, score_lines
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
    caption = (
        f"The metric on the test split over seeds, on {gpu(rows)}, with the standard error of the mean; then its "
        "difference from that of `reference` in float32 with the standard error for independent runs, and for runs of "
        "the same seeds, which start from the same weights."
    )
    return block(caption, SCORE_HEAD, score_lines(rows), 4)


def inference_scores(rows: pd.DataFrame) -> str:
    """What the precision of inference changes in test scores."""
    caption = (
        "The same weights in another precision: the test metric of `scripts/infer.py --checkpoint` minus that at the "
        f"end of training, on {gpu(rows)}: mean over the seeds, its standard error, and the seed that changes most."
    )
    return block(caption, CHANGE_HEAD, change_lines(rows), 4)
