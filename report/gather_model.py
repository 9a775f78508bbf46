"""Recorded peak rates of a machine, and the gather model of an attention kernel: its time without reuse of rows.

    model = gathered / (gather rate for rows of that size from a K and V of that size)
          + compulsory / (copy rate, bytes read and written)

with the bytes of `bench.traffic`; gathers and streams share one path to memory. Tensor cores are no limit: even full
blocks have 16 FLOP per gathered byte in fp16. The model is no lower bound: a kernel that works on more than 16 queries
at a time, or that finds rows of neighbouring windows in a cache, is faster.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from report.frames import latest

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
CELL = ["device", "graph", "dim", "heads", "dtype", "out_dtype", "series", "l2"]


@dataclass(frozen=True, eq=False)
class PeakRates:
    """Rates of one device.

    Attributes:
        copy: bytes read and written per ms; None if not measured.
        gather: bytes gathered per ms by the faster load path, [working sets of K and V in bytes, bytes of a row].
        mma: FLOP per ms of mma.sync; None if not measured.
    """

    device: str
    copy: float | None
    gather: pd.DataFrame
    mma: float | None

    @classmethod
    def of(cls, rows: pd.DataFrame, device: str) -> "PeakRates":
        rates = machine_rates(rows[rows["device"] == device])
        best = {name: found["rate"].max() for name, found in rates.groupby("backend")}
        gather = rates[rates["backend"] == "gather"].pivot_table("rate", "working_set", "row_bytes", "max")
        return cls(device, best.get("copy"), gather, best.get("mma"))

    @property
    def complete(self) -> bool:
        """Whether the gather model can be computed."""
        return self.copy is not None and not self.gather.empty

    def gather_rate(self, row_bytes: int, working_set: int) -> float:
        """Bytes per ms for rows of `row_bytes` from a K and V of `working_set` bytes.

        Interpolated over the logarithm of the working set; the nearest value outside of the measured range and for
        other row sizes.

        Raises:
            ValueError: no gather was measured on this device.
        """
        if self.gather.empty:
            raise ValueError(f"{self.device}: no gather rates were recorded; scripts/peak_rates.py measures them")
        nearest = min(self.gather.columns, key=lambda size: abs(np.log(size / row_bytes)))
        rates = self.gather[nearest].dropna()
        return float(np.interp(np.log(working_set), np.log(rates.index.to_numpy(float)), rates))

    def model_ms(self, nodes: int, dim: int, dtype: str, gathered: float, compulsory: float) -> float:
        """Milliseconds of the gather model; K and V are [nodes, dim] of `dtype`, one head.

        Args:
            gathered, compulsory: bytes, see `bench.traffic`.

        Raises:
            ValueError: gather or copy was not measured on the device.
        """
        if self.copy is None:
            raise ValueError(f"{self.device}: no copy was recorded; scripts/peak_rates.py measures it")
        row_bytes = dim * ITEM_BYTES[dtype]
        return gathered / self.gather_rate(row_bytes, 2 * nodes * row_bytes) + compulsory / self.copy


def machine_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Latest successful row of each micro-benchmark, with columns row_bytes and rate (bytes or FLOP per ms)."""
    rows = rows[(rows["bench"] == "peak_rates") & (rows["status"] == "ok")]
    rows = latest(rows, "device", "backend", "variant", "dim", "dtype", "working_set")
    row_bytes = rows["dim"] * rows["dtype"].map(ITEM_BYTES)
    return rows.assign(row_bytes=row_bytes.astype(int), rate=rows["work"] / rows["value"])


def achieved(rows: pd.DataFrame, l2: str = "warm") -> pd.DataFrame:
    """Rows with the latest correct time of each cell, launched back to back, that has its bytes, and columns

    gathered_bytes, compulsory_bytes: see `bench.traffic`.
    tb_per_s: gathered and compulsory bytes over the time.
    tflop_per_s: 4 d per score over the time.
    """
    rows = rows[(rows["bench"] == "kernels") & (rows["launch"] != "isolated") & (rows["plan"] != "rebuilt")]
    rows = latest(rows, *CELL, "metric")
    times = rows[(rows["metric"] == "time") & (rows["status"] == "ok") & (rows["l2"] == l2)]
    sizes = ["gathered_bytes", "compulsory_bytes"]
    wide = rows[rows["metric"].isin(sizes)].pivot(index=CELL, columns="metric", values="value").reindex(columns=sizes)
    found = times.join(wide, on=CELL).dropna(subset=sizes)
    moved, flop = found[sizes].sum(axis=1), 4 * found["dim"] * found["nnz"] * found["heads"]
    return found.assign(tb_per_s=moved / found["value"] / 1e9, tflop_per_s=flop / found["value"] / 1e9)


def model_over_time(cells: pd.DataFrame, rates: PeakRates) -> pd.Series:
    """Gather model over time of the rows of `achieved`: above 1 where rows are shared between windows or cached."""
    columns = ["nodes", "dim", "dtype", "gathered_bytes", "compulsory_bytes"]
    model = [rates.model_ms(*cell) for cell in cells[columns].itertuples(index=False)]
    return pd.Series(model, cells.index, dtype=float) / cells["value"]
