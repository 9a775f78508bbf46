"""Figures: six kinds of charts, drawn from the declarations in figures.yaml with the ratios of `report.engine`.

A chart is a function of the data and a declaration whose $names are filled. pyplot is not used: no display, no global
state. Hatched bars and hollow dots are synthetic or surrogate graphs; error bars reach from p10 to p90 of both times.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from report.engine import DISTURBED, Data, Spec, axis, chain, mean, quiet, real
from report.rows import HERE, merged, read_yaml

matplotlib.style.use(HERE / "fused3s.mplstyle")

WIDTH, MOST_WIDTH = 7.0, 11.0  # inches
HATCH, GROUP_WIDTH, SMALL = "////", 0.9, 5.5
FAR = 6  # times the third quartile of the bars of an axis; longer bars are cut
MISSING = {"oom": "OOM", "": "not run"}
OTHER = "#999999"
DASHES = ("-", "--", ":", "-.")
Drawn = tuple[str, Figure]


def declarations() -> dict[str, Any]:
    """figures.yaml."""
    return read_yaml("figures.yaml")


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
    if figure is None:
        return
    devices = pd.concat(data.used)["device"]
    texts = {name: str(value) for name, value in values.items()}
    file = spec["file"].format(device=slug(devices.mode().iloc[0]), **texts)
    figure.suptitle(spec["title"].format(**texts))
    note = "; ".join(filter(None, [spec.get("note", "").rstrip("."), data.provenance()]))
    figure.supxlabel(note, x=0.01, ha="left", size=6, color="#444444", wrap=True)
    yield file, figure


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, Mapping):
        return {key: _filled(value, values) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, values) for value in part]
    return values[part[1:]] if isinstance(part, str) and part.startswith("$") else part


def slug(text: str) -> str:
    """Part of a file name, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def image(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file of that kind; the same bytes on every run on one machine. A PNG has a palette."""
    content, small = io.BytesIO(), io.BytesIO()
    none = {"Software": None} if kind == "png" else {"Date": None} if kind == "svg" else {"CreationDate": None}
    figure.savefig(content, format=kind, metadata=none)
    if kind != "png":
        return content.getvalue()
    palette = Image.open(content).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette.save(small, "PNG", optimize=True)
    return small.getvalue()


def colour(series: str) -> str:
    """The colour of a series, or of its backend; a grey for one that the table does not know."""
    colours = declarations()["colours"]
    return colours.get(series.removesuffix("+graph"), colours.get(series.split()[0], OTHER))


def in_order(series: Iterable[str]) -> list[str]:
    """In the order of the colour table, unknown ones last."""
    known = [*declarations()["colours"]]

    def place(name: str) -> tuple[int, str]:
        found = next((one for one in (name.removesuffix("+graph"), name.split()[0]) if one in known), None)
        return (known.index(found) if found else len(known)), name

    return sorted(set(series), key=place)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def milliseconds(time: float) -> str:
    """ "1,234 ms", "2.5 ms", "4.29 µs"."""
    return f"{time:,.0f} ms" if time >= 1000 else f"{time:.3g} ms" if time >= 1 else f"{1e3 * time:.3g} µs"


def edges(nnz: float) -> str:
    """A number with its unit: 115M, 88.7K."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")) if nnz >= size), (1, ""))
    return f"{nnz / size:.3g}{unit}"


def log_axis(axis: Axis, unit: str = "") -> None:
    """A logarithmic axis with ticks in plain digits at 1, 2 and 5."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))
    axis.set_minor_locator(NullLocator())


def name_graphs(axes: Axes, graphs: pd.DataFrame) -> None:
    """Slanted names of graphs with their edges below 0, 1, 2, ..."""
    names = [f"{label}, {edges(nnz)} edges" for label, nnz in zip(graphs["label"], graphs["nnz"], strict=True)]
    names = [name.replace("$", r"\$") for name in names]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", size=6)
    axes.set_xlim(-0.6, len(names) - 0.4)


def legend_above(axes: Axes, columns: int, extra: Sequence[Patch] = (), title: str = "") -> None:
    handles = [*axes.get_legend_handles_labels()[0], *extra]
    axes.legend(handles=handles, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), title=title)


def synthetic_key(graphs: pd.DataFrame) -> list[Patch]:
    made = (graphs["kind"] != "real").any()
    return [Patch(facecolor="white", edgecolor="black", linewidth=0.3, hatch=HATCH, label="not a real graph")] * bool(
        made
    )


def write(axes: Axes, x: float, text: str, y: float = 0.01, **options: Any) -> None:
    """A word on the axes at x, by default in place of a missing bar."""
    style = {"rotation": 90, "ha": "center", "va": "bottom", "size": SMALL} | options
    axes.text(x, y, text, transform=axes.get_xaxis_transform(), **style)


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """The graphs of rows by number of edges, one line each."""
    return rows.sort_values(["nnz", "label"]).drop_duplicates("data_sha256").set_index("data_sha256")


def speedups(data: Data, spec: Spec) -> Figure | None:
    """Grouped bars: a row of axes for each of `rows`, a group for each graph, a bar for each series of one side.

    The other side, `shared`, is one series, whose time stands above the group. Losses point down from 1; a missing bar
    has its status; bars far beyond the others are cut.
    """
    found = []
    for label, where, sides in spec["rows"]:
        own = "theirs" if sides["shared"] == "ours" else "ours"
        shared = data.pick(merged(data.resolve(where), data.resolve(sides[sides["shared"]])))
        others = data.pick(merged(data.resolve(where), data.resolve(sides[own])))
        pairs = {}
        for series in in_order(others["series"]):
            both = merged(data.resolve(where), {"by": ["data_sha256"], own: {"series": series}})
            pairs[series] = data.pairs(merged(both, {sides["shared"]: sides[sides["shared"]]}))
        if any(len(some) for some in pairs.values()):
            found.append((label, shared, others, pairs))
    if not found:
        return None
    graphs = distinct(pd.concat([rows for _, shared, others, _ in found for rows in (shared, others)]))
    bars = max(len(pairs) for *_, pairs in found)
    width = min(max(WIDTH, 1 + 0.09 * (bars + 1) * len(graphs)), MOST_WIDTH)
    figure, grid = new_figure(width, 1.6 + len(found) * (1.9 + 0.08 * bars), len(found), sharex=True)
    for axes, (label, shared, others, pairs) in zip(grid[:, 0], found, strict=True):
        _draw_groups(axes, graphs, others, pairs)
        times = shared[shared["status"] == "ok"].set_index("data_sha256")["value"].reindex(graphs.index)
        for place, time in enumerate(times):
            words = milliseconds(time) if pd.notna(time) else "-"
            write(axes, place, words, 0.99, rotation=90 if width / len(graphs) < 0.5 else 0, va="top")
        name_graphs(axes, graphs)
        axes.set_ylabel(label, size=7)
        legend_above(axes, int(width // 3.4), synthetic_key(graphs))
    return figure


def _draw_groups(axes: Axes, graphs: pd.DataFrame, others: pd.DataFrame, pairs: Mapping[str, pd.DataFrame]) -> None:
    ratios = pd.concat([found["ratio"] for found in pairs.values()])
    usual = ratios[ratios <= FAR * max(ratios.quantile(0.75), 1)]
    limit = np.inf if len(usual) == len(ratios) else 1.3 * max(usual.max(), 1)
    bar = GROUP_WIDTH / len(pairs)
    for nth, (series, found) in enumerate(pairs.items()):
        place = pd.Series(range(len(graphs)), graphs.index) - GROUP_WIDTH / 2 + bar * (nth + 0.5)
        drawn = found.set_index("data_sha256")
        at, height = place[drawn.index], drawn["ratio"].clip(upper=limit)
        hatches = [HATCH if kind != "real" else "" for kind in drawn["kind"]]
        style = {"color": colour(series), "edgecolor": "white", "linewidth": 0.3, "label": f"{series}: {_means(found)}"}
        axes.bar(at, height - 1, bar, 1, hatch=hatches, **style)
        axes.vlines(at, drawn["low"].clip(upper=limit), drawn["high"].clip(upper=limit), color="black", linewidth=0.5)
        for x, row in zip(at, drawn.itertuples(), strict=True):
            far = f"{row.ratio:,.0f}x" if row.ratio > limit else ""
            top, turn = max(min(row.ratio, limit), 1), 90 if far else 0
            axes.text(x, top, DISTURBED * row.noisy + far, ha="center", va="bottom", size=SMALL + 1, rotation=turn)
        statuses = others[others["series"] == series].set_index("data_sha256")["status"]
        for sha256 in graphs.index.difference(drawn.index, sort=False):
            status = statuses.get(sha256, "")
            write(axes, place[sha256], MISSING.get(status, "shared" if status == "ok" else status))
    axes.axhline(1, color="black", linewidth=0.6)
    log_axis(axes.yaxis, "x")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), high * (high / min(low, 0.8)) ** 0.25)


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
        hatches = [HATCH if kind != "real" else "" for kind in found["kind"][good]]
        axes.bar(place[good], found["value"][good], bar, color=colour(name), alpha=shade, label=label, hatch=hatches)
        for x, status in zip(place[~good], found["status"][~good].fillna(""), strict=True):
            write(axes, x, MISSING.get(status, status))
    log_axis(axes.yaxis, " ms")
    axes.set_ylabel(spec["label"])
    name_graphs(axes, graphs)
    legend_above(axes, 3, synthetic_key(graphs))
    return figure


def lines(data: Data, spec: Spec) -> Figure | None:
    """Lines of the median over `x` with a band from p10 to p90, one for each value of the column `series` and type.

    Axes for each value of the columns `panel`.
    """
    rows = data.pick(spec["where"])
    rows = rows[rows["status"].isin(["ok", "unchecked"])]
    panels = [*rows.groupby(spec["panel"])]
    if not panels:
        return None
    figure, grid = new_figure(WIDTH, 3.2, 1, len(panels))
    for axes, (names, found) in zip(grid[0], panels, strict=True):
        of = spec["series"]
        for nth, ((series, dtype), line) in enumerate(found.groupby([of, "dtype"])):
            line = line.sort_values(spec["x"])
            style = {"color": colour(series), "linestyle": DASHES[nth % len(DASHES)]}
            axes.plot(line[spec["x"]], line["value"], label=f"{series}, {dtype}, n = {line['repeats'].max()}", **style)
            axes.fill_between(line[spec["x"]], line["p10"], line["p90"], color=colour(series), alpha=0.12, linewidth=0)
        if spec.get("log"):
            log_axis(axes.xaxis)
            log_axis(axes.yaxis, " ms")
        axes.set_xlabel({"nnz": "edges"}.get(spec["x"], spec["x"]))
        title = ", ".join(
            f"{value} blocks" if of == "blocks" else str(value) for of, value in zip(spec["panel"], names, strict=True)
        )
        axes.legend(fontsize=5, title=title, title_fontsize=6, loc="best")
    return figure


def heat_map(data: Data, spec: Spec) -> Figure | None:
    """Ratios by graph and by each of `columns`, from white at 1 to red."""
    columns = {
        name: data.pairs(merged(data.resolve(spec["where"]), part)) for name, part in axis(data, spec["columns"], {})
    }
    table = pd.DataFrame({name: found.set_index("label")["ratio"] for name, found in columns.items()})
    if table.empty:
        return None
    figure, ((axes,),) = new_figure(1.6 + 0.7 * len(table.columns), 1 + 0.25 * len(table))
    axes.imshow(np.log(table), cmap="RdBu_r", vmin=-np.log(2), vmax=np.log(2), aspect="auto")
    for (y, x), ratio in np.ndenumerate(table.to_numpy()):
        axes.text(x, y, f"{ratio:.2f}" if np.isfinite(ratio) else "-", ha="center", va="center", size=7)
    axes.set_xticks(range(len(table.columns)), table.columns)
    axes.set_yticks(range(len(table)), table.index, size=6)
    axes.grid(visible=False)
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
    for axes in grid.flat[len(charts) :]:
        axes.set_axis_off()
    for axes, (title, steps) in zip(grid.flat, charts.items(), strict=False):
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
    """A dot for each series on each graph: its ratio, hollow on a graph that is not real.

    `best`: a ring around the ratio over the best other kernel, and a line at the geometric mean of those.
    """
    panels = []
    for panel in spec["panels"]:
        base = merged(data.resolve(panel["where"]), {"by": panel.get("by", ["data_sha256", "series"])})
        if "best" in panel:  # one series of ours against each other one
            others = data.pick(merged(base, data.resolve(panel["theirs"])))["series"]
            sides = {name: {"ours": panel["ours"], "theirs": {"series": name}} for name in in_order(others)}
            found = {name: data.pairs(merged(base, {"by": ["data_sha256"]}, side)) for name, side in sides.items()}
        else:
            pairs = data.pairs(merged(base, {"ours": panel["ours"], "theirs": panel["theirs"]}))
            found = {name: pairs[pairs["series"] == name] for name in in_order(pairs["series"])}
        if found and any(map(len, found.values())):
            panels.append((panel, base, found))
    if not panels:
        return None
    counts = [len(distinct(pd.concat(found.values()))) for *_, found in panels]
    width = min(max(WIDTH, 1.2 + 0.26 * sum(counts)), MOST_WIDTH)
    figure, grid = new_figure(width, 3.9, 1, len(panels), sharey=True, width_ratios=counts)
    for axes, (panel, base, found) in zip(grid[0], panels, strict=True):
        _draw_dots(axes, found)
        if "best" in panel:
            best = data.pairs(merged(base, {"by": ["data_sha256"], "ours": panel["ours"], "theirs": panel["best"]}))
            graphs = distinct(pd.concat(found.values()))
            label = f"best other kernel: {_means(best)}"
            places = graphs.index.get_indexer(best["data_sha256"])
            axes.plot(places, best["ratio"], "o", mfc="none", mec="black", ms=8, label=label)
            axes.axhline(mean(best["ratio"]), color="black", linewidth=0.8, linestyle="--")
        axes.axhline(1, color="black", linewidth=0.6)
        device = pd.concat(found.values())["device"].iloc[0]
        legend_above(axes, 1 if len(panels) > 1 else 3, title=", ".join(filter(None, [panel.get("title"), device])))
    log_axis(grid[0, 0].yaxis, "x")
    grid[0, 0].set_ylabel(spec["label"])
    return figure


def _draw_dots(axes: Axes, found: Mapping[str, pd.DataFrame]) -> None:
    graphs = distinct(pd.concat(found.values()))
    for series, rows in found.items():
        places, shade = graphs.index.get_indexer(rows["data_sha256"]), colour(series)
        faces = [shade if kind == "real" else "none" for kind in rows["kind"]]
        axes.vlines(places, rows["low"], rows["high"], color=shade, linewidth=0.7)
        axes.scatter(places, rows["ratio"], s=14, c=faces, edgecolors=shade, linewidths=0.8, zorder=2)
        axes.scatter([], [], s=14, color=shade, label=f"{series}: {_means(rows)}")
    name_graphs(axes, graphs)


CHARTS: dict[str, Callable[[Data, Spec], Figure | None]] = {
    "speedups": speedups,
    "times": times,
    "lines": lines,
    "heat-map": heat_map,
    "waterfall": waterfall,
    "dots": dots,
}


def drawn_files(data: Data, kind: str = "png", names: Sequence[str] | None = None) -> dict[str, bytes]:
    """Contents of the figures in git by the names of their files, or of the entries `names`."""
    entries = names or [name for name, spec in declarations()["figures"].items() if "draw" in spec]
    return {f"{file}.{kind}": image(figure, kind) for name in entries for file, figure in draw(data, name)}
