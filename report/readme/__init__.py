"""Generated parts of the README: tables between markers, computed from the recorded CSVs.

    <!-- begin generated: NAME -->
    <!-- end generated: NAME -->

`scripts/readme_tables.py` renews what stands between the two lines. NAME is one of BLOCKS.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from report.readme import backward, heads, kernels, layers, models, paper, targets, training

# Markdown of each block, from the rows of one device; a cell that was not recorded is "-".
BLOCKS: dict[str, Callable[[pd.DataFrame], str]] = {
    "layers": layers.layers,
    "kernel-times": kernels.times,
    "kernel-speedups": kernels.speedups,
    "kernel-targets": targets.kernels,
    "heads": heads.heads,
    "edges": heads.edges,
    "backward": backward.backward,
    "training-steps": training.steps,
    "training-scores": training.scores,
    "inference-scores": training.inference_scores,
    "model-times": models.times,
    "model-times-fp32": models.times_fp32,
    "model-ratios": models.ratios,
    "model-waterfall": models.waterfall,
    "model-targets": targets.models,
    "accuracy": models.accuracy,
    "paper": paper.headlines,
}
MARKED = re.compile(
    r"^<!-- begin generated: (?P<name>\S+) -->\n(?P<text>.*?)^<!-- end generated: (?P=name) -->$", re.M | re.S
)
MARKER = re.compile(r"^ *<!-- *(?:begin|end) generated", re.M)


class MarkerError(ValueError):
    """A marker that names no block, or has no counterpart; or a file that is no text."""


def read(path: Path) -> str:
    """Text of a file with markers.

    Raises:
        MarkerError: it is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MarkerError(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from error


def fill(text: str, rows: pd.DataFrame) -> str:
    """`text` with all marked blocks computed anew from `rows`.

    Raises:
        MarkerError: a name is unknown or used twice, or a marker has no counterpart.
    """
    found = [match["name"] for match in MARKED.finditer(text)]
    if 2 * len(found) != len(MARKER.findall(text)):
        raise MarkerError(
            f"{len(MARKER.findall(text))} marker lines make {len(found)} blocks; each block needs one line "
            "<!-- begin generated: NAME --> and, below it, one line <!-- end generated: NAME -->, and none inside it"
        )
    for name in found:
        if name not in BLOCKS:
            raise MarkerError(f"generated: {name}: no such block; allowed are {', '.join(BLOCKS)}")
        if found.count(name) > 1:
            raise MarkerError(f"generated: {name}: stands {found.count(name)} times; once is allowed")
    others = rows[rows["bench"] != "layers"]  # perhaps of another GPU

    def computed(match: re.Match) -> str:
        name = match["name"]
        return marked(name, BLOCKS[name](rows if name == "layers" else others))

    return MARKED.sub(computed, text)


def marked(name: str, block: str) -> str:
    """A block between its markers."""
    return f"<!-- begin generated: {name} -->\n{block}<!-- end generated: {name} -->"


OF_THEIR_OWN_GPU = ("layers", "float32", "parallel")  # benchmarks whose tables name their GPU, or without a table


def gpus(rows: pd.DataFrame) -> list[str]:
    """Names of the GPUs that the tables are of, but for those of OF_THEIR_OWN_GPU."""
    return sorted({*rows.loc[(rows["device_type"] == "cuda") & ~rows["bench"].isin(OF_THEIR_OWN_GPU), "device"]})


def of_one_gpu(rows: pd.DataFrame, device: str | None = None) -> pd.DataFrame:
    """Rows of the GPU named `device`, by default of the only one, and those of the benchmark `layers` on any GPU.

    Raises:
        ValueError: there is no row of that GPU, or rows are of several and none is named.
    """
    found = gpus(rows)
    if device is None and len(found) != 1:
        raise ValueError(f"--device is needed where rows are not of exactly one GPU; recorded are {found or 'none'}")
    if device is not None and device not in found:
        raise ValueError(f"--device: got {device!r}; recorded are {found or 'none'}")
    return rows[(rows["device"] == (device or found[0])) | (rows["bench"] == "layers")]
