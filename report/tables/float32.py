"""Attention in float32 over float16, other kernels over it, and its errors (benchmark `float32`), as Markdown."""

from collections.abc import Callable
from statistics import geometric_mean

import pandas as pd

from report.frames import latest
from report.markdown import table

TITLE = """# Attention in float32

Drawn by `make reproduce-figures` from the CSVs under `results/`. Geometric means over graphs, in brackets the worst
graph; all kernels by turns, back to back, L2 warm, each output compared with float64. "highest" and "high" are those of
`torch.get_float32_matmul_precision()`. float16: `fused3s` with fp16 inputs and output. Error: the worst row against
float64 in float32 "highest", as a multiple of that of plain torch in float32: median over graphs, and the worst. The
error of a row of a gradient is over the root mean square of all rows' norms where that is larger than its own.
"""
HEAD = (
    *("heads x columns", "pass", "graphs", "highest / float16", "high / float16", "`dfgnn_tiling` / highest"),
    *("`csr_unfused` / highest", "error over plain torch"),
)
KEY = ("graph", "heads", "dim", "region")
HIGHEST, HIGH, HALF = ("fused3s", "highest"), ("fused3s", "high"), ("fused3s", "none")
TILING, UNFUSED = ("dfgnn_tiling", "none"), ("csr_unfused", "none")


def float32_tables(rows: pd.DataFrame) -> str:
    """A section for each GPU."""
    sections = [TITLE]
    for device, found in rows[rows["bench"] == "float32"].groupby("device"):
        found = latest(found, *KEY, "backend", "variant", "dtype", "metric")
        commits = ", ".join(dict.fromkeys(commit[:9] for commit in found["commit"]))
        sections += [f"## {device}, commit {commits}\n", table(HEAD, _lines(found), 2)]
    return "\n".join(sections)


def _lines(rows: pd.DataFrame) -> list[list[str]]:
    lines = []
    for (heads, dim, region), found in rows.groupby(["heads", "dim", "region"]):
        times: dict[tuple[str, str], dict] = {}
        for row in found[(found["metric"] == "time") & (found["status"] == "ok")].itertuples():
            times.setdefault((row.backend, row.variant), {})[row.graph] = row.value
        errors = found.loc[found["metric"] == "error_over_torch", "value"]
        highest = times.get(HIGHEST, {})
        lines.append(
            [
                *(f"{heads}x{dim}", region, str(len(highest))),
                *(_mean(_ratios(over, times.get(HALF, {})), max) for over in (highest, times.get(HIGH, {}))),
                *(_mean(_ratios(times.get(other, {}), highest), min) for other in (TILING, UNFUSED)),
                f"{errors.median():.1f} ({errors.max():.1f})" if len(errors) else "-",
            ]
        )
    return lines


def _ratios(over: dict, under: dict) -> list[float]:
    """Quotients of the times of the graphs that occur in both."""
    return [value / under[graph] for graph, value in over.items() if graph in under]


def _mean(ratios: list[float], worst: Callable) -> str:
    return f"{geometric_mean(ratios):.2f} ({worst(ratios):.2f})" if ratios else "-"
