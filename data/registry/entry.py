"""Registry entry of a data set."""

from dataclasses import dataclass

from data.graph import Metric, Task
from data.sources.base import OfficialSource
from data.sources.embedded import EmbeddedGraph
from data.spec import Generator, GraphSpec


@dataclass(frozen=True)
class Published:
    """Block statistics (blocks of 16 x 8) from the paper or its artefacts; None where they state none.

    Attributes:
        tcb_per_rw, tcb_per_rw_cv, nnz_per_tcb, nnz_per_tcb_cv: the paper's table of single graphs.
        num_tcbs: total number of blocks, recovered from the throughputs of the published run to within a few.
        deciles: the paper's decile table, eleven bounds of the TCB counts.
    """

    num_tcbs: int
    tcb_per_rw: float | None = None
    tcb_per_rw_cv: float | None = None
    nnz_per_tcb: float | None = None
    nnz_per_tcb_cv: float | None = None
    deciles: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset(GraphSpec):
    """One data set.

    Attributes:
        task: "node" or "graph".
        num_classes: size of a model's output.
        feature_dim: columns of the node features.
        homepage: the publisher's description.
        licence: as the publisher states it.
        citation: how to cite it.
        official: fetches and reads the publisher's files.
        synthetic: generator of the surrogate.
        embedded: the publisher's files that ship with this repository, read instead of a download; None for most sets.
        feature_cardinalities: number of codes of each categorical column; None for float features.
        edge_feature_dim: columns of the edge features; 0 if the set has none.
        edge_feature_cardinalities: number of codes of each categorical column; None for float features.
        metric: the standard metric of the official labels; None if the source has no labels or there is no standard.
        published: block statistics that the surrogate is fitted to; None where none are published.
        note: remarks for a reader of results.
        warmup, repeats: default passes of an inference run (runtime.warmup, runtime.repeats): fewer on large graphs, of
            which a pass takes seconds on a CPU.
    """

    task: Task
    num_classes: int
    feature_dim: int
    homepage: str
    licence: str
    citation: str
    official: OfficialSource
    synthetic: Generator
    embedded: EmbeddedGraph | None = None
    feature_cardinalities: tuple[int, ...] | None = None
    edge_feature_dim: int = 0
    edge_feature_cardinalities: tuple[int, ...] | None = None
    metric: Metric | None = None
    published: Published | None = None
    note: str = ""
    warmup: int = 3
    repeats: int = 20
