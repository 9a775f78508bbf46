"""The loop over graphs: what cannot be loaded stops no other, and what was measured before is said."""

from types import SimpleNamespace

import pytest
import torch
from kernel_rows import row
from rich.table import Table

from bench.records import read_rows
from bench.runner import Cell, GraphBench, measure_graphs

FAILURES = {
    "missing": ValueError("no such graph"),
    "damaged": OSError(5, "Input/output error", "x.npz"),
    "large": MemoryError("Unable to allocate 9 GiB"),
    "larger": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    "largest": RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
}


def measure(tmp_path, names, rows=(), load=lambda name: name) -> int:
    return measure_graphs(
        names,
        load,
        lambda loaded: [(loaded, [*rows])],
        1,
        Table("data set"),
        lambda rows: [rows[0].dataset],
        tmp_path / "r.csv",
        "0123",
    )


def test_graphs_that_cannot_be_loaded_are_named_and_the_others_measured(tmp_path, capsys):
    def load(name: str) -> str:
        if name in FAILURES:
            raise FAILURES[name]
        return name

    assert measure(tmp_path, [*FAILURES, "cora"], [row("cora", "pyg", 1.0)], load) == 2
    assert len(read_rows(tmp_path / "r.csv")) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in errors] == [*FAILURES]


def test_a_bug_in_loading_is_no_problem_of_the_user(tmp_path):
    def load(name: str) -> str:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        measure(tmp_path, ["cora"], load=load)


def test_without_new_rows_there_is_a_sentence_in_place_of_an_empty_table(tmp_path, capsys):
    assert measure(tmp_path, ["cora", "pubmed"]) == 0
    out = capsys.readouterr().out
    assert "data set" not in out
    assert "skipped      2: " in out
    assert "r.csv holds them already (--again repeats them)" in out


class Compiling(GraphBench):
    """Compiles a function for the size of each graph."""

    bench = "training"

    @staticmethod
    def cells(config):
        return [Cell(64, "pyg", "float32", "float32", "model", dense="compiled")]

    def columns(self, cell):
        return row("cora", "pyg", 1.0).model_dump()

    def measure_cell(self, cell):
        self.config(torch.ones(self.loaded.meta.num_nodes))
        return [self.row(cell)]


def test_more_graphs_than_torch_compile_takes_sizes():
    compiled = torch.compile(lambda rows: rows + 1, backend="eager", fullgraph=True, dynamic=False)
    for nodes in range(2, 20):
        loaded = SimpleNamespace(meta=SimpleNamespace(num_nodes=nodes))
        bench = Compiling(loaded, compiled, "c.yaml", None, torch.device("cpu"))
        ((_, (measured,)),) = bench.measure({})
        assert measured.status == "ok", measured.reason
