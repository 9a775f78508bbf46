"""Findings about the paper's graphs, and about masks of sequence models."""

from statistics import geometric_mean

from report.claims.claim import NOT_RECORDED, Finding, Verdict, of_all
from report.claims.evidence import Evidence
from report.claims.ratios import Find
from report.frames import latest


def data_set_table(*datasets: str) -> Find:
    """Statistics of blocks against the paper's table."""

    def find(e: Evidence) -> Finding:
        table = e.data_sets("datasets")
        if table.empty:
            return NOT_RECORDED
        table = table[table["dataset"].isin(datasets) & table["status"].isin(["ok", "off"])]
        real = table[table["source"] != "synthetic"]
        only = table[(table["source"] == "synthetic") & ~table["dataset"].isin({*real["dataset"]})]
        if table.empty:
            return NOT_RECORDED
        texts = [
            f"{words}: {(rows['status'] == 'ok').sum()} of {len(rows)} values of {rows['dataset'].nunique()} sets"
            for words, rows in (("real", real), ("synthetic", only))
            if len(rows)
        ]
        on_target = (real["status"] == "ok").all() and len(real)
        verdict = Verdict.REPRODUCED if on_target and only.empty else Verdict.IN_PART if len(real) else Verdict.SCOPE
        why = (
            "Values within the target of the table."
            if only.empty
            else ("Values within the target; synthetic sets are made after the table, official loaders are there.")
        )
        return Finding(verdict, why, ours="; ".join(texts))

    return find


def deciles(*datasets: str) -> Find:
    """The table of deciles."""

    def find(e: Evidence) -> Finding:
        table = e.data_sets("deciles")
        if table.empty:
            return NOT_RECORDED
        table = table[table["dataset"].isin(datasets)]
        real = table[table["source"] != "synthetic"]
        chosen = real if len(real) else table
        if chosen.empty:
            return NOT_RECORDED
        same = (chosen["ours_min"] == chosen["paper_min"]) & (chosen["ours_max"] == chosen["paper_max"])
        kind = "real" if len(real) else "synthetic"
        verdict = of_all(int(same.sum()), len(chosen)) if len(real) else Verdict.IN_PART
        why = (
            "Cells that equal the paper's."
            if len(real)
            else "Cells that equal the paper's; the graphs are made after them."
        )
        return Finding(verdict, why, ours=f"{same.sum()} of {len(chosen)} cells ({kind})")

    return find


def masks(plan: str, *names: str) -> Find:
    """Masks of sequence models as graphs against FlexAttention and dense attention.

    Args:
        plan: fixed, or rebuilt at every call.
        names: with which the data sets begin.
    """

    def find(e: Evidence) -> Finding:
        rows = e.rows[(e.rows["bench"] == "kernels") & (e.rows["metric"] == "time") & (e.rows["plan"] == plan)]
        rows = rows[rows["dataset"].str.startswith(names) & (rows["launch"] != "isolated")]
        rows = latest(rows, "graph", "series", "dim", "out_dtype")
        rows = rows[rows["status"] == "ok"]
        times = rows.pivot(index=["graph", "dim", "out_dtype"], columns="series", values="value")
        texts, ahead, total = [], 0, 0
        for rival in ("flex_attention", "sdpa_padded"):
            if {"fused3s", rival} <= {*times.columns}:
                ratios = (times[rival] / times["fused3s"]).dropna()
                ahead, total = ahead + int((ratios > 1).sum()), total + len(ratios)
                span = f"{ratios.min():.2f} to {ratios.max():.2f}, n = {len(ratios)}"
                texts.append(f"{geometric_mean(ratios):.2f}x over {rival} ({span})")
        why = f"Speed-up of `fused3s` at all lengths and d, format {plan}. Reproduced: faster in every case."
        return Finding(of_all(ahead, total), why, ours="; ".join(texts)) if total else NOT_RECORDED

    return find
