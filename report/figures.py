"""Figures of recorded rows: one function is one figure, by the name that `scripts/plot.py` takes.

Its arguments are what `scripts/plot.py --set` may change; their values fill {…} in the texts.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from report import drawing as on
from report import selections as of
from report.charts import (
    Panel,
    PaperBars,
    Side,
    bars_over_best,
    by_edges,
    lines,
    paper_bars,
    sm_times,
    times,
    waterfall,
)
from report.drawing import image, slug
from report.engine import Data

Drawn = tuple[str, Figure]
Make = Callable[..., Figure | None]


class Entry(NamedTuple):
    make: Make
    file: str
    title: str
    note: str
    in_git: list[dict[str, Any]]  # the changes that are drawn in git

    @property
    def settings(self) -> dict[str, Any]:
        """What may be changed, with its default."""
        _, *others = inspect.signature(self.make).parameters.values()
        return {one.name: one.default for one in others}


FIGURES: dict[str, Entry] = {}


def figure(
    name: str, file: str, title: str = "", note: str = "", in_git: list[dict[str, Any]] | None = None
) -> Callable[[Make], Make]:
    """Adds a function to FIGURES. Without a title the function writes one, which says what it found."""

    def add(make: Make) -> Make:
        FIGURES[name] = Entry(make, file, title, note, [{}] if in_git is None else in_git)
        return make

    return add


def draw(data: Data, name: str, changes: Mapping[str, Any] | None = None) -> list[Drawn]:
    """The figures of an entry, by the names of their files: those in git, or the one with `changes`.

    Raises:
        ValueError: an unknown name, or a change that the entry does not take.
    """
    if name not in FIGURES:
        raise ValueError(f"{name}: no such figure; there are {', '.join(FIGURES)}")
    entry = FIGURES[name]
    if unknown := set(changes or ()) - entry.settings.keys():
        raise ValueError(f"--set {', '.join(unknown)}: {name} takes {', '.join(entry.settings) or 'none'}")
    chosen = [changes] if changes else entry.in_git or [{}]
    return [drawn for values in chosen for drawn in _draw(data, entry, entry.settings | values)]


def _draw(data: Data, entry: Entry, values: Mapping[str, Any]) -> Iterable[Drawn]:
    data.used.clear()
    made = data.of_one_device(lambda: entry.make(data, **values))
    devices = pd.concat(data.used)["device"] if made else []
    if made is None or (data.device and data.device not in {*devices}):  # drawn of another device: not asked for
        return
    file = entry.file.format(device=slug(devices.mode().iloc[0]), **values)
    if entry.title:
        made.suptitle(entry.title.format(**values))
    note = "; ".join(filter(None, [entry.note.format(**values), data.provenance()]))
    made.supxlabel(note, x=0.01, ha="left", size=6, color="#444444", wrap=True)
    yield file, made


def drawn_files(data: Data, kind: str = "png", names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Contents of the figures in git by the names of their files, or of the entries `names`."""
    entries = names or [name for name, entry in FIGURES.items() if entry.in_git]
    return {f"{file}.{kind}": image(made, kind) for name in entries for file, made in draw(data, name)}


@figure(
    "hero",
    "hero_{device}",
    "fused3s beside the best other kernel on each real graph, d = 128",
    "16 bits: isolated launches; float32: back to back, L2 warm. Every kernel that was measured with inputs of that "
    "type takes part; all but PyG's are implemented in this repository",
)
def hero(data: Data) -> Figure | None:
    real = {"kind": "real", "dim": 128}
    half = Side(
        "16-bit inputs, fp32 output",
        on.colour("fused3s"),
        of.KERNEL | of.ISOLATED | of.GRAPHS | real,
        of.OURS,
        {"backend": "best other", "dtype": "float16"},
    )
    full = Side(
        "float32",
        on.colour("fused3s fused"),
        of.TIME | real | {"bench": "float32", "region": "forward", "heads": 1, "dtype": "float32"},
        of.OURS | {"variant": "highest"},
        of.IN_FLOAT32 | {"backend": "best other"},
    )
    return bars_over_best(data, [half, full])


BARS = {"F3S_splitR": "F3S_splitR", "F3S_splitC": "F3S_splitC", "F3S_reorderRW": "F3S_reorderRW"}
BARS |= {"fused3s_paper": "F3S_permuteQKV (the paper's kernel)", "flashsparse_naive": "FlashSparse_naive_softmax"}
BARS |= {"flashsparse_stable": "FlashSparse_stable_softmax", "dfgnn_hyper": "DF-GNN_hyper", "pyg": "PyG"}
OVER = {"dfgnn_tiling": "DF-GNN_tiling", "dfgnn_hyper": "DF-GNN_hyper", "flashsparse_naive": "FlashSparse_naive"}
OVER |= {"flashsparse_stable": "FlashSparse_stable", "pyg": "PyG"}
KERNELS_NOTE = (
    "d = {dim}, fp32 output, back to back, L2 warm; PyG and DF-GNN compute in fp32. Mean: geometric, of the graphs on "
    "which all ran. refused: rows too long for shared memory. The paper's values: d = 128; OOM in (b) as it "
    "draws it"
)


def kernels_of_the_paper(
    data: Data, number: int, graphs_name: str, graphs: list[str], dim: int, bottom: float
) -> Figure | None:
    """Figure 5 or 6."""
    label, tiling = "speed-up over DF-GNN_tiling", {"series": "dfgnn_tiling"}
    where = of.FIXED | of.WARM | {"group": ["single", "batched"], "order": "none", "dtype": ["float16", "float32"]}
    here = Panel(
        "(a) {device}:", 2.3, label, where, tiling, of.PUBLISHED | {"device": "GH200"}, bottom, f"Figure {number}(a)"
    )
    there = Panel(
        "(b) A30, the authors' times:",
        2.0,
        label,
        of.PUBLISHED | {"device": "A30"},
        tiling,
        log=bottom,
        caption=f"Figure {number}(b)",
    )
    found = "fused3s_paper is {ours} as fast as DF-GNN_tiling on {device} ({paper} in the paper)"
    title = f"Figure {number}, {graphs_name}: {found}"
    return paper_bars(data, PaperBars(title, graphs, [dim], BARS, "fused3s_paper", OVER, [here, there]))


@figure("fig5_single", "fig5_single_d{dim}", note=KERNELS_NOTE)
def fig5_single(data: Data, dim: int = 128) -> Figure | None:
    return kernels_of_the_paper(data, 5, "single graphs", of.FIGURE_5, dim, 1 / 16)


@figure("fig6_batched", "fig6_batched_d{dim}", note=KERNELS_NOTE)
def fig6_batched(data: Data, dim: int = 128) -> Figure | None:
    return kernels_of_the_paper(data, 6, "batches of 1,024 graphs", of.FIGURE_6, dim, 1 / 32)


@figure("fig7_sm_activity", "fig7_sm_activity", note="The row windows of a synthetic graph are in random order")
def fig7_sm_activity(data: Data) -> Figure | None:
    title = "Figure 7, mean over longest active time of the SMs, without and with reordering: {shares}"
    where = {"bench": "sm_active", "group": {"not": ["twin"]}, "metric": "sm_active_time", "out_dtype": "float32"}
    where |= {"dtype": "float16", "dim": 128}
    of_paper = {"bench": "published", "metric": "sm_active_share", "device": "A30"}
    bars = {"F3S_splitC": "not reordered", "F3S_reorderRW": "reordered"}
    return sm_times(data, title, where, of_paper, ["reddit", "pubmed"], bars)


@figure(
    "fig8_end_to_end",
    "fig8_end_to_end_{dtype}",
    in_git=[{"dtype": "float32"}, {"dtype": "float16"}],
    note="10 blocks, {dtype} outside attention, eager. Labels: milliseconds; ~: bound by the CPU, in no mean. cuSPARSE "
    "(csr_unfused) stands for DGL. The paper gives means alone. Mean: geometric, of the graphs with a d on which all "
    "ran, each its own mean over d. Peptides-struct has the edges of Peptides-func",
)
def fig8_end_to_end(data: Data, dtype: str = "float32") -> Figure | None:
    title = "Figure 8, whole Graph Transformer: with fused3s_paper {ours} as fast as with cuSPARSE on {device} "
    title += "({paper} over DGL in the paper)"
    where = of.MODEL | of.EAGER | {"group": {"not": ["twin"]}, "dtype": dtype, "out_dtype": ["float32", "float16"]}
    bars = {"csr_unfused": "cuSPARSE, for DGL", "dfgnn_tiling": "DF-GNN_tiling", "dfgnn_hyper": "DF-GNN_hyper"}
    bars |= {"flashsparse_naive": "FlashSparse_naive_softmax", "fused3s_paper": "fused3s_paper"}
    bars = {f"{name} plain": text for name, text in bars.items()}
    over = {name: text.removesuffix("_naive_softmax") for name, text in bars.items() if text != "fused3s_paper"}
    dgl = {"series": "csr_unfused plain"}
    speed_up = Panel(
        "(c) {device}:", 2.8, "speed-up over cuSPARSE", where, dgl, None, 0.5, "Figure 8(c)", milliseconds=True
    )
    title_of_shares = "(d) {device}: share of attention in the time of the model"
    share = Panel(title_of_shares, 1.8, "share of attention", where, {"scope": "attention"})
    spec = PaperBars(title, of.FIGURE_8, [64, 128, 256], bars, "fused3s_paper plain", over, [speed_up, share])
    return paper_bars(data, spec)


@figure(
    "training-steps",
    "training-steps_{device}_{heads}-heads",
    "Training step, 10 blocks, d = 128, heads: {heads}, bf16",
    "Forward pass, backward pass and AdamW on the whole graph. Missing: wrong gradients",
)
def training_steps(data: Data, heads: int = 1) -> Figure | None:
    series = [
        ("pyg", of.EAGER | {"backend": "pyg", "dense": "plain"}, "PyG, plain, eager"),
        ("pyg", of.EAGER | {"backend": "pyg", "dense": "compiled"}, "PyG, compiled, eager"),
        ("pyg", of.GRAPH | of.FUSED | {"backend": "pyg"}, "PyG, fused, CUDA graph"),
        ("csr_unfused", of.GRAPH | of.FUSED | {"backend": "csr_unfused"}, "cuSPARSE, fused, CUDA graph"),
        ("fused3s compiled", of.GRAPH | of.OURS | {"dense": "compiled"}, "fused3s, compiled, CUDA graph"),
        ("fused3s", of.GRAPH | of.FUSED | of.OURS, "fused3s, fused, CUDA graph"),
    ]
    return times(data, of.STEP | {"heads": heads}, "time of a training step", series)


@figure(
    "kernel-times",
    "kernel-times_{group}_{device}_d{dim}",
    "Attention kernels, {group} graphs, d = {dim}, back to back, L2 warm",
    "DF-GNN, PyG and csr_unfused compute in fp32, the others take fp16",
    in_git=[],
)
def kernel_times(data: Data, group: str = "single", dim: int = 128) -> Figure | None:
    where = of.KERNEL | of.WARM | of.NO_BEST | {"group": group, "dim": dim}
    return times(data, where, "time of one attention")


@figure(
    "waterfall",
    "waterfall_{device}_d{dim}",
    note="Log axis: the length of a bar is its factor. Real graphs with undisturbed times of all steps",
)
def waterfall_of_the_model(data: Data, dim: int = 128) -> Figure | None:
    steps = {
        "csr_unfused, fp32, eager": of.EAGER | {"backend": "csr_unfused", "dtype": "float32"},
        "fp16": of.EAGER | {"backend": "csr_unfused"},
        "fused3s attention": of.EAGER | of.OURS,
        "CUDA graph": of.OURS,
        "fused dense block": of.OURS | of.FUSED,
    }
    title = f"Graph Transformer, 10 blocks, d = {dim}: most is gained by {{factors}}"
    return waterfall(data, of.MODEL | {"dim": dim, "kind": "real"}, steps, title)


@figure(
    "scale",
    "scale_{device}",
    "Training step of three layers (8 heads x 16 columns), 200,000 nodes, float32",
    "Power-law graphs; host and optimiser included. Crosses: out of memory or error of compiled PyG",
)
def scale(data: Data) -> Figure | None:
    where = {"bench": "layers", "variant": of.SIZES} | of.FP32
    series = [
        (on.OTHER, of.EAGER | {"backend": "pyg"}, "eager PyG"),
        (on.colour("pyg"), {"launch": "compiled", "backend": "pyg"}, "compiled PyG"),
        (on.colour("fused3s"), of.EAGER | {"backend": "auto"}, "fused3s.nn"),
    ]
    panels = {"time of a step, ms": (of.TIME, 1), "peak memory, GiB": ({"metric": "peak_memory"}, 2**-10)}
    return by_edges(data, where, panels, series)


@figure("learning-curves", "learning-curves_{device}", "Learning curves: median and 10th to 90th percentile over seeds")
def learning_curves(data: Data) -> Figure | None:
    scores = ("accuracy", "balanced_accuracy", "f1", "rocauc", "ap", "mae", "rmse")
    where = {"bench": "train", "metric": [f"valid_{score}" for score in scores], "epoch": {"least": 1}}
    return lines(data, where, "epoch")
