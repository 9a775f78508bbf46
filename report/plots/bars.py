"""Groups of bars, one group per graph: speed-ups above 1, losses below, and the reason for a missing bar."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.frames import Graph, Panel
from report.plots import style

ROW_HEIGHT, LEGEND_LINE, NAMES = 1.9, 0.16, 1.4  # inches
SHARED_SIZE, SHARED_INCHES = 6, 0.5  # of the font; least width of a group for level words
TEXT_ROOM = 0.25  # share of an axis above the longest bar, for the words on it


@dataclass(frozen=True)
class SpeedupBars:
    """The bars of one colour: speed-ups of `subject` over `baseline` in a panel.

    Attributes:
        own: the one of the two that the bars are for; the other is shared by the bars of a row.
    """

    panel: Panel
    subject: str
    baseline: str
    own: str
    label: str
    shade: str

    @property
    def shared(self) -> str:
        return self.baseline if self.own == self.subject else self.subject

    def speedup(self, graph: Graph) -> float | None:
        return self.panel.ratio(graph, self.subject, self.baseline)

    def disturbed(self, graph: Graph) -> bool:
        return any(self.panel.is_disturbed(graph, series) for series in (self.subject, self.baseline))

    def reason(self, graph: Graph) -> str | None:
        """Words in place of a missing bar: its status, or its time if only the other one failed; None: not run."""
        time = self.panel.time(graph, self.own)
        return self.panel.status(graph, self.own) if time is None else milliseconds(time)


def milliseconds(time: float) -> str:
    """A time in ms with its unit: "1,234 ms", "2.5 ms", "4.29 µs"."""
    return f"{time:,.0f} ms" if time >= 1000 else f"{time:.3g} ms" if time >= 1 else f"{1e3 * time:.3g} µs"


def draw_rows(rows: dict[str, Sequence[SpeedupBars]], graphs: Sequence[Graph], title: str) -> Figure:
    """Axes with a log scale for each list of series, labelled with its key; they share the graphs.

    Error bars reach over `Panel.ratio_range`. Where all bars of a row share a series, its time stands above the group.
    """
    width = style.width_of_bars(len(graphs), max(len(series) for series in rows.values()))
    synthetic = [style.synthetic_key()] if any(graph.synthetic for graph in graphs) else []
    labels = [[*(one.label for one in series), *(key.get_label() for key in synthetic)] for series in rows.values()]
    lines = sum(-(-len(some) // style.legend_columns(some, width)) for some in labels)
    height = NAMES + len(rows) * ROW_HEIGHT + LEGEND_LINE * lines
    figure, grid = style.new_figure(width, height, len(rows), sharex=True, squeeze=False)
    for axes, (label, series) in zip(grid[:, 0], rows.items(), strict=True):
        limit = style.cut_at(found for one in series for graph in graphs if (found := one.speedup(graph)))
        for nth, one in enumerate(series):
            _draw_series(axes, one, graphs, nth, len(series), limit)
        axes.axhline(1, color="black", linewidth=0.6)
        style.log_axis(axes.yaxis, "x")
        low, high = axes.get_ylim()
        low = min(low, 0.8)
        axes.set_ylim(low, high * (high / low) ** TEXT_ROOM)
        _write_missing(axes, series, graphs)
        if _share_one(series):
            _write_shared(axes, series[0], graphs)
        style.name_ticks(axes, [graph.tick for graph in graphs])
        axes.set_ylabel(label, size=7)
        style.legend_above(axes, "", synthetic)
    figure.suptitle(title, size=9)
    notes = ["on top: the time of the series named on the left"] * any(map(_share_one, rows.values()))
    notes += [f"{style.DISTURBED} set or disturbed by the host, in no mean"] * any(
        one.disturbed(graph) for series in rows.values() for one in series for graph in graphs
    )
    commits = {commit for series in rows.values() for one in series for commit in one.panel.rows["commit"]}
    notes += [f"rows of {len(commits)} commits"] * (len(commits) > 1)
    style.footnote(figure, "; ".join(["error bars: p10 to p90 of both times; means are geometric", *notes]))
    return figure


def _share_one(series: Sequence[SpeedupBars]) -> bool:
    return len({(id(one.panel), one.shared) for one in series}) == 1


def _draw_series(
    axes: Axes, series: SpeedupBars, graphs: Sequence[Graph], index: int, count: int, limit: float
) -> None:
    width = style.GROUP_WIDTH / count
    found = {middle: series.speedup(graph) for middle, graph in enumerate(graphs)}
    drawn = {middle: speedup for middle, speedup in found.items() if speedup is not None}
    places = [style.bar_x(middle, index, count) for middle in drawn]
    heights = [min(speedup, limit) - 1 for speedup in drawn.values()]
    hatches = [style.hatch(graphs[middle].synthetic) for middle in drawn]
    options = {"color": series.shade, "edgecolor": "white", "linewidth": 0.3, "label": series.label}
    axes.bar(places, heights, width, 1, hatch=hatches, **options)
    for place, (middle, speedup) in zip(places, drawn.items(), strict=True):
        mark = style.DISTURBED if series.disturbed(graphs[middle]) else ""
        if speedup > limit:
            style.mark_cut(axes, place, width, limit, f"{mark}{speedup:,.0f}x")
            continue
        low, high = series.panel.ratio_range(graphs[middle], series.subject, series.baseline)
        axes.plot([place, place], [low, min(high, limit)], color="black", linewidth=0.5)
        if mark:
            axes.text(place, max(speedup, 1), mark, ha="center", va="bottom", size=7)


def _write_missing(axes: Axes, series: Sequence[SpeedupBars], graphs: Sequence[Graph]) -> None:
    """Write the reason for each missing bar, and one "not run" for neighbouring bars without a row."""
    for middle, graph in enumerate(graphs):
        missing = [nth for nth, one in enumerate(series) if one.speedup(graph) is None]
        reasons = {nth: reason for nth in missing if (reason := series[nth].reason(graph))}
        for nth, reason in reasons.items():
            style.write_missing(axes, style.bar_x(middle, nth, len(series)), reason)
        not_run = enumerate(nth for nth in missing if nth not in reasons)
        for _, run in groupby(not_run, key=lambda at: at[1] - at[0]):
            place = style.bar_x(middle, float(np.mean([nth for _, nth in run])), len(series))
            style.write_missing(axes, place, None)


def _write_shared(axes: Axes, bars: SpeedupBars, graphs: Sequence[Graph]) -> None:
    """Above each group, the time of the series that all bars share, or why it has none."""
    inches = axes.figure.get_figwidth() / len(graphs)
    for middle, graph in enumerate(graphs):
        time, status = bars.panel.time(graph, bars.shared), bars.panel.status(graph, bars.shared)
        words = milliseconds(time) if time is not None else style.MISSING.get(status, status)
        options = {"ha": "center", "va": "top", "size": SHARED_SIZE, "color": "#444444"}
        options["rotation"] = 90 if inches < SHARED_INCHES else 0
        axes.text(middle, 0.99, words, transform=axes.get_xaxis_transform(), **options)
