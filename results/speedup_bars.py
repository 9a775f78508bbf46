"""Groups of bars, one group a graph: speed-ups above 1, losses below, and in place of a missing bar the reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from results import style
from results.kernel_times import Graph, Panel

ROW_HEIGHT, LEGEND_LINE, NAMES = 1.7, 0.16, 1.4  # inches


@dataclass(frozen=True)
class Series:
    """The bars of one colour: speed-ups of `subject` over `baseline` in a panel."""

    panel: Panel
    subject: str
    baseline: str
    shade: str
    label: str


def draw_rows(rows: dict[str, Sequence[Series]], graphs: Sequence[Graph], title: str) -> Figure:
    """A row of axes, with a log scale and the row's key as its label, for each list of series; graphs in common."""
    most = max(len(series) for series in rows.values())
    width = style.width_of_bars(len(graphs), most)
    columns = 3 if width > 9 else 2
    height = NAMES + len(rows) * (ROW_HEIGHT + LEGEND_LINE * (1 + most // columns))
    figure, grid = style.new_figure(width, height, len(rows), sharex=True, squeeze=False)
    synthetic = [style.synthetic_key()] if any(graph.synthetic for graph in graphs) else []
    for axes, (label, series) in zip(grid[:, 0], rows.items(), strict=True):
        for nth, one in enumerate(series):
            _draw_series(axes, one, graphs, nth, len(series))
        axes.axhline(1, color="black", linewidth=0.6)
        style.log_axis(axes.yaxis, "x")
        style.name_ticks(axes, [graph.tick for graph in graphs])
        axes.set_ylabel(label)
        style.legend_above(axes, "", columns, synthetic)
    figure.suptitle(title, size=9)
    return figure


def _draw_series(axes: Axes, series: Series, graphs: Sequence[Graph], nth: int, of: int) -> None:
    panel, width = series.panel, 0.9 / of
    drawn = []
    for middle, graph in enumerate(graphs):
        place = middle - 0.45 + width * (nth + 0.5)
        ours, theirs = panel.time(graph, series.subject), panel.time(graph, series.baseline)
        if ours is None or theirs is None:
            statuses = [panel.status(graph, name) for name in (series.baseline, series.subject)]
            style.write_missing(axes, place, next((word for word in statuses if word not in (None, "ok")), None))
        else:
            drawn.append((place, theirs / ours - 1, style.hatch(graph.synthetic)))
    places, heights, hatches = zip(*drawn, strict=True) if drawn else ((), (), ())
    options = {"color": series.shade, "edgecolor": "white", "linewidth": 0.3, "label": series.label}
    axes.bar(places, heights, width, 1, hatch=list(hatches), **options)
