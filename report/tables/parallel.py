"""Attention on several ranks (benchmark `parallel`) as Markdown."""

import pandas as pd

from configs.bench_schema import Shape
from report.markdown import table
from report.parallel import KEY, PARTS, rank_parts, runs

TITLE = """# Attention of one graph on several ranks

Drawn by `make reproduce-figures` from the CSVs under `results/`. Times are in ms, fp16. `one rank`: the whole graph on
one GPU.

In "parts" one GPU does the work of every rank, one rank after the other and part by part, without the exchange: the
keys and values of other ranks are already there. Times of a part are summed over the ranks; `sum` adds the parts, and
`over one rank` divides it by the time on one rank. `slowest`: the rank with the largest sum.

In "runs" each rank has a GPU of its own. Attention is launched by the host, with its exchange, until the slowest rank
is done; on one rank it is replayed as a CUDA graph, so that a graph of less than a millisecond shows the launches of
the host. `exchange`: keys and values alone; `-` where queries and outputs travel, too. `times faster`: `one rank` over
`attention`.
"""
RUN_HEAD = ("graph", "heads x columns", "partition", "ranks", "link", "scheme", "one rank", "attention", "exchange")
RUN_HEAD += ("times faster",)
HEAD = ("graph", "heads x columns", "partition", "ranks", "one rank", *PARTS, "sum", "over one rank", "slowest")


def parallel_tables(rows: pd.DataFrame) -> str:
    """Sections for each device with rows of the benchmark `parallel`."""
    sections = [TITLE]
    for device, found in rank_parts(rows).groupby("device"):
        sections += [f"## Parts, {device}\n", table(HEAD, _lines(found), 3)]
    for device, found in runs(rows).groupby("device"):
        sections += [f"## Runs, {device}\n", table(RUN_HEAD, [_run_line(run) for _, run in found.iterrows()], 3)]
    return "\n".join(sections)


def _run_line(run: pd.Series) -> list[str]:
    cells = (run["graph"].label, str(Shape(run["heads"], run["dim"])), run["order"], str(run["ranks"]))
    times = ("-" if pd.isna(run[each]) else f"{run[each]:.3f}" for each in ("whole", "attention", "exchange"))
    return [*cells, run["link"], run["variant"], *times, f"{run['whole'] / run['attention']:.2f}"]


def _lines(ranks: pd.DataFrame) -> list[list[str]]:
    lines = []
    for _, found in ranks.groupby(KEY, sort=False):
        one, parts = found.iloc[0], found[list(PARTS)]
        total = parts.to_numpy().sum()
        times = (one["whole"], *parts.sum(), total)
        cells = (one["graph"].label, str(Shape(one["heads"], one["dim"])), one["order"], str(one["ranks"]))
        slowest = f"{parts.sum(axis=1).max():.3f}"
        lines.append([*cells, *(f"{time:.3f}" for time in times), f"{total / one['whole']:.2f}", slowest])
    return lines
