"""Rows of a results CSV, as if recorded."""

import torch

from common.provenance import provenance
from common.records import RUN_COLUMNS, Row

PROVENANCE = provenance(torch.device("cpu")) | {
    "device": "NVIDIA H200",
    "device_type": "cuda",
    "date": "2026-01-01T00:00:00Z",
}
NNZ = {"cora": 10_556, "zinc": 51_000, "reddit": 114_848_857, "pubmed": 88_651}


def row(dataset: str, series: str, milliseconds: float | None, status: str = "ok", **changes) -> Row:
    """A kernel time of a series of `report.rows`, such as "fused3s+reorder" or "F3S_splitC"."""
    measured = milliseconds is not None
    backend, _, order = series.partition("+")
    values = {
        "bench": "kernels",
        "dataset": dataset,
        "data_sha256": f"hash of {dataset}",
        "data_source": "synthetic" if dataset == "reddit" else "official",
        "nodes": 10,
        "nnz": NNZ.get(dataset, 1000),
        "graphs": 1024 if dataset == "zinc" else 1,
        "dim": 128,
        "heads": 1,
        "blocks": 0,
        "dtype": "float16",
        "out_dtype": "float32",
        "backend": "fused3s_paper" if series.startswith("F3S_") else backend,
        "variant": series if series.startswith("F3S_") else "none",
        "order": "auto" if order else "none",
        "launch": "back_to_back",
        "plan": "fixed",
        "l2": "warm",
        "scope": "kernel",
        "metric": "time",
        "unit": "ms",
        "value": milliseconds,
        "p10": milliseconds,
        "p90": milliseconds,
        "repeats": 50 if measured else 0,
        "status": status,
        "reason": "none" if status == "ok" else "because",
        "relative_error": 1e-4 if measured else None,
        "config": "configs/bench/single.yaml",
        "config_sha": "abc",
    }
    columns = PROVENANCE | values | changes
    run = {name: columns.get(name) for name in RUN_COLUMNS if name != "run_id"}
    return Row(**({**columns, "run_id": f"{hash(tuple(run.values())):x}"} | changes))
