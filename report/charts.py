"""Types of charts, drawn from rows and ratios of `report.engine`; report/figures.py calls them.

pyplot is not used: no display, no global state. Hatched bars and hollow dots are synthetic or surrogate graphs; error
bars reach from p10 to p90 of both times.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from report import drawing as on
from report import selections as of
from report.engine import COUNTED, DISTURBED, Data, Where, by_graph, mean, quiet, real
from report.published import captions

DASHES = ("-", "--", ":", "-.")
GROUP = ["dataset", "dim"]  # of bars of a figure of the paper
Ratios = Mapping[str, pd.DataFrame]  # by series; a line for each group


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """The graphs of rows by number of edges, one line each."""
    return rows.sort_values(["nnz", "label"]).drop_duplicates("data_sha256").set_index("data_sha256")


def _means(found: pd.DataFrame) -> str:
    """ "2.31x on 5 real, 2.05x on all 15"."""
    found = quiet(found)
    some = real(found)
    texts = [f"{mean(some['ratio']):.2f}x on {len(some)} real"] * bool(len(some))
    texts += [f"{mean(found['ratio']):.2f}x on all {len(found)}"] * (len(found) > len(some))
    return ", ".join(texts) or "on no graph"


def times(data: Data, where: Where, label: str, series: Sequence[tuple[str, Where, str]] = ()) -> Figure | None:
    """Bars of times: a group for each graph, a bar for each of `series` (colour, selection, label), or of the rows."""
    rows = data.pick(where)
    if not (rows["status"] == "ok").any():
        return None
    where = {**where, "device": rows["device"].iloc[0]}
    series = series or [(name, {"series": name}, name) for name in on.in_order(rows["series"])]
    graphs, bar = distinct(rows), on.GROUP_WIDTH / len(series)
    figure, ((axes,),) = on.new_figure(min(max(on.WIDTH, 1 + 0.09 * len(series) * len(graphs)), on.MOST_WIDTH), 3.6)
    for nth, (name, selection, words) in enumerate(series):
        found = data.pick({**where, **selection}).drop_duplicates("data_sha256", keep="last")
        found = found.set_index("data_sha256").reindex(graphs.index)
        place = np.arange(len(graphs)) - on.GROUP_WIDTH / 2 + bar * (nth + 0.5)
        good = found["status"].isin(COUNTED).to_numpy()
        shade = 0.45 + 0.55 * (nth + 1) / len(series) if [one for one, *_ in series].count(name) > 1 else 1
        drawn = found[good]
        on.draw_bars(
            axes, place[good], drawn["value"], bar, drawn["kind"], label=words, color=on.colour(name), alpha=shade
        )
        for x, status in zip(place[~good], found["status"][~good].fillna(""), strict=True):
            on.write(axes, x, on.MISSING.get(status, status))
    on.log_axis(axes.yaxis, " ms")
    axes.set_ylabel(label)
    on.name_graphs(axes, graphs)
    on.legend_above(axes, 3, on.synthetic_key(graphs))
    return figure


def lines(data: Data, where: Where, x: str) -> Figure | None:
    """Lines of the median over the column `x` with a band from p10 to p90, one for each backend and type.

    Axes for each data set, model, recipe and metric.
    """
    rows = data.pick(where)
    rows = rows[rows["status"].isin(COUNTED)]
    panels = [*rows.groupby(["label", "blocks", "dim", "recipe", "metric"])]
    if not panels:
        return None
    columns = min(4, len(panels))
    lines_of_axes = -(-len(panels) // columns)
    figure, grid = on.new_figure(on.WIDTH, 0.4 + 1.9 * lines_of_axes, lines_of_axes, columns)
    for axes, (names, found) in zip(on.first_axes(grid, len(panels)), panels, strict=True):
        for nth, ((series, dtype), line) in enumerate(found.groupby(["backend", "dtype"])):
            line = line.sort_values(x)
            style = {"color": on.colour(series), "linestyle": DASHES[nth % len(DASHES)]}
            axes.plot(line[x], line["value"], label=f"{series}, {dtype}, n = {line['repeats'].max()}", **style)
            axes.fill_between(line[x], line["p10"], line["p90"], color=on.colour(series), alpha=0.12, linewidth=0)
        axes.set_xlabel(x)
        label, blocks, dim, _, metric = names
        title = [f"{label}, {blocks} x {dim}", f"{metric.removeprefix('valid_')}, validation"]
        if len(labels := axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(fontsize=6, loc="best")
        else:
            title += labels
        axes.set_title("\n".join(title), size=7)
    return figure


def by_edges(
    data: Data,
    where: Where,
    panels: Mapping[str, tuple[Where, float]],
    series: Sequence[tuple[str, Where, str]],
) -> Figure | None:
    """Log-log lines over the number of edges.

    Args:
        panels: selection and factor of the values, by the label of the y-axis.
        series: colour, selection, label. A cross at the top: it failed there.
    """
    figure, (grid,) = on.new_figure(on.WIDTH, 3.0, 1, len(panels))
    for axes, (label, (panel, factor)) in zip(grid, panels.items(), strict=True):
        for colour, selection, words in series:
            found = data.pick({**where, **panel, **selection}).sort_values("nnz")
            good = found[found["status"].isin(COUNTED)]
            if good.empty:
                return None
            places, values = good["nnz"], good["value"] * factor
            axes.plot(places, values, "o-", color=colour, label=words, markersize=4)
            last = places.iloc[-1], values.iloc[-1]
            axes.annotate(f"{last[1]:.3g}", last, (5, -3), textcoords="offset points", color=colour, size=7)
            failed = data.pick({**where, **of.TIME, **selection})
            failed = failed[~failed["status"].isin(COUNTED)]
            height = 0.93 + 0.04 * (words == series[0][2])  # beside each other
            axes.plot(failed["nnz"], [height] * len(failed), "x", color=colour, transform=axes.get_xaxis_transform())
        axes.set(xscale="log", yscale="log", xlabel="edges", ylabel=label)
        axes.margins(0.14)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: on.edges(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    grid[0].legend(loc="upper left", fontsize=7)
    return figure


def waterfall(data: Data, where: Where, steps: Mapping[str, Where], title: str) -> Figure | None:
    """From the first of the `steps` to the last, one factor at a time: the geometric mean of the graphs on which all
    ran undisturbed.

    Args:
        title: `{factors}` becomes the factors, the largest first.
    """
    measured = {name: data.measured({**where, **step}) for name, step in steps.items()}
    columns = [found.loc[found["disturbed"] != "yes", "value"] for found in measured.values()]
    times = pd.concat(columns, axis=1, keys=measured, join="inner")  # by graph and d
    if times.empty:
        return None
    rows = distinct(data.pick({**where, **next(iter(steps.values()))}))
    graphs = rows.loc[rows.index.isin(times.index.get_level_values(0)), "label"]
    means = times.apply(mean)
    figure, grid = on.new_figure(on.WIDTH, 2.6)
    _draw_steps(grid[0, 0], means)
    grid[0, 0].set_xlabel(f"ms, geometric mean of {', '.join(graphs)}", size=7)
    factors = {after: means[before] / means[after] for before, after in pairwise(means.index)}
    largest = sorted(factors, key=factors.get, reverse=True)[:2]
    figure.suptitle(title.format(factors=", ".join(f"{name} {factors[name]:.2f}x" for name in largest)))
    return figure


def _draw_steps(axes: Axes, steps: pd.Series) -> None:
    left, last = steps.min() / 2, len(steps)
    names = [steps.index[0], *(f"+ {name}" for name in steps.index[1:]), "all together"]
    for place, time in ((0, steps.iloc[0]), (last, steps.iloc[-1])):
        axes.barh(place, time - left, left=left, color="#777777")
    axes.text(steps.iloc[0], 0, f" {on.milliseconds(steps.iloc[0])}", va="center", size=7)
    total = f" {on.milliseconds(steps.iloc[-1])}: {steps.iloc[0] / steps.iloc[-1]:.3g}x"
    axes.text(steps.iloc[-1], last, total, va="center", size=7, weight="bold")
    for place, ((_, before), (name, after)) in enumerate(pairwise(steps.items()), start=1):
        ours = on.colour("fused3s fused" if "dense" in name else "fused3s") if "fused" in name else "#BBBBBB"
        low, high = sorted((before, after))
        axes.barh(place, high - low, left=low, color=ours if after <= before else "#222222")
        axes.text(high, place, f" {before / after:.2f}x" + " (slower)" * (after > before), va="center", size=7)
    on.log_axis(axes.xaxis)
    axes.set_xlim(left, steps.max() * (steps.max() / left) ** 0.35)
    axes.set_ylim(last + 0.6, -0.6)
    axes.set_yticks(range(last + 1), names, size=7)


class Side(NamedTuple):
    """Bars of `bars_over_best`: name, colour, rows, ours, and the best other kernel on a graph."""

    name: str
    colour: str
    where: Where
    ours: Where
    best: Where


def bars_over_best(data: Data, sides: Sequence[Side]) -> Figure | None:
    """For each graph a bar a side: the speed-up over the best other kernel, whose name stands at its end. The graph
    with the largest speed-up is at the top."""
    found = [(side, data.pairs(side.where, side.ours, side.best, ["data_sha256"])) for side in sides]
    found = [(side, rows) for side, rows in found if len(rows)]
    if not found:
        return None
    every = pd.concat([rows for _, rows in found])
    graphs = distinct(every).assign(mean=every.groupby("data_sha256")["ratio"].agg(mean)).sort_values("mean")
    figure, grid = on.new_figure(on.WIDTH, 0.9 + 0.28 * len(graphs))
    axes, height = grid[0, 0], 0.8 / len(found)
    for nth, (side, rows) in enumerate(found):
        places = graphs.index.get_indexer(rows["data_sha256"]) + (len(found) / 2 - nth - 0.5) * height
        axes.barh(places, rows["ratio"], height, color=side.colour, label=f"{side.name}: {_means(rows)}")
        others = data.pick({**side.where, **side.best}).drop_duplicates("data_sha256").set_index("data_sha256")["note"]
        for place, sha, ratio in zip(places, rows["data_sha256"], rows["ratio"], strict=True):
            axes.text(ratio, place, f" {ratio:.1f}x  {others[sha]}", va="center", size=on.SMALL)
    axes.axvline(1, color="black", linewidth=0.6)
    names = [f"{row.label}, {on.edges(row.nnz)} edges" for row in graphs.itertuples()]
    axes.set_yticks(range(len(graphs)), names, size=7)
    axes.set_xlim(0, 1.25 * every["ratio"].max())
    axes.set_xlabel("speed-up over the best other kernel, which is named", size=7)
    axes.legend(loc="lower right", fontsize=7)
    return figure


class Panel(NamedTuple):
    """A row of axes of `paper_bars`: a bar is the ratio of `theirs` over a series of `where`.

    Attributes:
        marks: the paper's own rows.
        log: the bottom of a logarithmic axis, on which also stand the geometric means over the graphs on which all ran.
        caption: the place in the paper that states the speed-up of the subject over each baseline.
    """

    title: str
    inches: float
    label: str
    where: Where
    theirs: Where
    marks: Where | None = None
    log: float | None = None
    caption: str = ""
    milliseconds: bool = False


class PaperBars(NamedTuple):
    """A figure of the paper: series and baselines with their names in it, and the series that its title is about."""

    title: str
    graphs: Sequence[str]
    dims: Sequence[int]
    bars: Mapping[str, str]
    subject: str
    over: Mapping[str, str]
    panels: Sequence[Panel]


def paper_bars(data: Data, spec: PaperBars) -> Figure | None:
    """Figures 5, 6 and 8: a group of bars for each graph and d, in a row of axes for each panel. The title says what
    was found."""
    drawn = {"dataset": spec.graphs, "dim": spec.dims, "series": [*spec.bars, *spec.over]}
    panels = []
    for panel in spec.panels:
        where = {**panel.where, **drawn}
        rows = data.pick(where)
        if rows["value"].notna().any():
            panels.append((panel, where | {"device": rows["device"].iloc[0]}, rows))
    if not panels or panels[0][0] is not spec.panels[0]:
        return None
    heights = [panel.inches for panel, *_ in panels]
    figure, grid = on.new_figure(on.MOST_WIDTH, 0.8 + sum(heights), len(panels), height_ratios=heights)
    message = {}
    for axes, (panel, where, rows) in zip(grid[:, 0], panels, strict=True):
        found = {series: _ratios(data, where, panel.theirs, series) for series in spec.bars}
        of_paper = {**panel.marks, **drawn} if panel.marks else None
        marks = {series: _ratios(data, of_paper, panel.theirs, series) for series in spec.bars if of_paper}
        marks = marks if any(map(len, marks.values())) else {}
        _draw_bars(axes, spec, panel, rows, found, marks)
        device = where["device"].removeprefix("NVIDIA ")
        title = panel.title.format(device=device)
        if panel.caption:
            over = {series: _ratios(data, where, {"series": series}, spec.subject) for series in spec.over}
            texts, first = _captions(spec, panel.caption, over)
            also = "on real ones; " * (";" in "".join(texts)) + "in the paper"
            title = f"{title} the paper's kernel over each, on all graphs [{also}]:\n{', '.join(texts)}"
            message = message or {"device": device, **first}
        axes.set_title(title, size=6.5, loc="left")
    if "ours" not in message:
        return None
    first, where, rows = panels[0]
    on.legend_above(
        grid[0, 0], 6, on.synthetic_key(rows, _of_twins(data, where, spec, first.theirs)), 1.15, fontsize=6.5
    )
    figure.suptitle(spec.title.format(**message))
    return figure


def _ratios(data: Data, where: Where, theirs: Where, series: str) -> pd.DataFrame:
    found = [data.pairs({**where, "series": series, "dim": dim}, {}, theirs, GROUP) for dim in where["dim"]]
    return pd.concat(found).set_index(GROUP)


def _of_twins(data: Data, where: Where, spec: PaperBars, theirs: Where) -> str:
    """How far synthetic graphs can be trusted: the speed-up of `subject` on surrogates over that on their originals."""
    same = {name: where[name] for name in ("device", "dataset", "dim")}
    twins = data.pairs(of.EACH_TYPE | of.NO_BEST | of.WARM | same, of.ORIGINALS, of.TWINS, [*GROUP, "series"])
    times = quiet(twins).pivot(index=GROUP, columns="series", values="ratio")
    both = theirs["series"].split()[0], spec.subject.split()[0]
    factors = (times[both[0]] / times[both[1]]).dropna() if {*both} <= {*times} else times
    if factors.empty:
        return ""
    factors = factors.groupby(level="dataset").agg(mean)
    return f": surrogates have {mean(factors):.2f} of the kernel's real speed-up (n = {len(factors)})"


def _captions(spec: PaperBars, place: str, over: Ratios) -> tuple[list[str], dict[str, str]]:
    """The mean ratio over each series beside the paper's, and both numbers of the first."""
    stated, texts, first = captions(place), [], {}
    for series, found in over.items():
        graphs, paper = by_graph(quiet(found)), f"{stated[series.split()[0]]:g}x"
        if graphs.empty:
            continue
        ratios, of_real = graphs["ratio"], real(graphs)["ratio"]
        words = f"{mean(ratios):.2f}x"
        first = first or {"ours": words, "paper": paper}
        also = [f"{mean(of_real):.2f}x"] * (0 < len(of_real) < len(ratios)) + [paper]
        texts.append(f"{spec.over[series]} {words} [{'; '.join(also)}]")
    return texts, first


def _draw_bars(axes: Axes, spec: PaperBars, panel: Panel, rows: pd.DataFrame, found: Ratios, marks: Ratios) -> None:
    groups = pd.MultiIndex.from_product([spec.graphs, spec.dims], names=GROUP)
    means = _mean_groups(found, marks) if panel.log else {}
    width, measured = on.GROUP_WIDTH / len(found), {*rows["dataset"]}
    statuses = rows.set_index([*GROUP, "series"])["status"].to_dict()
    for nth, (series, ratios) in enumerate(found.items()):
        drawn, heights = ratios.reindex(groups), _heights(ratios, groups, means)
        places = np.arange(len(heights)) - on.GROUP_WIDTH / 2 + width * (nth + 0.5)
        kinds = [*drawn["kind"], *["real"] * len(means)]
        style = {"color": on.colour(series), "edgecolor": "white", "linewidth": 0.2, "label": spec.bars[series]}
        on.draw_bars(axes, places, heights, width, kinds, **style)
        for x, key, one in zip(places, groups, drawn.itertuples(), strict=False):
            if key[0] not in measured:
                on.write(axes, x, "not run" * (nth == len(found) // 2))
            elif np.isnan(one.ratio):
                status = statuses.get((*key, series), "" if rows["date"].any() else "oom")
                words = "no base" if status in COUNTED else on.MISSING.get(status, status)
                on.write(axes, x, words, color="#555555")
            else:
                text = f"{one.value:,.0f}" if one.value >= 100 else f"{one.value:.3g}"
                text = DISTURBED * bool(one.noisy) + text * panel.milliseconds
                axes.text(x, one.ratio, text, size=on.SMALL - 1, rotation=90, ha="center", va="bottom")
        if marks:
            label = "the paper's own value (GH200)" if nth == len(found) - 1 else None
            style = {"color": "black", "linewidth": 1.1, "label": label}
            axes.hlines(_heights(marks[series], groups, means), places - width / 2, places + width / 2, **style)
    labels = [_label(*key, rows, spec.dims) for key in groups] + [*means]
    axes.set_xticks(range(len(labels)), labels, size=6)
    axes.set_xlim(-0.6, len(groups) + 2 * any(one.log for one in spec.panels) - 0.4)
    axes.set_ylabel(panel.label, size=7)
    if means:
        axes.axvline(len(groups) - 0.5, color="black", linewidth=0.5)
    if panel.log:
        axes.axhline(1, color="black", linestyle="--", linewidth=0.7)
        axes.set_yscale("log", base=2)
        axes.set_ylim(panel.log, axes.get_ylim()[1] * 1.5)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.yaxis.set_minor_locator(NullLocator())


def _heights(ratios: pd.DataFrame, groups: pd.MultiIndex, means: Mapping[str, pd.Index]) -> list[float]:
    common = [by_graph(ratios[ratios.index.isin(some)])["ratio"] for some in means.values()]
    return [*ratios["ratio"].reindex(groups), *(mean(some) if len(some) else np.nan for some in common)]


def _mean_groups(found: Ratios, marks: Ratios) -> dict[str, pd.Index]:
    """By their label the groups on which all series ran undisturbed, and the paper's too; and those of real graphs."""
    ran = [quiet(ratios) for ratios in (*found.values(), *marks.values()) if len(ratios)]
    common = reduce(pd.Index.intersection, (ratios.index for ratios in ran))
    of_real = common[(ran[0].loc[common, "kind"] == "real").to_numpy()] if len(common) else common
    kept = {"": common} | ({" real": of_real} if len(of_real) < len(common) else {})
    return {f"mean\nof {some.unique(0).size}{kind}": some for kind, some in kept.items() if len(some)}


def _label(dataset: str, dim: int, rows: pd.DataFrame, dims: Sequence[int]) -> str:
    """Of a group: the data set with its edges below the middle one of its d."""
    text = f"{dim}\n" * (len(dims) > 1)
    if dim != dims[len(dims) // 2]:
        return text
    nnz = rows.loc[rows["dataset"] == dataset, "nnz"].max()
    unit = " edges" if len(dims) > 1 else "\nedges"
    return text + dataset.replace("-", "-\n", 1) + (f"\n{on.edges(nnz)}{unit}" if nnz > 0 else "")


def sm_times(
    data: Data, title: str, where: Where, of_paper: Where, graphs: Sequence[str], bars: Mapping[str, str]
) -> Figure | None:
    """Figure 7: the active time of each SM and a line at their mean; a row of axes for each of `graphs`, without (left)
    and with (right) reordering."""
    times = data.pick(where)
    if times.empty:
        return None
    same = {"metric": "sm_active_share", "device": times["device"].iloc[0]}
    shares = data.pick({**where, **same}).set_index(["dataset", "series"])["value"]
    published = data.pick(of_paper).set_index(["dataset", "series"])["value"]
    datasets = [name for name in graphs if name in {*times["dataset"]}]
    figure, grid = on.new_figure(on.MOST_WIDTH * 0.7, 0.6 + 1.7 * len(datasets), len(datasets), 2, sharey="row")
    found = []
    for line, dataset in zip(grid, datasets, strict=True):
        for axes, (series, label) in zip(line, bars.items(), strict=True):
            of_sm = times[(times["dataset"] == dataset) & (times["series"] == series)]
            axes.bar(of_sm["sm"], of_sm["value"] / 1e3, 1, color=on.colour(series))
            axes.axhline(of_sm["value"].mean() / 1e3, color="black", linewidth=0.8, linestyle="--")
            share, paper = shares[dataset, series], published[dataset, series]
            name = of_sm["label"].iloc[0]
            axes.set_title(f"{name}, {label}: {share:.2f} (the paper's A30: {paper:.2f})", size=7)
        line[0].set_ylabel("thousand cycles")
        found.append(f"{' to '.join(f'{shares[dataset, series]:.2f}' for series in bars)} on {dataset}")
    for axes in grid[-1]:
        axes.set_xlabel(f"SM of {times['device'].iloc[0]}")
    figure.suptitle(title.format(shares=", ".join(found)))
    return figure
