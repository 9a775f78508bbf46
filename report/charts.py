"""Figures: charts, drawn from the declarations in figures.yaml with the ratios of `report.engine`.

A chart is a function of the data and a declaration whose $names are filled. pyplot is not used: no display, no global
state. Hatched bars and hollow dots are synthetic or surrogate graphs; error bars reach from p10 to p90 of both times.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.drawing import (
    GROUP_WIDTH,
    MISSING,
    MOST_WIDTH,
    WIDTH,
    colour,
    declarations,
    draw_bars,
    edges,
    first_axes,
    image,
    in_order,
    legend_above,
    log_axis,
    milliseconds,
    name_graphs,
    new_figure,
    slug,
    synthetic_key,
    write,
)
from report.engine import Data, Spec, chain, mean, quiet, real
from report.paper_figures import paper_bars, sm_times
from report.rows import merged

DASHES = ("-", "--", ":", "-.")
Drawn = tuple[str, Figure]


def draw(data: Data, name: str, changes: Mapping[str, Any] | None = None) -> list[Drawn]:
    """The figures of an entry, by the names of their files: the sets in git, or the one with `changes`.

    Raises:
        ValueError: an unknown name, or a change that the entry does not take.
    """
    figures = declarations()["figures"]
    if name not in figures:
        raise ValueError(f"{name}: no such figure; there are {', '.join(figures)}")
    spec = figures[name]
    if unknown := set(changes or ()) - spec["set"].keys():
        raise ValueError(f"--set {', '.join(unknown)}: {name} takes {', '.join(spec['set']) or 'none'}")
    chosen = [changes] if changes else spec.get("draw", [{}])
    return [drawn for values in chosen for drawn in _draw(data, spec, spec["set"] | values)]


def _draw(data: Data, spec: Spec, values: Mapping[str, Any]) -> Iterable[Drawn]:
    data.used.clear()
    figure = CHARTS[spec["chart"]](data, _filled(spec, values))
    devices = pd.concat(data.used)["device"] if figure else []
    if figure is None or (data.device and data.device not in {*devices}):  # drawn of another device: not asked for
        return
    texts = {name: str(value) for name, value in values.items()}
    file = spec["file"].format(device=slug(devices.mode().iloc[0]), **texts)
    if not figure.get_suptitle():  # a figure of the paper says what it found
        figure.suptitle(spec["title"].format(**texts))
    note = "; ".join(filter(None, [spec.get("note", "").rstrip(".").format(**texts), data.provenance()]))
    figure.supxlabel(note, x=0.01, ha="left", size=6, color="#444444", wrap=True)
    yield file, figure


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, Mapping):
        return {key: _filled(value, values) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, values) for value in part]
    return values[part[1:]] if isinstance(part, str) and part.startswith("$") else part


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


def times(data: Data, spec: Spec) -> Figure | None:
    """Bars of times: a group for each graph, a bar for each of `series`, or for each series of the rows."""
    where = data.resolve(spec["where"])
    rows = data.pick(where)
    if not (rows["status"] == "ok").any():
        return None
    where |= {"device": rows["device"].iloc[0]}
    series = spec.get("series") or [[name, {"series": name}, name] for name in in_order(rows["series"])]
    graphs, bar = distinct(rows), GROUP_WIDTH / len(series)
    figure, ((axes,),) = new_figure(min(max(WIDTH, 1 + 0.09 * len(series) * len(graphs)), MOST_WIDTH), 3.6)
    for nth, (name, selection, label) in enumerate(series):
        found = data.pick(merged(where, data.resolve(selection))).drop_duplicates("data_sha256", keep="last")
        found = found.set_index("data_sha256").reindex(graphs.index)
        place = np.arange(len(graphs)) - GROUP_WIDTH / 2 + bar * (nth + 0.5)
        good = found["status"].isin(["ok", "unchecked"]).to_numpy()
        shade = 0.45 + 0.55 * (nth + 1) / len(series) if [one for one, *_ in series].count(name) > 1 else 1
        drawn = found[good]
        draw_bars(axes, place[good], drawn["value"], bar, drawn["kind"], label=label, color=colour(name), alpha=shade)
        for x, status in zip(place[~good], found["status"][~good].fillna(""), strict=True):
            write(axes, x, MISSING.get(status, status))
    log_axis(axes.yaxis, " ms")
    axes.set_ylabel(spec["label"])
    name_graphs(axes, graphs)
    legend_above(axes, 3, synthetic_key(graphs))
    return figure


def lines(data: Data, spec: Spec) -> Figure | None:
    """Lines of the median over `x` with a band from p10 to p90, one for each value of the column `series` and type.

    Axes for each data set, model and metric.
    """
    rows = data.pick(spec["where"])
    rows = rows[rows["status"].isin(["ok", "unchecked"])]
    panels = [*rows.groupby(["dataset", "blocks", "dim", "metric"])]
    if not panels:
        return None
    columns = min(4, len(panels))
    lines_of_axes = -(-len(panels) // columns)
    figure, grid = new_figure(WIDTH, 0.4 + 1.9 * lines_of_axes, lines_of_axes, columns)
    for axes, (names, found) in zip(first_axes(grid, len(panels)), panels, strict=True):
        of = spec["series"]
        for nth, ((series, dtype), line) in enumerate(found.groupby([of, "dtype"])):
            line = line.sort_values(spec["x"])
            style = {"color": colour(series), "linestyle": DASHES[nth % len(DASHES)]}
            axes.plot(line[spec["x"]], line["value"], label=f"{series}, {dtype}, n = {line['repeats'].max()}", **style)
            axes.fill_between(line[spec["x"]], line["p10"], line["p90"], color=colour(series), alpha=0.12, linewidth=0)
        axes.set_xlabel(spec["x"])
        dataset, blocks, dim, metric = names
        title = [f"{dataset}, {blocks} x {dim}", f"{metric.removeprefix('valid_')}, validation"]
        if len(labels := axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(fontsize=6, loc="best")
        else:
            title += labels
        axes.set_title("\n".join(title), size=7)
    return figure


def waterfall(data: Data, spec: Spec) -> Figure | None:
    """From the first of the `steps` to the last, one factor at a time: five graphs, and the geometric mean of all."""
    where = data.resolve(spec["where"])
    times = chain(data, where)
    if times.empty:
        return None
    rows = distinct(data.pick(merged(where, next(iter(where["steps"].values())))))
    order = sorted(times.index.get_level_values(0), key=lambda sha256: rows.at[sha256, "nnz"])
    times = times.droplevel(1).loc[order]
    some = [order[round(nth)] for nth in np.linspace(0, len(order) - 1, min(5, len(order)))]
    charts = {f"{rows.at[one, 'label']}, {edges(rows.at[one, 'nnz'])} edges": times.loc[one] for one in some}
    charts[f"geometric mean of {len(times)} real graphs"] = times.apply(mean)
    columns = min(3, len(charts))
    lines = -(-len(charts) // columns)
    figure, grid = new_figure(1.3 + 2.6 * columns, 0.9 + 1.75 * lines, lines, columns, sharey=True)
    for axes, (title, steps) in zip(first_axes(grid, len(charts)), charts.items(), strict=True):
        _draw_steps(axes, steps)
        axes.set_title(title, size=8)
    return figure


def _draw_steps(axes: Axes, steps: pd.Series) -> None:
    left, last = steps.min() / 2, len(steps)
    names = [steps.index[0], *(f"+ {name}" for name in steps.index[1:]), "all together"]
    for place, time in ((0, steps.iloc[0]), (last, steps.iloc[-1])):
        axes.barh(place, time - left, left=left, color="#777777")
    axes.text(steps.iloc[0], 0, f" {milliseconds(steps.iloc[0])}", va="center", size=7)
    total = f" {milliseconds(steps.iloc[-1])}: {steps.iloc[0] / steps.iloc[-1]:.3g}x"
    axes.text(steps.iloc[-1], last, total, va="center", size=7, weight="bold")
    for place, ((_, before), (name, after)) in enumerate(pairwise(steps.items()), start=1):
        ours = colour("fused3s fused" if "dense" in name else "fused3s") if "fused" in name else "#BBBBBB"
        low, high = sorted((before, after))
        axes.barh(place, high - low, left=low, color=ours if after <= before else "#222222")
        axes.text(high, place, f" {before / after:.2f}x" + " (slower)" * (after > before), va="center", size=7)
    log_axis(axes.xaxis)
    axes.set_xlim(left, steps.max() * (steps.max() / left) ** 0.35)
    axes.set_ylim(last + 0.6, -0.6)
    axes.set_yticks(range(last + 1), names, size=7)
    axes.set_xlabel("ms", size=7)


def dots(data: Data, spec: Spec) -> Figure | None:
    """A dot for each other kernel on each graph: the speed-up over it, hollow on a graph that is not real.

    `best`: a ring around the ratio over the best other kernel, and a line at the geometric mean of those.
    """
    panels = []
    for panel in spec["panels"]:
        base = merged(data.resolve(panel["where"]), {"by": ["data_sha256"]})
        others = data.pick(merged(base, data.resolve(panel["theirs"])))["series"]
        sides = {name: {"ours": panel["ours"], "theirs": {"series": name}} for name in in_order(others)}
        found = {name: data.pairs(merged(base, side)) for name, side in sides.items()}
        if any(map(len, found.values())):
            panels.append((panel, base, found))
    if not panels:
        return None
    counts = [len(distinct(pd.concat(found.values()))) for *_, found in panels]
    width = min(max(WIDTH, 1.2 + 0.26 * sum(counts)), MOST_WIDTH)
    figure, grid = new_figure(width, 3.9, 1, len(panels), sharey=True, width_ratios=counts)
    for axes, (panel, base, found) in zip(grid[0], panels, strict=True):
        graphs = distinct(pd.concat(found.values()))
        for series, rows in found.items():
            places, shade = graphs.index.get_indexer(rows["data_sha256"]), colour(series)
            faces = [shade if kind == "real" else "none" for kind in rows["kind"]]
            axes.vlines(places, rows["low"], rows["high"], color=shade, linewidth=0.7)
            axes.scatter(places, rows["ratio"], s=14, c=faces, edgecolors=shade, linewidths=0.8, zorder=2)
            axes.scatter([], [], s=14, color=shade, label=f"{series}: {_means(rows)}")
        name_graphs(axes, graphs)
        best = data.pairs(merged(base, {"ours": panel["ours"], "theirs": panel["best"]}))
        label = f"best other kernel: {_means(best)}"
        places = graphs.index.get_indexer(best["data_sha256"])
        axes.plot(places, best["ratio"], "o", mfc="none", mec="black", ms=8, label=label)
        axes.axhline(mean(best["ratio"]), color="black", linewidth=0.8, linestyle="--")
        axes.axhline(1, color="black", linewidth=0.6)
        device = pd.concat(found.values())["device"].iloc[0]
        legend_above(axes, 1 if len(panels) > 1 else 3, title=f"{panel['title']}, {device}")
    log_axis(grid[0, 0].yaxis, "x")
    grid[0, 0].set_ylabel(spec["label"])
    return figure


CHARTS: dict[str, Callable[[Data, Spec], Figure | None]] = {
    "paper-bars": paper_bars,
    "sm-times": sm_times,
    "times": times,
    "lines": lines,
    "waterfall": waterfall,
    "dots": dots,
}


def drawn_files(data: Data, kind: str = "png", names: Sequence[str] | None = None) -> dict[str, bytes]:
    """Contents of the figures in git by the names of their files, or of the entries `names`."""
    entries = names or [name for name, spec in declarations()["figures"].items() if "draw" in spec]
    return {f"{file}.{kind}": image(figure, kind) for name in entries for file, figure in draw(data, name)}
