"""Verdicts on claims: the predicates that claims.yaml names, each computed from recorded rows at every call."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import log
from pathlib import Path
from typing import Any

import pandas as pd

from common.csv_files import AS_TEXT
from common.records import NOT_BUILT
from report.engine import COUNTED, Data, by_graph, mean, quiet, real

NEAR, HALF_WAY = 1.25, 2.0  # largest factors between a ratio and the paper's: reproduced, and reproduced in part
NOISE = 1.05  # a factor on what was measured that should not turn a verdict
YES, PART, NO, MISSING = "reproduced", "reproduced in part", "not reproduced", "not tested"
VERDICTS = (YES, PART, NO, MISSING)
SYNTHETIC = "Synthetic graphs alone."
Spec = Mapping[str, Any]
SOURCES = ("official", "file", "synthetic")
EMULATED = {"bench": "stability", "metric": "relative_error", "backend": "emulated"}


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        verdict: one of VERDICTS.
        ours, codes: the numbers of this repository, and of the authors' codes on the same GPU.
        real: the verdict on real graphs alone.
        why: what was computed; follows the `why` of the declaration.
        means: the mean ratios behind `ours`.
    """

    verdict: str
    ours: str = "-"
    codes: str = "-"
    real: str = "-"
    why: str = ""
    means: tuple[float, ...] = ()


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
    on_real = of_all(real(found)["holds"].sum(), len(real(found))) if len(real(found)) else "-"
    return Finding(worst([of_all(found["holds"].sum(), len(found)), on_real]), text, real=on_real)


def describe(found: pd.DataFrame) -> str:
    """Means with their counts: "2.14x (n = 15, 10 synthetic, slower on 1); real 2.45x (n = 5)"."""
    noisy, found = found["noisy"].sum(), by_graph(quiet(found))
    kinds = found["kind"].value_counts()
    counts = [f"{kinds[kind]} {kind}" for kind in ("synthetic", "file") if kind in kinds]
    slower = (found["ratio"] < 1).sum()
    counts += [f"slower on {slower}"] * bool(slower) + [f"{noisy} CPU-bound"] * bool(noisy)
    text = f"{mean(found['ratio']):.2f}x ({', '.join([f'n = {len(found)}', *counts])})"
    some = real(found)
    return text if len(some) in (0, len(found)) else f"{text}; real {mean(some['ratio']):.2f}x (n = {len(some)})"


def judge_near(data: Data, spec: Spec, noise: float = 1.0) -> Finding:
    """`value` (or [low, high]) against the mean ratio of each of `cases`; `codes`: that of the authors' codes, one
    case or several.

    `times`: of the paper's own times, whose mean over the same graphs takes the place of `value`. `half`: of the graphs
    that gain, which are a third to two thirds of all. `instead`: cases that are judged if none of `cases` was measured,
    and else told beside them; with `stand_in` they are of another code than the paper's, and get no verdict.
    """
    cases, beside = spec["cases"], spec.get("instead", {})
    is_instead = all(quiet(pairs(data, case)).empty for case in cases.values())
    if is_instead:
        cases, beside = beside or cases, {}
    paper = pairs(data, spec["times"]).set_index("dataset")["ratio"] if "times" in spec else pd.Series()
    limits = spec["value"] if isinstance(spec["value"], list) else [spec["value"]]
    verdicts, on_real, texts, means = [], [], [], []
    for name, pair in cases.items():
        found = pairs(data, pair, noise)
        if quiet(found).empty:  # the default run of the figures does not measure every case
            continue
        some = [quiet(found), real(quiet(found))]
        if spec.get("half"):
            gain = [rows[rows["ratio"] > 1] for rows in some]
            if gain[0].empty:
                return Finding(NO, f"gains on none of {len(found)}")
            shares = [len(few) / len(rows) for few, rows in zip(gain, some, strict=True) if len(rows)]
            verdicts += [YES if 1 / 3 <= share <= 2 / 3 else PART for share in shares]
            name = f"{name}gains on {len(gain[0])} of {len(some[0])}"
            found, some = gain[0], gain
        some = [by_graph(rows) for rows in some]
        means += [mean(rows["ratio"]) for rows in some if len(rows)]
        verdicts += [PART] * (not len(some[1]))
        judged = [near(*_beside(rows, paper, limits)) for rows in some if len(rows)]
        verdicts, on_real = verdicts + judged, on_real + judged[1:]
        text = f"{name}: {describe(found)}" if name else describe(found)
        same = [_beside(rows, paper, limits) for rows in some if rows["dataset"].isin(paper.index).any()]
        both = [
            f"{ours:.2f}x, {theirs:.2f}x{kind}" for kind, (ours, theirs) in zip(("", " (real)"), same, strict=False)
        ]
        published = f"; on the paper's graphs here, published: {'; '.join(both)}{_ranks(some[0], paper)}"
        texts.append(text + published * bool(both))
    if not texts:
        raise NotRecordedError
    told = {name: pairs(data, case) for name, case in beside.items()}
    texts += [f"{name}: {describe(found)}" for name, found in told.items() if not quiet(found).empty]
    codes = spec.get("codes", {})
    theirs = _of_codes(data, {"": codes} if "ours" in codes else codes, paper, limits)
    rewritten = pairs(data, spec["rewritten"]) if "rewritten" in spec else pd.DataFrame()
    factor = f"{mean(by_graph(rewritten)['ratio']):.2f}" if len(rewritten) else ""
    why = f"Our form of the baseline is {factor} times as fast as {spec['than']}." if factor else ""
    if is_instead and spec.get("stand_in"):
        return Finding(MISSING, "; ".join(texts), theirs)
    real_alone = worst(on_real) if on_real else "-"
    return Finding(worst(verdicts), "; ".join(texts), theirs, real_alone, why, tuple(means))


def _of_codes(data: Data, cases: Mapping[str, Spec], paper: pd.Series, limits: Sequence[float]) -> str:
    """The authors' codes, judged on the graphs where both outputs are right; the others are told beside them."""
    texts, verdicts = [], []
    for name, case in cases.items():
        found = quiet(pairs(data, {**case, "statuses": (*COUNTED, "wrong")}))
        right, wrong = found[~found["wrong"]], by_graph(found[found["wrong"]])
        parts = [describe(right)] if len(right) else []
        if len(wrong):
            low, high = wrong["ratio"].min(), wrong["ratio"].max()
            parts.append(f"wrong outputs on {len(wrong)} ({low:.2f}x to {high:.2f}x)")
        if parts:
            texts.append(f"{name}: " * bool(name) + ", ".join(parts))
            verdicts.append(near(*_beside(by_graph(right), paper, limits)) if len(right) else MISSING)
    return f"{'; '.join(texts)}: {worst(verdicts)}" if texts else "-"


def _ranks(found: pd.DataFrame, paper: pd.Series) -> str:
    """Spearman's correlation of our ratio and the paper's over the graphs of both."""
    ours = found.set_index("dataset")["ratio"].reindex(paper.index).dropna()
    correlation = ours.rank().corr(paper[ours.index].rank())
    return f"; rank correlation {correlation:.2f} (n = {len(ours)})" if len(ours) > 2 else ""


def _beside(found: pd.DataFrame, paper: pd.Series, limits: Sequence[float]) -> tuple[float, ...]:
    """Our mean ratio and the paper's over the graphs of both; without one, ours over all and what the paper states."""
    both = found[found["dataset"].isin(paper.index)]
    if both.empty:
        return mean(found["ratio"]), *limits
    return mean(both["ratio"]), mean(paper[both["dataset"]])


def _held(data: Data, cases: Mapping[str, Spec], noise: float = 1.0) -> tuple[pd.DataFrame, list[str]]:
    """Whether each pair of all cases `holds`, and the kind of its graph; a text for each case."""
    every, texts = [pd.DataFrame({"holds": pd.Series(dtype=bool), "kind": ""})], []
    for name, case in cases.items():
        found = quiet(pairs(data, case, noise))
        if found.empty:
            continue
        bound = None
        if case.get("of"):  # the bound is the mean over all graphs; the claim speaks of some
            bound, found = mean(found["ratio"]), found[found["dataset"].isin(case["of"])]
        ratios = found["ratio"]
        limit = case["below"] if "below" in case else case["above"]
        limit = bound if limit is None else limit
        kept = ratios < limit if "below" in case else ratios > limit
        every.append(found.assign(holds=kept)[["holds", "kind"]])
        form = case.get("form", ".2f")
        if len(found) <= 3:
            text = ", ".join(f"{label} {ratio:{form}}" for label, ratio in zip(found["label"], ratios, strict=True))
        else:
            text = f"{kept.sum()} of {len(kept)} ({ratios.min():{form}} to {ratios.max():{form}})"
        texts.append(f"{name}: {text}" + (f" (mean {bound:{form}})" if bound else ""))
    return pd.concat(every, ignore_index=True), texts


def judge_holds(data: Data, spec: Spec, noise: float = 1.0) -> Finding:
    """Every pair of each case has a ratio `above` or `below` a bound; null: the mean, for the graphs in `of`."""
    found, texts = _held(data, spec["cases"], noise)
    counted = f"{recorded(found)['holds'].sum()} of {len(found)}"
    ours = "; ".join([counted] * (len(texts) > 1) + texts)
    finding = over_graphs(found, f"{counted} pairs" if spec.get("short") else ours)
    codes, of_codes = _held(data, spec.get("codes", {}))
    if len(codes):
        names = ", ".join(text.partition(":")[0] for text in of_codes)
        finding = replace(finding, codes=f"{codes['holds'].sum()} of {len(codes)} pairs ({names})")
    if finding.real != "-" or spec.get("sizes"):
        return finding
    return replace(finding, verdict=worst([finding.verdict, PART]), why=SYNTHETIC)


def judge_less(data: Data, spec: Spec, noise: float = 1.0) -> Finding:
    """The mean of the first case is above that of each other one, over all graphs and over real ones.

    Cases that have pairs of the same `same` columns in common are compared on those alone. `least`: graphs of a
    mean, by default one. `each`: the others are judged one by one, below this part of the first.
    """
    found = {name: recorded(quiet(pairs(data, case))) for name, case in spec["cases"].items()}
    if same := spec.get("same"):
        keys = [rows.set_index(same).index for rows in found.values()]
        common = reduce(pd.Index.intersection, keys)
        found = {name: rows[key.isin(common)] for (name, rows), key in zip(found.items(), keys, strict=True)}
    texts, verdicts = [], []
    for kind, some in (("", found), ("real ", {name: real(rows) for name, rows in found.items()})):
        some = {name: by_graph(rows) for name, rows in some.items()}
        if any(len(rows) < spec.get("least", 1) for rows in some.values()):
            continue
        means = {name: mean(rows["ratio"]) for name, rows in some.items()}
        first, *others = means.values()
        below = sum(other < first * noise * spec.get("each", 1) for other in others)
        verdicts.append(of_all(below, len(others)) if "each" in spec else of_all(below == len(others), 1))
        form = spec.get("form", ".2f")
        texts.append(", ".join(f"{kind}{name} {value:{form}} (n = {len(some[name])})" for name, value in means.items()))
    if not verdicts:
        raise NotRecordedError
    codes = {name: quiet(pairs(data, case)) for name, case in spec.get("codes", {}).items()}
    theirs = {name: mean(rows["ratio"]) for name, rows in codes.items() if len(rows)}
    words = ", ".join(f"{name} {value:.2f} (n = {len(codes[name])})" for name, value in theirs.items())
    if len(theirs) > 1:
        first, *others = theirs.values()
        words += f": {YES if all(other < first for other in others) else NO}"
    finding = Finding(worst(verdicts), "; ".join(texts), words or "-")
    if len(verdicts) == 2:
        return replace(finding, real=verdicts[1])
    why = f"Fewer than {spec['least']} real graphs on a side." if "least" in spec else SYNTHETIC
    return replace(finding, verdict=worst([PART, *verdicts]), why=why)


def judge_small(data: Data, spec: Spec) -> Finding:
    """The graphs of each batch have fewer than `nodes` nodes on average."""
    found = recorded(data.pick(spec["where"]).drop_duplicates("data_sha256"))
    sizes = found["nodes"] / found["graphs"]
    text = f"{sizes.min():.0f} to {sizes.max():.0f} nodes on average (n = {len(found)})"
    return over_graphs(found.assign(holds=sizes < spec["nodes"]), text)


def judge_status(data: Data, spec: Spec) -> Finding:
    """Each of `cases` runs or fails as the paper says: {name: {fails: true, ...selection}}."""
    texts, holds = [], 0
    for name, case in spec["cases"].items():
        statuses = {*data.pick({k: v for k, v in case.items() if k != "fails"})["status"]}
        failed = statuses - {"ok", "unchecked", "wrong"}
        holds += bool(statuses) and bool(failed) == case.get("fails", False)
        texts.append(f"{name}: {', '.join(sorted(failed)) or ('runs' if statuses else 'not measured')}")
    if all(text.endswith("not measured") for text in texts):
        raise NotRecordedError
    return Finding(of_all(holds, len(texts)), "; ".join(texts))


def judge_fits(data: Data, spec: Spec) -> Finding:
    """On each graph the peak memory of `subject` is at most `gib`; every other kernel needs more, or failed.

    At most in part if `subject` fails on one of the graphs where `beside` was measured, on a GPU of less memory.
    """
    texts, holds = [], 0
    for dataset in spec["graphs"]:
        found = data.pick({**spec["where"], "dataset": dataset})
        need = found[found["status"] == "ok"].groupby("series")["value"].max() / 1024
        fits = need.index[need <= spec["gib"]]
        if spec["subject"] not in need:
            raise NotRecordedError
        holds += {*fits} == {spec["subject"]}
        texts.append(f"{dataset}: {', '.join(f'{name} {value:.1f}' for name, value in need.sort_values().items())} GiB")
    finding = Finding(of_all(holds, len(texts)), "; ".join(texts))
    beside = data.pick({**spec["beside"], "dataset": spec["graphs"]})
    failed = beside[beside["status"] == "oom"]
    if spec["subject"] not in {*failed["series"]}:
        return finding
    ran = beside[beside["status"] == "ok"].groupby("dataset")["series"].agg(", ".join)
    words = [f"{dataset} with {ran.get(dataset, 'no kernel')}" for dataset in spec["graphs"]]
    ours = f"{finding.ours}; {failed['device'].iloc[0]} runs {', '.join(words)}"
    return replace(finding, verdict=worst([finding.verdict, PART]), ours=ours)


def judge_error(data: Data, spec: Spec) -> Finding:
    """The largest relative error of a row is below `below`, and no output is wrong."""
    found = recorded(data.pick(spec["where"]).dropna(subset="relative_error"))
    largest = found["relative_error"].max()
    good = largest < spec["below"] and (found["status"] == "ok").all()
    return Finding(YES if good else NO, f"worst row {largest:.1e} of {len(found)} outputs")


def judge_balance(data: Data, spec: Spec, noise: float = 1.0) -> Finding:
    """The share of active time of the SMs rises above 0.9 with reordering."""
    where = {"bench": "sm_active", "metric": "sm_active_share", "dataset": spec["dataset"]}
    ours = data.pick(where | {"status": "ok", "out_dtype": "float32"})
    shares = ours.set_index("series")["value"]
    if not {"F3S_splitC", "F3S_reorderRW"} <= {*shares.index}:
        raise NotRecordedError
    before, after = shares["F3S_splitC"], shares["F3S_reorderRW"]
    risen = after * noise > before
    verdict = YES if risen and after * noise > 0.9 else PART if risen else NO
    synthetic = len(real(ours)) == 0
    text = f"{before:.2f} to {after:.2f}{' (synthetic)' * synthetic}"
    return Finding(worst([verdict, PART]), text, why=SYNTHETIC) if synthetic else Finding(verdict, text, real=verdict)


def judge_bandwidth(data: Data, spec: Spec, noise: float = 1.0) -> Finding:
    """The kernel uses a larger share of the rate of copies than of that of the tensor cores, on every graph."""
    memory = recorded(data.measured({**spec["where"], "metric": "tb_per_s"}))
    tensor = data.measured({**spec["where"], "metric": "tflop_per_s"})
    peaks = data.pick({"bench": "peak_rates", "status": "ok", "device": memory["device"].iloc[0]})
    rates = (peaks["work"] / peaks["value"] / 1e9).groupby(peaks["backend"]).max()  # TB/s, TFLOP/s
    if not {"copy", "mma"} <= {*rates.index}:
        raise NotRecordedError
    bandwidth, cores = noise * memory["value"] / rates["copy"], tensor["value"] / rates["mma"]
    shares = [
        f"{name} {some.min():.1%} to {some.max():.1%}" for name, some in (("copies", bandwidth), ("mma.sync", cores))
    ]
    text = f"{', '.join(shares)} (n = {len(memory)}); below half of that of copies on {(bandwidth < 0.5).sum()}"
    return over_graphs(memory.assign(holds=(bandwidth > cores) & (bandwidth >= 0.5)), text)


def judge_by_width(data: Data, spec: Spec, noise: float = 1.0) -> Finding:
    """The share of attention at the second of two d is at least 0.9 of that at the first."""
    texts, holds = [], []
    for name, case in spec["cases"].items():
        shares = quiet(pairs(data, case)).pivot(index=["data_sha256", "kind"], columns="dim", values="ratio").dropna()
        if shares.empty:
            continue
        kept = noise * shares.iloc[:, -1] >= 0.9 * shares.iloc[:, 0]
        holds.append(kept)
        medians = f"{shares.iloc[:, 0].median():.0%} to {shares.iloc[:, -1].median():.0%}"
        texts.append(f"{name}: {medians}, not falling on {kept.sum()} of {len(kept)}")
    if not texts:
        raise NotRecordedError
    every = pd.concat(holds).reset_index(name="holds")
    finding = over_graphs(every, "; ".join(texts))
    return replace(finding, verdict=of_all(every["holds"].sum(), len(every)))


def judge_overflow(data: Data, spec: Spec) -> Finding:
    """The naive softmax loses its first row within 1.5 times the threshold of each type."""
    where = EMULATED | {"variant": "naive", "scores": "spread"}
    texts, holds = [], 0
    for dtype, threshold in spec["thresholds"].items():
        found = recorded(data.pick(where | {"dtype": dtype}))
        lost = found.loc[found["status"] != "ok", "score_range"].min()
        fine = found.loc[(found["status"] == "ok") & ~(found["score_range"] >= lost), "score_range"].max()
        texts.append(f"{dtype}: all rows finite up to {fine:g}, some not from {lost:g}")
        holds += bool(threshold - 1 <= fine <= 1.5 * threshold and threshold <= lost <= 1.5 * threshold)
    return Finding(of_all(holds, len(texts)), "; ".join(texts))


def judge_losses(data: Data, spec: Spec) -> Finding:
    """`loser` loses rows at some range of scores, and no other kernel does."""
    found = recorded(data.pick(EMULATED | {"backend": {"not": ["emulated"]}}))
    lost = found[found["status"] != "ok"].groupby("series").size()
    text = ", ".join(f"{name} at {count} ranges" for name, count in lost.items()) or "none"
    return Finding(YES if {*lost.index} == {spec["loser"]} else NO, f"rows lost by {text}")


def judge_blocks(data: Data, spec: Spec) -> Finding:
    """The error of the online softmax over that of the stable one is above 1.01, and larger with smaller blocks."""
    where = EMULATED | {"dtype": "float16", "status": "ok", "scores": "spread"}
    found = data.pick(where).pivot_table("value", "score_range", "variant")
    sizes = sorted((int(name.partition("_")[2]), name) for name in found if name.startswith("online_"))
    if not sizes or "stable" not in found:
        raise NotRecordedError
    excess = {name: mean((found[name] / found["stable"]).dropna()) for _, name in sizes}
    values = [*excess.values()]
    verdict = YES if values[0] > 1.01 and values[0] >= values[-1] else NO
    return Finding(verdict, ", ".join(f"{name} {value:.3f}" for name, value in excess.items()))


def judge_values(data: Data, spec: Spec, folder: Path) -> Finding:
    """Statistics of data sets, or their deciles, equal the paper's: rows of a table of results/datasets."""
    found = _table_of_sets(folder, spec["table"])
    found = found[found["dataset"].isin(spec["sets"]) & ~found["status"].eq("not published")]
    if spec["table"] == "deciles":
        found = found.assign(same=(found["ours_min"] == found["paper_min"]) & (found["ours_max"] == found["paper_max"]))
    else:
        found = found[found["status"].isin(["ok", "off"])]
        found = found.assign(same=found["status"] == "ok")
    official, made = found[found["source"] != "synthetic"], found[found["source"] == "synthetic"]
    made = made[~made["dataset"].isin(official["dataset"])]
    kinds = {"real": official, "synthetic, made after the table": made}
    texts = [
        f"{name}: {rows['same'].sum()} of {len(rows)} values of {rows['dataset'].nunique()} sets"
        for name, rows in kinds.items()
        if len(rows)
    ]
    recorded(found)
    verdict = of_all(int(official["same"].sum()), len(official)) if len(official) else NO
    return Finding(worst([verdict, PART]) if len(made) and len(official) else verdict, "; ".join(texts))


def judge_formats(data: Data, spec: Spec, folder: Path) -> Finding:
    """BSB is smaller than another format by the paper's formulas, on every data set; as built is told beside it."""
    table = _of_best_source(_table_of_sets(folder, "formats"))
    texts, verdict = [], MISSING
    for column, words in (("formula_bits", "by formula"), ("built_bits", "as built")):
        wide = table[table[column] != NOT_BUILT].pivot(index="dataset", columns="format", values=column)
        ratios = (wide["BSB"].astype(float) / wide[spec["against"]].astype(float)).dropna()
        if len(ratios):
            smaller = int((ratios < 1).sum())
            verdict = of_all(smaller, len(ratios)) if words == "by formula" else verdict
            texts.append(f"{words} {ratios.min():.2g} to {ratios.max():.2g}, smaller on {smaller} of {len(ratios)}")
    return Finding(verdict, "; ".join(texts))


def judge_tiles(data: Data, spec: Spec, folder: Path) -> Finding:
    """The tiles of `denser` hold more nonzeros over their elements than those of BSB, on every data set."""
    table = _of_best_source(_table_of_sets(folder, "tiles"))
    wide = table.pivot(index=["dataset", "source"], columns="format", values="density").astype(float)
    found = (wide[spec["denser"]] / wide["BSB"]).reset_index(name="ratio")
    text = f"{found['ratio'].min():.2f} to {found['ratio'].max():.2f} times as dense (n = {len(found)})"
    kinds = found["source"].where(found["source"] == "synthetic", "real")
    return over_graphs(found.assign(holds=found["ratio"] > 1, kind=kinds), text)


def _table_of_sets(folder: Path, name: str) -> pd.DataFrame:
    """A table of results/datasets, of text."""
    path = folder / f"{name}.csv"
    return recorded(pd.read_csv(path, **AS_TEXT) if path.exists() else pd.DataFrame())


def _of_best_source(table: pd.DataFrame) -> pd.DataFrame:
    """One line for each data set and format: of the official source, else of a file, else of a surrogate."""
    best_first = table.sort_values("source", key=lambda source: source.map(SOURCES.index))
    return best_first.drop_duplicates(["dataset", "format"])


def judge_summary(data: Data, spec: Spec, findings: Mapping[str, Finding]) -> Finding:
    """All claims whose `says` holds `of`: reproduced if all are, in part if more than half are at least in part. One
    that only another code than the paper's was measured for is not."""
    found = [finding for says, finding in findings.items() if spec["of"] in says]
    counts = Counter(finding.verdict for finding in found)
    if not found or NOT_RECORDED in found:
        return NOT_RECORDED
    on_real = [finding.real for finding in found if finding.real != "-" or finding.verdict == MISSING]
    verdicts = [_of_several([finding.verdict for finding in found]), _of_several(on_real) if on_real else "-"]
    theirs = Counter(finding.codes.rpartition(": ")[2] for finding in found if finding.codes != "-")
    words = [", ".join(f"{number} {name}" for name, number in some.items()) for some in (counts, theirs)]
    values = [value for finding in found for value in finding.means]
    ours = f"{min(values):.2f}x to {max(values):.2f}x; of {len(found)} captions: {words[0]}"
    codes = f"of {theirs.total()} captions: {words[1]}" if theirs else "-"
    return Finding(worst(verdicts), ours, codes, verdicts[1])


def _of_several(verdicts: Sequence[str]) -> str:
    """Reproduced if all are, in part if more than half are at least in part."""
    some = sum(verdict in (YES, PART) for verdict in verdicts)
    return YES if {*verdicts} == {YES} else of_all(some, len(verdicts)) if some < len(verdicts) else PART


PREDICATES: dict[str, Callable[..., Finding]] = {
    "near": judge_near,
    "holds": judge_holds,
    "less": judge_less,
    "small": judge_small,
    "status": judge_status,
    "fits": judge_fits,
    "error": judge_error,
    "balance": judge_balance,
    "bandwidth": judge_bandwidth,
    "by_width": judge_by_width,
    "overflow": judge_overflow,
    "losses": judge_losses,
    "blocks": judge_blocks,
    "values": judge_values,
    "formats": judge_formats,
    "tiles": judge_tiles,
}


def judged(kind: str, data: Data, spec: Spec, folder: Path = Path()) -> Finding:
    """The finding of a predicate, which says if a factor of NOISE on what was measured would turn its verdict.

    Args:
        folder: of the tables of data sets.
    """
    judge = PREDICATES[kind]
    takes = inspect.signature(judge).parameters
    try:
        finding = judge(data, spec, **({"folder": folder} if "folder" in takes else {}))
    except NotRecordedError:
        return NOT_RECORDED
    noises = (1 / NOISE, NOISE) if "noise" in takes else ()
    turned = any(judge(data, spec, noise=noise).verdict != finding.verdict for noise in noises)
    return replace(finding, why=f"{finding.why} On the edge.".strip()) if turned else finding
