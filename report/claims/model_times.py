"""Findings about the whole model."""

import pandas as pd

from report.claims.claim import NOT_RECORDED, Finding, Verdict, of_all, together
from report.claims.evidence import Evidence
from report.claims.ratios import SUBJECT, Find, in_words, judged, means, span
from report.frames import latest, model_rows, model_speedup
from report.paper import DGL, stated_means


def model_ratio(baseline: str, value: float) -> Find:
    """A caption of the end-to-end figure: eager, plain modules, the model outside attention in fp32 and in fp16."""

    def find(e: Evidence) -> Finding:
        verdicts, texts, measured = {}, [], baseline
        for dtype, words in (("float32", "fp32 model"), ("float16", "fp16 model")):
            for name in DGL if baseline == "dgl" else (baseline,):
                speedup = model_speedup(e.rows, SUBJECT, name, dtype=dtype, launch="eager")
                if speedup:
                    measured = name
                    verdicts |= {f"{words}, {who}": verdict for who, verdict in judged(speedup, value).items()}
                    texts.append(f"{words}: {means(speedup)}")
                    break
        if not texts:
            return NOT_RECORDED
        stands = "" if measured == baseline else f" `{measured}` stands for DGL, which has no CUDA on PyPI."
        commits = _commits(e, SUBJECT, measured)
        mixed = f" Rows of {commits} commits." if commits > 1 else ""
        why = f"{in_words(verdicts)} n counts pairs of a graph and a d; untrained weights.{stands}{mixed}"
        return Finding(together(verdicts.values()), why, ours="; ".join(texts))

    return find


def _commits(e: Evidence, *backends: str) -> int:
    """Number of commits that the eager times of plain models come from."""
    rows = model_rows(e.rows)
    rows = rows[(rows["metric"] == "time") & rows["series"].isin([f"{name} plain" for name in backends])]
    return latest(rows, "graph", "dim", "scope", "dtype", "series", "region")["commit"].nunique()


def model_range(e: Evidence) -> Finding:
    """The abstract's end-to-end range."""
    stated = {m.baseline: m.low for m in stated_means() if (m.gpu, m.group) == ("H100", "model")}
    findings = {name: model_ratio(name, value)(e) for name, value in stated.items()}
    found = {name: finding for name, finding in findings.items() if finding is not NOT_RECORDED}
    if not found:
        return NOT_RECORDED
    verdicts = [finding.verdict for finding in findings.values()]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in Verdict if v in verdicts)
    values = []
    for name in found:
        for dtype in ("float32", "float16"):
            speedups = [model_speedup(e.rows, SUBJECT, one, dtype=dtype) for one in (DGL if name == "dgl" else (name,))]
            values += [speedup.mean for speedup in speedups if speedup]
    why = f"Of the {len(verdicts)} means of the caption: {counts}. Both sides of a ratio have one precision."
    verdict = together(verdicts) if len(found) == len(findings) else Verdict.UNCHECKED
    return Finding(verdict, why, ours=span(values))


def attention_shares(e: Evidence, backend: str) -> pd.DataFrame:
    """Attention over the whole eager model with plain layers, [graph, d]; in an fp32 model where it was recorded."""
    rows = model_rows(e.rows)
    rows = rows[(rows["metric"] == "time") & (rows["region"] == "none") & (rows["series"] == f"{backend} plain")]
    rows = latest(rows[(rows["heads"] == 1) & (rows["blocks"] == 10)], "graph", "dim", "scope", "dtype")
    rows = rows[(rows["status"] == "ok") & (rows["disturbed"] != "yes")]
    for dtype in ("float32", "float16"):
        times = rows[rows["dtype"] == dtype]
        wide = times.pivot(index=["graph", "dim"], columns="scope", values="value").reindex(
            columns=["attention", "model"]
        )
        found = (wide["attention"] / wide["model"]).dropna()
        if len(found):
            return found.unstack("dim")
    return pd.DataFrame()


def baseline_spends_most(e: Evidence) -> Finding:
    """DGL's attention takes most of the time, here that of what stands for it."""
    for backend in DGL:
        shares = attention_shares(e, backend)
        if not shares.empty:
            values = shares.stack().dropna()
            text = f"more than half in {(values > 0.5).sum()} of {len(values)} pairs of graph and d"
            why = f"Share of `{backend}`'s attention in the eager model, median {values.median():.0%}."
            return Finding(of_all(int((values > 0.5).sum()), len(values)), why, ours=text)
    return NOT_RECORDED


def bottleneck_on(*datasets: str) -> Find:
    """Attention takes most of the time of Fused3S's model on large graphs."""

    def find(e: Evidence) -> Finding:
        shares = attention_shares(e, SUBJECT)
        if shares.empty:
            return NOT_RECORDED
        chosen = shares[[graph.dataset in datasets for graph in shares.index]].stack().dropna()
        if chosen.empty:
            return NOT_RECORDED
        names = ", ".join(sorted({graph.label for graph, _ in chosen.index}))
        text = f"{chosen.min():.0%} to {chosen.max():.0%} (n = {len(chosen)})"
        why = f"Share of attention on {names}; reproduced: more than half in every pair of graph and d."
        return Finding(of_all(int((chosen > 0.5).sum()), len(chosen)), why, ours=text)

    return find


def share_by_width(e: Evidence) -> Finding:
    """On the H100 attention stays a constant or growing share as d grows, above all of hyper and FlashSparse."""
    texts, grows, total = [], 0, 0
    for backend in (SUBJECT, "dfgnn_hyper", "flashsparse_naive"):
        shares = attention_shares(e, backend)
        if not {64, 256} <= {*shares.columns}:
            continue
        both = shares[[64, 256]].dropna()
        kept = int((both[256] >= 0.9 * both[64]).sum())
        grows, total = grows + kept, total + len(both)
        texts.append(
            f"{backend}: {both[64].median():.0%} to {both[256].median():.0%}, not falling on {kept} of {len(both)}"
        )
    why = "Median share of attention at d = 64 and 256, eager. Not falling: at least 0.9 of the share at d = 64."
    return Finding(of_all(grows, total), why, ours="; ".join(texts)) if texts else NOT_RECORDED
