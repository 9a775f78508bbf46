"""README: the backward pass beside the forward pass and others' codes."""

import pandas as pd

from report.backward import PassTimes
from report.readme.block import block, gpu
from report.tables.backward import RATIOS, ratio_lines


def backward(rows: pd.DataFrame) -> str:
    """Ratios by shape of heads."""
    device = gpu(rows)
    caption = (
        f"Backward pass of `fused3s` on {device}, fp16, by heads x columns of a head: its time over that of the "
        "forward pass with the LSE, the bound of this ratio in bytes, and their quotient; geometric mean over n "
        "graphs, and the slowest of them. Then times of others' backward passes over ours, and the graph on which ours "
        "gains least: Turbo-GNN in its best of 16 settings, on all graphs and on six of over 300,000 edges with hubs, "
        "with its default parameters, and anemoi; published codes, measured at another time. `-` was not recorded. All "
        "graphs: [backward.md](results/figures/backward.md)."
    )
    times = PassTimes.of(rows)
    return block(caption, ["shape", *RATIOS], ratio_lines(times, device), 1)
