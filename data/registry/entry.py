"""What the registry knows about a data set."""

from dataclasses import dataclass

from data.graph import Task
from data.sources.base import OfficialSource
from data.synthetic.generate import Generator


@dataclass(frozen=True)
class Published:
    """Block statistics (blocks of 16 x 8) that the paper or its artefacts state; None where they do not.

    Attributes:
        tcb_per_rw, tcb_per_rw_cv, nnz_per_tcb, nnz_per_tcb_cv: the paper's table of single graphs.
        num_tcbs: blocks in all, recovered from the throughputs of the published run, to within a few.
        deciles: the paper's decile table, eleven bounds of the TCB counts.
    """

    num_tcbs: int
    tcb_per_rw: float | None = None
    tcb_per_rw_cv: float | None = None
    nnz_per_tcb: float | None = None
    nnz_per_tcb_cv: float | None = None
    deciles: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """One data set.

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
        official: how to fetch and read the publisher's files.
        synthetic: generator of the stand-in.
        feature_cardinalities: number of codes of each categorical column; None for float features.
        num_graphs: graphs that num_nodes and nnz speak of; None for a single graph.
        published: block statistics that the stand-in is fitted to; None where nobody published them.
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
    official: OfficialSource
    synthetic: Generator
    feature_cardinalities: tuple[int, ...] | None = None
    num_graphs: int | None = None
    published: Published | None = None
    note: str = ""
