"""Verdicts on claims: the predicates that claims.yaml names, each computed from recorded rows at every call."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from common.csv_files import AS_TEXT
from common.records import NOT_BUILT
from report.engine import Data, mean, quiet, real
from report.findings import (
    MISSING,
    NO,
    NOISE,
    NOT_RECORDED,
    PART,
    SYNTHETIC,
    YES,
    Finding,
    NotRecordedError,
    Spec,
    of_all,
    over_graphs,
    pairs,
    recorded,
    worst,
)
from report.ratio_verdicts import judge_holds, judge_less, judge_near

SOURCES = ("official", "file", "synthetic")
EMULATED = {"bench": "stability", "metric": "relative_error", "backend": "emulated"}


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
        runs = "runs, wrong output" if statuses == {"wrong"} else "runs" if statuses else "not measured"
        texts.append(f"{name}: {', '.join(sorted(failed)) or runs}")
    if all(text.endswith("not measured") for text in texts):
        raise NotRecordedError
    return Finding(of_all(holds, len(texts)), "; ".join(texts))


def judge_fits(data: Data, spec: Spec) -> Finding:
    """On each graph the peak memory of `subject` is at most `gib`; every other kernel needs more, or failed.

    At most in part if `subject` fails on one of the graphs where `beside` was measured, on a GPU of less memory.
    """
    texts, shorts, holds = [], [], 0
    for dataset in spec["graphs"]:
        found = data.pick({**spec["where"], "dataset": dataset})
        need = found[found["status"] == "ok"].groupby("series")["value"].max() / 1024
        fits = need.index[need <= spec["gib"]]
        if spec["subject"] not in need:
            raise NotRecordedError
        holds += {*fits} == {spec["subject"]}
        texts.append(f"{dataset}: {', '.join(f'{name} {value:.1f}' for name, value in need.sort_values().items())} GiB")
        others = need.drop(spec["subject"])
        rest = f"baselines {others.min():.1f} or more" if len(others) else "no baseline runs"
        shorts.append(f"{dataset}: {need[spec['subject']]:.1f} GiB, {rest}")
    finding = Finding(of_all(holds, len(texts)), "; ".join(texts), short="; ".join(shorts))
    beside = data.pick({**spec["beside"], "dataset": spec["graphs"]})
    failed = beside[beside["status"] == "oom"]
    if spec["subject"] not in {*failed["series"]}:
        return finding
    ran = beside[beside["status"] == "ok"].groupby("dataset")["series"].agg(", ".join)
    words = [f"{dataset} with {ran.get(dataset, 'no kernel')}" for dataset in spec["graphs"]]
    told = f"; {failed['device'].iloc[0]} runs {', '.join(words)}"
    verdict = worst([finding.verdict, PART])
    return replace(finding, verdict=verdict, ours=finding.ours + told, short=finding.short + told)


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
    return over_graphs(every, "; ".join(texts))


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
