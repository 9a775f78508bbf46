"""The soak program: cases on the CPU that do not grow, planted leaks that it finds, table, rows and exit status."""

from itertools import product

import pytest
import torch
from reference_room import CalledAgain, ReferenceRoom, capture_steps_on_cpu
from scripts_as_modules import load_script
from torch import nn
from typer.testing import CliRunner

from bench import soak
from bench.soak import LAYERS, SoakCase, run_case, soak_cases
from common.records import read_rows
from fused3s.nn.cached import planned_edges
from fused3s.nn.cached.tensor_memo import TensorMemo

CPU = torch.device("cpu")
EDGES = 600
pytestmark = pytest.mark.usefixtures("one_thread")


class Keeps(nn.Module):
    """Keeps what it is called with."""

    def __init__(self, **options):
        super().__init__()
        self.lin, self.kept = nn.Linear(soak.WIDTH, soak.WIDTH), []

    def forward(self, x, edge_index, attr=None):
        self.kept.append(edge_index)
        return self.lin(x)


class KeepsValues(Keeps):
    """Keeps its output with the graph of autograd behind it."""

    def forward(self, x, edge_index, attr=None):
        self.kept.append(self.lin(x))
        return self.kept[-1]


@pytest.mark.parametrize(
    ("layer", "mode"),
    [
        *((name, "training") for name, layer in LAYERS.items() if layer.eager != "room"),
        *product(["TransformerConv-edges", "GATConv-edges"], ["no_grad", "inference_mode"]),
    ],
)
def test_eager_steps_on_a_cpu_do_not_grow(layer, mode):
    found = run_case(SoakCase(layer, mode, "eager", EDGES), 12, CPU)
    assert (found.error, found.grown) == ("", [])
    assert [each.steps for each in found.readings] == [3, 6, 12]
    assert found.growth("allocated") < EDGES  # bytes: not even one row of ids


@pytest.mark.parametrize("layer", ["TransformerConv-edges", "SparseMHA"])
def test_compiled_steps_do_not_grow(compiles_eagerly, layer):
    found = run_case(SoakCase(layer, "training", "compiled", EDGES), 16, CPU)
    assert (found.error, found.grown) == ("", [])


@pytest.mark.parametrize("mode", ["no_grad", "training"])
@pytest.mark.parametrize("layer", ["TransformerConv", "GATConv-edges", "AGNNConv", "PlanRoom"])
def test_captured_steps_copy_each_graph_into_place(monkeypatch, layer, mode):
    """With calls in place of replays, and a room of the reference backend, whose plan has no room for more features."""
    rooms = []

    class Room(ReferenceRoom):
        def fill(self, edges):
            super().fill(edges)
            rooms.append(self.plan.data)

    capture_steps_on_cpu(monkeypatch, soak)
    monkeypatch.setattr(soak, "PlanRoom", Room)
    monkeypatch.setattr(soak, "capture", CalledAgain)
    found = run_case(SoakCase(layer, mode, "captured", EDGES), 8, CPU)
    assert found.error == ""
    assert len(rooms) == (9 if LAYERS[layer].captured == "room" else 0)  # once in the capture


@pytest.mark.parametrize(("make", "mode"), [(Keeps, "no_grad"), (Keeps, "training"), (KeepsValues, "training")])
def test_a_layer_that_keeps_tensors_fails(make, mode):
    found = run_case(SoakCase("GATConv", mode, "eager", EDGES), 24, CPU, make)
    assert found.grown == ["allocated"]
    kept = found.readings[-1].allocated - found.readings[0].allocated
    least = 18 * EDGES // 2 * 16 if make is Keeps else 18 * soak.NODES * soak.WIDTH * 4
    assert kept >= least


def test_a_cache_of_the_package_that_does_not_forget_is_counted(monkeypatch):
    class Keeps(TensorMemo):
        def get(self, tensor, *others, **options):
            self._kept = [*getattr(self, "_kept", []), tensor]
            return super().get(tensor, *others, **options)

    monkeypatch.setattr(planned_edges, "_plans", Keeps("edge_index"))
    monkeypatch.setattr(soak, "ENTRIES_NOISE", 10)
    found = run_case(SoakCase("TransformerConv", "no_grad", "eager", EDGES), 24, CPU)
    assert found.grown == ["allocated", "entries"]
    assert found.growth("entries") >= 18 * 2  # the tensor and its results


def test_an_error_ends_a_case_alone():
    class Raises(Keeps):
        def forward(self, *given):
            raise RuntimeError("out of ideas")

    found = run_case(SoakCase("GATConv", "no_grad", "eager", EDGES), 8, CPU, Raises)
    assert found.error == "RuntimeError: out of ideas"
    assert found.grown == []


def test_every_step_has_another_graph():
    source = soak.graphs(SoakCase("GATConv", "no_grad", "eager", 4_000), CPU, soak.SIZES)
    drawn = [next(source)[0] for _ in range(soak.SIZES)]
    sizes = {each.shape[1] for each in drawn}
    assert len(sizes) == soak.SIZES
    assert (min(sizes), max(sizes)) == (2_000, 4_000)
    late = next(soak.graphs(SoakCase("GATConv", "no_grad", "eager", soak.DEFERRED), CPU, 2))
    assert late[0].shape[1] == soak.DEFERRED > soak.CHECKED_EDGES
    assert {case.edges for case in soak_cases()} == {soak.CHECKED, soak.DEFERRED}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr("common.provenance._commit", lambda: ("0" * 40, "no"))
    module = load_script("soak")
    return lambda *options: CliRunner().invoke(module.app, ["--device", "cpu", "--processes", "1", *options])


def test_the_script_prints_a_table_and_writes_rows(script, tmp_path):
    given = ("--steps", "8", "--only", "GATConv-edges/training/eager", "--edges", str(EDGES), "--output", str(tmp_path))
    done = script(*given)
    assert done.exit_code == 0, done.output
    assert "KiB after 2" in done.stdout
    assert "memory grew or an error came in 0 of 1 cases" in done.stdout
    rows = read_rows(tmp_path / "soak.csv")
    assert {(row.metric, row.region) for row in rows} == {
        (metric, f"after {steps} steps")
        for metric in ("allocated", "host", "pinned", "objects", "entries")
        for steps in (2, 4, 8)
    }
    assert {(row.variant, row.nnz, row.launch, row.status) for row in rows} == {
        ("GATConv-edges training", EDGES, "eager", "unchecked")
    }


def test_the_script_fails_if_memory_grew(script, monkeypatch, tmp_path):
    monkeypatch.setitem(soak.LAYERS, "GATConv", soak.Layer(Keeps))
    only = ("--steps", "24", "--edges", str(EDGES), "--only", "GATConv/no_grad/eager")
    done = script(*only, "--output", str(tmp_path))
    assert done.exit_code == 1, done.output
    assert "grew: allocated" in done.stdout
    assert {row.note for row in read_rows(tmp_path / "soak.csv")} == {"grew: allocated"}


def test_cases_that_nobody_named_and_cases_of_a_gpu_are_errors(script):
    done = script("--only", "SAGEConv")
    assert done.exit_code == 2
    assert "--only: SAGEConv is in no case; a case is LAYER/MODE/LAUNCH/EDGES" in done.output
    done = script("--only", "captured")
    assert done.exit_code == 2
    assert "these 30 cases need an NVIDIA GPU" in done.output
