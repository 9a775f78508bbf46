"""Predictions of the simulator (benchmark `scaling`), and their ratio to measured runs (benchmark `parallel`).

A prediction and a measurement are of the same case if all columns of CASE agree.
"""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from bench.records import NONE
from configs.bench_schema import Shape
from report.frames import latest
from report.parallel import KEY, PARTS, rank_parts

SCHEMES = ("halo", "heads", "allgather")
BLOCK = "block"  # region of the time of a whole block
ITEM = 2  # bytes of float16
TENSORS = 5  # h, Q, K, V and O of a block
UPPER_BOUND = "upper bound"  # note of a time whose kernels were recorded with more heads only
CASE = [
    *("device", "dataset", "data_sha256", "order", "ranks", "heads", "dim", "dtype"),
    *("variant", "link", "scope", "region"),
]


@dataclass(frozen=True)
class Size:
    """A quantity of the ranks.

    Attributes:
        largest, mean: over the ranks.
    """

    largest: float
    mean: float

    @property
    def balance(self) -> float:
        """Largest over mean; 1 where all ranks have as much."""
        return self.largest / self.mean if self.mean else 1.0


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions for one graph on one device.

    Attributes:
        rows: the latest row of each quantity.
    """

    device: str
    dataset: str
    synthetic: bool
    nodes: int
    edges: int
    rows: pd.DataFrame

    @property
    def name(self) -> str:
        return f"{self.dataset} (synthetic)" if self.synthetic else self.dataset

    @cached_property
    def partitions(self) -> list[str]:
        """As in the column `order`, in the order of the file."""
        return [*dict.fromkeys(self.rows["order"])]

    @cached_property
    def shapes(self) -> list[Shape]:
        found = self.rows[self.rows["metric"] == "time"]
        return [*dict.fromkeys(Shape(*pair) for pair in zip(found["heads"], found["dim"], strict=True))]

    @cached_property
    def links(self) -> list[str]:
        return [*dict.fromkeys(self.rows.loc[self.rows["link"] != NONE, "link"])]

    def ranks(self, partition: str) -> list[int]:
        """Numbers of ranks, 2 or more."""
        found = self.rows[(self.rows["order"] == partition) & (self.rows["ranks"] > 1)]
        return sorted({*found["ranks"]})

    def size(self, partition: str, ranks: int, metric: str) -> Size:
        """Of rows, edges or halo_rows."""
        found = self._select(order=partition, ranks=ranks, metric=metric)["value"]
        return Size(found.max(), found.mean())

    def largest_bytes(self, partition: str, ranks: int, shape: Shape, scheme: str, where: str) -> float | None:
        """Bytes that the busiest rank receives (`where` "rank"), or one rank from one other ("peer"), of a block."""
        key = {"order": partition, "ranks": ranks, "heads": shape.heads, "dim": shape.dim, "variant": scheme}
        return self._value(**key, metric=f"bytes_per_{where}", region="largest")

    def ms(
        self, partition: str, ranks: int, shape: Shape, scheme: str = NONE, link: str = NONE, region: str = NONE
    ) -> float | None:
        """Time of attention (region "none"), of a part of it, or of a block; one rank has neither scheme nor link.

        None where it was not predicted.
        """
        key = {"order": partition, "ranks": ranks, "heads": shape.heads, "dim": shape.dim}
        return self._value(**key, variant=scheme, link=link, metric="time", region=region)

    def is_bound(self, partition: str, ranks: int, shape: Shape, scheme: str) -> bool:
        """Whether the times of a scheme are upper bounds."""
        key = {"order": partition, "ranks": ranks, "heads": shape.heads, "dim": shape.dim, "variant": scheme}
        return UPPER_BOUND in {*self._select(**key)["note"]}

    def best(self, partition: str, ranks: int, shape: Shape, link: str, region: str = NONE) -> tuple[str, float] | None:
        """The fastest scheme and its time in ms; None if none was predicted."""
        found = {scheme: self.ms(partition, ranks, shape, scheme, link, region) for scheme in SCHEMES}
        found = {scheme: ms for scheme, ms in found.items() if ms is not None}
        return min(found.items(), key=lambda item: item[1]) if found else None

    def _value(self, **key: object) -> float | None:
        found = self._select(**key)["value"].dropna()
        return float(found.iloc[0]) if len(found) else None

    def _select(self, **key: object) -> pd.DataFrame:
        mask = pd.Series(True, self.rows.index)
        for column, value in key.items():
            mask &= self.rows[column] == value
        return self.rows[mask]


def predicted(rows: pd.DataFrame) -> list[Predicted]:
    """Predictions by device and graph, the graph with the most edges first.

    Args:
        rows: of `report.frames.recorded`.
    """
    found = rows[(rows["bench"] == "scaling") & (rows["status"].isin(("predicted", "unsupported")))]
    found = latest(found, *CASE, "metric")
    found = found[found["ranks"] > 0]
    groups = found.groupby(["device", "dataset", "data_source", "nodes", "nnz"], sort=False)
    result = [
        Predicted(device, dataset, source == "synthetic", nodes, edges, each)
        for (device, dataset, source, nodes, edges), each in groups
    ]
    return sorted(result, key=lambda one: (one.device, -one.edges))


def inputs(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of the inputs of each configuration: bandwidth, latency or fit_error."""
    found = rows[(rows["bench"] == "scaling") & (rows["metric"] == metric)]
    return latest(found, "device", "config", "link", "heads", "dim", "region")


def predicted_over_measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Cases that were predicted and measured, the latest of each: CASE, `predicted` and `measured` in ms, and `ratio`.

    A wrong or disturbed measurement, and a prediction that is an upper bound, do not count. The order is that of CASE.

    Args:
        rows: of `report.frames.recorded`.
    """
    times = rows[rows["metric"] == "time"]
    of_simulator = times[(times["bench"] == "scaling") & (times["status"] == "predicted")]
    of_simulator = of_simulator[of_simulator["note"] != UPPER_BOUND]
    of_runs = times[(times["bench"] == "parallel") & times["status"].isin(("ok", "unchecked"))]
    of_runs = of_runs[of_runs["disturbed"] != "yes"]
    sides = [
        latest(found, *CASE)[[*CASE, "value"]].rename(columns={"value": name})
        for name, found in (("predicted", of_simulator), ("measured", of_runs))
    ]
    both = sides[0].merge(sides[1], on=CASE, validate="one_to_one").sort_values(CASE, ignore_index=True)
    return both.assign(ratio=both["predicted"] / both["measured"])


def predicted_over_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Work of the slowest rank without the exchange, predicted and measured part by part on one GPU.

    Args:
        rows: of `report.frames.recorded`.

    Returns:
        KEY, `part` (one of PARTS, or "sum"), `predicted` and `measured` in ms, and `ratio`; of a part that neither
        side has, no row.
    """
    found = rows[(rows["bench"] == "scaling") & (rows["metric"] == "time") & (rows["status"] == "predicted")]
    found = found[(found["variant"] == "halo") & found["region"].isin(PARTS)]
    # The rank that takes longest can be another one with another link, by the exchange.
    of_links = latest(found, *KEY, "link", "region").pivot_table(index=[*KEY, "link"], columns="region", values="value")
    measured = rank_parts(rows)
    if of_links.empty or measured.empty:
        return pd.DataFrame(columns=[*KEY, "part", "predicted", "measured", "ratio"])
    sides = {"predicted": of_links.reset_index(), "measured": measured}
    for name, side in sides.items():
        side["sum"] = side[list(PARTS)].sum(axis=1)
        slowest = side.loc[side.groupby(KEY)["sum"].idxmax()]
        sides[name] = slowest.melt(KEY, [*PARTS, "sum"], var_name="part", value_name=name)
    both = sides["measured"].merge(sides["predicted"], on=[*KEY, "part"])
    both = both[(both["measured"] > 0) | (both["predicted"] > 0)]
    return both.assign(ratio=both["predicted"] / both["measured"])
