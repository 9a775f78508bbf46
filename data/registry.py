"""The table of data sets. A new one is a new entry, and a loader in `data.official` if its format is new."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.download import Fetch
from data.graph import RawGraph, Task
from data.official import ogb_graphs, planetoid
from data.synthetic import Degrees, Generator, LogNormalGraph, MoleculeBatch


@dataclass(frozen=True)
class Dataset:
    """One data set of the paper.

    Attributes:
        name: the name that `data.load` takes.
        task: "node" or "graph".
        num_nodes: nodes; for a collection of small graphs those of its first `num_graphs`.
        nnz: directed edges, nnz(A), of the same.
        symmetric: whether A is symmetric.
        num_classes: size of a model's output.
        feature_dim: columns of the node features.
        homepage: where its publisher describes it.
        licence: as the publisher states it.
        citation: how to cite it.
        synthetic: generator of the stand-in.
        official: `(root, batch_size, fetch) -> RawGraph`, calling `fetch` for files that are not under root;
            None where no official loader exists.
        feature_cardinalities: number of codes of each categorical column; None for float features.
        num_graphs: graphs that num_nodes and nnz speak of; None for a single graph.
        note: what a reader of results should know.
    """

    name: str
    task: Task
    num_nodes: int
    nnz: int
    symmetric: bool
    num_classes: int
    feature_dim: int
    homepage: str
    licence: str
    citation: str
    synthetic: Generator
    official: Callable[[Path, int, Fetch], RawGraph] | None = None
    feature_cardinalities: tuple[int, ...] | None = None
    num_graphs: int | None = None
    note: str = ""


_PLANETOID = {
    "homepage": "https://github.com/kimiyoung/planetoid",
    "licence": "MIT (kimiyoung/planetoid)",
    "citation": "Yang, Cohen, Salakhutdinov: Revisiting Semi-Supervised Learning with Graph Embeddings, ICML 2016",
}

_ENTRIES = (
    Dataset(
        name="cora",
        task="node",
        num_nodes=2_708,
        nnz=10_556,
        symmetric=True,
        num_classes=7,
        feature_dim=1_433,
        official=partial(planetoid, "CoraGraphDataset"),
        synthetic=LogNormalGraph(Degrees(minimum=1, sigma=1.0, maximum=168)),
        **_PLANETOID,
    ),
    Dataset(
        name="citeseer",
        task="node",
        num_nodes=3_327,
        nnz=9_228,
        symmetric=True,
        num_classes=6,
        feature_dim=3_703,
        official=partial(planetoid, "CiteseerGraphDataset"),
        synthetic=LogNormalGraph(Degrees(minimum=1, sigma=1.1, maximum=99), self_loops=124),
        **_PLANETOID,
    ),
    Dataset(
        name="pubmed",
        task="node",
        num_nodes=19_717,
        nnz=88_651,
        symmetric=True,
        num_classes=3,
        feature_dim=500,
        official=partial(planetoid, "PubmedGraphDataset"),
        synthetic=LogNormalGraph(Degrees(minimum=1, sigma=1.4, maximum=171), self_loops=3),
        **_PLANETOID,
    ),
    Dataset(
        name="musae-github",
        task="node",
        num_nodes=37_700,
        nnz=578_006,
        symmetric=True,
        num_classes=2,
        feature_dim=128,
        homepage="https://github.com/benedekrozemberczki/MUSAE",
        licence="GPL-3.0 (benedekrozemberczki/MUSAE)",
        citation="Rozemberczki, Allen, Sarkar: Multi-Scale Attributed Node Embedding, J. Complex Networks 9(2), 2021",
        synthetic=LogNormalGraph(Degrees(minimum=1, sigma=1.4, maximum=15_000)),  # gives a hub of about 9458
        note="the original has 4005 binary features; without them 128 random float features are used",
    ),
    Dataset(
        name="elliptic",
        task="node",
        num_nodes=203_769,
        nnz=234_355,
        symmetric=False,
        num_classes=2,
        feature_dim=165,
        homepage="https://www.kaggle.com/datasets/ellipticco/elliptic-data-set",
        licence="terms of the Kaggle page",
        citation="Weber et al.: Anti-Money Laundering in Bitcoin, KDD Workshop on Anomaly Detection in Finance 2019",
        synthetic=LogNormalGraph(
            Degrees(minimum=0, sigma=0.7, maximum=472), columns=Degrees(minimum=0, sigma=1.2, maximum=284)
        ),
        note="one direction, as published: the first transaction of a pair attends to the second",
    ),
    Dataset(
        name="ogbg-molhiv",
        task="graph",
        num_nodes=21_535,
        nnz=45_740,
        num_graphs=1_024,
        symmetric=True,
        num_classes=1,
        feature_dim=9,
        # ogb.utils.features.get_atom_feature_dims(); written out, as a file or a stand-in should not need ogb
        feature_cardinalities=(119, 5, 12, 12, 10, 6, 6, 2, 2),
        homepage="https://ogb.stanford.edu/docs/graphprop/#ogbg-mol",
        licence="MIT",
        citation="Hu et al.: Open Graph Benchmark: Datasets for Machine Learning on Graphs, NeurIPS 2020",
        official=partial(ogb_graphs, "ogbg-molhiv"),
        synthetic=MoleculeBatch(),
        note="the first batch_size molecules in data set order; nodes and edges are those of 1024",
    ),
)

REGISTRY: dict[str, Dataset] = {entry.name: entry for entry in _ENTRIES}


def names() -> tuple[str, ...]:
    """Registered names, in the order of the table."""
    return tuple(REGISTRY)


def info(name: str) -> Dataset:
    """The registry's entry for `name`.

    Raises:
        ValueError: `name` is not registered.
    """
    if name not in REGISTRY:
        raise ValueError(
            f"name: got {name!r}; registered are {', '.join(REGISTRY)}. For a graph of your own pass path=, "
            "under any name"
        )
    return REGISTRY[name]
