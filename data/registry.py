"""Table of data sets, `datasets.yaml`, as frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from data.graph import CsrGraph, Metric, Task
from data.sources.base import OfficialSource

TABLE = Path(__file__).with_name("datasets.yaml")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One data set. Nodes and edges of a collection of small graphs are those of its first `num_graphs`.

    Attributes:
        name: registered name.
        num_nodes: nodes; nnz: directed edges, nnz(A).
        num_graphs: graphs that `num_nodes` and `nnz` count; None for a single graph.
        symmetric: whether A is symmetric.
        task: "node" or "graph".
        num_classes: size of a model's output.
        feature_dim: columns of the node features; of random ones where the set has none.
        homepage: the publisher's description.
        licence: as the publisher states it.
        citation: how to cite it.
        official: fetches and reads the publisher's files; None of a user's file.
        surrogate: generator of the surrogate and its arguments; see `synthetic`. None: `no_surrogate` says why.
        embedded: folder of the publisher's files that ship with this repository, read instead of a download.
        feature_cardinalities: number of codes of each categorical column; None for float features.
        edge_feature_dim: columns of the edge features; 0 if the set has none.
        edge_feature_cardinalities: number of codes of each categorical column; None for float features.
        metric: the standard metric of the official labels; None if the source has no labels or there is no standard.
        unit: of the targets of regression; "" for none.
        published: block statistics (blocks of 16 x 8) from the paper or its artefacts, which the surrogate has, too:
            `num_tcbs`, recovered from the throughputs of the published run to within a few blocks; of the paper's table
            of single graphs `tcb_per_rw`, `tcb_per_rw_cv`, `nnz_per_tcb`, `nnz_per_tcb_cv`; of its decile table
            `decile_size` (row windows) and `deciles`, (min, max) TCB count of a row window in each. Empty: none.
        note: remarks for a reader of results.
        warmup, repeats: default passes of an inference run (runtime.warmup, runtime.repeats): fewer on large graphs, of
            which a pass takes seconds on a CPU.
    """

    name: str
    num_nodes: int
    nnz: int
    num_graphs: int | None = None
    symmetric: bool = True
    task: Task = "node"
    num_classes: int = 2
    feature_dim: int = 128
    homepage: str = ""
    licence: str = ""
    citation: str = ""
    official: OfficialSource | None = None
    surrogate: Mapping[str, Any] | None = None
    no_surrogate: str = ""
    embedded: str | None = None
    feature_cardinalities: tuple[int, ...] | None = None
    edge_feature_dim: int = 0
    edge_feature_cardinalities: tuple[int, ...] | None = None
    metric: Metric | None = None
    unit: str = ""
    published: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    warmup: int = 3
    repeats: int = 20

    @cached_property
    def synthetic(self) -> partial[CsrGraph]:
        """The generator of the surrogate, a function of this entry, the number of graphs, a seed and an array module:
        one seed gives one graph, on NumPy and on CuPy."""
        return _made("synthetic", self.surrogate, "generator")


@cache
def _table() -> dict[str, dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(TABLE.read_text(encoding="utf-8"), loader)["sets"]


def names() -> tuple[str, ...]:
    """Registered names, in the order of the table."""
    return tuple(_table())


def info(name: str) -> Dataset:
    """The registry's entry for `name`; the same object each time.

    Raises:
        ValueError: `name` is not registered.
    """
    if not isinstance(name, str) or name not in _table():
        raise ValueError(
            f"name: got {name!r}; registered are {', '.join(names())}. For a graph of your own pass path=, "
            "under any name"
        )
    return _known(name)


@cache
def _known(name: str) -> Dataset:
    return _entry(name, _table()[name])


def _entry(name: str, fields: dict[str, Any]) -> Dataset:
    fields = _with_tuples(fields)
    official, surrogate = _made("sources", fields.pop("official"), "reader")(), fields.pop("synthetic", None)
    return Dataset(name=name, official=official, surrogate=surrogate, **fields)


def _made(package: str, arguments: Mapping[str, Any], kind: str) -> partial:
    """The class or function MODULE.NAME of a package, imported on use, with its arguments."""
    module, _, name = arguments[kind].partition(".")
    known = getattr(import_module(f"data.{package}.{module}"), name)
    return partial(known, **{key: value for key, value in arguments.items() if key != kind})


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(part) for key, part in value.items()}
    return tuple(value) if isinstance(value, list) else value
