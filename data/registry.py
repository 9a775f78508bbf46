"""Table of data sets, `datasets.yaml`, as frozen dataclasses."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from data.graph import GraphSpec, Metric, Task
from data.sources.base import OfficialSource
from data.sources.block_models import SbmCluster, SbmPattern
from data.sources.edge_lists import EdgeList, Facebook100
from data.sources.elliptic import Elliptic
from data.sources.large import Igb, Papers100M
from data.sources.molecules import OgbMolecules, SmilesTable
from data.sources.planetoid import Planetoid
from data.sources.power_law import PowerLaw
from data.sources.pyg import OgbGraphs, OgbNodes, PygCollection, PygGraph
from data.sources.qm9 import Qm9
from data.sources.sequence_masks import BigBird, Longformer, SelectedBlocks
from data.sources.sphere import Sphere
from data.synthetic.batch import DenseBatch, MoleculeBatch, SuperpixelBatch, SyntaxTreeBatch
from data.synthetic.generate import Generator, NoSurrogate
from data.synthetic.graph import WindowedGraph
from data.synthetic.huge import HugeGraph
from data.synthetic.windows import Deciles, LogNormal

TABLE = Path(__file__).with_name("datasets.yaml")
READERS = (
    *(BigBird, EdgeList, Elliptic, Facebook100, Igb, Longformer, OgbGraphs, OgbMolecules, OgbNodes, Papers100M),
    *(Planetoid, PowerLaw, PygCollection, PygGraph, Qm9, SbmCluster, SbmPattern, SelectedBlocks, SmilesTable, Sphere),
)
GENERATORS = (DenseBatch, HugeGraph, MoleculeBatch, NoSurrogate, SuperpixelBatch, SyntaxTreeBatch, WindowedGraph)


@dataclass(frozen=True)
class Published:
    """Block statistics (blocks of 16 x 8) from the paper or its artefacts; None where they state none.

    Attributes:
        num_tcbs: total number of blocks, recovered from the throughputs of the published run to within a few.
        tcb_per_rw, tcb_per_rw_cv, nnz_per_tcb, nnz_per_tcb_cv: the paper's table of single graphs.
        decile_size: row windows in a decile, from the paper's decile table.
        deciles: (min, max) TCB count of a row window in each decile, from the same table.
    """

    num_tcbs: int
    tcb_per_rw: float | None = None
    tcb_per_rw_cv: float | None = None
    nnz_per_tcb: float | None = None
    nnz_per_tcb_cv: float | None = None
    decile_size: int | None = None
    deciles: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset(GraphSpec):
    """One data set.

    Attributes:
        task: "node" or "graph".
        num_classes: size of a model's output.
        feature_dim: columns of the node features; of random ones where the set has none.
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
        unit: of the targets of regression; "" for none.
        published: block statistics that the surrogate is fitted to; None where none are published.
        note: remarks for a reader of results.
        warmup, repeats: default passes of an inference run (runtime.warmup, runtime.repeats): fewer on large graphs, of
            which a pass takes seconds on a CPU.
    """

    task: Task = "node"
    symmetric: bool = True
    num_classes: int = 2
    feature_dim: int = 128
    homepage: str
    licence: str
    citation: str
    official: OfficialSource
    synthetic: Generator
    embedded: Planetoid | None = None
    feature_cardinalities: tuple[int, ...] | None = None
    edge_feature_dim: int = 0
    edge_feature_cardinalities: tuple[int, ...] | None = None
    metric: Metric | None = None
    unit: str = ""
    published: Published | None = None
    note: str = ""
    warmup: int = 3
    repeats: int = 20


@cache
def registry() -> dict[str, Dataset]:
    """All entries by name, in the order of the table."""
    table = yaml.load(TABLE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: _entry(name, fields) for name, fields in table["sets"].items()}


def names() -> tuple[str, ...]:
    """Registered names, in the order of the table."""
    return tuple(registry())


def info(name: str) -> Dataset:
    """The registry's entry for `name`.

    Raises:
        ValueError: `name` is not registered.
    """
    if not isinstance(name, str) or name not in registry():
        raise ValueError(
            f"name: got {name!r}; registered are {', '.join(registry())}. For a graph of your own pass path=, "
            "under any name"
        )
    return registry()[name]


def _entry(name: str, fields: dict[str, Any]) -> Dataset:
    fields = _with_tuples(fields)
    made = {key: _made(READERS, fields[key], "reader") for key in ("official", "embedded") if key in fields}
    surrogate = dict(fields["synthetic"])
    if "deciles" in surrogate:
        surrogate["tcbs"] = Deciles(surrogate.pop("deciles"))
    elif "cv" in surrogate:
        most = {"maximum": surrogate.pop("max_tcbs")} if "max_tcbs" in surrogate else {}
        surrogate["tcbs"] = LogNormal(surrogate.pop("cv"), **most)
    made["synthetic"] = _made(GENERATORS, surrogate, "generator")
    if "published" in fields:
        made["published"] = Published(**fields["published"])
    return Dataset(**{"name": name, **fields, **made})


def _made(classes: tuple[type, ...], arguments: dict[str, Any], kind: str) -> Any:
    """An instance of the class that the entry names."""
    known = {each.__name__: each for each in classes}
    return known[arguments[kind]](**{key: value for key, value in arguments.items() if key != kind})


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(part) for key, part in value.items()}
    return tuple(value) if isinstance(value, list) else value
