"""Times of plans (benchmark `plans`), and of a model over all graphs of a collection (`infer`), as Markdown."""

import pandas as pd

from bench.records import NONE
from configs.bench_schema import Shape
from report.frames import latest
from report.markdown import table

TITLE = """# Plans, and whole collections

Drawn by `make reproduce-figures` from the CSVs under `results/`. Times are medians in ms.
"""
PLANS = """`plan`: `plan_attention` from CSR arrays on the GPU. `with backward`: with the format and the schedules of
the backward pass. `and attention`: a plan and one attention with it, as for a mask that changes at every call. Wall
clock of the host, synchronised after each call; inputs of the attention are fp16.
"""
COLLECTIONS = """The 10-block model over all graphs of a collection: batches are assembled from packed arrays, planned
and run anew, and the logits of all graphs are copied to the host. `in forward passes`: share of that time between the
CUDA events around forward passes, whose launch gaps count. One CUDA graph: `runtime.cuda_graph: true`, of batches that
are padded to one size.
"""
LAUNCHES = {"eager": "eager", "cuda_graph": "one CUDA graph"}
COLUMNS = {"plan": "plan", "plan_backward": "with backward", "plan_and_run": "and attention"}  # by variant
HEAD = (
    "collection",
    "graphs",
    "model",
    "launches",
    "backend",
    "graphs/s",
    "in forward passes",
    "ms a batch",
    "batches",
)
COLLECTION = ["graph", "dim", "heads", "blocks", "dtype", "backend", "dense", "launch"]


def plan_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with rows of the benchmarks `plans` and `infer`."""
    sections = [TITLE]
    for device, found in rows[rows["bench"] == "plans"].groupby("device"):
        times = latest(found[found["metric"] == "time"], "graph", "heads", "dim", "backend", "variant")
        for (heads, dim, backend), cells in times.groupby(["heads", "dim", "backend"]):
            sections += [
                f"## Plans of `{backend}`, heads x columns {Shape(heads, dim)}, {device}\n",
                PLANS,
                table(["graph", "edges", *COLUMNS.values()], _plan_lines(cells), 1),
            ]
    whole = rows[(rows["bench"] == "infer") & (rows["region"] == "all batches") & (rows["device_type"] == "cuda")]
    for device, found in whole.groupby("device"):
        sections += [
            f"## All graphs of a collection, {device}\n",
            COLLECTIONS,
            table(HEAD, _collection_lines(found), 5),
        ]
    return "\n".join(sections)


def _plan_lines(cells: pd.DataFrame) -> list[list[str]]:
    lines = []
    for graph, found in sorted(cells.groupby("graph"), key=lambda pair: pair[0]):
        rows = {row.variant: row for row in found.itertuples()}
        lines.append([graph.label, f"{graph.nnz:,}", *(_cell(rows.get(variant)) for variant in COLUMNS)])
    return lines


def _cell(row) -> str:
    if row is None:
        return "-"
    return f"{row.value:.3f}" if row.status in ("ok", "unchecked") else row.status


def _collection_lines(rows: pd.DataFrame) -> list[list[str]]:
    lines = []
    for key, found in latest(rows, *COLLECTION, "metric").groupby(COLLECTION):
        run = dict(zip(COLLECTION, key, strict=True))
        by_metric = {row.metric: row for row in found.itertuples()}
        rate, share, time = (by_metric.get(name) for name in ("throughput", "share_in_forward_passes", "time"))
        heads = "1 head" if run["heads"] == 1 else f"{run['heads']} heads"
        lines.append(
            [
                run["graph"].label,
                "-" if rate is None else f"{rate.graphs:,}",
                f"{run['blocks']} blocks, d = {run['dim']}, {heads}, {run['dtype']}, {run['dense']}",
                LAUNCHES[run["launch"]],
                run["backend"],
                "-" if rate is None else f"{rate.value:,.0f}",
                "-" if share is None else f"{share.value:.1%}",
                "-" if time is None else f"{time.value:.3f}",
                "-" if rate is None or rate.note == NONE else rate.note,
            ]
        )
    return lines
