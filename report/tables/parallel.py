"""The parts of attention on several ranks, timed on one GPU (benchmark `parallel`), as Markdown."""

import pandas as pd

from configs.bench_schema import Shape
from report.markdown import table
from report.parallel import KEY, PARTS, rank_parts

TITLE = """# Parts of attention on several ranks, on one GPU

Drawn by `make reproduce-figures` from the CSVs under `results/`. The work of every rank, one rank after the other and
part by part, without the exchange: the keys and values of other ranks are already there. Times are in ms, fp16, and
those of a part are summed over the ranks; `sum` adds the parts, and `over one rank` divides it by the time of the whole
graph on one rank. `slowest`: the rank with the largest sum.
"""
HEAD = ("graph", "heads x columns", "partition", "ranks", "one rank", *PARTS, "sum", "over one rank", "slowest")


def parallel_tables(rows: pd.DataFrame) -> str:
    """A section for each device with rows of the benchmark `parallel`."""
    sections = [TITLE]
    for device, found in rank_parts(rows).groupby("device"):
        sections += [f"## {device}\n", table(HEAD, _lines(found), 3)]
    return "\n".join(sections)


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
