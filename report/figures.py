"""Figures of recorded rows: one function is one figure, by the name that `scripts/plot.py` takes.

Its arguments are what `scripts/plot.py --set` may change; their values fill {…} in the note. The title, which it sets,
tells what was found. Title and docstring are the alternative text of the picture.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from report import drawing as on
from report import selections as of
from report.charts import distinct, gains, line, ratios, times
from report.engine import COUNTED, DISTURBED, Data, Where, by_graph, mean, quiet, real
from report.published import captions, scores
from report.training import last_of_seeds

Make = Callable[..., Figure | None]
SCORES = {"balanced_accuracy": "balanced accuracy", "rocauc": "ROC-AUC", "mae": "MAE", "rmse": "RMSE"}


class Entry(NamedTuple):
    make: Make
    note: str
    in_git: bool

    @property
    def settings(self) -> dict[str, Any]:
        """What may be changed, with its default."""
        _, *others = inspect.signature(self.make).parameters.values()
        return {one.name: one.default for one in others}


class Drawn(NamedTuple):
    file: str
    figure: Figure
    alt: str


FIGURES: dict[str, Entry] = {}


def figure(name: str, note: str, *, in_git: bool = True) -> Callable[[Make], Make]:
    """Adds a function to FIGURES."""

    def add(make: Make) -> Make:
        FIGURES[name] = Entry(make, note, in_git)
        return make

    return add


def draw(data: Data, name: str, changes: Mapping[str, Any] | None = None) -> Drawn | None:
    """The figure of that name with `changes`; None if its rows were not recorded.

    Raises:
        ValueError: an unknown name, or a change that the entry does not take.
    """
    if name not in FIGURES:
        raise ValueError(f"{name}: no such figure; there are {', '.join(FIGURES)}")
    entry, changes = FIGURES[name], changes or {}
    if unknown := set(changes) - entry.settings.keys():
        raise ValueError(f"--set {', '.join(unknown)}: {name} takes {', '.join(entry.settings) or 'none'}")
    values = entry.settings | changes
    data.used.clear()
    made = data.of_one_device(lambda: entry.make(data, **values))
    if made is None or (data.device and data.device not in {*pd.concat(data.used)["device"]}):
        return None  # drawn of another device: not asked for
    title = made.get_suptitle()
    made.suptitle(textwrap.fill(title, 92, break_on_hyphens=False), x=0.01, ha="left")
    note = "; ".join(filter(None, [entry.note.format(**values), data.provenance()]))
    made.supxlabel(note, x=0.01, ha="left", size=7, color="#555555", wrap=True)
    file = name + "".join(f"_{key}-{value}" for key, value in changes.items() if value != entry.settings[key])
    return Drawn(file, made, f"{title}. {inspect.cleandoc(entry.make.__doc__)}".replace("\n", " "))


def drawn_in_git(data: Data) -> dict[str, Drawn]:
    """The figures in git by name, but for those whose rows were not recorded."""
    found = {name: draw(data, name) for name, entry in FIGURES.items() if entry.in_git}
    return {name: drawn for name, drawn in found.items() if drawn}


@figure(
    "hero",
    "Isolated launches. Every kernel that was measured with 16-bit inputs takes part; all are implemented in this "
    "repository",
)
def hero(data: Data, dim: int = 128) -> Figure | None:
    """Bars of the speed-up over the best other kernel with 16-bit inputs, which is named at the end, for each real
    graph; isolated launches."""
    where = of.KERNEL | of.ISOLATED | of.GRAPHS | {"kind": "real", "dim": dim}
    best = {"backend": "best other", "dtype": "float16"}
    found = quiet(data.pairs(where, of.OURS, best)).sort_values("ratio", ascending=False)
    if found.empty:
        return None
    others = distinct(data.pick(where | best | {"device": found["device"].iloc[0]}))["note"]
    lines = []
    for _, graph in found.iterrows():
        text = f"{on.factor(graph['ratio'])} over {on.name(others[graph['data_sha256']])}"
        lines.append(line(graph, "fused3s", graph["ratio"], text, panel="", name=on.graph(graph)))
    drawn = on.bars(pd.DataFrame(lines), base=1)
    words = f"{mean(found['ratio']):.2f}x as fast as the best other kernel on {real_graphs(found)}"
    drawn.suptitle(f"fused3s is {words}, 16 bits, d = {dim}")
    return drawn


def real_graphs(found: pd.DataFrame) -> str:
    """Their number, and how many of them are of another table than the paper's."""
    rebuilt = found["label"].str.endswith("(rebuilt)").sum()
    return f"{len(found)} real graph{'s' * (len(found) > 1)}" + f", {rebuilt} of them rebuilt" * bool(rebuilt)


KERNELS = ["fused3s", "fused3s_paper", "F3S_reorderRW", "F3S_splitC", "F3S_splitR", "flashsparse_naive"]
KERNELS += ["flashsparse_stable", "dfgnn_hyper", "dfgnn_tiling", "pyg"]
TILING = "dfgnn_tiling"


def kernels_of_the_paper(data: Data, number: int, graphs: Sequence[str], dim: int) -> Figure | None:
    """Figure 5 or 6."""
    graph = {"dataset": graphs, "dim": [dim]}
    where = of.FIXED | of.WARM | graph | {"group": ["single", "batched"], "order": "none"}
    where |= {"dtype": ["float16", "float32"]}
    rows = data.pick(where | {"series": KERNELS})
    if rows.empty:
        return None
    where |= {"device": rows["device"].iloc[0]}
    sides = where, *(of.PUBLISHED | graph | {"device": gpu} for gpu in ("GH200", "A30"))
    found, tick, ring = ({one: ratios(data, side, {"series": TILING}, one) for one in KERNELS} for side in sides)
    over = {series: quiet(ratios(data, where, {"series": series}, "fused3s_paper")) for series in KERNELS}
    over = {series: by_graph(found) for series, found in over.items() if len(found) and series != "fused3s_paper"}
    if TILING not in over:
        return None
    of_series = rows.set_index(["dataset", "series"])
    lines = []
    for dataset, graph in rows.drop_duplicates("dataset").set_index("dataset").iterrows():
        at, panel = (dataset, dim), on.graph(graph, "\n")
        for series in KERNELS:
            marks = {"tick": tick[series]["ratio"].get(at), "ring": ring[series]["ratio"].get(at)}
            marks = {} if series == TILING else marks
            ratio = found[series]["ratio"].get(at)
            row = of_series.loc[dataset, series] if (dataset, series) in of_series.index else None
            text = "" if series == TILING else on.factor(ratio) if ratio else ""
            lines.append(line(row, series, ratio, text, panel=panel, name=on.name(series), **marks))
    stated = [captions(f"Figure {number}({part})") for part in "ab"]
    for series, of_graphs in over.items():
        value, panel = mean(of_graphs["ratio"]), "the paper's kernel\nover each, mean"
        marks = {"tick": stated[0].get(series), "ring": stated[1].get(series)}
        one = {"panel": panel, "name": on.name(series), "value": value, "text": f"{value:.2f}x", "colour": on.PAPER}
        lines.append(one | marks)
    drawn = on.bars(pd.DataFrame(lines), base=1)
    on_real = real(over[TILING])
    words = f"{mean(on_real['ratio']):.2f}x on {real_graphs(on_real)}; " * (0 < len(on_real) < len(over[TILING]))
    words = f"{mean(over[TILING]['ratio']):.2f}x as fast as DF-GNN tiling ({words}paper: {stated[0][TILING]:g}x)"
    if "fused3s" in over:
        words += f", fused3s {1 / mean(over['fused3s']['ratio']):.2f}x as fast as the paper's kernel"
    drawn.suptitle(f"Figure {number}: the paper's kernel is {words}")
    return drawn


KERNELS_NOTE = (
    "Bars: speed-up over DF-GNN tiling, whose time is given; d = {dim}, fp32 output, back to back, L2 warm. | and ○: "
    "the authors' own times, GH200 and A30, over their DF-GNN tiling; in the last axes the paper's captions. PyG and "
    "DF-GNN compute in fp32. Means: geometric, of graphs on which both ran. Refused: rows too long for shared memory"
)


@figure("fig5_single", KERNELS_NOTE)
def fig5_single(data: Data, dim: int = 128) -> Figure | None:
    """For each single graph of the paper, by number of edges, bars of the speed-up of each kernel over DF-GNN tiling,
    with marks at the authors' own values."""
    return kernels_of_the_paper(data, 5, of.FIGURE_5, dim)


@figure("fig6_batched", KERNELS_NOTE)
def fig6_batched(data: Data, dim: int = 128) -> Figure | None:
    """For each batch of 1,024 graphs of the paper, by number of edges, bars of the speed-up of each kernel over DF-GNN
    tiling, with marks at the authors' own values."""
    return kernels_of_the_paper(data, 6, of.FIGURE_6, dim)


@figure(
    "fig7_sm_activity",
    "Dashed, and in the titles: the mean; in brackets the paper's, of an A30. The row windows of a synthetic graph are "
    "in random order",
)
def fig7_sm_activity(data: Data) -> Figure | None:
    """Bars of the active time of each SM over the longest one, on Pubmed and Reddit, without and with reordering."""
    where = {"bench": "sm_active", "group": {"not": ["twin"]}, "dtype": "float16", "out_dtype": "float32", "dim": 128}
    active = data.pick(where | {"metric": "sm_active_time"})
    if active.empty:
        return None
    device, share = active["device"].iloc[0], {"metric": "sm_active_share"}
    of_paper = {"bench": "published", "device": "A30"} | share
    sides = where | share | {"device": device}, of_paper
    shares, published = (data.pick(side).set_index(["dataset", "series"])["value"] for side in sides)
    rows = active.drop_duplicates("dataset").set_index("dataset")
    rows = rows.loc[rows.index.isin(["reddit", "pubmed"])].sort_values("nnz")
    drawn, grid = on.new_figure(1.6 * len(rows), len(rows), 2, sharex=True, sharey=True)
    bars = {"F3S_splitC": "not reordered", "F3S_reorderRW": "reordered"}
    found = []
    for axes_of, graph in zip(grid, rows.itertuples(), strict=True):
        for axes, (series, label) in zip(axes_of, bars.items(), strict=True):
            of_sm = active[(active["dataset"] == graph.Index) & (active["series"] == series)]
            longest = of_sm["value"].max()
            axes.bar(of_sm["sm"], of_sm["value"] / longest, 1, color=on.colour(series))
            axes.axhline(of_sm["value"].mean() / longest, color="black", linewidth=1, linestyle="--")
            ours, paper = shares[graph.Index, series], published[graph.Index, series]
            axes.set_title(f"{graph.label}, {label}: {ours:.2f} (paper: {paper:.2f})")
            axes.grid(axis="x", visible=False)
            axes.margins(x=0.01)
        axes_of[0].set_ylabel("active time / longest")
        found.append(f"{' to '.join(f'{shares[graph.Index, series]:.2f}' for series in bars)} on {graph.Index}")
    for axes in grid[-1]:
        axes.set_xlabel(f"SM of {device}")
    title = "Figure 7: reordering balances the SMs, mean over longest active time"
    drawn.suptitle(f"{title} {' and '.join(found)}")
    return drawn


MODELS = {"dgl": "DGL", "csr_unfused": "cuSPARSE", "dfgnn_tiling": "DF-GNN\ntiling", "dfgnn_hyper": "DF-GNN\nhyper"}
MODELS |= {"flashsparse_naive": "FlashSparse\nnaive", "fused3s_paper": "the paper's\nkernel"}
MODELS |= {"fused3s": "fused3s\n(ours)"}
MODEL_OF_THE_PAPER = of.MODEL | of.EAGER | {"group": {"not": ["twin"]}}
MODEL_OF_THE_PAPER |= {"dataset": of.FIGURE_8, "dim": [64, 128, 256]}
MODEL_NOTE = (
    "10 blocks, eager. ~: bound by the CPU, in no mean. cuSPARSE: csr_unfused. Refused: rows too long for shared "
    "memory. Blank: not recorded"
)


def model_of_the_paper(data: Data, theirs: Where, text: Callable[[pd.Series], str]) -> dict[str, pd.DataFrame]:
    """Lines of Figure 8 by precision: the ratio of `theirs` over each kernel, for each data set and d."""
    found = {}
    for dtype, precision in of.PRECISIONS.items():
        where = MODEL_OF_THE_PAPER | precision | {"series": [f"{name} plain" for name in MODELS]}
        rows = data.pick(where)
        where |= {"device": rows["device"].iloc[0] if len(rows) else ""}
        lines = []
        for series, title in MODELS.items():
            pairs = ratios(data, where, theirs, f"{series} plain")
            for _, row in rows[rows["series"] == f"{series} plain"].iterrows():
                at = row["dataset"], row["dim"]
                pair = pairs.loc[at] if at in pairs.index else None
                about = *on.graph(row, "\n").split("\n"), ""  # beside the first, second and third d
                about = dict(zip(where["dim"], about, strict=True))[row["dim"]]
                lines.append(
                    line(
                        row,
                        series,
                        np.nan if pair is None else pair["ratio"],
                        "" if pair is None else DISTURBED * bool(pair["noisy"]) + text(pair),
                        panel=f"{title}\n{dtype}",
                        name=f"{about}, d = {row['dim']}".removeprefix(", "),
                        group=row["dataset"],
                    )
                )
        if lines:
            found[dtype] = pd.DataFrame(lines)
    return found


@figure(
    "fig8_end_to_end",
    "Bars: speed-up over DGL (cuSPARSE where DGL was not measured), with the milliseconds of the model. |: the paper's "
    "mean on an H100. " + MODEL_NOTE,
)
def fig8_end_to_end(data: Data) -> Figure | None:
    """For each precision of the layers outside attention, and each kernel, bars of the speed-up of the whole model over
    the one with DGL, with its milliseconds: data sets by number of edges with d = 64, 128 and 256. The last bar is the
    mean speed-up of the paper's kernel over that one, with a mark at the paper's value."""
    by_dgl = (data.pick(MODEL_OF_THE_PAPER | precision | {"backend": "dgl"}) for precision in of.PRECISIONS.values())
    runs = any(rows["status"].isin(COUNTED).any() for rows in by_dgl)
    base, name = ("dgl", "DGL") if runs else ("csr_unfused", "cuSPARSE")
    slowest = {"series": f"{base} plain"}
    tables = model_of_the_paper(data, slowest, lambda pair: on.milliseconds(pair["value"]).removesuffix(" ms"))
    stated, words = captions("Figure 8(c)"), []
    for dtype, lines in tables.items():
        where, extra = MODEL_OF_THE_PAPER | of.PRECISIONS[dtype], []
        for series, title in MODELS.items():
            over = quiet(ratios(data, where, {"series": f"{series} plain"}, "fused3s_paper plain"))
            if len(over) and series != "fused3s_paper":
                value = mean(by_graph(over)["ratio"])
                if series == base and len(few := real(by_graph(over))):
                    words.append(f"{mean(few['ratio']):.2f}x ({dtype}, {real_graphs(few)})")
                one = {"value": value, "text": f"{value:.2f}x", "colour": on.PAPER, "group": "mean"}
                one |= {"panel": f"{title}\n{dtype}", "name": "the paper's kernel over each, mean"}
                extra.append(one | {"tick": stated.get("dgl" if series == base else series, np.nan)})
        tables[dtype] = pd.concat([lines, pd.DataFrame(extra)])
    if not words:
        return None
    drawn = on.bars(pd.concat(tables.values()), columns=len(MODELS), base=1)
    title = f"Figure 8 (c): with the paper's kernel the model is {' and '.join(words)} as fast as with {name} "
    drawn.suptitle(f"{title}where the GPU sets the time; {stated['dgl']:g}x over DGL in the paper")
    return drawn


@figure(
    "fig8_attention_share",
    "Bars: share of attention in the time of the model, each timed in passes of its own, so that it can exceed 100 %. "
    + MODEL_NOTE,
)
def fig8_attention_share(data: Data) -> Figure | None:
    """For each precision of the layers outside attention, and each kernel, bars of the share of attention in the time
    of the whole model: data sets by number of edges with d = 64, 128 and 256."""
    tables = model_of_the_paper(data, {"scope": "attention"}, lambda pair: f"{100 * pair['ratio']:.0f} %")
    words = []
    for dtype, lines in tables.items():
        ours = lines[(lines["colour"] == on.PAPER) & ~lines["text"].str.startswith(DISTURBED)]["value"].dropna()
        words += [f"{ours.min():.0%} to {ours.max():.0%} ({dtype})"] * bool(len(ours))
    if not words:
        return None
    drawn = on.bars(pd.concat(tables.values()), columns=len(MODELS), log=False, ticks="{:.0%}".format)
    drawn.suptitle(f"Figure 8 (d): with the paper's kernel attention takes {' and '.join(words)} of the model's time")
    return drawn


@figure(
    "kernel-times",
    "d = {dim}, back to back, L2 warm. DF-GNN, PyG and cuSPARSE compute in fp32, the others take fp16",
    in_git=False,
)
def kernel_times(data: Data, group: str = "single", dim: int = 128) -> Figure | None:
    """For each graph bars of the time of one attention with each kernel."""
    lines = times(data, of.KERNEL | of.WARM | of.NO_BEST | {"group": group, "dim": dim})
    if lines is None:
        return None
    drawn = on.bars(lines, ticks=on.duration)
    others = [name for name in lines["name"].unique() if not name.startswith("fused3s")]
    found = gains(lines, on.name("fused3s"), others)
    words = f"fused3s is {mean(found):.2f}x as fast as the best other kernel: " if len(found) else ""
    drawn.suptitle(f"{words}time of one attention, {group} graphs")
    return drawn


@figure(
    "scale",
    "Training step of three layers (8 heads x 16 columns), float32; 200,000 nodes, power-law graphs; host and "
    "optimiser included. Failures: out of memory or error of compiled PyG",
)
def scale(data: Data) -> Figure | None:
    """Lines of time and peak memory of a training step from 1 to 134 million edges: eager PyG, compiled PyG and
    fused3s.nn."""
    where = {"bench": "layers", "variant": of.SIZES} | of.FP32
    series = {
        "eager PyG": (on.PEOPLE, "--", of.EAGER | {"backend": "pyg"}),
        "compiled PyG": (on.PEOPLE, "-", {"launch": "compiled", "backend": "pyg"}),
        "fused3s.nn": (on.OURS, "-", of.EAGER | {"backend": "auto"}),
    }
    panels = {"time of a step, ms": (of.TIME, 1), "peak memory, GiB": ({"metric": "peak_memory"}, 2**-10)}
    sides = [series[name][-1] for name in ("fused3s.nn", "compiled PyG")]
    both = [data.pairs(where | panel, *sides, ["data_sha256"]) for panel, _ in panels.values()]
    if not all(map(len, both)):
        return None
    drawn, (grid,) = on.new_figure(3.0, 1, len(panels))
    for axes, (title, (panel, scaled)) in zip(grid, panels.items(), strict=True):
        for name, (colour, style, selection) in series.items():
            found = data.pick(where | panel | selection).sort_values("nnz")
            good = found[found["status"].isin(COUNTED)]
            if good.empty:
                return None
            values = good["value"] * scaled
            axes.plot(good["nnz"], values, style, marker="o", color=colour)
            last = data.pick(where | of.TIME | selection).sort_values("nnz").iloc[-1]
            text = f"{name}\n{values.iloc[-1]:.3g}" + ", then fails" * (last["status"] not in COUNTED)
            at = good["nnz"].iloc[-1], values.iloc[-1]
            axes.annotate(text, at, (6, 0), textcoords="offset points", color=colour, size=7.5, va="center")
        axes.set(xscale="log", yscale="log", xlabel="edges")
        axes.set_title(title)
        axes.grid(visible=True, axis="both")
        axes.set_xlim(right=axes.get_xlim()[1] * 4)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: on.edges(value)))
        on.log_axis(axes.yaxis)
    (time, memory), largest = (rows.iloc[-1] for rows in both), on.edges(both[0].iloc[-1]["nnz"])
    ours = f"{on.milliseconds(time['value'])} and {memory['value'] / 2**10:.3g} GiB"
    pyg = f"{on.milliseconds(time['theirs'])} and {memory['theirs'] / 2**10:.3g} GiB"
    drawn.suptitle(f"With fused3s a training step on {largest} edges takes {ours}, with compiled PyG {pyg}")
    return drawn


@figure(
    "learning-curves",
    "Solid: validation, median over seeds; band: 10th to 90th percentile. Dashed: mean test score of the weights with "
    "the best validation score. Dotted: published test score (results/paper/scores.csv)",
)
def learning_curves(data: Data) -> Figure | None:
    """For each data set a line of the validation score by epoch, with lines at our mean test score and at a published
    one. Of several trainings of a model, the one of most seeds: in bfloat16 with `fused3s`, if there is one."""
    names = ("accuracy", "balanced_accuracy", "f1", "rocauc", "ap", "mae", "rmse")
    any_device = {"bench": "train", "device": {"not": ["none"]}}
    rows = data.pick(any_device | {"metric": [f"valid_{score}" for score in names], "epoch": {"least": 1}})
    rows, published = rows[rows["status"].isin(COUNTED)], scores()
    rows = rows.assign(is_ours=rows["backend"] == "fused3s", is_bfloat16=rows["dtype"] == "bfloat16")
    rows = rows.sort_values(["is_ours", "is_bfloat16", "date"], kind="stable")
    model = ["label", "blocks", "dim", "recipe", "data_sha256"]
    panels = [*rows.groupby([*model, "metric"])]
    if not panels:
        return None
    columns = min(4, len(panels))
    shape = -(-len(panels) // columns), columns
    drawn, grid = on.new_figure(1.9 * shape[0], *shape)
    found_scores = []
    for axes, ((*one, metric), found) in zip(on.first_axes(grid, len(panels)), panels, strict=True):
        score = metric.removeprefix("valid_")
        seeds = found["variant"].str.split().str[0].astype(int)
        run = found[seeds == seeds.max()].iloc[-1]
        found = found[found["run_id"] == run["run_id"]].sort_values("epoch")
        axes.plot(found["epoch"], found["value"], color=on.OURS)
        axes.fill_between(found["epoch"], found["p10"], found["p90"], color=on.OURS, alpha=0.2, linewidth=0)
        same = dict(run[[*model, "device", "backend", "dtype"]]) | {"bench": "train", "region": "none"}
        tests = last_of_seeds(data.pick(same | {"metric": f"test_{score}"}))["value"]
        others = published[(published["dataset"] == found["dataset"].iloc[0]) & (published["metric"] == score)]
        sides = [("test", score_of, on.PAPER, "--") for score_of in [tests.mean()] * bool(len(tests))]
        sides += [(other.model, other.score, on.PEOPLE, ":") for other in others.itertuples()]
        for words, value, colour, style in sides:
            axes.axhline(value, color=colour, linestyle=style, linewidth=1.2, label=f"{words} {value:.3f}")
        if sides:
            axes.legend(loc="best", labelcolor="linecolor", borderaxespad=0.2)
        if len(sides) > 1:
            found_scores.append(f"{one[0]} {sides[0][1]:.3f} ({sides[1][0]} {sides[1][1]:.3f})")
        unit = "" if found["unit"].iloc[0] == "1" else f", {found['unit'].iloc[0]}"
        axes.set_title(f"{one[0]}\n{SCORES.get(score, score)}{unit}, {one[1]} blocks")
        axes.margins(x=0.02)
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    beside = f", beside published ones: {', '.join(found_scores)}" if found_scores else ""
    drawn.suptitle(f"Test scores of {len(panels)} trained model{'s' * (len(panels) > 1)}{beside}")
    return drawn
