"""README: training steps with our layer in place of PyG's."""

import pandas as pd

from report.layers import CAPTURED, OURS, PRECISIONS, PYG, LayerTimes, versions, words_of
from report.readme.block import block

COLUMNS = ("PyG", "ours", "ratio")
NOTHING = "No step of configs/bench/layers.yaml has been recorded yet: `scripts/bench_layers.py` times them on a GPU.\n"


def layers(rows: pd.DataFrame) -> str:
    """Milliseconds of both layers and their ratio, by workload and precision."""
    times = LayerTimes.of(rows)
    head = ["training step", *(f"{name}: {column}" for name in PRECISIONS.values() for column in COLUMNS)]
    if not times.device:
        return NOTHING
    marks = "".join(
        text
        for mark, text in (
            ("~", "~: disturbed by the host, in no mean. "),
            ("*", "*: PyG's own output is further from float64 than allowed, in no mean. "),
        )
        if any(
            mark in times.cell(one, precision, side)
            for one in times.workloads
            for precision in PRECISIONS
            for side in (PYG, OURS, CAPTURED)
        )
    )
    dirty = " with changes" if "yes" in {*times.rows["dirty"]} else ""
    commits = ", ".join(dict.fromkeys(commit[:9] for commit in times.rows["commit"]))
    caption = (
        "`torch_geometric.nn.TransformerConv` replaced by `models.FusedTransformerConv`, and nothing else changed: ms "
        "of a whole training step (forward, loss, backward, fused AdamW; the host included), medians, both layers by "
        "turns, and PyG's time over ours. 3 layers of 8 heads x 16 columns with LayerNorm and ReLU between them on "
        f"{times.device}; torch {times.names('torch')}, {versions(times.rows['note'])}, CUDA {times.names('cuda')}, "
        f"commit {commits}{dirty}. New batches and samples bring a new edge_index in every step; drawing them is not "
        'timed. "One CUDA graph": our loop captured with `PlanRoom` (plan, copies and step), over PyG\'s eager step. '
        f"{marks}Means are geometric, over real graphs. Time in which the GPU is busy, launches and errors: "
        "[layers.md](results/figures/layers.md)."
    )
    lines = [*_lines(times, OURS, ""), *_lines(times, CAPTURED, ", one CUDA graph")]
    return block(caption, head, lines, 1)


def _lines(times: LayerTimes, layer: tuple[str, str], how: str) -> list[list[str]]:
    """A line for each workload that was timed with a layer, and their mean."""
    lines = []
    for workload in times.workloads:
        if all(times.row(workload, precision, layer) is None for precision in PRECISIONS):
            continue
        cells = []
        for precision in PRECISIONS:
            ratio = times.ratio(workload, precision, layer)
            cells += [times.cell(workload, precision, one) for one in (PYG, layer)]
            cells.append("-" if ratio is None else f"**{ratio:.2f}**")
        lines.append([words_of(workload) + how, *cells])
    means = [times.mean(precision, layer) for precision in PRECISIONS]
    if any(means):
        cells = [cell for mean in means for cell in ("", "", f"**{mean[0]:.2f}** (n = {mean[1]})" if mean else "-")]
        lines.append([f"mean{how}", *cells])
    return lines
