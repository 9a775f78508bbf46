"""Charts that are no bars of `report.drawing.bars`, and tables of its lines; report/figures.py calls both."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from report import drawing as on
from report import selections as of
from report.engine import COUNTED, DISTURBED, Data, Where

SCORES = {"balanced_accuracy": "balanced accuracy", "rocauc": "ROC-AUC", "mae": "MAE", "rmse": "RMSE"}
Line = dict[str, object]  # of the table of `report.drawing.bars`


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """The graphs of rows by number of edges, one line each."""
    return rows.sort_values(["nnz", "label"]).drop_duplicates("data_sha256").set_index("data_sha256")


def line(row: pd.Series | None, series: str, value: float | None = None, text: str = "", **changes: object) -> Line:
    """A bar of a row: its value and time, or why there is none."""
    if row is None or row["status"] not in COUNTED:
        status = "not run" if row is None else row["status"]
        value, text = np.nan, on.MISSING.get(status, status)
    elif value is None:
        value = row["value"]
    text = text or on.milliseconds(row["value"])
    return {"value": value, "text": text, "colour": on.colour(series), **changes}


def times(data: Data, where: Where) -> pd.DataFrame | None:
    """Lines of times: axes for each graph, a bar for each series. None without a time."""
    rows = data.pick(where)
    if rows.empty:
        return None
    lines = []
    for _, of_graph in rows.groupby(rows["data_sha256"].map({sha: n for n, sha in enumerate(distinct(rows).index)})):
        found = of_graph.drop_duplicates("series").set_index("series")
        for series in on.in_order(rows["series"]):
            row = found.loc[series] if series in found.index else None
            one = line(row, series, panel=on.graph(of_graph.iloc[0], "\n"), name=on.name(series))
            noisy = row is not None and row["disturbed"] == "yes"
            lines.append(one | {"text": DISTURBED * noisy + one["text"]})
    table = pd.DataFrame(lines)
    return table if table["value"].notna().any() else None


def gains(lines: pd.DataFrame, ours: str, theirs: Sequence[str]) -> pd.Series:
    """The time of the fastest of `theirs` over that of `ours`, for each graph with both, undisturbed."""
    table = lines[~lines["text"].str.startswith(DISTURBED)].pivot(index="panel", columns="name", values="value")
    table = table.reindex(columns=[ours, *theirs])
    return (table[[*theirs]].min(axis=1) / table[ours]).dropna()


def learning(data: Data, where: Where, published: pd.DataFrame) -> Figure | None:
    """The validation score by epoch, median and band from p10 to p90 over seeds, with the mean test score of the best
    weights and a published one as lines. Axes for each data set, model and recipe."""
    rows = data.pick(where)
    rows = rows[rows["status"].isin(COUNTED)]
    model = ["label", "blocks", "dim", "recipe", "backend", "dtype"]
    panels = [*rows.groupby([*model, "metric"])]
    if not panels:
        return None
    columns = min(4, len(panels))
    shape = -(-len(panels) // columns), columns
    figure, grid = on.new_figure(1.9 * shape[0], *shape)
    found_scores = []
    for axes, ((*one, metric), found) in zip(on.first_axes(grid, len(panels)), panels, strict=True):
        score = metric.removeprefix("valid_")
        found = found.sort_values("epoch")
        axes.plot(found["epoch"], found["value"], color=on.OURS)
        axes.fill_between(found["epoch"], found["p10"], found["p90"], color=on.OURS, alpha=0.2, linewidth=0)
        same = dict(zip(model, one, strict=True)) | {"bench": "train", "metric": f"test_{score}", "region": "none"}
        tests = data.pick(same | {"device": found["device"].iloc[0]})["value"]
        others = published[(published["dataset"] == found["dataset"].iloc[0]) & (published["metric"] == score)]
        sides = [("test", score_of, on.PAPER, "--") for score_of in [tests.mean()] * bool(len(tests))]
        sides += [(other.model, other.score, on.PEOPLE, ":") for other in others.itertuples()]
        falls = found["value"].iloc[-1] < found["value"].iloc[0]  # then the corner above the curve is empty
        for nth, (words, value, colour, style) in enumerate(sides):
            axes.axhline(value, color=colour, linestyle=style, linewidth=1.2)
            place = 0.9 - 0.1 * nth if falls else 0.04 + 0.1 * (len(sides) - 1 - nth)
            axes.text(0.98, place, f"{words} {value:.3f}", color=colour, transform=axes.transAxes, ha="right")
        if len(sides) > 1:
            found_scores.append(f"{one[0]} {sides[0][1]:.3f} ({sides[1][0]} {sides[1][1]:.3f})")
        unit = "" if found["unit"].iloc[0] == "1" else f", {found['unit'].iloc[0]}"
        axes.set_title(f"{one[0]}\n{SCORES.get(score, score)}{unit}")
        axes.margins(x=0.02)
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    beside = f", beside published ones: {', '.join(found_scores)}" if found_scores else ""
    figure.suptitle(f"Test scores of {len(panels)} trained models{beside}")
    return figure


def by_edges(
    data: Data, where: Where, panels: Mapping[str, tuple[Where, float]], series: Mapping[str, tuple[str, str, Where]]
) -> Figure | None:
    """Log-log lines over the number of edges, each with its name and last value.

    Args:
        panels: selection and factor of the values, by the title of the axes.
        series: by name the colour, the style of the line and a selection.
    """
    figure, (grid,) = on.new_figure(3.0, 1, len(panels))
    for axes, (title, (panel, factor)) in zip(grid, panels.items(), strict=True):
        for name, (colour, style, selection) in series.items():
            found = data.pick({**where, **panel, **selection}).sort_values("nnz")
            good = found[found["status"].isin(COUNTED)]
            if good.empty:
                return None
            values = good["value"] * factor
            axes.plot(good["nnz"], values, style, marker="o", color=colour)
            last = data.pick({**where, **of.TIME, **selection}).sort_values("nnz").iloc[-1]
            text = f"{name}\n{values.iloc[-1]:.3g}" + ", then fails" * (last["status"] not in COUNTED)
            at = good["nnz"].iloc[-1], values.iloc[-1]
            axes.annotate(text, at, (6, 0), textcoords="offset points", color=colour, size=7.5, va="center")
        axes.set(xscale="log", yscale="log", xlabel="edges")
        axes.set_title(title)
        axes.grid(visible=True, axis="both")
        axes.set_xlim(right=axes.get_xlim()[1] * 4)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: on.edges(value)))
        on.log_axis(axes.yaxis)
    return figure


def sm_times(
    data: Data, where: Where, of_paper: Where, graphs: Sequence[str], bars: Mapping[str, str]
) -> Figure | None:
    """Figure 7: the active time of each SM over that of the longest and a line at the mean; a row of axes for each of
    `graphs`, without (left) and with (right) reordering."""
    times = data.pick(where)
    if times.empty:
        return None
    same = {"metric": "sm_active_share", "device": times["device"].iloc[0]}
    shares = data.pick({**where, **same}).set_index(["dataset", "series"])["value"]
    published = data.pick(of_paper).set_index(["dataset", "series"])["value"]
    rows = times.drop_duplicates("dataset").set_index("dataset")
    rows = rows.loc[rows.index.isin(graphs)].sort_values("nnz")
    figure, grid = on.new_figure(1.6 * len(rows), len(rows), 2, sharex=True, sharey=True)
    found = []
    for axes_of, graph in zip(grid, rows.itertuples(), strict=True):
        for axes, (series, label) in zip(axes_of, bars.items(), strict=True):
            of_sm = times[(times["dataset"] == graph.Index) & (times["series"] == series)]
            longest = of_sm["value"].max()
            axes.bar(of_sm["sm"], of_sm["value"] / longest, 1, color=on.colour(series))
            axes.axhline(of_sm["value"].mean() / longest, color="black", linewidth=1, linestyle="--")
            share, paper = shares[graph.Index, series], published[graph.Index, series]
            axes.set_title(f"{graph.label}, {label}: {share:.2f} (paper: {paper:.2f})")
            axes.grid(axis="x", visible=False)
            axes.margins(x=0.01)
        axes_of[0].set_ylabel("active time / longest")
        found.append(f"{' to '.join(f'{shares[graph.Index, series]:.2f}' for series in bars)} on {graph.Index}")
    for axes in grid[-1]:
        axes.set_xlabel(f"SM of {times['device'].iloc[0]}")
    title = "Figure 7: reordering balances the SMs, mean over longest active time"
    figure.suptitle(f"{title} {' and '.join(found)}")
    return figure


def ratios(data: Data, where: Where, theirs: Where, series: str) -> pd.DataFrame:
    """Undisturbed and disturbed ratios of `theirs` over `series`, by data set and d."""
    by = ["dataset", "dim"]
    found = [data.pairs({**where, "series": series, "dim": dim}, {}, theirs, by) for dim in where["dim"]]
    return pd.concat(found).set_index(by)
