"""Groups of bars, one group per graph: speed-ups above 1, losses below, and the reason for a missing bar."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.frames import Graph, Panel
from report.plots import style

ROW_HEIGHT, LEGEND_LINE, NAMES = 1.7, 0.16, 1.4  # inches


@dataclass(frozen=True)
class SpeedupBars:
    """The bars of one colour: speed-ups of `subject` over `baseline` in a panel."""

    panel: Panel
    subject: str
    baseline: str
    shade: str
    label: str

    def speedup(self, graph: Graph) -> float | None:
        return self.panel.ratio(graph, self.subject, self.baseline)

    def failure(self, graph: Graph) -> str | None:
        """Status that explains a missing speed-up; None if one of the two was not run."""
        statuses = [self.panel.status(graph, series) for series in (self.baseline, self.subject)]
        return next((status for status in statuses if status not in (None, "ok")), None)


def draw_rows(rows: dict[str, Sequence[SpeedupBars]], graphs: Sequence[Graph], title: str) -> Figure:
    """Axes with a log scale for each list of series, labelled with its key; they share the graphs."""
    width = style.width_of_bars(len(graphs), max(len(series) for series in rows.values()))
    synthetic = [style.synthetic_key()] if any(graph.synthetic for graph in graphs) else []
    labels = [[*(one.label for one in series), *(key.get_label() for key in synthetic)] for series in rows.values()]
    lines = sum(-(-len(some) // style.legend_columns(some, width)) for some in labels)
    height = NAMES + len(rows) * ROW_HEIGHT + LEGEND_LINE * lines
    figure, grid = style.new_figure(width, height, len(rows), sharex=True, squeeze=False)
    for axes, (label, series) in zip(grid[:, 0], rows.items(), strict=True):
        for nth, one in enumerate(series):
            _draw_series(axes, one, graphs, nth, len(series))
        _write_missing(axes, series, graphs)
        axes.axhline(1, color="black", linewidth=0.6)
        style.log_axis(axes.yaxis, "x")
        style.name_ticks(axes, [graph.tick for graph in graphs])
        axes.set_ylabel(label)
        style.legend_above(axes, "", synthetic)
    figure.suptitle(title, size=9)
    return figure


def _draw_series(axes: Axes, series: SpeedupBars, graphs: Sequence[Graph], index: int, count: int) -> None:
    found = {middle: series.speedup(graph) for middle, graph in enumerate(graphs)}
    drawn = {middle: speedup for middle, speedup in found.items() if speedup is not None}
    places = [style.bar_x(middle, index, count) for middle in drawn]
    heights = [speedup - 1 for speedup in drawn.values()]
    hatches = [style.hatch(graphs[middle].synthetic) for middle in drawn]
    options = {"color": series.shade, "edgecolor": "white", "linewidth": 0.3, "label": series.label}
    axes.bar(places, heights, style.GROUP_WIDTH / count, 1, hatch=hatches, **options)


def _write_missing(axes: Axes, series: Sequence[SpeedupBars], graphs: Sequence[Graph]) -> None:
    """Write a status for each bar that failed, and one "not run" for neighbouring bars without a row."""
    for middle, graph in enumerate(graphs):
        missing = [nth for nth, one in enumerate(series) if one.speedup(graph) is None]
        failures = {nth: status for nth in missing if (status := series[nth].failure(graph))}
        for nth, status in failures.items():
            style.write_missing(axes, style.bar_x(middle, nth, len(series)), status)
        not_run = enumerate(nth for nth in missing if nth not in failures)
        for _, run in groupby(not_run, key=lambda at: at[1] - at[0]):
            several = [nth for _, nth in run]
            style.write_missing(axes, style.bar_x(middle, sum(several) / len(several), len(series)), None)
