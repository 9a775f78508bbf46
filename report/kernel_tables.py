"""Tables of attention kernels: times, other kernels beside ours, shapes of heads, edge data, the backward pass."""

from functools import partial

from report import selections as of
from report.cells import (
    HASH,
    REAL,
    Cell,
    Grid,
    graphs,
    kernels,
    largest,
    least,
    mean_of_real,
    means,
    over,
    shapes,
    show,
    table,
    widths,
)
from report.engine import Data, Where, quiet
from report.sentences import SHOWN

HALF = {"out_dtype": "float16"}
SHAPE = of.TIME | of.WARM | of.OURS | {"bench": "heads", "kv_heads": 0, "edges": "none"}
ON_ARXIV = {"dataset": "ogbn-arxiv"}


@table()
def kernel_times(data: Data) -> Grid:
    """Milliseconds of one attention (d = 128, one head, fp32 output), median of back-to-back launches with a warm L2
    cache. "Best other kernel": the fastest other one on that graph, with fp16 inputs (`fused3s_paper`, FlashSparse) or
    fp32 inputs (DF-GNN, PyG, cuSPARSE). Reordered times may be of another run."""

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
    lines = graphs(data, of.KERNEL | of.WARM | REAL | {"dim": 128}, {"dataset": SHOWN})
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
    return Grid("graph", graphs(data, of.KERNEL | of.WARM | of.GRAPHS | REAL | {"dim": 128}), columns)


@table("Speed-up of `fused3s` over `fused3s_paper`")
def kernel_speedups(data: Data) -> Grid:
    """Geometric means over real / all graphs, with their number. Back-to-back times benefit from programmatic dependent
    launch, which only `fused3s` uses; an isolated time includes the launch latency. Reordered times may be of another
    run."""
    lines = {
        "`fused3s`, fp32, back to back": over(of.WARM | of.OURS, of.WARM | of.PAPER, means),
        "`fused3s`, fp32, isolated": over(of.ISOLATED | of.OURS, of.ISOLATED | of.PAPER, means),
        "`fused3s+reorder`, fp32, back to back": over(of.WARM | of.REORDERED, of.WARM | of.PAPER, means),
    }
    return Grid("kernel, output, launch", lines, widths(of.KERNEL | of.GRAPHS))


@table("Surrogates beside their originals")
def surrogates(data: Data) -> Grid:
    """Time on a synthetic surrogate divided by the time on its real graph (d = 128, fp32 output, back to back, L2
    warm; batches of molecules are rebuilt); then the geometric mean and the graph with the least ratio."""
    where = of.KERNEL | of.WARM | {"dim": 128, "backend": {"not": ["best other"]}}
    lines = {name: where | kernel for name, kernel in kernels(data, where | {"group": "twin"}).items()}
    sets = {name: name for name in ("citeseer", "cora", "pubmed", "elliptic", "musae-github")}
    sets |= {f"1,024 × {name}": name for name in ("ogbg-molhiv", "peptides-func")}
    sides = of.ORIGINALS, of.TWINS
    columns = {
        name: over(*({**side, "dataset": dataset} for side in sides), by=["dataset"]) for name, dataset in sets.items()
    }
    return Grid("kernel", lines, columns | {"all": over(*sides, least, ["dataset"])})


@table("Speed-up over each baseline, d = 128")
def kernel_baselines(data: Data) -> Grid:
    """Time of a baseline divided by that of `fused3s` or `fused3s_paper` (isolated launches, warm L2 cache, fp32
    output); geometric means over real / all graphs. Baselines marked fp32 take float32 inputs, `fused3s` float16."""
    where = of.KERNEL | of.GRAPHS | of.ISOLATED | {"dim": 128}
    others = REAL | {"backend": {"not": ["fused3s", "best other"]}}
    lines = {"best other kernel on each graph": of.BEST_OTHER} | kernels(data, where | others)

    def column(ours: Where, batch: str) -> Cell:
        return lambda data, theirs: means(quiet(data.pairs(where | {"batch": batch}, ours, theirs)))

    batches = ("single", "batched")
    columns = {f"`{k['backend']}`, {batch}": column(k, batch) for k in (of.OURS, of.PAPER) for batch in batches}
    return Grid("over", lines, columns)


@table("The authors' codes on the same GPU")
def published_codes(data: Data) -> Grid:
    """Time of a published code divided by ours on the same real graphs (same hash of the edges). Times of published
    codes are sums of kernel durations, which hold no launch cost. Ours are back to back, isolated, or sums as theirs;
    sums count twice what the kernels of `fused3s` do at the same time. A code whose output is wrong has no line or
    fewer graphs ([how](paper/README.md))."""
    compare = partial(over, text=mean_of_real, by=HASH)
    alone = {"Fused3S": "fused3s_paper", "FlashSparse": "flashsparse_naive"}
    alone |= {"DF-GNN tiling": "dfgnn_tiling", "DF-GNN hyper": "dfgnn_hyper"}
    lines = {
        f"Fused3S over `{kernel['backend']}`, {name}": compare(kernel | launch, of.CODES | of.PAPER)
        for kernel in (of.OURS, of.PAPER)
        for name, launch in {"back to back": of.WARM, "isolated": of.ISOLATED}.items()
    }
    lines["Fused3S over `fused3s`, kernels alone"] = compare(of.KERNEL_SUMS | of.OURS, of.CODES | of.PAPER)
    for code, name in alone.items():
        kernel = {"backend": name}
        lines[f"{code} over `{name}`, kernels alone"] = compare(of.KERNEL_SUMS | kernel, of.CODES | kernel)
    lines["Turbo-GNN over `fused3s`, kernels alone"] = compare(
        of.KERNEL_SUMS | of.OURS, of.CODES | {"backend": "turbo_gnn"}
    )
    return Grid("code over ours", lines, widths(of.KERNEL | of.GRAPHS | REAL))


@table("Shapes of heads (heads x columns)")
def heads(data: Data) -> Grid:
    """Slow-down of `fused3s` relative to one head of the same total width, or to one call per head: geometric mean over
    n real graphs, and the worst graph. 16-byte loads do not fit heads of 10 and 13 columns. Then milliseconds on
    ogbn-arxiv, fp16 (PyG: fp32), back to back."""
    lines = shapes(SHAPE | REAL, (2, 64), (4, 32), (8, 16), (8, 10), (4, 13))
    lines = {f"{name} over 1x{line['heads'] * line['dim']}": line for name, line in lines.items()}
    calls = shapes(SHAPE | REAL, (16, 64), (4, 128))
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
    of the gather model with windows of 16 / 8 queries. fp16; geometric mean over n real graphs, and the worst graph."""
    lines = {"8x128/1 over 8x128": SHAPE | REAL | HALF | {"heads": 8, "dim": 128}}
    cell = over({"kv_heads": 0}, {"kv_heads": 1}, largest, HASH)
    return Grid("shape", lines, {"time": {}, "bytes": {"metric": "bytes"}}, cell)


@table("Edge data")
def edges(data: Data) -> Grid:
    """Slow-down of `fused3s` by edge data and score terms, by shape of heads: geometric mean over n real graphs,
    and the worst graph. `low_rank_11`: 11 features with weights of keys and values; `types_4`: one of 4 vectors; `gat`
    reads no query and no key."""
    terms = ("bias", "bias_per_head", "low_rank_11", "types_4", "column", "soft_cap", "gat", "gatv2")
    lines = {f"`{name}` over none": over({"edges": "none"}, {"edges": name}, largest, HASH) for name in terms}
    where = of.TIME | of.WARM | of.OURS | REAL | {"bench": "edges"}
    return Grid("edge data", lines, shapes(where, (1, 64), (1, 128), (8, 16), (16, 64)))


@table("Backward pass")
def backward(data: Data) -> Grid:
    """Time of the backward pass of `fused3s` divided by its forward pass with the LSE (fp16), by shape of heads, and
    the ratio of their bytes for comparison. Then the time of Turbo-GNN's backward pass divided by ours, and the graph
    with the least ratio. Turbo-GNN runs with its default parameters; its outputs and gradients were checked. It
    cannot be captured, so that one eager run at a time is timed, with the gaps between its kernels; ours is timed in
    CUDA graphs of up to ten runs, in another run on another host."""
    forward, size = {"region": "forward"}, {"metric": "bytes"}
    columns = {
        "over forward": over(forward, {}, largest, HASH),
        "bytes": over(forward | size, size, largest, HASH),
        "Turbo-GNN over ours": over({}, {"backend": "turbo_gnn"}, least, HASH),
    }
    lines = shapes(of.BACKWARD | REAL, (1, 64), (1, 128), (1, 256), (8, 16), (16, 64))
    return Grid("shape", lines, columns)
