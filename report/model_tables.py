"""Tables of whole models, of training steps of layers, and of the attention of groups of users."""

import pandas as pd

from report import selections as of
from report.cells import NAMES, REAL, Cell, Grid, graphs, mean_of_real, over, show, table
from report.engine import COUNTED, DISTURBED, Data, Where, mean
from report.published import captions

PRECISIONS = {NAMES.get(name, name): precision for name, precision in of.PRECISIONS.items()}
BASELINES = ("dgl", "csr_unfused", "pyg", "dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable")
WAYS = {"eager": of.EAGER, "CUDA graph": of.GRAPH, "compiled with its blocks": {"launch": "compiled"}}
WAYS |= {f"CUDA graph, {dense} blocks": of.GRAPH | {"dense": dense} for dense in ("compiled", "fused")}


@table("Whole model")
def model_times(data: Data) -> Grid:
    """Milliseconds of a forward pass of 10 blocks, d = 128, one head, by precision of the layers outside attention, for
    all backends; the projection writes the type that attention reads. `~`: CPU-bound (at least 1.1 times as long as
    the GPU computes), left out of means."""
    lines = {
        f"{case}, `{name}`, {how}": of.MODEL | REAL | {"dim": 128, "backend": name} | precision | way
        for case, precision in PRECISIONS.items()
        for name in (*BASELINES, "fused3s_paper", "fused3s")
        for how, way in WAYS.items()
    }
    lines = {name: line for name, line in lines.items() if data.pick(line)["status"].isin(COUNTED).any()}
    return Grid("attention and mode", lines, graphs(data, {}, of.MODEL | {"dim": 128}), show({}, ".3f"))


SIX_GRAPHS = ["pubmed", "elliptic", "musae-github", "ogbn-arxiv", "ogbg-molhiv", "peptides-func"]
CASES = {name: of.MODEL | REAL | {"dim": 128} | case for name, case in PRECISIONS.items()}
ANY_WAY = {"dense": ["plain", "compiled", "fused"], "launch": ["eager", "compiled", "cuda_graph"]}
FIVE = of.GRAPH | {"dataset": [name for name in SIX_GRAPHS if name != "musae-github"]}
SHARE = ({}, {"scope": "attention"})


@table()
def end_to_end(data: Data) -> Grid:
    """Time of the 10-block model with another attention divided by its time with `fused3s_paper`, by precision of the
    layers outside attention, d = 128, one head: geometric mean over n of six real graphs, the two of molecules rebuilt;
    CPU-bound times are left out, from 1.1 times that in which the GPU is busy. DGL ran in a process of its own. The
    projection computes in 16 bits where layers or attention do, and writes the type that attention reads. Five graphs:
    all but musae-github, whose degrees vary most. "Without attention": the time of `csr_unfused` divided by its part
    outside attention, a limit in TF32 and fp16; in fp32 the 16-bit kernels have a faster projection. Last lines: the
    fastest of all others, `fused3s_paper` included, over `fused3s`: as plain CUDA graphs; with compiled blocks in CUDA
    graphs; then each in its fastest way, CPU-bound ones included, ours in fp16 with the fused dense block."""
    paper = captions("Figure 8(c)")
    lines: dict[str, Cell] = {}
    for name in BASELINES:
        stated = f" (in the paper {paper[name]:g})" if name in paper else ""
        for launch, way in {f"eager{stated}": of.EAGER, "CUDA graph": of.GRAPH}.items():
            lines[f"`{name}`, {launch}"] = _of_column(of.PAPER | way, way | {"backend": name})
        if stated:
            lines[f"`{name}`, CUDA graph, five graphs"] = _of_column(of.PAPER | FIVE, FIVE | {"backend": name})
    pyg = {"backend": "pyg", "launch": "compiled"}
    lines["`pyg`, compiled with its blocks, over eager `fused3s_paper`"] = _of_column(of.PAPER | of.EAGER, pyg)
    lines["`csr_unfused` without attention"] = _without_attention
    compiled = of.GRAPH | {"dense": "compiled"}
    for how, way in {"plain CUDA graphs": of.GRAPH, "compiled blocks": compiled, "any way": ANY_WAY}.items():
        lines[f"fastest of all others over `fused3s`, {how}"] = _fastest_over_ours(way)
    return Grid("over `fused3s_paper`", lines, {name: case | {"dataset": SIX_GRAPHS} for name, case in CASES.items()})


def _of_column(ours: Where, theirs: Where) -> Cell:
    return lambda data, column: over(ours, theirs, mean_of_real)(data, column)


def _without_attention(data: Data, column: Where) -> str:
    shares = data.pairs(column | {"backend": "csr_unfused"}, *SHARE)
    return mean_of_real(shares.assign(ratio=1 / (1 - shares["ratio"])))


def _fastest_over_ours(way: Where) -> Cell:
    def cell(data: Data, column: Where) -> str:
        rows = data.pick(column | {"backend": [*BASELINES, "fused3s_paper", "fused3s"]} | way)
        rows = rows[rows["status"].isin(COUNTED)]
        is_ours = rows["backend"] == "fused3s"
        ours, others = (rows[side].groupby("data_sha256")["value"].min() for side in (is_ours, ~is_ours))
        ratios = (others / ours).dropna()
        return f"**{mean(ratios):.2f}** (n = {len(ratios)})" if len(ratios) else "-"

    return cell


@table()
def end_to_end_large(data: Data) -> Grid:
    """The same on synthetic graphs with the sizes and blocks of the three data sets of Figure 8 that the paper's text
    names: eager, d = 128. Then attention's share of a pass."""
    others = ("dgl", "csr_unfused", "dfgnn_tiling", "flashsparse_naive")
    columns = {f"`{name}`": over(of.PAPER, {"backend": name}) for name in others}
    columns |= {f"share, `{name}`": _share({"backend": name}) for name in ("dgl", "fused3s_paper")}
    where = of.MODEL | of.EAGER | {"dim": 128}
    lines = {f"{n}, {case}": where | {"dataset": n} | kind for n in of.LARGE for case, kind in PRECISIONS.items()}
    return Grid("over `fused3s_paper`", lines, columns)


@table()
def attention_shares(data: Data) -> Grid:
    """Share of attention in a pass of the 10-block model, by attention and precision of the layers outside it, d = 128,
    one head: of DGL in eager passes, unless CPU-bound, of others in a CUDA graph. The last two graphs are batches of
    1,024 molecules, rebuilt."""
    columns = {"`dgl`, fp32": _share(CASES["fp32"] | of.EAGER | {"backend": "dgl"})}
    columns |= {
        f"`{name}`, {case}": _share(where | of.GRAPH | {"backend": name})
        for name in ("csr_unfused", "fused3s_paper")
        for case, where in CASES.items()
    }
    return Grid("graph", {name: {"dataset": name} for name in SIX_GRAPHS}, columns)


def _share(where: Where) -> Cell:
    return over(*(where | side for side in SHARE), form=".0%")


# Training steps of layers

LAYERS = REAL | {"bench": "layers", "plan": ["fixed", "rebuilt"], "region": "step"}
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
    """The fastest launch of a step, if `where` names none. One whose output is `wrong` counts: the work is the same."""
    found = data.pick({"launch": [*LAUNCHES]} | where | of.TIME)
    found = found[found["status"].isin([*COUNTED, "wrong"])]
    return None if found.empty else found.loc[found["value"].idxmin()]


def show_best(where: Where) -> Cell:
    def cell(data: Data, line: Where) -> str:
        if (row := best(data, line | where)) is None:
            return "-"
        return DISTURBED * (row["disturbed"] == "yes") + f"{row['value']:.2f}" + " (wrong)" * (row["status"] == "wrong")

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


def step_time(where: Where) -> Cell:
    """As `show`, with the time of a step whose output is wrong."""
    shown, timed = show(where | of.TIME, ".2f"), show_best(where)

    def cell(data: Data, line: Where) -> str:
        return timed(data, line) if (text := shown(data, line)) == "wrong" else text

    return cell


def steps_of(*names: str) -> dict[str, Where]:
    return {WORKLOADS[name]: LAYERS | {"variant": name} for name in names or WORKLOADS}


@table()
def layers(data: Data) -> Grid:
    """Milliseconds of a training step (3 `TransformerConv`, 8 heads x 16 columns; AdamW and host included), each side
    in its fastest way: eager, `torch.compile`, or `mode="reduce-overhead"` where the graph stays; medians, by turns.
    `wrong`: PyG's worst row is too far from float64 ([why](docs/semantics.md#sums-in-bfloat16)); `~`: the host
    disturbed the time. Marked times count in the ratios. PyG was not captured for new graphs.
    Captured: our step by [`CapturedLoop`](docs/training.md#as-one-cuda-graph), a CUDA graph for new graphs."""
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
    `CapturedLoop`. GPU busy: time of our fastest step in which the GPU computes. `wrong`: a row of PyG's output is
    further from float64 than allowed, in bf16 0.05 of its norm for the first layer, 0.15 for the model
    ([why](semantics.md#sums-in-bfloat16)), or in fp32 its gradients are, by more than 1e-4; such a time counts in the
    ratio, since the work is the same. `~`: the host disturbed it; it counts, too. `error`: no step ran. "-": not
    measured."""
    columns = {
        f"{name} {how}": step_time(side | {"launch": launch})
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
    arxiv, inference = LAYERS | {"variant": "arxiv", "dtype": "float32"}, LAYERS | {"region": "forward"}
    lines["ogbn-arxiv, tf32"] = arxiv | {"out_dtype": "tf32"}
    lines["ogbn-arxiv, autocast to bf16"] = arxiv | {"out_dtype": "bfloat16"}
    for graph in ("cora", "ogbn-arxiv"):
        for kind, types in (("fp32", of.FP32), ("bf16", BF16)):
            lines[f"{graph}, inference, {kind}"] = inference | {"dataset": graph} | types
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
    "relational, three masks, each as one CUDA graph: FlexAttention": MASKS | FLEX | of.GRAPH | {"plan": "fixed"},
    "relational, masks made anew, each as one CUDA graph: FlexAttention": MASKS | FLEX | of.GRAPH | {"plan": "rebuilt"},
}


@table()
def doors_in_short(data: Data) -> Grid:
    """Attention as four groups of users run it, beside the fastest code that they use: milliseconds of a forward pass
    with all gradients, and their peak memory; forward: ratio of a forward pass alone; relational: both sides as one
    CUDA graph ([eager, where new masks make our forward pass
    slower](docs/benchmarks.md#beside-the-code-of-four-groups-of-users)). Outputs were checked on small instances."""
    grid, fastest = doors(data), {}
    for name, line in grid.lines.items():
        found = best(data, line | STEP)["value"], name
        problem = line["variant"], line.get("plan")
        fastest[problem] = min(found, fastest.get(problem, found))
    return grid._replace(lines={name: grid.lines[name] for _, name in fastest.values()})


@table()
def doors(data: Data) -> Grid:
    """Attention of four groups of users, ours (eager, unless a line says otherwise) beside what they use: milliseconds
    of a forward pass with all gradients, host included, and their peak memory; forward: ratio of the times of a forward
    pass alone. Of PyG, times are those of the faster of eager and compiled, and GiB those of the faster step, even if
    the other needs less. Outputs and gradients were checked on small instances of the same inputs. `bench/doors.py` has
    the sizes and types; small: of `size=small`."""
    columns = {"theirs": show_best(STEP), "ours": show_best(STEP | AUTO), "theirs / ours": best_over_best(STEP, {})}
    columns["forward"] = best_over_best({"region": "forward"}, {})
    for name, side in {"theirs": STEP, "ours": STEP | AUTO}.items():
        columns[f"GiB: {name}"] = metric_of_best(side, "peak_memory", 2**-10)
    lines = {
        name + size: {"bench": "doors"} | line | {"variant": line["variant"] + size}
        for size in ("", " (small)")
        for name, line in DOORS.items()
    }
    some = {name: line for name, line in lines.items() if best(data, line | STEP) is not None}
    return Grid("attention: beside", some, columns)
