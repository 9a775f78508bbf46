"""Share of a machine's memory bandwidth that a kernel time amounts to, so that times of several GPUs can be compared.

The bytes are those of `bench.traffic`: gathered without reuse between row windows, and compulsory. Where windows share
rows a cache serves some of them, and the share can exceed 1.
"""

import pandas as pd

from report.frames import Graph, latest

# TB/s of device memory: the paper's section "Setup" for its GPUs, NVIDIA's data sheet for the H200.
BANDWIDTH = {"A30": 0.933, "GH200": 4.0, "NVIDIA H200": 4.8}


def bytes_moved(rows: pd.DataFrame, device: str, dim: int) -> dict[Graph, float]:
    """Bytes of one run with fp16 inputs and fp32 output, one head, by graph."""
    rows = rows[(rows["bench"] == "kernels") & rows["metric"].isin(["gathered_bytes", "compulsory_bytes"])]
    rows = rows[(rows["dtype"] == "float16") & (rows["out_dtype"] == "float32") & (rows["heads"] == 1)]
    rows = latest(rows[(rows["device"] == device) & (rows["dim"] == dim)], "graph", "metric")
    wide = rows.pivot(index="graph", columns="metric", values="value")
    return wide.sum(axis=1, min_count=2).dropna().to_dict() if wide.shape[1] == 2 else {}


def share(num_bytes: float, milliseconds: float, gpu: str) -> float:
    """Bytes per time over the bandwidth of a GPU of BANDWIDTH."""
    return num_bytes / (milliseconds * 1e-3) / (BANDWIDTH[gpu] * 1e12)
