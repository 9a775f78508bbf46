"""Findings about the softmax and the accuracy of the output."""

from statistics import geometric_mean

import pandas as pd

from report.claims.claim import NOT_RECORDED, Finding, Verdict, of_all
from report.claims.evidence import Evidence
from report.claims.ratios import SUBJECT
from report.frames import latest
from report.plots.softmax_stability import THRESHOLDS

TCB_KEYS = 8  # of a tensor core block of the paper, the block size of a variant that names none


def overflow(e: Evidence) -> Finding:
    """Naive softmax overflows above e^89 in fp32 and e^11 in fp16."""
    rows = _stability(e)
    rows = rows[(rows["backend"] == "emulated") & (rows["variant"] == "naive") & (rows["scores"] == "spread")]
    texts, holds = [], []
    for dtype, threshold in THRESHOLDS.items():
        found = rows[rows["dtype"] == dtype]
        if found.empty:
            return NOT_RECORDED
        fine = found.loc[found["status"] == "ok", "score_range"]
        lost = found.loc[found["status"] != "ok", "score_range"]
        low, high = (
            fine[fine < lost.min()].max() if len(lost) else fine.max(),
            lost.min() if len(lost) else float("inf"),
        )
        texts.append(f"{dtype}: all rows finite up to {low:g}, some not from {high:g}")
        holds.append(threshold - 1 <= low <= 1.5 * threshold and threshold <= high <= 1.5 * threshold)
    why = "Largest |score| of the emulated naive softmax; reproduced: the first loss is within 1.5 times the threshold."
    return Finding(of_all(sum(holds), len(holds)), why, ours="; ".join(texts))


def stable_kernels(e: Evidence) -> Finding:
    """The kernels with online or stable softmax lose no row at any range of scores, the naive one does."""
    rows = _stability(e)
    rows = rows[rows["backend"] != "emulated"]
    if rows.empty:
        return NOT_RECORDED
    lost = rows[rows["status"] != "ok"].groupby("series").size().to_dict()
    names = ", ".join(f"{name} at {count} ranges" for name, count in lost.items()) or "none"
    verdict = Verdict.REPRODUCED if {*lost} == {"flashsparse_naive"} else Verdict.NOT
    why = "Only the naive softmax may lose rows. Reproduced: it does and no other kernel does."
    return Finding(verdict, why, ours=f"rows lost by {names}")


def online_by_block(e: Evidence) -> Finding:
    """Online softmax loses accuracy against the stable one, and more with smaller blocks."""
    rows = _stability(e)
    rows = rows[(rows["backend"] == "emulated") & (rows["dtype"] == "float16") & (rows["status"] == "ok")]
    wide = rows[rows["scores"] == "spread"].pivot_table(index="score_range", columns="variant", values="value")
    online = [name for name in wide.columns if name.startswith("online")]
    if "stable" not in wide or not online:
        return NOT_RECORDED
    excess = {name: geometric_mean((wide[name] / wide["stable"]).dropna()) for name in online}
    excess = dict(sorted(excess.items(), key=lambda item: _block_size(item[0])))
    text = ", ".join(f"{name} {value:.3f}" for name, value in excess.items())
    worse = [value > 1.01 for value in excess.values()]
    why = "Error of fp16 arithmetic over that of the stable softmax, mean over ranges. Less stable: above 1.01."
    if len(online) == 1:
        return Finding(
            Verdict.REPRODUCED if all(worse) else Verdict.NOT, f"{why} One block size was recorded.", ours=text
        )
    smallest, largest = next(iter(excess.values())), [*excess.values()][-1]
    verdict = Verdict.REPRODUCED if smallest > 1.01 and smallest > largest else Verdict.NOT
    return Finding(verdict, why, ours=text)


def _block_size(variant: str) -> int:
    """Keys per block of a variant of the online softmax."""
    digits = "".join(filter(str.isdigit, variant))
    return int(digits) if digits else TCB_KEYS


def _stability(e: Evidence) -> pd.DataFrame:
    rows = e.rows[(e.rows["bench"] == "stability") & (e.rows["metric"] == "relative_error")]
    return latest(rows, "series", "dtype", "scores", "score_range")


def accuracy(e: Evidence) -> Finding:
    """Largest error of a row of the paper's kernel against float64 over all its kernel times."""
    rows = e.rows[(e.rows["bench"] == "kernels") & (e.rows["metric"] == "time") & (e.rows["series"] == SUBJECT)]
    rows = rows[rows["relative_error"].notna() & (rows["plan"] == "fixed")]
    rows = latest(rows, "graph", "dim", "out_dtype", "launch", "l2")
    if rows.empty:
        return NOT_RECORDED
    worst = rows["relative_error"].max()
    verdict = Verdict.REPRODUCED if worst < 1e-3 and (rows["status"] == "ok").all() else Verdict.NOT
    text = f"worst row {worst:.1e} of {len(rows)} outputs"
    return Finding(verdict, "Norm of a row's error over its norm, against float64. Reproduced: below 1e-3.", ours=text)
