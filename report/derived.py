"""Rows that follow from measured ones: achieved rates, bytes, and the best other kernel on a graph."""

import pandas as pd

from report.rows import select

CELL = ["device", "bench", "data_sha256", "dim", "heads", "kv_heads", "dtype", "out_dtype", "series", "edges"]
CELL += ["region", "l2"]
SAME_RUN = ["device", "bench", "data_sha256", "dim", "heads", "out_dtype", "launch", "l2", "plan", "region"]
BEST_OTHER = "best other"
OURS = ("fused3s",)


def derived_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """All of them; each has the provenance of the row that it is computed from."""
    return pd.concat([*achieved(rows), best_other(rows)], ignore_index=True)


def achieved(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Of each correct time launched back to back with known bytes: rows of the metrics

    bytes: gathered and compulsory bytes, see `bench.traffic`.
    tb_per_s, tflop_per_s: bytes and 4 d per score over the time.
    """
    times = select(rows, {"metric": "time", "status": "ok", "launch": "back_to_back", "plan": ["fixed", "none"]})
    kinds = ["gathered_bytes", "compulsory_bytes"]
    sizes = select(rows, {"metric": kinds}).pivot_table("value", CELL, "metric", "last").reindex(columns=kinds)
    found = times.join(sizes, on=CELL).dropna(subset=kinds)
    moved, seconds = found["gathered_bytes"] + found["compulsory_bytes"], found["value"] / 1e3
    flop = 4 * found["dim"] * found["nnz"] * found["heads"]
    values = {"bytes": moved, "tb_per_s": moved / seconds / 1e12, "tflop_per_s": flop / seconds / 1e12}
    return [found.drop(columns=kinds).assign(metric=metric, value=value) for metric, value in values.items()]


def best_other(rows: pd.DataFrame) -> pd.DataFrame:
    """The least correct time of a kernel that is not ours, by graph and run: backend "best other", named in the note.

    One row for each type of the inputs, and one of type "any"; disturbed if a disturbed time may be less.
    """
    kernels = {"bench": "kernels", "metric": "time", "status": "ok", "variant": "none", "heads": 1}
    times = select(rows, kernels | {"backend": {"not": [*OURS]}})
    both = pd.concat([times, times.assign(dtype="any")])
    cell = [*SAME_RUN, "dtype"]
    noisy = both["disturbed"] == "yes"
    first = both.assign(noisy=noisy).sort_values(["noisy", "value"], kind="stable").drop_duplicates(cell)
    first = first.join(both[noisy].groupby(cell)["p10"].min().rename("low"), on=cell)
    disturbed = first["disturbed"].mask(first["low"] < first["value"], "yes")
    named = {"note": first["series"], "backend": BEST_OTHER, "series": BEST_OTHER}
    return first.drop(columns=["noisy", "low"]).assign(disturbed=disturbed, **named)
