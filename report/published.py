"""The authors' values as rows of the same form, so that a table or claim compares ours with them like any two rows.

    bench "codes"      their codes: rows of that benchmark. Sums of kernel durations, so without the cost of a launch
    bench "published"  times that they published for a GH200 and an A30, d = 128 (published_runtime_ms_*.csv); without a
                       hash of edges, so found by the name of the data set; and shares of SM active time on an A30

The columns of the second kind are named in results/paper/README.md.
"""

from functools import cache
from pathlib import Path

import pandas as pd

from common.records import NONE, Row
from report.rows import read_yaml, with_names

FOLDER = Path(__file__).parents[1] / "results" / "paper"
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
PLAIN = {"device_type": "cuda", "commit": "published", "date": "", "dirty": "no", "data_sha256": NONE, "nnz": 0}
PLAIN |= {"nodes": 0, "graphs": 1, "metric": "time", "unit": "ms", "scope": "kernel", "status": "unchecked"}
PLAIN |= {"scores": "normal", "dtype": "float16", "out_dtype": "float32", "dim": 128, "heads": 1, "blocks": 0}


def with_published(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows`, those of the authors' codes once more under the name of our form of the kernel, and those of this
    module."""
    codes = rows[(rows["bench"] == "codes") & (rows["metric"] == "kernel_time")]
    codes = codes[codes["backend"].str.startswith(("published_", "turbo_gnn"))]
    names = codes["backend"].str.removeprefix("published_").replace("fused3s", "fused3s_paper")
    codes = codes.assign(backend=names, series=names, metric="time", l2=NONE)
    return pd.concat([rows, codes, published_rows()], ignore_index=True)


@cache
def published_rows() -> pd.DataFrame:
    """All of them."""
    table = pd.concat([*map(_times, ("GH200", "A30")), _sm_shares()], ignore_index=True)
    for name, field in Row.model_fields.items():
        default = PLAIN.get(name, None if field.is_required() else field.default)
        table[name] = table[name].fillna(default) if name in table and default is not None else table.get(name, default)
    whole = dict.fromkeys(("dim", "heads", "kv_heads", "blocks", "nodes", "nnz", "graphs", "ranks"), int)
    return with_names(table.astype(whole | dict.fromkeys(("p10", "p90", "relative_error", "score_range"), float)))


def _times(gpu: str) -> pd.DataFrame:
    table = pd.read_csv(FOLDER / f"published_runtime_ms_{gpu.lower()}_d128.csv", index_col="dataset")
    groups = read_yaml("graphs.yaml")["groups"]
    names = groups["single"] | groups["batched"]
    table = table[list(COLUMNS)].rename(columns=COLUMNS, index=names).stack().dropna()
    table = table.rename_axis(["dataset", "backend"]).rename("value").reset_index()
    return table.assign(bench="published", device=gpu, data_source="official")


def _sm_shares() -> pd.DataFrame:
    table = pd.read_csv(FOLDER / "sm_active.csv").rename(columns={"gpu": "device", "mean_over_longest": "value"})
    table = table[["device", "dataset", "variant", "value"]]
    return table.assign(bench="published", backend="fused3s_paper", metric="sm_active_share", data_source="official")


def captions(place: str) -> dict[str, float]:
    """Geometric means of speed-ups over each baseline that a place in the paper states, such as "Figure 5(a)"."""
    table = pd.read_csv(FOLDER / "geomeans.csv")
    found = table[table["source"].str.startswith(place)]
    return dict(zip(found["baseline"], found["low"], strict=True))


def scores() -> pd.DataFrame:
    """Test scores that others published, with the columns dataset, metric, score and model."""
    return pd.read_csv(FOLDER / "scores.csv")
