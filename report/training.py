"""Times of training steps (benchmark `training`), and learning curves and scores of trained models (benchmarks `train`
and `infer`)."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import hypot
from statistics import fmean, stdev

import pandas as pd

from bench.records import NONE
from report.frames import Graph, latest
from report.head_shapes import Ratios, ratios

OURS, PYG, CSR, REFERENCE = "fused3s", "pyg", "csr_unfused", "reference"
# Ways to run a step: how the layers around attention are computed, and how it is launched.
MODES = (
    *(("plain", "eager"), ("compiled", "eager"), ("fused", "eager")),
    *(("plain", "cuda_graph"), ("compiled", "cuda_graph"), ("fused", "cuda_graph")),
)
BEST = ("fused", "cuda_graph")


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Steps of one device.

    Attributes:
        rows: the latest row of each graph, number of heads, backend, dense and launch.
    """

    rows: pd.DataFrame

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "StepTimes":
        """From rows of one device."""
        kept = (rows["bench"] == "training") & (rows["metric"] == "time")
        return cls(latest(rows[kept], "graph", "heads", "backend", "dense", "launch"))

    @property
    def graphs(self) -> list[Graph]:
        return sorted({*self.rows["graph"]}, key=lambda graph: graph.nnz)

    @property
    def heads(self) -> list[int]:
        return sorted({*self.rows["heads"]})

    def times(self, heads: int, backend: str, mode: tuple[str, str]) -> dict[Graph, float]:
        """Milliseconds of steps with correct gradients."""
        rows = self._cells(heads, backend, mode)
        rows = rows[rows["status"] == "ok"]
        return dict(zip(rows["graph"], rows["value"], strict=True))

    def cell(self, graph: Graph, heads: int, backend: str, mode: tuple[str, str]) -> str:
        """A time in ms, the status of a failed step, or "-"."""
        rows = self._cells(heads, backend, mode)
        rows = rows[rows["graph"] == graph]
        if rows.empty:
            return "-"
        (row,) = rows.itertuples()
        if row.status != "ok":
            return row.status
        return f"{row.value:.2f}"

    def over_ours(self, heads: int, backend: str, mode: tuple[str, str]) -> Ratios | None:
        """Time of a way to run a step over ours in BEST; wrong gradients count too, since their time is the same."""
        rows = self._cells(heads, backend, mode)
        rows = rows[rows["status"].isin(("ok", "wrong"))]
        theirs = dict(zip(rows["graph"], rows["value"], strict=True))
        return ratios(theirs, self.times(heads, OURS, BEST))

    def _cells(self, heads: int, backend: str, mode: tuple[str, str]) -> pd.DataFrame:
        rows, (dense, launch) = self.rows, mode
        kept = (rows["heads"] == heads) & (rows["backend"] == backend) & (rows["dense"] == dense)
        return rows[kept & (rows["launch"] == launch)]


@dataclass(frozen=True)
class Curve:
    """The metric on the validation split by epoch: median, 10th and 90th percentile over the seeds."""

    metric: str
    epochs: list[int]
    median: list[float]
    p10: list[float]
    p90: list[float]
    seeds: int


@dataclass(frozen=True, order=True)
class Trained:
    """What was trained."""

    dataset: str
    dim: int
    blocks: int
    backend: str
    dtype: str

    @property
    def title(self) -> str:
        return f"{self.dataset}, {self.blocks} blocks, d = {self.dim}"

    @property
    def attention(self) -> str:
        return f"{self.backend}, {self.dtype}"

    @property
    def in_float32(self) -> "Trained":
        """The same model with `reference` in float32."""
        return replace(self, backend=REFERENCE, dtype="float32")


KEY = [field.name for field in fields(Trained)]


def curves(rows: pd.DataFrame) -> dict[Trained, Curve]:
    """Learning curves of one device."""
    kept = (rows["bench"] == "train") & rows["region"].str.startswith("epoch ")
    found = latest(rows[kept], *KEY, "region")
    result = {}
    for key, points in found.groupby(KEY):
        points = points.assign(epoch=points["region"].str.removeprefix("epoch ").astype(int)).sort_values("epoch")
        lists = (points[column].tolist() for column in ("epoch", "value", "p10", "p90"))
        metric = points["metric"].iloc[0].removeprefix("valid_")
        result[Trained(*key)] = Curve(metric, *lists, int(points["repeats"].max()))
    return result


@dataclass(frozen=True)
class Mean:
    """A mean over seeds.

    Attributes:
        value, error: the mean and its standard error (0 for one seed).
        seeds: how many.
        largest: the value of largest size.
    """

    value: float
    error: float
    seeds: int
    largest: float

    @classmethod
    def of(cls, values: list[float]) -> "Mean":
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return cls(fmean(values), error, len(values), max(values, key=abs))


@dataclass(frozen=True)
class Score:
    """The metric on the test split over seeds.

    Attributes:
        metric: its name.
        by_seed: the metric by name of the seed.
        mean: over the seeds.
    """

    metric: str
    by_seed: dict[str, float]

    @cached_property
    def mean(self) -> Mean:
        return Mean.of([*self.by_seed.values()])

    def minus(self, other: "Score") -> tuple[float, float]:
        """Difference of the means, and its standard error for independent runs."""
        return self.mean.value - other.mean.value, hypot(self.mean.error, other.mean.error)

    def minus_by_seed(self, other: "Score") -> Mean | None:
        """Mean difference of the runs of the same seeds, which start from the same weights; None without one."""
        changes = [value - other.by_seed[seed] for seed, value in self.by_seed.items() if seed in other.by_seed]
        return Mean.of(changes) if changes else None


def scores(rows: pd.DataFrame) -> dict[Trained, Score]:
    """Scores of one device."""
    found = latest(_tested(rows, "train"), *KEY, "variant")
    return {
        Trained(*key): Score(_metric(runs), dict(zip(runs["variant"], runs["value"], strict=True)))
        for key, runs in found.groupby(KEY)
    }


def inference_changes(rows: pd.DataFrame) -> dict[tuple[Trained, str], tuple[str, Mean]]:
    """The metric on the test split of the same weights in inference, minus that of the run that trained them.

    Returns:
        By run and attention of the inference, where that is not the run's: name and mean over the seeds, of one device.
    """
    trained = latest(_tested(rows, "train"), "checkpoint")
    used = latest(_tested(rows, "infer"), "checkpoint", "backend", "dtype")
    pairs = used.merge(trained, on=["dataset", "checkpoint", "metric"], suffixes=("", "_trained"))
    pairs = pairs[(pairs["backend"] != pairs["backend_trained"]) | (pairs["dtype"] != pairs["dtype_trained"])]
    pairs = pairs.assign(change=pairs["value"] - pairs["value_trained"])
    of_run = ["dataset", *(f"{name}_trained" for name in KEY[1:])]
    result = {}
    for (*run, backend, dtype), found in pairs.groupby([*of_run, "backend", "dtype"]):
        key = Trained(*run), f"{backend}, {dtype}"
        result[key] = _metric(found), Mean.of(found["change"].tolist())
    return result


def _tested(rows: pd.DataFrame, bench: str) -> pd.DataFrame:
    """Metrics on the test split of weights in a file."""
    return rows[(rows["bench"] == bench) & rows["metric"].str.startswith("test_") & (rows["checkpoint"] != NONE)]


def _metric(rows: pd.DataFrame) -> str:
    return rows["metric"].iloc[0].removeprefix("test_")
