"""README: the targets of this project beside what was measured."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

import pandas as pd

from configs.bench_schema import REORDERED
from report.frames import POOLED, Graph, ModelRun, Panel, Speedup, group_of, joined, latest, run_speedup
from report.gather_model import PeakRates, achieved, model_over_time
from report.published_codes import codes_over_ours
from report.readme.block import block, gpu
from report.readme.kernels import DIMS, LAUNCHES, OURS, PAPER, means, panels_by_dim, speedup
from report.tables.beyond import LEAST_GATHERED

HEAD = ["quantity", "target", "measured"]
NARROW = (64, 128)  # head dimensions of most targets
Panels = dict[tuple[str, str, str], dict[int, Panel]]  # by output type, launch and L2, then by d
MEANS = (
    "Means are geometric, over real graphs / over all (with surrogate and synthetic graphs), with their numbers; "
    "over two d each pair of a graph and a d counts."
)


def kernels(rows: pd.DataFrame) -> str:
    """Targets of the attention kernels."""
    panels: Panels = {
        (out_dtype, *launch): panels_by_dim(rows, out_dtype, *launch)
        for out_dtype in ("float32", "float16")
        for launch in LAUNCHES
    }
    same, mixed = ("float32", "float32"), ("float16", "float32")
    lines = [
        ["speed-up over the authors' Fused3S on the same GPU, fp32 output, real graphs", "-", _over_authors(rows)],
        [f"speed-up over `{PAPER}`, fp32 output, d = 64 and 128", "2.75", _mean(panels, "fused3s", same, NARROW)],
        ["the same, our fp16 output against its fp32 output", "3.0", _mean(panels, "fused3s", mixed, NARROW)],
        ["the same, on every real graph, d = 64 to 256, same output on both sides", "1.5", _least(panels)],
        ["the same, fp32 output, d = 256", "2.5", _mean(panels, "fused3s", same, (256,))],
        ["the same, batches, d = 64 and 128", "2.5", _mean(panels, "fused3s", same, NARROW, batches=True)],
        ["the same, reordered, our fp16 output against its fp32 output", "4", _mean(panels, REORDERED, mixed, NARROW)],
        *_shares(rows),
        ["cora, d = 128", "5 µs", _microseconds(panels, "cora")],
        ["citeseer, d = 128", "5 µs", _microseconds(panels, "citeseer")],
        ["musae-github, d = 128", "55 µs", _microseconds(panels, "musae-github")],
        ["worst row of `fused3s` against float64, any graph, d and output", "5e-4", _worst_row(rows)],
        ["a whole plan by our kernels, over the BSB format alone by CuPy", "2", _build_ratios(rows)],
    ]
    caption = (
        f"{MEANS} Launches are in a row with L2 warm unless stated. The gather model is the time to move all bytes "
        "without reuse across row windows; it is no bound, since row windows that share keys find them in a "
        f"cache. Its rows are of graphs with at least {LEAST_GATHERED / 1e9:g} GB gathered."
    )
    return block(caption, HEAD, lines)


def _mean(panels: Panels, subject: str, outputs: Sequence[str], dims: Sequence[int], batches: bool = False) -> str:
    found = {dim: one for dim in dims if (one := _speedup(panels, subject, outputs, dim, batches))}
    return means(joined(found, dims))


def _speedup(panels: Panels, subject: str, outputs: Sequence[str], dim: int, batches: bool = False) -> Speedup | None:
    ours, theirs = (panels[out_dtype, "back_to_back", "warm"].get(dim) for out_dtype in outputs)
    found = speedup(ours, theirs, subject)
    if found is None or not batches:
        return found
    several = {*ours.rows.loc[ours.rows["graphs"] > 1, "graph"]}
    ratios = {graph: ratio for graph, ratio in found.ratios.items() if graph in several}
    return Speedup(ratios) if ratios else None


def _over_authors(rows: pd.DataFrame) -> str:
    """Geometric means of the time of the authors' kernel over that of `fused3s`, by d."""
    texts = []
    for dim in DIMS:
        ratios = codes_over_ours(rows, dim, PAPER, "fused3s").dropna()
        ratios = ratios[ratios.index.get_level_values("kind") != "surrogate"]
        if len(ratios):
            texts.append(f"d = {dim}: {geometric_mean(ratios):.2f} ({len(ratios)})")
    return "; ".join(texts) or "-"


def _least(panels: Panels) -> str:
    """Least ratio of a real graph: "2.07 (pubmed, d = 128, fp16 output)"."""
    ratios = [
        (ratio, f"{graph.dataset}, d = {dim}, {words} output")
        for out_dtype, words in (("float32", "fp32"), ("float16", "fp16"))
        for dim in DIMS
        if (found := _speedup(panels, "fused3s", (out_dtype, out_dtype), dim)) and found.real
        for graph, ratio in found.real.ratios.items()
    ]
    return "{:.2f} at least ({})".format(*min(ratios)) if ratios else "-"


def _shares(rows: pd.DataFrame) -> list[list[str]]:
    """Time of the gather model over that of `fused3s`, on real and on synthetic graphs."""
    cells = achieved(rows)
    cells = cells[(cells["series"] == "fused3s") & (cells["heads"] == 1) & (cells["gathered_bytes"] >= LEAST_GATHERED)]
    cells = cells[cells["dataset"].map(group_of).isin(POOLED)]
    rates = PeakRates.of(rows, gpu(rows)) if len(rows) else None
    shares = model_over_time(cells, rates) if rates is not None and rates.complete else pd.Series(dtype=float)
    cells = cells.loc[shares.index].assign(share=shares)
    kinds = {"real": lambda graph: graph.real, "surrogate and synthetic": lambda graph: not graph.real}
    return [
        [
            f"share of the gather model, {words} graphs",
            "90 %",
            _share_ranges(cells[cells["graph"].map(kept).astype(bool)]),
        ]
        for words, kept in kinds.items()
    ]


def _share_ranges(cells: pd.DataFrame) -> str:
    texts = []
    for out_dtype, words in (("float32", "fp32"), ("float16", "fp16")):
        for dim in DIMS:
            found = cells[(cells["out_dtype"] == out_dtype) & (cells["dim"] == dim)]
            if len(found):
                texts.append(f"d = {dim}, {words}: {_range(100 * found['share'], '{:.0f} %')} (n = {len(found)})")
    return "; ".join(texts) or "-"


def _microseconds(panels: Panels, dataset: str) -> str:
    """Time of `fused3s` with fp32 output by launch: "4.9 µs in a row, L2 warm; ...", a real graph only."""
    texts = []
    for launch, words in LAUNCHES.items():
        panel = panels["float32", *launch].get(128)
        found = [panel.time(graph, "fused3s") for graph in _named(panel.graphs, dataset)] if panel else []
        texts += [f"{1e3 * time:.1f} µs {words}" for time in found if time is not None]
    return "; ".join(texts) or "-"


def _named(graphs: Iterable[Graph], dataset: str) -> list[Graph]:
    """The real graph of that name, if it is among them; a sampled one is no real graph."""
    return [graph for graph in graphs if graph.dataset == dataset and graph.real][-1:]


def _worst_row(rows: pd.DataFrame) -> str:
    rows = rows[(rows["bench"] == "kernels") & (rows["metric"] == "time") & (rows["backend"] == "fused3s")]
    rows = latest(rows, "graph", "dim", "heads", "dtype", "out_dtype", "series", "launch", "plan", "l2")
    rows = rows[(rows["dtype"] == "float16") & rows["series"].isin(OURS) & rows["relative_error"].notna()]
    if rows.empty:
        return "-"
    worst = rows.loc[rows["relative_error"].idxmax()]
    return f"{worst['relative_error']:.1e} ({worst['graph'].label}, d = {worst['dim']})"


def _build_ratios(rows: pd.DataFrame) -> str:
    rows = rows[(rows["bench"] == "preprocessing") & (rows["backend"] == "fused3s") & (rows["status"] == "unchecked")]
    times = latest(rows, "graph", "variant").pivot(index="graph", columns="variant", values="value")
    times = times.reindex(columns=["none", "bsb"]).dropna()
    return f"{_range(times['none'] / times['bsb'], '{:.1f}')} (n = {len(times)})" if len(times) else "-"


def _range(values: pd.Series, form: str) -> str:
    return f"{form.format(values.min())} to {form.format(values.max())}"


def models(rows: pd.DataFrame) -> str:
    """Targets of the whole model."""
    ours = ModelRun("fused3s", "fused", "cuda_graph")
    paper = ModelRun(PAPER, launch="cuda_graph")
    eager, eager_fp32 = ModelRun("csr_unfused"), ModelRun("csr_unfused", dtype="float32")
    limits = (("cora", NARROW, 0.20), ("citeseer", NARROW, 0.20), ("ogbn-arxiv", (128,), 3.0))
    lines = [
        [f"{dataset}, d = {' and '.join(map(str, dims))}", f"{limit:.2f} ms", _milliseconds(rows, ours, dataset, dims)]
        for dataset, dims, limit in (*limits, ("peptides-func", (128,), 2.3))
    ]
    for words, target, baseline in (
        (f"speed-up over `{PAPER}` with plain modules, CUDA graph on both sides", "3", paper),
        ("speed-up over `csr_unfused`, eager and fp32, as users run it", "10", eager_fp32),
        ("the same, both in fp16", "-", eager),
    ):
        for group in ("single", "batched"):
            found = run_speedup(rows, ours, baseline, dims=NARROW, group=group)
            lines.append([f"{words}; {group} graphs, d = 64 and 128", target, means(found)])
    caption = f"{MEANS} Ours is `fused3s` with the fused dense block in a CUDA graph, fp16."
    return block(caption, HEAD, lines)


def _milliseconds(rows: pd.DataFrame, run: ModelRun, dataset: str, dims: Sequence[int]) -> str:
    times = run.times(rows, "model", dims)
    found = [times.loc[dim, graph]["value"] for dim in dims for graph in _of_dim(times, dim, dataset)]
    return f"{', '.join(f'{time:.3f}' for time in found)} ms" if len(found) == len(dims) else "-"


def _of_dim(times: pd.DataFrame, dim: int, dataset: str) -> list[Graph]:
    return _named([graph for width, graph in times.index if width == dim], dataset)
