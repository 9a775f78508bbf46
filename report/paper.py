"""The paper's values, in this project's names: its published times and the geometric means that it states."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal

import pandas as pd

FOLDER = Path(__file__).parents[1] / "results" / "paper"
DIM = 128  # head dimension of the published times
GPUS = {"H100": "GH200", "A30": "A30"}  # names in the paper and in its published files

# The graphs of the paper's kernel figures, by the names of the published CSVs.
SINGLE = {
    "citeseer": "citeseer",
    "cora": "cora",
    "pubmed": "pubmed",
    "Ell": "elliptic",
    "github": "musae-github",
    "Artist": "artist",
    "com-amazon.ungraph": "com-amazon",
    "Blog": "blog",
    "amazon0505": "amazon0505",
    "igb_small": "igb-small",
    "yelp": "yelp",
    "reddit": "reddit",
    "igb_medium": "igb-medium",
    "ogbn-products": "ogbn-products",
    "amazonProducts": "amazon-products",
}
BATCHED = {
    "ZINC": "zinc",
    "PascalVOC-SP": "pascalvoc-sp",
    "COCO-SP": "coco-sp",
    "Peptides-func": "peptides-func",
    "Peptides-struct": "peptides-struct",
    "ogbg-molhiv": "ogbg-molhiv",
    "ogbg-ppa": "ogbg-ppa",
    "ogbg-molpcba": "ogbg-molpcba",
    "ogbg-code2": "ogbg-code2",
}
SETS = {"single": tuple(SINGLE.values()), "batched": tuple(BATCHED.values())}
COLUMNS = {
    "f3s_1tb1tcb": "F3S_splitR",
    "f3s_1tb1rw": "F3S_splitC",
    "f3s_1tb1rw_scheduled": "F3S_reorderRW",
    "f3s_1tb1rw_scheduled_permuteV": "fused3s_paper",
    "flashSparse_naive_softmax": "flashsparse_naive",
    "flashSparse_stable_softmax": "flashsparse_stable",
    "dfgnn_tiling": "dfgnn_tiling",
    "dfgnn_hyper": "dfgnn_hyper",
    "pyg_gtconv": "pyg",
}
# Published time that stands beside ours: of the same kernel, and of Fused3S for `fused3s`.
PUBLISHED_AS = {name: name for name in COLUMNS.values()} | {"fused3s": "fused3s_paper"}


@dataclass(frozen=True)
class StatedMean:
    """A geometric mean that the paper states; `low` and `high` differ if it is a range."""

    source: str
    gpu: str
    group: Literal["single", "batched", "model"]
    subject: str
    baseline: str
    low: float
    high: float

    def describe(self) -> str:
        return f"{self.low:g}x" if self.low == self.high else f"{self.low:g}x to {self.high:g}x"


def stated_means() -> list[StatedMean]:
    """Means of the captions of the paper's Figures 5, 6 and 8 and of its performance breakdown."""
    return [StatedMean(**row) for row in pd.read_csv(FOLDER / "geomeans.csv").to_dict("records")]


@cache
def published_times(gpu: str) -> dict[tuple[str, str], float]:
    """Milliseconds on a GH200 or A30 by data set and backend, where there is a time."""
    table = pd.read_csv(FOLDER / f"published_runtime_ms_{gpu.lower()}_d{DIM}.csv", index_col="dataset")
    table = table[list(COLUMNS)].rename(columns=COLUMNS, index=SINGLE | BATCHED)
    return {key: float(time) for key, time in table.stack().dropna().items()}


def published_ratio(gpu: str, dataset: str, backend: str, milliseconds: float | None) -> float | None:
    """Published time over ours, above 1 where ours is faster; None if one is missing."""
    published = published_times(gpu).get((dataset, PUBLISHED_AS.get(backend)))
    return published / milliseconds if published is not None and milliseconds is not None else None


def published_speedup(gpu: str, group: str, subject: str, baseline: str) -> tuple[float, int] | None:
    """Geometric mean and number of sets, from the published times of a group; None if no set has both.

    As in the paper, Peptides-struct counts although it has the graphs of Peptides-func.
    """
    times = published_times(gpu)
    subject, baseline = (("fused3s_paper" if name == "F3S_permuteQKV" else name) for name in (subject, baseline))
    ratios = [
        times[name, baseline] / times[name, subject]
        for name in SETS[group]
        if (name, baseline) in times and (name, subject) in times
    ]
    return (geometric_mean(ratios), len(ratios)) if ratios else None


# Backends that stand for the paper's end-to-end baseline: `csr_unfused` where DGL has no CUDA.
DGL = ("dgl", "csr_unfused")
MODEL_SUBJECTS = ("fused3s_paper plain", "fused3s plain", "fused3s fused+graph")


@dataclass(frozen=True)
class ModelRatio:
    """An end-to-end ratio of the paper, and ours over the same baseline with plain modules, eager.

    Attributes:
        baseline: the paper's, in our names.
        measured: the backend that we measured for it.
        stated: by GPU of the paper.
        ours: geometric mean and number of (graph, width) pairs, by MODEL_SUBJECTS.
    """

    baseline: str
    measured: str
    stated: dict[str, float]
    ours: dict[str, tuple[float, int]]

    @property
    def label(self) -> str:
        return self.baseline if self.baseline == self.measured else f"{self.baseline} (ours: {self.measured})"


def model_ratios(panels: Iterable[Any]) -> list[ModelRatio]:
    """The paper's end-to-end ratios beside ours over all graphs and widths of `panels` (of one device)."""
    panels = list(panels)
    stated: dict[str, dict[str, float]] = {}
    for mean in stated_means():
        if mean.group == "model":
            stated.setdefault(mean.baseline, {})[mean.gpu] = mean.low
    found = []
    for baseline, by_gpu in stated.items():
        for measured in DGL if baseline == "dgl" else (baseline,):
            ours = {}
            for subject in MODEL_SUBJECTS:
                speedups = [panel.speedup(subject, f"{measured} plain") for panel in panels]
                ratios = [ratio for speedup in speedups if speedup for ratio in speedup.ratios.values()]
                if ratios:
                    ours[subject] = geometric_mean(ratios), len(ratios)
            if ours:
                found.append(ModelRatio(baseline, measured, by_gpu, ours))
                break
    return found


def reordering_gains(gpu: str) -> dict[str, float]:
    """Published time without row-window reordering over that with it, by single graph."""
    times = published_times(gpu)
    return {name: times[name, "F3S_splitC"] / times[name, "F3S_reorderRW"] for name in SETS["single"]}


def published_sm_active() -> pd.DataFrame:
    """Mean over longest active time of the SMs on an A30, from the authors' values: [data set, variant]."""
    table = pd.read_csv(FOLDER / "sm_active.csv")
    return table.pivot(index="dataset", columns="variant", values="mean_over_longest")
