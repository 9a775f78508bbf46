"""Times of one GPU from recorded rows: attention by shape, and the layers around it by width.

Attention of R rows that gather C columns (`bench.traffic`), of a shape whose times were recorded:

    time = launch + a * (bytes of C keys and values) / (recorded rate of random gathers) + b * (row windows)

The rate depends on the bytes of a row and on the working set, keys and values of all columns that can be gathered
(`report.gather_model`). launch, a and b are fitted to the recorded graphs of the shape, smallest sum of relative
deviations. On 30 graphs of 1x128 the time of a graph that was left out of the fit is off by 10 % in the median; with
edges in place of the gather term it is off by 29 %: rows of a window share columns, and L2 serves small graphs.

The layers around attention: time = launch + c * rows, fitted alike to recorded regions of eager passes.
"""

from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd
from scipy.optimize import linprog

from configs.bench_schema import Shape
from report.frames import latest
from report.gather_model import PeakRates, achieved

BACKEND = "fused3s"
ITEM = 2  # bytes of float16
WINDOW_ROWS = 16
FEWEST = 6  # recorded graphs that a fit needs, twice the number of its terms
DENSE_REGIONS = ("dense", "qkv")  # of a fused eager pass; without embedding and readout


class NotRecordedError(ValueError):
    """There are too few recorded times for a fit."""


@dataclass(frozen=True)
class Fit:
    """time = terms @ coefficients, in ms.

    Attributes:
        coefficients: of each term, 0 or more.
        errors: |predicted / recorded - 1| of each graph by the fit to the others.
    """

    coefficients: tuple[float, ...]
    errors: tuple[float, ...]

    @classmethod
    def of(cls, terms: np.ndarray, times: np.ndarray) -> "Fit":
        """Args: terms [n, t], times [n] in ms.

        Raises:
            NotRecordedError: fewer than FEWEST times.
        """
        if len(times) < FEWEST:
            raise NotRecordedError(f"{len(times)} recorded graphs; {FEWEST} or more are needed")
        everyone = np.arange(len(times))
        errors = []
        for one in everyone:
            others = everyone != one
            errors.append(abs(terms[one] @ _least_deviation(terms[others], times[others]) / times[one] - 1))
        return cls(tuple(_least_deviation(terms, times).tolist()), tuple(errors))

    @property
    def graphs(self) -> int:
        return len(self.errors)

    @property
    def median_error(self) -> float:
        return median(self.errors)

    def ms(self, *terms: float) -> float:
        return float(np.dot(self.coefficients, terms))


def _least_deviation(terms: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Coefficients from 0 on with the least sum of |terms @ x / times - 1|; medians do not follow outliers."""
    relative = terms / times[:, None]
    scale = relative.max(0)
    relative = relative / scale
    count, size = relative.shape
    # Variables: x, then the deviation of each time.
    slack = np.eye(count)
    bounds = np.block([[relative, -slack], [-relative, -slack]])
    found = linprog(
        np.concatenate([np.zeros(size), np.ones(count)]), bounds, np.concatenate([np.ones(count), -np.ones(count)])
    )
    return found.x[:size] / scale


@dataclass(frozen=True, eq=False)
class AttentionTimes:
    """Attention of one shape on one GPU, float16.

    Attributes:
        anchors: recorded over fitted time of each recorded graph, by the hash of its edges: what the fit does not know
            of a graph (columns in L2, skew).
    """

    shape: Shape
    fit: Fit
    rates: PeakRates
    anchors: dict[str, float]

    @classmethod
    def of(cls, rows: pd.DataFrame, device: str, shape: Shape) -> "AttentionTimes":
        """From rows of `report.frames.recorded`.

        Raises:
            NotRecordedError: too few times of the shape, or no gather rates of the device.
        """
        rates = PeakRates.of(rows, device)
        if not rates.complete:
            raise NotRecordedError(f"{device}: no peak rates are recorded; scripts/peak_rates.py measures them")
        kept = (rows["device"] == device) & rows["bench"].isin(("kernels", "heads")) & (rows["series"] == BACKEND)
        kept &= (rows["heads"] == shape.heads) & (rows["dim"] == shape.dim)
        kept &= (rows["dtype"] == "float16") & (rows["out_dtype"] == "float16")
        # One benchmark for `achieved`; graphs that both have were measured last in `heads`.
        cells = latest(achieved(rows[kept].assign(bench="kernels")), "data_sha256").sort_values("data_sha256")
        found = cls(shape, Fit((0.0, 0.0, 0.0), ()), rates, {})
        sizes = [
            (row.nodes, round(row.gathered_bytes / (2 * found.row_bytes)), row.nodes) for row in cells.itertuples()
        ]
        times = cells["value"].to_numpy(float)
        try:
            fit = Fit.of(np.array([found._terms(*size) for size in sizes]).reshape(-1, 3), times)
        except NotRecordedError as error:
            raise NotRecordedError(f"attention of {shape} on {device}: {error}") from None
        fitted = cls(shape, fit, rates, {})
        anchors = {
            sha: float(time / fitted.ms(*size))
            for sha, time, size in zip(cells["data_sha256"], times, sizes, strict=True)
        }
        return cls(shape, fit, rates, anchors)

    @property
    def row_bytes(self) -> int:
        """Of a row of keys, all heads."""
        return ITEM * self.shape.width

    def ms(self, rows: int, gathered: int, columns: int) -> float:
        """Milliseconds of `rows` rows that gather `gathered` columns out of `columns`; 0 without rows."""
        return self.fit.ms(*self._terms(rows, gathered, columns)) if rows else 0.0

    def copy_ms(self, num_bytes: float) -> float:
        """Milliseconds to read and write this many bytes together."""
        return num_bytes / self.rates.copy

    def _terms(self, rows: int, gathered: int, columns: int) -> tuple[float, float, float]:
        gather = 0.0
        if gathered:
            rate = self.rates.gather_rate(self.row_bytes, 2 * columns * self.row_bytes)
            gather = 2 * gathered * self.row_bytes / rate
        return 1.0, gather, float(-(-rows // WINDOW_ROWS))


@dataclass(frozen=True, eq=False)
class DenseTimes:
    """The layers of one block around attention, fused, float16, on one GPU."""

    fit: Fit

    @classmethod
    def of(cls, rows: pd.DataFrame, device: str, width: int) -> "DenseTimes":
        """From rows of `report.frames.recorded`.

        Raises:
            NotRecordedError: too few regions of models of this width.
        """
        kept = (rows["device"] == device) & (rows["bench"] == "end_to_end") & rows["region"].isin(DENSE_REGIONS)
        kept &= (rows["backend"] == BACKEND) & (rows["dense"] == "fused") & (rows["dtype"] == "float16")
        kept &= (rows["dim"] == width) & (rows["metric"] == "time") & rows["value"].notna()
        found = latest(rows[kept], "data_sha256", "region")
        whole = found.groupby("data_sha256").agg(
            ms=("value", "sum"), regions=("region", "nunique"), nodes=("nodes", "first"), blocks=("blocks", "first")
        )
        whole = whole[whole["regions"] == len(DENSE_REGIONS)]
        terms = np.stack([np.ones(len(whole)), whole["nodes"].to_numpy(float)], 1)
        try:
            return cls(Fit.of(terms, (whole["ms"] / whole["blocks"]).to_numpy(float)))
        except NotRecordedError as error:
            raise NotRecordedError(f"layers of width {width} on {device}: {error}") from None

    def ms(self, rows: int) -> float:
        """Milliseconds of one block's layers for `rows` rows; 0 without rows."""
        return self.fit.ms(1.0, rows) if rows else 0.0
