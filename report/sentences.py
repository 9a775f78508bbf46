"""Sentences of the README whose numbers follow from recorded rows. Each is "" where its rows are not recorded."""

from report import drawing as on
from report import selections as of
from report.cells import HASH
from report.engine import Data, quiet, real

SHOWN = ["cora", "musae-github", "ogbn-arxiv", "ego-twitter", "ogbg-molhiv", "peptides-func"]  # in docs/benchmarks.md


def scale(data: Data) -> str:
    """A training step on the largest graph on which compiled PyG runs."""
    step = {"bench": "layers", "variant": of.SIZES} | of.FP32
    ours, theirs = of.EAGER | {"backend": "auto"}, {"launch": "compiled", "backend": "pyg"}
    time, memory = (data.pairs(step | metric, ours, theirs) for metric in (of.TIME, {"metric": "peak_memory"}))
    if time.empty or memory.empty:
        return ""
    time, memory = time.iloc[-1], memory.iloc[-1]
    return (
        f"A training step on {on.edges(time['nnz'])} edges (3 layers, float32, synthetic graph, one {time['device']}) "
        f"takes **{on.milliseconds(time['value'])} and {memory['value'] / 1024:.3g} GiB**; compiled PyG takes "
        f"{on.milliseconds(time['theirs'])} and {memory['theirs'] / 1024:.3g} GiB "
        "([table](docs/limits.md#when-it-is-worth-using))."
    )


def kernels(data: Data) -> str:
    """Attention alone on the graphs of the table of kernels."""
    where = of.KERNEL | {"dim": 128, "dataset": SHOWN}
    warm, isolated = (
        real(quiet(data.pairs(where | launch, of.OURS, of.BEST_OTHER, HASH)))["ratio"]
        for launch in (of.WARM, of.ISOLATED)
    )
    both = warm.index.intersection(isolated.index)
    if both.empty:
        return ""
    warm, isolated = (f"{some[both].min():.2f} to {some[both].max():.2f}" for some in (warm, isolated))
    return (
        f"Attention alone, d = 128, on {len(both)} real graphs: ours is {warm} times as fast as the best other kernel "
        "back to back ([table](docs/benchmarks.md#attention-kernels)), where ours alone starts before the previous "
        f"kernel ends, and {isolated} times in isolated launches."
    )


SENTENCES = {"scale-in-short": scale, "kernels-in-short": kernels}
