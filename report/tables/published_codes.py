"""The authors' codes on our GPU, and shares of bandwidth, as sections of the page beside the paper."""

from collections.abc import Sequence
from statistics import geometric_mean

import pandas as pd

from report.bandwidth import BANDWIDTH, bytes_moved, share
from report.frames import SUBJECTS, Panel
from report.markdown import table
from report.paper import DIM, GPUS, published_times, stated_means
from report.published_codes import (
    DEVICE,
    KINDS,
    LAUNCH_WORDS,
    code_commits,
    code_times,
    codes_over_ours,
    on_graphs_of,
    our_times,
    ratio,
)

DIMS = (64, 128, 256)
BASELINES = ("flashsparse_naive", "dfgnn_tiling", "dfgnn_hyper")  # of the codes
COMPARED = (  # tables with columns of a code, ours, head dimensions
    (("fused3s_paper", "fused3s_paper", DIMS), ("fused3s_paper", "fused3s", DIMS)),
    (
        *((baseline, baseline, (DIM,)) for baseline in BASELINES),
        ("turbo_gnn", "fused3s", DIMS),
    ),
)
OVER_OURS = """Time of the authors' code over that of ours; above 1, ours is faster. `-`: not recorded, or the code does
not take the graph. Turbo-GNN ran with the best of nine settings at d = 128 and its default at the other two.
"""
NAMES = {"fused3s_paper": "Fused3S", "turbo_gnn": "Turbo-GNN", "flashsparse_naive": "FlashSparse naive"}
NAMES |= {"dfgnn_tiling": "DF-GNN tiling", "dfgnn_hyper": "DF-GNN hyper"}


def code_tables(rows: pd.DataFrame) -> list[str]:
    """The paper's ratios with the authors' codes and with ours, and each code over ours by graph."""
    commits = ", ".join(f"{name} {commit}" for name, commit in code_commits().items())
    introduction = f"""The authors' repositories ({commits}), built and
run by this project on an {DEVICE}; how is told in [results/paper](../paper/README.md). Their times are sums of
kernel durations, launched one at a time. Ours are kernel times with the L2 cache warm, {LAUNCH_WORDS}. Fused3S is the
fastest of its kernels with one thread block per row window. All graphs but the surrogate are real. The rules by which
`fused3s` shares out row windows were fitted on these same graphs: none of them is held out. Numbers in brackets count
graphs.
"""
    return [
        f"## The authors' codes on {DEVICE}\n",
        introduction,
        f"Baseline over Fused3S on the same real graphs, d = {DIM}:\n",
        _ratios(rows),
        OVER_OURS,
        *(_by_graph(rows, compared) for compared in COMPARED),
    ]


def _ratios(rows: pd.DataFrame) -> str:
    theirs, mine = code_times()[DIM], our_times(rows, DIM)
    stated = {(m.group, m.baseline): m for m in stated_means() if m.gpu == "H100"}
    lines = []
    for kind, group in (("single", "single"), ("molecules", "batched")):
        for baseline in BASELINES:
            cells = [ratio(theirs, "fused3s_paper", baseline, kind)]
            ours = on_graphs_of(mine, "fused3s_paper", baseline)
            cells += [ratio(ours, subject, baseline, kind) for subject in SUBJECTS]
            lines.append([KINDS[kind], baseline, stated[group, baseline].describe(), *map(_mean, cells)])
    head = ["graphs", "baseline", "paper, H100, its own graphs", f"authors' codes, {DEVICE}"]
    return table([*head, *(f"ours, `{subject}`" for subject in SUBJECTS)], lines)


def _mean(found: tuple[float, int] | None) -> str:
    return f"{found[0]:.2f}x ({found[1]})" if found else "-"


def _by_graph(rows: pd.DataFrame, compared: Sequence[tuple[str, str, Sequence[int]]]) -> str:
    columns = {
        f"{NAMES[code]} / `{ours}`, d = {dim}": codes_over_ours(rows, dim, code, ours)
        for code, ours, dims in compared
        for dim in dims
    }
    ratios = pd.DataFrame(columns)
    kinds = ratios.index.get_level_values("kind")
    lines = []
    for (_, dataset, kind, nnz), line in ratios.iterrows():
        name = f"{dataset} (surrogate)" if kind == "surrogate" else dataset
        lines.append([name, f"{nnz:,}", *("-" if pd.isna(one) else f"{one:.2f}" for one in line)])
    real = [kind for kind in KINDS if kind != "surrogate"]
    for label, chosen in (*((KINDS[kind], [kind]) for kind in real), ("all real graphs", real)):
        found = (ratios.loc[kinds.isin(chosen), column].dropna() for column in ratios)
        means = ((geometric_mean(one), len(one)) if len(one) else None for one in found)
        lines.append([f"mean, {label}", "", *map(_mean, means)])
    return table(["graph", "edges", *ratios], lines, 1)


def bandwidth_tables(rows: pd.DataFrame, device: str, panels: Sequence[Panel]) -> list[str]:
    """Share of each machine's bandwidth at the paper's head dimension; nothing if no bytes were recorded."""
    moved = bytes_moved(rows, device, DIM)
    graphs = [(graph, panel) for panel in panels for graph in panel.graphs if graph in moved]
    if not graphs or device not in BANDWIDTH:
        return []
    codes = code_times()[DIM, "fused3s_paper"].droplevel(["dataset", "kind", "nnz"]) if device == DEVICE else {}
    columns = {f"published, {gpu}": gpu for gpu in GPUS.values()}
    columns |= {f"authors' code, {device}": device} | {f"`{subject}`, {device}": device for subject in SUBJECTS}
    lines, shares = [], []
    for graph, panel in graphs:
        times = [published_times(gpu).get((graph.dataset, "fused3s_paper")) for gpu in GPUS.values()]
        times += [codes.get(graph.sha256), *(panel.time(graph, subject) for subject in SUBJECTS)]
        found = [
            None if time is None or pd.isna(time) else share(moved[graph], time, gpu)
            for time, gpu in zip(times, columns.values(), strict=True)
        ]
        shares.append((graph, found))
        cells = ["-" if one is None else f"{one:.0%}" for one in found]
        lines.append([graph.label, f"{graph.nnz:,}", f"{moved[graph] / 1e6:,.1f}", *cells])
    distinct = {graph.sha256: (graph, found) for graph, found in shares}.values()
    for label, kept in (("mean, real graphs", lambda graph: graph.real), ("mean, all graphs", lambda graph: True)):
        found = [one for graph, one in distinct if kept(graph)]
        lines.append([label, "", "", *_column_means(found, len(columns))])
    speeds = ", ".join(f"{gpu} {speed:g}" for gpu, speed in BANDWIDTH.items() if gpu in {*columns.values()})
    introduction = f"""Times of Fused3S on GPUs of different bandwidth ({speeds} TB/s: the
paper's words for its two GPUs, of which it calls the GH200 H100, and NVIDIA's data sheet) compare as shares of it.
MB: bytes that one run moves if no row of K or V is reused between row windows, d = {DIM}, fp16 in, fp32 out, counted on
our copy of the graph; for a synthetic graph an estimate of the original's. Rows found in a cache count too, so that a
share can exceed 100 %. The smallest graphs are bound by latency. Numbers in brackets count distinct graphs.
"""
    head = ["graph", "edges", "MB", *columns]
    return ["## Share of each machine's memory bandwidth\n", introduction, table(head, lines, 1)]


def _column_means(lines: list[list[float | None]], width: int) -> list[str]:
    columns = [[line[nth] for line in lines if line[nth] is not None] for nth in range(width)]
    return [f"{geometric_mean(found):.0%} ({len(found)})" if found else "-" for found in columns]
