"""Rows that follow from measured ones: the gather model, achieved rates, bytes, and the best other kernel on a graph.

The gather model is the time of an attention kernel that reuses no row:

    model = gathered / (gather rate for rows of that size from a K and V of that size)
          + compulsory / (copy rate, bytes read and written)

with the bytes of `bench.traffic`; gathers and streams share one path to memory. It is no lower bound: a kernel that
works on more than 16 queries at a time, or that finds rows of neighbouring windows in a cache, is faster.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from report.rows import select

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
CELL = ["device", "bench", "data_sha256", "dim", "heads", "kv_heads", "dtype", "out_dtype", "series", "edges"]
CELL += ["region", "l2"]
SAME_RUN = ["device", "bench", "data_sha256", "dim", "heads", "out_dtype", "launch", "l2", "plan", "region"]
BEST_OTHER = "best other"
OURS = ("fused3s",)


@dataclass(frozen=True, eq=False)
class PeakRates:
    """Rates of one device, from the rows of `peak_rates`.

    Attributes:
        copy: bytes read and written per ms; None if not measured.
        gather: bytes gathered per ms by the faster load path: [working sets of K and V in bytes, bytes of a row].
        mma: FLOP per ms of mma.sync; None if not measured.
    """

    device: str
    copy: float | None
    gather: pd.DataFrame
    mma: float | None

    @classmethod
    def of(cls, rows: pd.DataFrame, device: str) -> "PeakRates":
        rates = select(rows, {"bench": "peak_rates", "status": "ok", "device": device})
        row_bytes = (rates["dim"] * rates["dtype"].map(ITEM_BYTES)).astype(int)
        rates = rates.assign(row_bytes=row_bytes, rate=rates["work"] / rates["value"])
        best = {name: found["rate"].max() for name, found in rates.groupby("backend")}
        gather = rates[rates["backend"] == "gather"].pivot_table("rate", "working_set", "row_bytes", "max")
        return cls(device, best.get("copy"), gather, best.get("mma"))

    @property
    def complete(self) -> bool:
        """Whether the gather model can be computed."""
        return self.copy is not None and not self.gather.empty

    def gather_rate(self, row_bytes: int, working_set: int) -> float:
        """Bytes per ms for rows of `row_bytes` from a K and V of `working_set` bytes.

        Interpolated over the logarithm of the working set; outside of the measured range and for other row sizes the
        nearest value counts.
        """
        nearest = min(self.gather.columns, key=lambda size: abs(np.log(size / row_bytes)))
        rates = self.gather[nearest].dropna()
        return float(np.interp(np.log(working_set), np.log(rates.index.to_numpy(float)), rates))

    def model_ms(self, nodes: int, dim: int, dtype: str, gathered: float, compulsory: float) -> float:
        """Milliseconds of the gather model; K and V are [nodes, dim] of `dtype`, one head."""
        row_bytes = dim * ITEM_BYTES[dtype]
        return gathered / self.gather_rate(row_bytes, 2 * nodes * row_bytes) + compulsory / self.copy


def derived_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """All of them; each has the provenance of the row that it is computed from."""
    return pd.concat([*achieved(rows), best_other(rows)], ignore_index=True)


def achieved(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Of each correct time launched back to back with known bytes: rows of the metrics

    bytes: gathered and compulsory bytes.
    tb_per_s, tflop_per_s: bytes and 4 d per score over the time.
    gather_model: milliseconds, of one head on a device with recorded peak rates.
    """
    times = select(rows, {"metric": "time", "status": "ok", "launch": "back_to_back", "plan": ["fixed", "none"]})
    kinds = ["gathered_bytes", "compulsory_bytes"]
    sizes = select(rows, {"metric": kinds}).pivot_table("value", CELL, "metric", "last").reindex(columns=kinds)
    found = times.join(sizes, on=CELL).dropna(subset=kinds)
    moved, seconds = found["gathered_bytes"] + found["compulsory_bytes"], found["value"] / 1e3
    flop = 4 * found["dim"] * found["nnz"] * found["heads"]
    rates = {device: PeakRates.of(rows, device) for device in found["device"].unique()}
    model = [
        rates[row.device].model_ms(row.nodes, row.dim, row.dtype, row.gathered_bytes, row.compulsory_bytes)
        if rates[row.device].complete and row.heads == 1
        else np.nan
        for row in found.itertuples()
    ]
    values = {"bytes": moved, "tb_per_s": moved / seconds / 1e12, "tflop_per_s": flop / seconds / 1e12}
    values["gather_model"] = pd.Series(model, found.index, dtype=float)
    return [
        found.drop(columns="compulsory_bytes").assign(metric=metric, value=value).dropna(subset="value")
        for metric, value in values.items()
    ]


def best_other(rows: pd.DataFrame) -> pd.DataFrame:
    """The least correct time of a kernel that is not ours, by graph and run: backend "best other", named in the note.

    One row for each type of the inputs, and one of type "any".
    """
    kernels = {"bench": ["kernels", "float32"], "metric": "time", "status": "ok", "variant": "none", "heads": 1}
    times = select(rows, kernels | {"backend": {"not": [*OURS]}})
    both = pd.concat([times, times.assign(dtype="any")])
    first = both.sort_values("value", kind="stable").drop_duplicates([*SAME_RUN, "dtype"])
    return first.assign(note=first["series"], backend=BEST_OTHER, series=BEST_OTHER)
