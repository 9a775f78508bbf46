"""The authors' own codes on our GPU (results/paper/published_codes_*.csv), and our kernels on the same graphs.

Both are matched by the hash of the edges. The codes' times are sums of kernel durations, which hold no launch cost. Of
ours, launches back to back come closest: an isolated launch holds the time of an empty kernel. `fused3s` may overlap
with the launch in front of it.
"""

from functools import cache
from statistics import geometric_mean

import pandas as pd

from report.frames import kernel_panels
from report.paper import DIM, FOLDER

DEVICE = "NVIDIA H200"
CODES = {  # name in the CSV: the kernel of ours that it is compared with
    "Fused3S": "fused3s_paper",
    "FlashSparse": "flashsparse_naive",
    "DF-GNN tiling": "dfgnn_tiling",
    "DF-GNN hyper": "dfgnn_hyper",
    "Turbo-GNN": "turbo_gnn",  # a code of its own, compared with fused3s
}
KINDS = {  # of the graphs, in the order of the tables
    "single": "real single graphs of the paper",
    "molecules": "real batches of molecules",
    "more": "further real graphs",
    "surrogate": "surrogate (superpixels of other photographs)",
}
LAUNCH = "back_to_back"  # of ours
LAUNCH_WORDS = "launched back to back"


@cache
def code_times() -> pd.DataFrame:
    """Milliseconds: [graphs, (dim, backend)]; the index has data_sha256, dataset, kind and nnz."""
    graphs = pd.read_csv(FOLDER / "published_codes_graphs.csv")
    times = pd.read_csv(FOLDER / "published_codes_nvidia-h200.csv")
    times = times[times["code"].isin(list(CODES))].merge(graphs, on="graph", validate="many_to_one")
    times = times.assign(
        backend=times["code"].map(CODES), kind=pd.Categorical(times["kind"], list(KINDS), ordered=True)
    )
    wide = times.pivot(
        index=["kind", "nnz", "dataset", "data_sha256"], columns=["dim", "backend"], values="ms"
    ).sort_index()
    return wide.reorder_levels(["data_sha256", "dataset", "kind", "nnz"])


def code_commits() -> dict[str, str]:
    """Commit of each repository by its name."""
    times = pd.read_csv(FOLDER / "published_codes_nvidia-h200.csv")
    repositories = times["code"].str.split(" ").str[0]
    return dict(zip(repositories, times["commit"], strict=True))


def our_times(rows: pd.DataFrame, dim: int, out_dtype: str = "float32") -> pd.DataFrame:
    """Milliseconds of correct outputs at one head dimension: [graphs as `code_times`, series]."""
    index = code_times().index
    panels = kernel_panels(rows, out_dtype, LAUNCH)
    panels = [p for p in panels if p.of_paper and (p.device, p.dim) == (DEVICE, dim)]
    if not panels:
        return pd.DataFrame(index=index)
    times = pd.concat([panel.times for panel in panels])
    times.index = pd.Index([graph.sha256 for graph in times.index])
    return times[~times.index.duplicated()].reindex(index.get_level_values("data_sha256")).set_axis(index)


def ratio(times: pd.DataFrame, subject: str, baseline: str, *kinds: str) -> tuple[float, int] | None:
    """Geometric mean of `baseline` over `subject` over the graphs of `kinds`, and their number; None if there is none.

    Args:
        times: [graphs as `code_times`, backends].
    """
    if not {subject, baseline} <= {*times.columns}:
        return None
    chosen = times[times.index.get_level_values("kind").isin(kinds)]
    ratios = (chosen[baseline] / chosen[subject]).dropna()
    return (geometric_mean(ratios), len(ratios)) if len(ratios) else None


def on_graphs_of(times: pd.DataFrame, subject: str, baseline: str) -> pd.DataFrame:
    """Our times on the graphs on which both codes ran at the paper's head dimension, so that means are comparable."""
    theirs = code_times()[DIM]
    return times[theirs[[subject, baseline]].notna().all(axis=1)]


def codes_over_ours(rows: pd.DataFrame, dim: int, code: str, ours: str) -> pd.Series:
    """Time of a code (a backend of `code_times`) over that of one of our series, by graph; NaN where one is missing."""
    theirs, mine = code_times()[dim], our_times(rows, dim)
    if code not in theirs or ours not in mine:
        return pd.Series(float("nan"), index=code_times().index)
    return theirs[code] / mine[ours]
