"""Predicates of claims.yaml on ratios: a mean near the paper's value, every pair beyond a bound, means that fall."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import pandas as pd

from report.engine import COUNTED, Data, by_graph, mean, quiet, real
from report.findings import (
    MISSING,
    NO,
    NOISE,
    PART,
    SYNTHETIC,
    YES,
    Finding,
    NotRecordedError,
    Spec,
    describe,
    near,
    of_all,
    over_graphs,
    pairs,
    recorded,
    worst,
)

FEW = 3  # graphs; of the authors' codes a mean over fewer is weak evidence


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
    """The authors' codes, judged on the graphs where both outputs are right, of those of `paper` if any; wrong ones are
    told beside them. The verdict is the least favourable one over `cases`; with a mean of fewer than FEW graphs it is
    at most "in part"."""
    texts, means, missing = [], [], []
    for name, case in cases.items():
        found = quiet(pairs(data, {**case, "statuses": (*COUNTED, "wrong")}))
        right, wrong = found[~found["wrong"]], by_graph(found[found["wrong"]])
        in_paper = right["dataset"].isin(paper.index)
        right = right[in_paper] if in_paper.any() else right
        parts = [describe(right)] if len(right) else []
        if in_paper.any():
            parts[0] += f", published for these {_beside(by_graph(right), paper, limits)[1]:.2f}x"
        if len(wrong):
            low, high = wrong["ratio"].min(), wrong["ratio"].max()
            parts.append(f"wrong outputs on {len(wrong)} ({low:.2f}x to {high:.2f}x)")
        if not parts:
            missing.append(name)
            continue
        texts.append(f"{name}: " * bool(name) + ", ".join(parts))
        means.append(by_graph(right))
    if not texts:
        return "-"
    texts += [f"{', '.join(missing)}: no mean"] * bool(missing)

    def verdict(noise: float) -> str:
        noisy = [rows.assign(ratio=rows["ratio"] * noise) for rows in means]
        judged = [near(*_beside(rows, paper, limits)) if len(rows) else MISSING for rows in noisy]
        return worst([*judged, _with_few(means), PART if missing else YES])

    on_edge = ", on the edge" * any(verdict(noise) != verdict(1) for noise in (1 / NOISE, NOISE))
    return f"{'; '.join(texts)}{on_edge}: {verdict(1)}"


def _with_few(means: Iterable[pd.DataFrame]) -> str:
    """The best verdict that means over the graphs of these frames can have."""
    return PART if any(len(rows) < FEW for rows in means) else YES


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
        below = _below_first(means.values(), noise * spec.get("each", 1))
        verdicts.append(of_all(sum(below), len(below)) if "each" in spec else YES if all(below) else NO)
        form = spec.get("form", ".2f")
        texts.append(", ".join(f"{kind}{name} {value:{form}} (n = {len(some[name])})" for name, value in means.items()))
    if not verdicts:
        raise NotRecordedError
    codes = {name: quiet(pairs(data, case)) for name, case in spec.get("codes", {}).items()}
    codes = {name: by_graph(rows) for name, rows in codes.items() if len(rows)}
    theirs = {name: mean(rows["ratio"]) for name, rows in codes.items()}
    words = ", ".join(f"{name} {value:.2f} (n = {len(codes[name])})" for name, value in theirs.items())
    if len(theirs) > 1:
        words += f": {worst([YES if all(_below_first(theirs.values())) else NO, _with_few(codes.values())])}"
    finding = Finding(worst(verdicts), "; ".join(texts), words or "-")
    if len(verdicts) == 2:
        return replace(finding, real=verdicts[1])
    why = f"Fewer than {spec['least']} real graphs on a side." if "least" in spec else SYNTHETIC
    return replace(finding, verdict=worst([PART, *verdicts]), why=why)


def _below_first(means: Iterable[float], factor: float = 1.0) -> list[bool]:
    """Of each mean but the first: whether it is below `factor` times the first."""
    first, *others = means
    return [other < first * factor for other in others]
