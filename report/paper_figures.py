"""Figures 5 to 8 of the paper, from rows of any GPU: its series, axes, order and grouping, and its own values as marks.

The title of each says what was found.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from report.drawing import (
    GROUP_WIDTH,
    MISSING,
    MOST_WIDTH,
    SMALL,
    colour,
    draw_bars,
    edges,
    legend_above,
    new_figure,
    synthetic_key,
    write,
)
from report.engine import DISTURBED, Data, Spec, mean, quiet, real
from report.published import captions
from report.rows import merged

GROUP = ["dataset", "dim"]  # of bars
Ratios = Mapping[str, pd.DataFrame]  # by series; a line for each group


def paper_bars(data: Data, spec: Spec) -> Figure | None:
    """Figures 5, 6 and 8: a group of `bars` for each graph and each of `dims`, in a row of axes for each of `panels`.

    `graphs` names a selection of tables.yaml, which the claims on the figure share.
    A bar is the ratio of `theirs` over a series of `where`. A panel may have `marks`, the paper's own rows; `means`,
    groups for the geometric means over the graphs on which all series ran; `log`, the bottom of a logarithmic axis; and
    `caption`, the place in the paper that states the speed-up of `subject` over each series of `over`.
    """
    spec = {**spec, "graphs": data.defs[spec["graphs"]]["dataset"]}
    drawn = {"dataset": spec["graphs"], "dim": spec["dims"], "series": [*spec["bars"], *spec["over"]]}
    panels = []
    for panel in spec["panels"]:
        where = data.resolve(panel["where"]) | drawn
        rows = data.pick(where)
        if rows["value"].notna().any():
            panels.append((panel, where | {"device": rows["device"].iloc[0]}, rows))
    if not panels or panels[0][0] is not spec["panels"][0]:
        return None
    heights = [panel["inches"] for panel, *_ in panels]
    figure, grid = new_figure(MOST_WIDTH, 0.8 + sum(heights), len(panels), height_ratios=heights)
    message = {}
    for axes, (panel, where, rows) in zip(grid[:, 0], panels, strict=True):
        found = {series: _ratios(data, where, panel["theirs"], series) for series in spec["bars"]}
        of_paper = data.resolve(panel["marks"]) | drawn if "marks" in panel else None
        marks = {series: _ratios(data, of_paper, panel["theirs"], series) for series in spec["bars"] if of_paper}
        marks = marks if any(map(len, marks.values())) else {}
        _draw_bars(axes, spec, panel, rows, found, marks)
        device = where["device"].removeprefix("NVIDIA ")
        title = panel["title"].format(device=device)
        if "caption" in panel:
            over = {series: _ratios(data, where, {"series": series}, spec["subject"]) for series in spec["over"]}
            texts, first = _captions(spec, panel["caption"], over)
            also = "on real ones; " * (";" in "".join(texts)) + "in the paper"
            title = f"{title} Fused3S over each, on all graphs [{also}]:\n{', '.join(texts)}"
            message = message or {"device": device, **first}
        axes.set_title(title, size=6.5, loc="left")
    if "ours" not in message:
        return None
    first, where, rows = panels[0]
    legend_above(grid[0, 0], 6, synthetic_key(rows, _of_twins(data, where, spec, first["theirs"])), 1.15, fontsize=6.5)
    figure.suptitle(spec["title"].format(**message))
    return figure


def _ratios(data: Data, where: Spec, theirs: Spec, series: str) -> pd.DataFrame:
    sides = {"by": GROUP, "series": series, "ours": {}, "theirs": theirs}
    return pd.concat([data.pairs(merged(where, sides, {"dim": dim})) for dim in where["dim"]]).set_index(GROUP)


def _of_twins(data: Data, where: Spec, spec: Spec, theirs: Spec) -> str:
    """How far synthetic graphs can be trusted: the speed-up of `subject` on surrogates over that on their originals."""
    twins = {"use": ["twins"], "device": where["device"], "dataset": where["dataset"], "dim": where["dim"]}
    times = quiet(data.pairs(twins)).pivot(index=GROUP, columns="series", values="ratio")
    both = theirs["series"].split()[0], spec["subject"].split()[0]
    factors = (times[both[0]] / times[both[1]]).dropna() if {*both} <= {*times} else times
    if factors.empty:
        return ""
    count = factors.index.get_level_values(0).nunique()
    return f": surrogates have {mean(factors):.2f} of the kernel's real speed-up (n = {count})"


def _captions(spec: Spec, place: str, over: Ratios) -> tuple[list[str], dict[str, str]]:
    """The mean ratio over each series beside the paper's, and both numbers of the first."""
    stated, texts, first = captions(place), [], {}
    for series, found in over.items():
        ratios, paper = quiet(found)["ratio"], f"{stated[series.split()[0]]:g}x"
        if ratios.empty:
            continue
        of_real = real(quiet(found))["ratio"]
        words = f"{mean(ratios):.2f}x"
        first = first or {"ours": words, "paper": paper}
        also = [f"{mean(of_real):.2f}x"] * (0 < len(of_real) < len(ratios)) + [paper]
        texts.append(f"{spec['over'][series]} {words} [{'; '.join(also)}]")
    return texts, first


def _draw_bars(axes: Axes, spec: Spec, panel: Spec, rows: pd.DataFrame, found: Ratios, marks: Ratios) -> None:
    groups = pd.MultiIndex.from_product([spec["graphs"], spec["dims"]], names=GROUP)
    means = _mean_groups(found, marks) if panel.get("means") else {}
    width, measured = GROUP_WIDTH / len(found), {*rows["dataset"]}
    statuses = rows.set_index([*GROUP, "series"])["status"].to_dict()
    for nth, (series, ratios) in enumerate(found.items()):
        drawn, heights = ratios.reindex(groups), _heights(ratios, groups, means)
        places = np.arange(len(heights)) - GROUP_WIDTH / 2 + width * (nth + 0.5)
        kinds = [*drawn["kind"], *["real"] * len(means)]
        style = {"color": colour(series), "edgecolor": "white", "linewidth": 0.2, "label": spec["bars"][series]}
        draw_bars(axes, places, heights, width, kinds, **style)
        for x, key, one in zip(places, groups, drawn.itertuples(), strict=False):
            if key[0] not in measured:
                write(axes, x, "not run" * (nth == len(found) // 2))
            elif np.isnan(one.ratio):
                status = statuses.get((*key, series), "" if rows["date"].any() else "oom")
                words = "no base" if status in ("ok", "unchecked") else MISSING.get(status, status)
                write(axes, x, words, color="#555555")
            else:
                text = f"{one.value:,.0f}" if one.value >= 100 else f"{one.value:.3g}"
                text = DISTURBED * bool(one.noisy) + text * panel.get("milliseconds", False)
                axes.text(x, one.ratio, text, size=SMALL - 1, rotation=90, ha="center", va="bottom")
        if marks:
            label = "the paper's own value (GH200)" if nth == len(found) - 1 else None
            style = {"color": "black", "linewidth": 1.1, "label": label}
            axes.hlines(_heights(marks[series], groups, means), places - width / 2, places + width / 2, **style)
    labels = [_label(*key, rows, spec["dims"]) for key in groups] + [*means]
    axes.set_xticks(range(len(labels)), labels, size=6)
    axes.set_xlim(-0.6, len(groups) + 2 * any(one.get("means") for one in spec["panels"]) - 0.4)
    axes.set_ylabel(panel["label"], size=7)
    if means:
        axes.axvline(len(groups) - 0.5, color="black", linewidth=0.5)
    if "log" in panel:
        axes.axhline(1, color="black", linestyle="--", linewidth=0.7)
        axes.set_yscale("log", base=2)
        axes.set_ylim(panel["log"], axes.get_ylim()[1] * 1.5)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.yaxis.set_minor_locator(NullLocator())


def _heights(ratios: pd.DataFrame, groups: pd.MultiIndex, means: Mapping[str, pd.Index]) -> list[float]:
    return [*ratios["ratio"].reindex(groups), *(mean(ratios["ratio"].reindex(some)) for some in means.values())]


def _mean_groups(found: Ratios, marks: Ratios) -> dict[str, pd.Index]:
    """By their label the groups on which all series ran undisturbed, and the paper's too; and those of real graphs."""
    ran = [quiet(ratios) for ratios in (*found.values(), *marks.values()) if len(ratios)]
    common = reduce(pd.Index.intersection, (ratios.index for ratios in ran))
    of_real = common[(ran[0].loc[common, "kind"] == "real").to_numpy()] if len(common) else common
    kept = {"": common} | ({" real": of_real} if len(of_real) < len(common) else {})
    return {f"mean\nof {len(some)}{kind}": some for kind, some in kept.items() if len(some)}


def _label(dataset: str, dim: int, rows: pd.DataFrame, dims: Sequence[int]) -> str:
    """Of a group: the data set with its edges below the middle one of its d."""
    text = f"{dim}\n" * (len(dims) > 1)
    if dim != dims[len(dims) // 2]:
        return text
    nnz = rows.loc[rows["dataset"] == dataset, "nnz"].max()
    unit = " edges" if len(dims) > 1 else "\nedges"
    return text + dataset.replace("-", "-\n", 1) + (f"\n{edges(nnz)}{unit}" if nnz > 0 else "")


def sm_times(data: Data, spec: Spec) -> Figure | None:
    """Figure 7: the active time of each SM and a line at their mean; a row of axes for each of `graphs`, without (left)
    and with (right) reordering."""
    times = data.pick(spec["where"])
    if times.empty:
        return None
    same = {"metric": "sm_active_share", "device": times["device"].iloc[0]}
    shares = data.pick(merged(spec["where"], same)).set_index(["dataset", "series"])["value"]
    of_paper = data.pick(spec["marks"]).set_index(["dataset", "series"])["value"]
    datasets = [name for name in spec["graphs"] if name in {*times["dataset"]}]
    figure, grid = new_figure(MOST_WIDTH * 0.7, 0.6 + 1.7 * len(datasets), len(datasets), 2, sharey="row")
    found = []
    for line, dataset in zip(grid, datasets, strict=True):
        for axes, (series, label) in zip(line, spec["bars"].items(), strict=True):
            of_sm = times[(times["dataset"] == dataset) & (times["series"] == series)]
            axes.bar(of_sm["sm"], of_sm["value"] / 1e3, 1, color=colour(series))
            axes.axhline(of_sm["value"].mean() / 1e3, color="black", linewidth=0.8, linestyle="--")
            share, paper = shares[dataset, series], of_paper[dataset, series]
            name = of_sm["label"].iloc[0]
            axes.set_title(f"{name}, {label}: {share:.2f} (the paper's A30: {paper:.2f})", size=7)
        line[0].set_ylabel("thousand cycles")
        found.append(f"{' to '.join(f'{shares[dataset, series]:.2f}' for series in spec['bars'])} on {dataset}")
    for axes in grid[-1]:
        axes.set_xlabel(f"SM of {times['device'].iloc[0]}")
    figure.suptitle(spec["title"].format(shares=", ".join(found)))
    return figure
