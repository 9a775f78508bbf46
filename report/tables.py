"""Tables of recorded rows: one function is one table.

Its docstring is the caption; its name is that of the block of a page (`<!-- begin generated: kernel-times -->`) and of
`scripts/report.py --table`. With a title it stands in RESULTS.md. It returns lines and columns by name: some are
selections of rows, others compute and write a cell of them (`show`, `over`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from report import selections as of
from report.engine import COUNTED, DISTURBED, PAIR, Data, Where, by_graph, markdown, mean, quiet, real
from report.published import captions

Cell = Callable[[Data, Where], str]
HASH = ["data_sha256"]
REAL, MEASURED = {"kind": "real"}, {"kind": ["real", "surrogate"]}
HALF = {"out_dtype": "float16"}
NAMES = {"float16": "fp16", "float32": "fp32"}


class Grid(NamedTuple):
    """Lines and columns by name. If one of the two is a function, it computes the cell from the selection that is the
    other; if both are selections, `cell` computes it."""

    corner: str
    lines: Mapping[str, Where | Cell]
    columns: Mapping[str, Where | Cell]
    cell: Cell | None = None


class Table(NamedTuple):
    make: Callable[[Data], Grid]
    title: str


class Mean(dict):
    """The selection of a line of means over other lines."""


TABLES: dict[str, Table] = {}


def table(title: str = "") -> Callable[[Callable[[Data], Grid]], Callable[[Data], Grid]]:
    """Adds a function to TABLES."""

    def add(make: Callable[[Data], Grid]) -> Callable[[Data], Grid]:
        TABLES[make.__name__.replace("_", "-")] = Table(make, title)
        return make

    return add


def render(data: Data, name: str) -> str:
    """Caption, provenance and Markdown table; "" if none of its rows was recorded."""
    make = TABLES[name].make
    grid, cells = data.of_one_device(lambda: _cells(data, make(data)))
    cells = [line for line in cells if {*line[1:]} - {"-", ""}]
    caption = " ".join(make.__doc__.split())
    return f"{caption} {data.provenance()}.\n\n{markdown([grid.corner, *grid.columns], cells, 1)}" if cells else ""


def _cells(data: Data, grid: Grid) -> tuple[Grid, list[list[str]]]:
    data.used.clear()  # the rows of the cells count
    columns = grid.columns.values()
    lines = grid.lines.items()
    return grid, [[name, *(_text(data, line, column, grid.cell) for column in columns)] for name, line in lines]


def _text(data: Data, line: Where | Cell, column: Where | Cell, cell: Cell | None) -> str:
    if callable(column):
        return column(data, line)
    return line(data, column) if callable(line) else cell(data, line | column)


def show(where: Where, form: str = ".4f", column: str = "value", scale: float = 1, newest: bool = False) -> Cell:
    """The value of a row, or the status of a row that failed; `~` marks a time that the host disturbed."""

    def cell(data: Data, line: Where) -> str:
        found = data.pick(line | where, newest=newest)
        if found.empty or isinstance(line, Mean):
            return "" if isinstance(line, Mean) else "-"
        row = found.iloc[-1]
        mark = DISTURBED if row["disturbed"] == "yes" else ""
        return f"{mark}{row[column] * scale:{form}}" if row["status"] in COUNTED else row["status"]

    return cell


def over(
    ours: Where,
    theirs: Where,
    text: Callable[[pd.DataFrame], str] | None = None,
    by: Sequence[str] = PAIR,
    form: str = ".2f",
    column: str = "ratio",
    newest: bool = False,
) -> Cell:
    """`text` of the pairs that the host did not disturb. By default: the ratio theirs / ours (or another `column`) of a
    single pair; in a line of means, the geometric mean over real graphs."""

    def cell(data: Data, line: Where) -> str:
        found = quiet(data.pairs(line, ours, theirs, by, newest=newest))
        if text:
            return text(found)
        if isinstance(line, Mean):
            return mean_of_real(found) if column == "ratio" else ""
        return f"{found[column].iloc[0]:{form}}" if len(found) == 1 else "-"

    return cell


def mean_of_real(pairs: pd.DataFrame) -> str:
    found = by_graph(real(pairs))["ratio"]
    return f"**{mean(found):.2f}** (n = {len(found)})" if len(found) else "-"


def means(pairs: pd.DataFrame) -> str:
    """Geometric means over real graphs and over all: "2.83 (13) / 2.46 (30)"."""
    found = by_graph(pairs)
    both = (f"{mean(some['ratio']):.2f} ({len(some)})" if len(some) else "-" for some in (real(found), found))
    return " / ".join(both) if len(pairs) else "-"


def largest(pairs: pd.DataFrame, end: Callable = pd.Series.idxmax, parts: int = 1) -> str:
    """Geometric mean, and the graph with the largest ratio: "1.27 (n = 9; 1.67 on ego-twitter)"."""
    if pairs.empty:
        return "-"
    ratios = pairs["ratio"] / parts
    worst = end(ratios)
    return f"{mean(ratios):.2f} (n = {len(ratios)}; {ratios[worst]:.2f} on {pairs.at[worst, 'label']})"


least = partial(largest, end=pd.Series.idxmin)


def extreme(where: Where, of_all: Callable[[pd.Series], float], form: str) -> Cell:
    """The least or largest value and the number of rows."""

    def cell(data: Data, line: Where) -> str:
        found = data.pick(line | where)["value"].dropna()
        return f"{of_all(found):{form}} (n = {len(found)})" if len(found) else "-"

    return cell


def graphs(data: Data, where: Where, among: Where | None = None) -> dict[str, Where]:
    """`where` on each graph that has rows: single ones, batches, surrogates last, by edges."""
    found = data.pick(where | (among or {}))
    found = found.assign(last=found["kind"] != "real")
    found = found.sort_values(["last", "batch", "nnz"], ascending=[True, False, True]).drop_duplicates("data_sha256")
    names = zip(found["label"], found["graphs"], found["data_sha256"], strict=True)
    return {label if n == 1 else f"{n:,} × {label}": where | {"data_sha256": sha256} for label, n, sha256 in names}


def kernels(data: Data, where: Where, column: str = "series") -> dict[str, Where]:
    """The values of a column, with the type of the inputs in their names."""
    found = data.pick(where)
    types = found.groupby(column)["dtype"].first().replace(NAMES)
    return {f"`{name}`, {types[name]}": {column: name} for name in found[column].unique()}


def widths(where: Where) -> dict[str, Where]:
    return {f"d = {dim}": where | {"dim": dim} for dim in (64, 128, 256)}


def shapes(where: Where, *pairs: tuple[int, int]) -> dict[str, Where]:
    return {f"{heads}x{dim}": where | {"heads": heads, "dim": dim} for heads, dim in pairs}


# Kernels


@table()
def kernel_times(data: Data) -> Grid:
    """Milliseconds of one attention (d = 128, one head, fp32 output), median of back-to-back launches with a warm L2
    cache. "Best other kernel": the fastest other one on that graph, with fp16 inputs (`fused3s_paper`, FlashSparse) or
    fp32 inputs (DF-GNN, PyG, cuSPARSE)."""

    def best(data: Data, line: Where) -> str:
        found = data.pick(line | of.BEST_OTHER)
        return f"{found['value'].iloc[-1]:.4f} (`{found['note'].iloc[-1]}`)" if len(found) else "-"

    columns = {
        "edges": show(of.OURS, ",", "nnz"),
        "best other kernel": best,
        "`fused3s_paper`": show(of.PAPER),
        "`fused3s`": show(of.OURS),
        "`fused3s`, reordered": show(of.REORDERED),
        "best other / `fused3s`": over(of.OURS, of.BEST_OTHER),
        "`fused3s_paper` / `fused3s`": over(of.OURS, of.PAPER),
    }
    shown = ["cora", "musae-github", "ogbn-arxiv", "ego-twitter", "ogbg-molhiv", "peptides-func"]
    lines = graphs(data, of.KERNEL | of.WARM | REAL | {"dim": 128}, {"dataset": shown})
    return Grid("graph", lines, columns)


@table("Attention kernels, d = 128")
def all_kernel_times(data: Data) -> Grid:
    """Milliseconds of one attention (one head, fp32 output), median of back-to-back launches with a warm L2 cache.
    `8x16` is 8 heads of 16 columns with fp16 output. `dfgnn_tiling` computes in fp32, the others take fp16 inputs.
    Error: the worst row of `fused3s`, relative to float64."""
    columns = {
        "nodes": show(of.OURS, ",", "nodes"),
        "edges": show(of.OURS, ",", "nnz"),
        "`dfgnn_tiling`": show({"backend": "dfgnn_tiling"}),
        "`flashsparse_stable`": show({"backend": "flashsparse_stable"}),
        "`fused3s_paper`": show(of.PAPER),
        "`fused3s`": show(of.OURS),
        "`fused3s`, reordered": show(of.REORDERED),
        "`fused3s`, 8x16": show(SHAPE | HALF | {"heads": 8, "dim": 16}),
        "`fused3s_paper` / `fused3s`": over(of.OURS, of.PAPER),
        "best other / `fused3s`": over(of.OURS, of.BEST_OTHER),
        "error": show(of.OURS, ".1e", "relative_error"),
    }
    return Grid("graph", graphs(data, of.KERNEL | of.WARM | of.GRAPHS | MEASURED | {"dim": 128}), columns)


@table("Speed-up of `fused3s` over `fused3s_paper`")
def kernel_speedups(data: Data) -> Grid:
    """Geometric means over real / all graphs, with their number. Back-to-back times benefit from programmatic dependent
    launch, which only `fused3s` uses; an isolated time includes the launch latency."""
    lines = {
        "`fused3s`, fp32, back to back": over(of.WARM | of.OURS, of.WARM | of.PAPER, means),
        "`fused3s`, fp16 over fp32, back to back": over(of.WARM | of.OURS | HALF, of.WARM | of.PAPER, means),
        "`fused3s`, fp32, isolated": over(of.ISOLATED | of.OURS, of.ISOLATED | of.PAPER, means),
        "`fused3s+reorder`, fp32, back to back": over(of.WARM | of.REORDERED, of.WARM | of.PAPER, means),
    }
    return Grid("kernel, output, launch", lines, widths(of.KERNEL | of.GRAPHS))


@table("Surrogates beside their originals")
def surrogates(data: Data) -> Grid:
    """Time on a synthetic surrogate divided by the time on its real graph (d = 128, fp32 output, back to back, L2
    warm); then the geometric mean and the graph with the largest ratio."""
    where = of.KERNEL | of.WARM | {"dim": 128, "backend": {"not": ["best other"]}}
    lines = {name: where | kernel for name, kernel in kernels(data, where | {"group": "twin"}).items()}
    sets = {name: name for name in ("citeseer", "cora", "pubmed", "elliptic", "musae-github")}
    sets |= {f"1,024 × {name}": name for name in ("ogbg-molhiv", "peptides-func")}
    sides = of.ORIGINALS, of.TWINS
    columns = {
        name: over(*({**side, "dataset": dataset} for side in sides), by=["dataset"]) for name, dataset in sets.items()
    }
    return Grid("kernel", lines, columns | {"all": over(*sides, largest, ["dataset"])})


@table("Speed-up over each baseline, d = 128")
def kernel_baselines(data: Data) -> Grid:
    """Time of a baseline divided by that of `fused3s` or `fused3s_paper` (isolated launches, warm L2 cache, fp32
    output); geometric means over real / all graphs. Baselines marked fp32 take float32 inputs, `fused3s` float16. The
    best other kernel takes fp16 on every graph; on all batches it is `fused3s_paper`."""
    where = of.KERNEL | of.GRAPHS | of.ISOLATED | {"dim": 128}
    others = REAL | {"backend": {"not": ["fused3s", "best other", "flex_attention", "sdpa_padded"]}}
    lines = {"best other kernel on each graph": of.BEST_OTHER} | kernels(data, where | others)

    def column(ours: Where, batch: str) -> Cell:
        return lambda data, theirs: means(quiet(data.pairs(where | {"batch": batch}, ours, theirs)))

    batches = ("single", "batched")
    columns = {f"`{k['backend']}`, {batch}": column(k, batch) for k in (of.OURS, of.PAPER) for batch in batches}
    return Grid("over", lines, columns)


@table("The authors' codes on the same GPU")
def published_codes(data: Data) -> Grid:
    """Time of a published code divided by ours on the same real graphs (same hash of the edges). Times of published
    codes are sums of kernel durations, which hold no launch cost. Ours are back to back, or isolated: the fair ratio
    lies between the two. The outputs of the published codes were not checked ([how](paper/README.md))."""
    compare = partial(over, text=mean_of_real, by=HASH)
    alone = {"Fused3S": "fused3s_paper", "FlashSparse": "flashsparse_naive"}
    alone |= {"DF-GNN tiling": "dfgnn_tiling", "DF-GNN hyper": "dfgnn_hyper"}
    lines = {
        f"Fused3S over `{kernel['backend']}`, {name}": compare(kernel | launch, of.CODES | of.PAPER)
        for kernel in (of.OURS, of.PAPER)
        for name, launch in {"back to back": of.WARM, "isolated": of.ISOLATED}.items()
    }
    for code, name in alone.items():
        kernel = {"backend": name}
        lines[f"{code} over `{name}`, kernels alone"] = compare(of.KERNEL_SUMS | kernel, of.CODES | kernel)
    turbo = of.CODES | {"backend": "turbo_gnn"}
    lines["Turbo-GNN over `fused3s`, back to back"] = compare(of.OURS | of.WARM | HALF, turbo)
    return Grid("code over ours", lines, widths(of.KERNEL | of.GRAPHS | REAL))


# Shapes of heads, edge data, the backward pass

SHAPE = of.TIME | of.WARM | of.OURS | {"bench": "heads", "kv_heads": 0, "edges": "none"}
ON_ARXIV = {"dataset": "ogbn-arxiv"}


@table("Shapes of heads (heads x columns)")
def heads(data: Data) -> Grid:
    """Slow-down of `fused3s` relative to one head of the same total width, or to one call per head: geometric mean over
    n graphs (surrogate included), and the worst graph. 16-byte loads do not fit heads of 10 and 13 columns. Then
    milliseconds on ogbn-arxiv, fp16 (PyG: fp32), back to back."""
    lines = shapes(SHAPE | MEASURED, (2, 64), (4, 32), (8, 16), (8, 10), (4, 13))
    lines = {f"{name} over 1x{line['heads'] * line['dim']}": line for name, line in lines.items()}
    calls = shapes(SHAPE | MEASURED, (16, 64), (4, 128))
    lines |= {f"{name} over {line['heads']} calls of 1x{line['dim']}": line for name, line in calls.items()}

    def slow_down(data: Data, line: Where) -> str:
        total = line["heads"] * line["dim"]
        parts = line["heads"] if total > 128 else 1
        one = {"heads": 1, "dim": line["dim"] if parts > 1 else total}
        return over(HALF | one, HALF, partial(largest, parts=parts), HASH)(data, line)

    columns = {
        "slow-down": slow_down,
        "`fused3s`, ms": show(ON_ARXIV | HALF),
        "PyG, fp32, ms": show(ON_ARXIV | {"backend": "pyg"}),
    }
    return Grid("shape", lines, columns)


@table("Grouped queries")
def grouped_queries(data: Data) -> Grid:
    """`fused3s` with 8 query heads of 128 columns on one KV head, relative to 8 KV heads: time, back to back, and bytes
    of the gather model with windows of 16 / 8 queries. fp16; geometric mean over n graphs (surrogate included), and the
    worst graph."""
    lines = {"8x128/1 over 8x128": SHAPE | MEASURED | HALF | {"heads": 8, "dim": 128}}
    cell = over({"kv_heads": 0}, {"kv_heads": 1}, largest, HASH)
    return Grid("shape", lines, {"time": {}, "bytes": {"metric": "bytes"}}, cell)


@table("Edge data")
def edges(data: Data) -> Grid:
    """Slow-down of `fused3s` by edge data and score terms, by shape of heads: geometric mean over n graphs (surrogate
    included), and the worst graph. `low_rank_11`: 11 features with weights of keys and values; `types_4`: one of 4
    vectors; `gat` reads no query and no key. Last line, on an H200 at an earlier commit: time of anemoi's Triton kernel
    divided by ours, and the graph with the least ratio."""
    terms = ("bias", "bias_per_head", "low_rank_11", "types_4", "column", "soft_cap", "gat", "gatv2")
    none, low_rank, anemoi = {"edges": "none"}, of.H200 | {"edges": "low_rank_11"}, of.H200 | {"backend": "anemoi"}
    lines = {f"`{name}` over none": over(none, {"edges": name}, largest, HASH, newest=True) for name in terms}
    lines["backend `anemoi` over ours, `low_rank_11`"] = over(low_rank, low_rank | anemoi, least, HASH)
    where = of.TIME | of.WARM | of.OURS | MEASURED | {"bench": "edges"}
    return Grid("edge data", lines, shapes(where, (1, 64), (1, 128), (8, 16), (16, 64)))


@table("Backward pass")
def backward(data: Data) -> Grid:
    """Time of the backward pass of `fused3s` divided by its forward pass with the LSE (fp16), by shape of heads, and
    the ratio of their bytes as a bound. Then published backward passes divided by ours on an H200, and the graph with
    the least ratio (measured at another time, outputs unchecked; Turbo-GNN with its default parameters, and in the best
    of 16 settings)."""
    forward, size, code = {"region": "forward"}, {"metric": "bytes"}, of.CODES | of.H200 | {"region": "none"}
    columns = {
        "over forward": over(forward, {}, largest, HASH),
        "bound": over(forward | size, size, largest, HASH),
        "Turbo-GNN over ours": over(of.H200, code | {"backend": "Turbo-GNN backward"}, least, HASH),
        "the same, best setting": over(of.H200, code | {"backend": "Turbo-GNN backward, best"}, least, HASH),
    }
    lines = shapes(of.BACKWARD | MEASURED, (1, 64), (1, 128), (1, 256), (8, 16), (16, 64))
    return Grid("shape", lines, columns)


# The whole model


@table("Whole model, fp16")
def model_times(data: Data) -> Grid:
    """Milliseconds of a forward pass of 10 blocks, d = 128, one head. Layers outside attention compute in fp16 for all
    backends. `~`: CPU-bound (eager takes at least 1.5 times its CUDA graph), left out of means."""
    lines = {f"`{name}`, eager": of.EAGER | {"backend": name} for name in ("csr_unfused", "fused3s")}
    for name in ("csr_unfused", "dfgnn_tiling", "flashsparse_stable", "fused3s_paper", "fused3s"):
        lines[f"`{name}`, CUDA graph"] = of.GRAPH | {"backend": name}
    lines["`fused3s`, CUDA graph, torch.compile"] = of.GRAPH | of.OURS | {"dense": "compiled"}
    lines["`fused3s`, CUDA graph, fused dense block"] = of.GRAPH | of.OURS | of.FUSED
    where = of.MODEL | REAL | {"dim": 128}
    lines = {name: where | line for name, line in lines.items()}
    return Grid("attention and mode", lines, graphs(data, {}, where), show({}, ".3f"))


@table("Speed-up of the whole model")
def model_ratios(data: Data) -> Grid:
    """Time of the same model with another attention divided by ours, fp16 unless stated. Geometric means, first over
    the d of a graph (64, 128, 256; CPU-bound ones left out), then over graphs, real / all."""
    slow = of.EAGER | {"dtype": "float32"}
    compared = {
        "attention alone, CUDA graphs": ({"scope": "attention"}, {"scope": "attention"}),
        "other attention only, CUDA graphs": ({}, {}),
        "other attention only, eager": (of.EAGER, of.EAGER),
        "fused dense block, CUDA graphs": (of.FUSED, {}),
        "fused dense block in a CUDA graph over eager": (of.FUSED, of.EAGER),
        "the same over eager and fp32": (of.FUSED, slow),
    }
    where, batches = of.MODEL | {"dim": [64, 128, 256]}, ("single", "batched")
    lines = {
        f"{name}, {batch}": (where | {"batch": batch}, *sides) for name, sides in compared.items() for batch in batches
    }

    def column(backend: str) -> Cell:
        return lambda data, line: over(of.OURS | line[1], line[2] | {"backend": backend}, means)(data, line[0])

    others = ("csr_unfused", "dfgnn_tiling", "flashsparse_stable", "fused3s_paper")
    return Grid("compared", lines, {f"over `{name}`": column(name) for name in others})


# Of configs/bench/end_to_end_precisions.yaml; "casts": with the casts in the time of attention.
SIX_GRAPHS = ["pubmed", "elliptic", "musae-github", "ogbn-arxiv", "ogbg-molhiv", "peptides-func"]
CASES = {"fp32, casts": of.FP32, "fp16, casts": of.FP16}
CASES |= {"fp32": of.FP32 | of.TYPED, "TF32": of.TF32 | of.TYPED, "fp16": of.FP16 | of.TYPED}
CASES = {name: of.MODEL | REAL | {"dim": 128} | case for name, case in CASES.items()}
ANY_WAY = {"dense": ["plain", "compiled", "fused"], "launch": ["eager", "compiled", "cuda_graph"]}
SHARE = ({}, {"scope": "attention"})


@table()
def end_to_end(data: Data) -> Grid:
    """Time of the 10-block model with another attention divided by its time with `fused3s_paper`, by precision of the
    layers outside attention, d = 128, one head: geometric mean over n of six real graphs; CPU-bound times are left out.
    "Casts": q, k and v come in that precision, and attention of another type casts them; else the projection computes
    in 16 bits where layers or attention do, and writes the type that attention reads. "Without attention": the time of
    `csr_unfused` divided by its part outside attention, so that no kernel can gain more. Last line: the fastest way of
    all others, `fused3s_paper` included, over the fastest way of `fused3s`; in fp16 this is the fused dense block in a
    CUDA graph."""
    others = ("dgl", "csr_unfused", "pyg", "dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable")
    paper = captions("Figure 8(c)")
    paper["dgl"] = paper["csr_unfused"]
    lines: dict[str, Cell] = {}
    for name in others:
        whose = " over DGL" * (name == "csr_unfused")
        stated = f" (in the paper{whose} {paper[name]:g})" if name in paper else ""
        for launch, way in {f"eager{stated}": of.EAGER, "CUDA graph": of.GRAPH}.items():
            lines[f"`{name}`, {launch}"] = _of_column(of.PAPER | way, way | {"backend": name})
    compiled = {"backend": "pyg", "launch": "compiled"}
    lines["`pyg`, compiled with its blocks, over eager"] = _of_column(of.PAPER | of.EAGER, compiled)
    lines["`csr_unfused` without attention"] = _without_attention
    lines["fastest of all others over `fused3s`"] = _fastest_over_ours
    return Grid("over `fused3s_paper`", lines, {name: case | {"dataset": SIX_GRAPHS} for name, case in CASES.items()})


def _of_column(ours: Where, theirs: Where) -> Cell:
    return lambda data, column: over(ours, theirs, mean_of_real)(data, column)


def _without_attention(data: Data, column: Where) -> str:
    shares = data.pairs(column | {"backend": "csr_unfused"}, *SHARE)
    return mean_of_real(shares.assign(ratio=1 / (1 - shares["ratio"])))


def _fastest_over_ours(data: Data, column: Where) -> str:
    rows = data.pick(column | ANY_WAY)
    rows = rows[rows["status"].isin(COUNTED)]
    is_ours = rows["backend"] == "fused3s"
    ours, others = (rows[side].groupby("dataset")["value"].min() for side in (is_ours, ~is_ours))
    ratios = (others / ours).dropna()
    return f"**{mean(ratios):.2f}** (n = {len(ratios)})" if len(ratios) else "-"


@table()
def attention_shares(data: Data) -> Grid:
    """Share of attention in a pass of the 10-block model in a CUDA graph, by attention and precision of the layers
    outside it, d = 128, one head. The last two graphs are batches of 1,024 molecules."""
    columns = {
        f"`{name}`, {case}": over(*(where | {"backend": name} | side for side in SHARE), form=".0%")
        for name in ("csr_unfused", "fused3s_paper")
        for case, where in CASES.items()
    }
    return Grid("graph", {name: {"dataset": name} for name in SIX_GRAPHS}, columns)


# Training steps of layers

LAYERS = REAL | {"bench": "layers", "plan": ["fixed", "rebuilt"]}
WORKLOADS = {
    "cora": "cora",
    "arxiv": "ogbn-arxiv",
    "github": "musae-github",
    "arxiv-edges": "ogbn-arxiv, edge_dim = 8",
    "github-edges-32": "musae-github, edge_dim = 32",
    "github-edges-128": "musae-github, edge_dim = 128",
    "arxiv-gat": "ogbn-arxiv, GATConv",
    "arxiv-gatv2": "ogbn-arxiv, GATv2Conv",
    "arxiv-gatv2-edges": "ogbn-arxiv, GATv2Conv, edge_dim = 8",
    "molecules-1024": "ogbg-molhiv, new batch of 1,024",
    "molecules-256-edges": "ogbg-molhiv, new batch of 256, edge_dim = 8",
    "molecules-gat": "ogbg-molhiv, new batch of 1,024, GATConv",
    "sampled-1024": "ogbn-arxiv, sampled: 1,024 seeds, fan-out 15, 10, 5",
    "sampled-8192": "ogbn-arxiv, sampled: 8,192 seeds, fan-out 20, 15; 2 layers",
}
BF16 = {"dtype": "bfloat16"}
PYG, AUTO = {"backend": "pyg"}, {"backend": "auto"}
LAUNCHES = {"eager": "eager", "compiled": "compiled", "reduce_overhead": "reduce-overhead"}


def best(data: Data, where: Where) -> pd.Series | None:
    """The fastest launch of a step. One whose output is `wrong` counts: the work is the same."""
    found = data.pick(where | of.TIME | {"launch": [*LAUNCHES]})
    found = found[found["status"].isin([*COUNTED, "wrong"])]
    return None if found.empty else found.loc[found["value"].idxmin()]


def show_best(where: Where) -> Cell:
    def cell(data: Data, line: Where) -> str:
        row = best(data, line | where)
        return "-" if row is None else f"{row['value']:.2f}" + " (wrong)" * (row["status"] == "wrong")

    return cell


def best_over_best(kind: Where, others: Where = PYG) -> Cell:
    def cell(data: Data, line: Where) -> str:
        theirs, ours = (best(data, line | kind | side) for side in (others, AUTO))
        return "-" if theirs is None or ours is None else f"{theirs['value'] / ours['value']:.2f}"

    return cell


def metric_of_best(side: Where, metric: str, scale: float = 1) -> Cell:
    """Another metric of the fastest launch."""

    def cell(data: Data, line: Where) -> str:
        if (row := best(data, line | side)) is None:
            return "-"
        found = data.pick(line | side | {"launch": row["launch"], "metric": metric})["value"]
        return f"{found.iloc[-1] * scale:.2f}" if len(found) else "-"

    return cell


def steps_of(*names: str) -> dict[str, Where]:
    return {WORKLOADS[name]: LAYERS | {"variant": name} for name in names or WORKLOADS}


@table()
def layers(data: Data) -> Grid:
    """Milliseconds of a training step (3 `TransformerConv`, 8 heads x 16 columns; AdamW and host included), each side
    in its fastest way: eager, `torch.compile`, or `mode="reduce-overhead"` where the graph stays; medians, by turns.
    `wrong`: PyG's worst row is too far from float64 ([why](docs/semantics.md#sums-in-bfloat16)). Captured: our step by
    [`CapturedLoop`](docs/training.md#as-one-cuda-graph), a CUDA graph for new graphs."""
    columns = {}
    for name, kind in (("fp32", of.FP32), ("bf16", BF16)):
        columns[f"{name}: best PyG"] = show_best(kind | PYG)
        columns[f"{name}: best ours"] = show_best(kind | AUTO)
        columns[f"{name}: PyG / ours"] = best_over_best(kind)
    columns["fp32: captured"] = show(of.FP32 | AUTO | of.GRAPH | of.TIME, ".2f")
    return Grid(
        "training step",
        steps_of("cora", "arxiv", "github", "arxiv-edges", "github-edges-128", "molecules-1024"),
        columns,
    )


@table()
def all_layers(data: Data) -> Grid:
    """Milliseconds of a training step with PyG's layer and with ours in its place (`TransformerConv` where no other is
    named; 3 layers of 8 heads x 16 columns; forward, loss, backward, AdamW; host included): eager, after
    `torch.compile`, and with its `mode="reduce-overhead"` where the graph stays. All are timed alternately; times are
    medians. A workload with new batches or samples brings a new `edge_index` in every step; drawing it is not timed.
    Ratio: the fastest of PyG's three over the fastest of ours. GiB: peak memory of these two. Captured: our step by
    `CapturedLoop`. GPU busy: time of our fastest step in which the GPU computes. `wrong`: the worst row of PyG's output
    is further from float64 than allowed ([why](semantics.md#sums-in-bfloat16)). "-": not measured."""
    columns = {
        f"{name} {how}": show(side | of.TIME | {"launch": launch}, ".2f")
        for name, side in (("PyG", PYG), ("ours", AUTO))
        for launch, how in LAUNCHES.items()
    }
    columns["ratio"] = best_over_best({})
    columns["GiB: PyG"] = metric_of_best(PYG, "peak_memory", 2**-10)
    columns["GiB: ours"] = metric_of_best(AUTO, "peak_memory", 2**-10)
    columns["captured"] = show(AUTO | of.GRAPH | of.TIME, ".2f")
    columns["GPU busy"] = metric_of_best(AUTO, "gpu_busy")
    lines = {
        f"{name}, {kind}": line | types
        for kind, types in (("fp32", of.FP32), ("bf16", BF16))
        for name, line in steps_of().items()
    }
    lines["ogbn-arxiv, tf32"] = LAYERS | {"variant": "arxiv", "out_dtype": "tf32"}
    return Grid("training step", lines, columns)


@table()
def scale(data: Data) -> Grid:
    """A training step with PyG's `TransformerConv`, eager and compiled by `torch.compile`, and with ours, eager (3
    layers of 8 heads x 16 columns; forward, loss, backward, AdamW; host included). They are timed alternately; times
    are medians. GiB: peak of PyTorch's allocator. Synthetic graphs of 200,000 nodes whose degrees follow a power law.
    `oom`: out of memory. `error`: the compiled step ends in "CUDA driver error: invalid argument". `wrong`: the worst
    row of PyG's output is further from float64 than allowed ([why](semantics.md#sums-in-bfloat16))."""
    compiled, memory = PYG | {"launch": "compiled"}, {"metric": "peak_memory"}
    sides = {"eager PyG": PYG | of.EAGER, "compiled PyG": compiled, "ours": AUTO | of.EAGER}
    columns = {f"ms: {name}": show(of.TIME | side, ".1f") for name, side in sides.items()}
    columns["ms: compiled PyG / ours"] = over(of.TIME | sides["ours"], of.TIME | compiled, by=["variant"])
    columns |= {f"GiB: {name}": show(memory | side, ".1f", scale=2**-10) for name, side in sides.items()}
    columns["GiB: compiled PyG / ours"] = over(memory | sides["ours"], memory | compiled, by=["variant"])
    lines = {
        f"{size[:-1]} million, {name}": {"bench": "layers", "variant": size} | dtype
        for name, dtype in (("fp32", of.FP32), ("bf16", BF16))
        for size in of.SIZES
    }
    return Grid("edges", lines, columns)


# Attention of groups of users

MESH, WEATHER, MASKS = {"variant": "mesh"} | of.FP32, {"variant": "weather"}, {"variant": "relational"}
FLEX, STEP = {"backend": "flex_attention"}, {"region": "step"}
DOORS = {  # each beside one of what its group uses
    "mesh, 4 x 64, fp32: torch.sparse": MESH | {"backend": "csr_unfused"},
    "mesh, 4 x 64, fp32: PyG": MESH | PYG,
    "weather, 16 x 64, 11 edge columns, bf16: anemoi's Triton kernel": WEATHER | {"backend": "anemoi"},
    "weather, 16 x 64, 11 edge columns, bf16: PyG": WEATHER | PYG,
    "driving, six layers, 8 x 16, 128 edge columns, fp32: PyG": {"variant": "driving"} | PYG,
    "relational, three masks, 8 x 32, bf16: FlexAttention": MASKS | FLEX | {"plan": "fixed"},
    "relational, masks made anew in every pass: FlexAttention": MASKS | FLEX | {"plan": "rebuilt"},
}


@table()
def doors_in_short(data: Data) -> Grid:
    """Attention of groups of users beside the fastest that they use: milliseconds of a forward pass with all gradients,
    and their peak memory; forward: ratio of a forward pass alone
    ([more](docs/benchmarks.md#beside-the-code-of-four-groups-of-users))."""
    grid, fastest = doors(data), {}
    for name, line in grid.lines.items():
        found = best(data, line | STEP)["value"], name
        problem = line["variant"], line.get("plan")
        fastest[problem] = min(found, fastest.get(problem, found))
    return grid._replace(lines={name: grid.lines[name] for _, name in fastest.values()})


@table()
def doors(data: Data) -> Grid:
    """Attention of four groups of users, ours (eager) beside what they use: milliseconds of a forward pass with all
    gradients, host included, and their peak memory; forward: ratio of the times of a forward pass alone. Of PyG the
    faster of eager and compiled. `bench/doors.py` has the sizes and types."""
    columns = {"theirs": show_best(STEP), "ours": show_best(STEP | AUTO), "theirs / ours": best_over_best(STEP, {})}
    columns["forward"] = best_over_best({"region": "forward"}, {})
    for name, side in {"theirs": STEP, "ours": STEP | AUTO}.items():
        columns[f"GiB: {name}"] = metric_of_best(side, "peak_memory", 2**-10)
    lines = {name: {"bench": "doors"} | line for name, line in DOORS.items()}
    some = {name: line for name, line in lines.items() if best(data, line | STEP) is not None}
    return Grid("attention: beside", some, columns)
