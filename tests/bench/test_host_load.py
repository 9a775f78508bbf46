"""Work of others on the host: noticed, and said beside the times that it makes longer."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from kernel_rows import PROVENANCE

from bench import runner
from bench.host_load import HostLoad, describe_wait
from bench.records import Provenance, Row
from bench.runner import Cell, GraphBench
from data import GraphMeta

SPIN = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass\n"


def cell(**options: str) -> Cell:
    return Cell(64, "pyg", "float32", "float32", "model", **options)


CELLS = {
    "eager": cell(launch="eager", dense="plain"),
    "graph": cell(launch="cuda_graph", dense="plain"),
    "kernel": cell(launch="back_to_back", plan="fixed"),
    "rebuilt": cell(plan="rebuilt"),
}


class Timed(GraphBench):
    """Every cell has a time and a peak of memory."""

    bench = "end_to_end"

    @staticmethod
    def cells(config) -> list[Cell]:
        return [*CELLS.values()]

    def measure_cell(self, cell: Cell) -> list[Row]:
        measured = {"value": 1.0, "p10": 1.0, "p90": 1.0, "repeats": 1, "status": "unchecked"}
        note = {"note": "CUDA events"} if cell.launch == "eager" else {}
        return [self.row(cell, **measured, **note), self.row(cell, metric="peak_memory", unit="MiB", **measured)]


@pytest.fixture
def bench() -> Timed:
    meta = GraphMeta.__new__(GraphMeta)  # only its columns are read
    for name, value in {"name": "cora", "sha256": "0", "source": "official", "num_nodes": 3, "num_edges": 2}.items():
        object.__setattr__(meta, name, value)
    object.__setattr__(meta, "num_graphs", 1)
    environment = Provenance(**{name: PROVENANCE[name] for name in Provenance.model_fields})
    config = SimpleNamespace(measure=SimpleNamespace(sha=lambda: "0"))
    return Timed(SimpleNamespace(meta=meta), config, "c.yaml", environment, torch.device("cpu"))


@pytest.mark.parametrize(
    ("waited", "said"), [(0.4, "the host was busy: threads of this run waited 40%"), (0.05, ""), (None, "")]
)
def test_times_that_the_host_is_part_of_say_that_it_was_busy(bench, monkeypatch, waited, said):
    monkeypatch.setattr(runner, "HostLoad", lambda: SimpleNamespace(waited=lambda: waited))
    notes = {}
    for measured, rows in bench.measure({}):
        (name,) = (name for name, each in CELLS.items() if each == measured)
        assert rows[1].note in ("none", "CUDA events")  # memory does not depend on the host
        notes[name] = rows[0].note
    assert (notes["graph"], notes["kernel"]) == ("none", "none")
    if said:
        assert notes["eager"].startswith(f"CUDA events; {said}")
        assert notes["rebuilt"].startswith(said)
    else:
        assert (notes["eager"], notes["rebuilt"]) == ("CUDA events", "none")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_core_that_is_shared_is_noticed():
    """Two processes that compute, pinned to one core: each waits about half of its time."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        other = subprocess.Popen([sys.executable, "-c", SPIN.format(20)])  # inherits the core
        time.sleep(0.3)
        host = HostLoad()
        exec(SPIN.format(1.5))
        waited = host.waited()
        other.kill()
        other.wait()
    finally:
        os.sched_setaffinity(0, before)
    if waited is None:
        pytest.skip("the system does not tell how long threads wait")
    assert 0.1 < waited < 1
    assert "waited" in describe_wait(waited)
