"""The finding on a claim, with its verdict, and the rules that all predicates share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import pandas as pd

from report.engine import Data, by_graph, mean, quiet, real

NEAR, HALF_WAY = 1.25, 2.0  # largest factors between a ratio and the paper's: reproduced, and reproduced in part
NOISE = 1.05  # a factor on what was measured that should not turn a verdict
YES, PART, NO, MISSING = "reproduced", "reproduced in part", "not reproduced", "not tested"
VERDICTS = (YES, PART, NO, MISSING)
SYNTHETIC = "Synthetic graphs alone."
Spec = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        verdict: one of VERDICTS.
        ours, codes: the numbers of this repository, and of the authors' codes on the same GPU.
        real: the verdict on real graphs alone.
        why: what was computed; follows the `why` of the declaration.
        means: the mean ratios behind `ours`.
        short: `ours` in the README; if empty, the part of it before a semicolon.
    """

    verdict: str
    ours: str = "-"
    codes: str = "-"
    real: str = "-"
    why: str = ""
    means: tuple[float, ...] = ()
    short: str = ""


RULES = ("above", "below", "of", "form", "times", "ours", "theirs")  # of a case; other keys are columns
OPTIONS = ("by", "across", "statuses")  # of `Data.pairs`
NOT_RECORDED = Finding(MISSING, why="The rows are not recorded.")


class NotRecordedError(Exception):
    """Rows of a claim are missing."""


def recorded(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows`, or a NotRecordedError if there are none."""
    if rows.empty:
        raise NotRecordedError
    return rows


def pairs(data: Data, case: Spec, noise: float = 1.0) -> pd.DataFrame:
    """The pairs of a case, whose ratio is `times` theirs over ours, and `noise`, which memory has not."""
    where = {name: value for name, value in case.items() if name not in RULES + OPTIONS}
    options = {name: case[name] for name in OPTIONS if name in case}
    found = data.pairs(where, case["ours"], case["theirs"], **options)
    factor = case.get("times", 1) * (1 if case.get("metric") == "peak_memory" else noise)
    return found.assign(ratio=found["ratio"] * factor)


def near(value: float, low: float, high: float | None = None) -> str:
    """Verdict on a ratio against the paper's value or range: near 1 a small factor is a large part of the gain."""
    high = low if high is None else high
    if (value > 1) != (low > 1):
        return NO
    if low / NEAR <= value <= high * NEAR and abs(log(value)) >= abs(log(low)) / 2:
        return YES
    return PART if low / HALF_WAY <= value <= high * HALF_WAY else NO


def of_all(holds: int, total: int) -> str:
    """Verdict on a statement that holds in some of several cases."""
    return YES if holds == total else PART if 2 * holds > total else NO


def worst(verdicts: Iterable[str]) -> str:
    """The least favourable one; "-" is none."""
    return max((verdict for verdict in verdicts if verdict != "-"), key=VERDICTS.index)


def over_graphs(found: pd.DataFrame, text: str) -> Finding:
    """On a statement about several cases, in which it `holds` or not: the least favourable verdict over all cases and
    over those whose `kind` is real."""
    some = real(found)
    on_real = of_all(some["holds"].sum(), len(some)) if len(some) else "-"
    text += f"; real graphs: {some['holds'].sum()} of {len(some)}" * (len(some) not in (0, len(found)))
    return Finding(worst([of_all(found["holds"].sum(), len(found)), on_real]), text, real=on_real)


def describe(found: pd.DataFrame) -> str:
    """Means with their counts: "2.14x (n = 15, 10 synthetic, slower on 1); real 2.45x (n = 5)". Rebuilt graphs are real
    ones of another table than the paper's."""
    noisy, labels, found = found["noisy"].sum(), quiet(found)["label"], by_graph(quiet(found))
    kinds = found["kind"].value_counts()
    counts = [f"{kinds[kind]} {kind}" for kind in ("synthetic", "file") if kind in kinds]
    rebuilt = labels[labels.str.endswith("(rebuilt)")].nunique()
    counts += [f"{rebuilt} rebuilt"] * bool(rebuilt)
    slower = (found["ratio"] < 1).sum()
    counts += [f"slower on {slower}"] * bool(slower) + [f"{noisy} CPU-bound"] * bool(noisy)
    text = f"{mean(found['ratio']):.2f}x ({', '.join([f'n = {len(found)}', *counts])})"
    some = real(found)
    return text if len(some) in (0, len(found)) else f"{text}; real {mean(some['ratio']):.2f}x (n = {len(some)})"
