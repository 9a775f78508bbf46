"""The paper's own values, in this project's names: its published times and the geometric means that it states."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pandas as pd

from report.means import geometric_mean

FOLDER = Path(__file__).parents[1] / "results" / "paper"
DIM = 128  # of the published times
GPUS = ("GH200", "A30")  # with published times; the paper calls the first one H100

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
# The back end whose published time stands beside ours: its own, and Fused3S for `fused3s`, which the paper has not.
PUBLISHED_AS = {name: name for name in COLUMNS.values()} | {"fused3s": "fused3s_paper"}


@dataclass(frozen=True)
class StatedMean:
    """A geometric mean that the paper states; `low` and `high` differ where it gives a range."""

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
    """Of every caption of the paper's Figures 5, 6 and 8, and of its performance breakdown."""
    return [StatedMean(**row) for row in pd.read_csv(FOLDER / "geomeans.csv").to_dict("records")]


@cache
def published_times(gpu: str) -> dict[tuple[str, str], float]:
    """Milliseconds on a GH200 or A30 by data set and back end; a set without a time is left out."""
    table = pd.read_csv(FOLDER / f"published_runtime_ms_{gpu.lower()}_d{DIM}.csv", index_col="dataset")
    table = table[list(COLUMNS)].rename(columns=COLUMNS, index=SINGLE | BATCHED)
    return {key: float(time) for key, time in table.stack().dropna().items()}


def published_ratio(gpu: str, dataset: str, backend: str, milliseconds: float | None) -> float | None:
    """The published time over ours of `milliseconds`, above 1 where ours is faster; None where one is missing."""
    published = published_times(gpu).get((dataset, PUBLISHED_AS.get(backend)))
    return published / milliseconds if published is not None and milliseconds is not None else None


def published_speedup(gpu: str, group: str, subject: str, baseline: str) -> tuple[float, int] | None:
    """Geometric mean and number of sets, from the published times of a group; None where no set has both.

    As in the paper, each set counts, also Peptides-struct, which has the graphs of Peptides-func.
    """
    times = published_times(gpu)
    subject, baseline = (("fused3s_paper" if name == "F3S_permuteQKV" else name) for name in (subject, baseline))
    ratios = [
        times[name, baseline] / times[name, subject]
        for name in SETS[group]
        if (name, baseline) in times and (name, subject) in times
    ]
    return (geometric_mean(ratios), len(ratios)) if ratios else None
