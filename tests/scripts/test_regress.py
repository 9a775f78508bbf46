"""`make regress` on rows that were made up: what is measured again, which times count, and the exit status."""

import math

import pytest
import torch
from kernel_rows import row
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.measures import MEASURES
from common.cli import NOT_LOADED
from common.records import append_rows, read_rows
from configs import load_config
from configs.bench import BenchConfig
from report.rows import IDENTITY

SCRIPT = load_script("regress")
GPU = "NVIDIA H100 80GB HBM3"


def cell(dataset="cora", milliseconds=1.0, **changes):
    shown = {"device": GPU, "bench": "backward", "launch": "back_to_back", "region": "forward"}
    return row(dataset, "fused3s", milliseconds, **shown | changes)


def settings_of(part):
    return load_config(SCRIPT.ROOT / part["config"], part["set"], schema=BenchConfig)


@pytest.fixture
def regress(tmp_path, monkeypatch):
    """Run the script with these recorded rows, and those that each measurement of a part gives, in turn."""
    monkeypatch.setattr(SCRIPT, "devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(SCRIPT, "device_name", lambda device: GPU)
    monkeypatch.setattr(SCRIPT, "NEW", tmp_path / "new")
    monkeypatch.setattr(SCRIPT, "OWN", tmp_path / "own")

    def regress(recorded, *rounds, status=0, options=()):
        measured = []

        def measure(_, settings, path, file, device, again):
            assert again
            measured.append((settings.measure, *settings.graphs))
            append_rows(file, rounds[len(measured) - 1])
            return status

        for one in recorded:
            append_rows(tmp_path / "old" / "some gpu" / f"{one.bench}.csv", [one])
        monkeypatch.setattr(SCRIPT, "run_bench", measure)
        done = CliRunner().invoke(SCRIPT.app, ["--reference", str(tmp_path / "old"), *options])
        return done, measured

    return regress


def test_what_was_recorded_is_measured_again_and_compared(regress):
    later = cell(date="2026-02-01T00:00:00Z")
    old = [later, cell(milliseconds=2.0), cell("ogbn-arxiv"), cell("pubmed"), cell(device="NVIDIA H200")]
    done, measured = regress(old, [cell(milliseconds=1.04), cell("ogbn-arxiv", 0.5)])
    assert done.exit_code == 0, done.output
    assert measured == [("backward", "cora", "ogbn-arxiv")]  # the other parts have no rows of this GPU
    assert "1.040" in done.stdout  # over the later one of two rows
    mean = math.sqrt(1.04 * 0.5)
    assert f"2 times, 0 over the limit; geometric mean of the ratios {mean:.3f}" in done.stdout


@pytest.mark.parametrize(("second", "status", "shown"), [(1.02, 0, "1.020"), (1.2, 1, "1.080"), (1.06, 1, "1.060")])
def test_a_time_over_the_limit_is_measured_once_more(regress, second, status, shown):
    old = [cell(), cell("ogbn-arxiv")]
    new = [cell(milliseconds=1.08), cell("ogbn-arxiv")], [cell(milliseconds=second)]
    done, measured = regress(old, *new)
    assert done.exit_code == status, done.output
    assert measured == [("backward", "cora", "ogbn-arxiv"), ("backward", "cora")]
    assert shown in done.stdout
    assert f"2 times, {status} over the limit" in done.stdout


def test_the_limit_is_an_option(regress):
    assert regress([cell()], [cell(milliseconds=1.4)], options=["--limit", "50"])[0].exit_code == 0


def test_times_of_the_host_and_of_other_kernels_do_not_count(regress):
    of_layers = {"bench": "layers", "variant": "arxiv", "scope": "model", "region": "step", "launch": "eager"}
    busy, pyg = {"metric": "gpu_busy"}, of_layers | {"backend": "pyg", "metric": "gpu_busy"}
    old = [cell("ogbn-arxiv", **of_layers), cell("ogbn-arxiv", **of_layers, **busy), cell("ogbn-arxiv", **pyg)]
    new = [
        cell("ogbn-arxiv", 3.0, **of_layers),
        cell("ogbn-arxiv", 1.0, **of_layers, **busy),
        cell("ogbn-arxiv", 3.0, **pyg),
    ]
    done, measured = regress(old, new)
    assert done.exit_code == 0, done.output
    assert measured == [("layers", "arxiv")]
    assert "1 times, 0 over the limit" in done.stdout


@pytest.mark.parametrize(("status", "milliseconds"), [("wrong", 0.5), ("error", None)])
def test_a_failed_case_fails_however_fast_and_is_not_tried_again(regress, status, milliseconds):
    failed = cell(milliseconds=milliseconds, status=status)
    done, measured = regress([cell(), cell("ogbn-arxiv")], [failed, cell("ogbn-arxiv")], status=1)
    assert done.exit_code == 1, done.output
    assert len(measured) == 1
    assert f"{status}: because" in done.stdout


def test_a_graph_that_cannot_be_loaded_is_no_pass(regress):
    old = [cell(), cell("ogbn-arxiv")]
    assert regress(old, [cell()], status=NOT_LOADED)[0].exit_code == NOT_LOADED
    assert "no time that was measured has a recorded one" in regress(old, [], status=NOT_LOADED)[0].stderr


def test_a_gpu_without_rows_is_told_how_to_record_them(regress, tmp_path):
    done, measured = regress([cell(device="NVIDIA H200")])
    assert (done.exit_code, measured) == (2, [])
    assert f"holds no times of a {GPU} (but of NVIDIA H200); --record measures" in done.stderr
    names = [settings_of(part).measure for part in SCRIPT.PARTS]
    done, measured = regress([], *([cell(bench=name)] for name in names), options=["--record"])
    assert (done.exit_code, [name for name, *_ in measured]) == (0, names)
    assert all(read_rows(tmp_path / "own" / f"{name}.csv") for name in names)


def test_without_a_gpu_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(SCRIPT, "devices", lambda: [torch.device("cpu")])
    done = CliRunner().invoke(SCRIPT.app, [])
    assert (done.exit_code, done.stderr) == (2, "error: times are compared on an NVIDIA GPU, and none was found here\n")


@pytest.mark.parametrize("part", SCRIPT.PARTS, ids=lambda part: part["config"])
def test_each_case_of_a_part_was_recorded_on_one_of_the_gpus(part):
    settings = settings_of(part)
    names = {*settings.graphs}
    of_workloads = ("variant", "blocks", "plan", "edges") if settings.workloads else ()
    columns = [name for name in IDENTITY if name in SCRIPT.Case.__dataclass_fields__ and name not in of_workloads]
    gpus = {}
    for path in SCRIPT.ROOT.glob(f"results/h*/{settings.measure}.csv"):
        rows = [one for one in read_rows(path) if SCRIPT.cell_of(one)[1] in names]
        gpus[path.parent.name] = {tuple(getattr(one, name) for name in ("dataset", *columns)) for one in rows}
    cases = MEASURES[settings.measure].cases(settings, torch.device("cuda"))
    assert cases
    wanted = {tuple(getattr(case, name) for name in columns) for case in cases}
    for name in names:
        graph = settings.graph_of(name)
        assert any({(graph, *one) for one in wanted} <= found for found in gpus.values()), name


@pytest.mark.gpu
def test_on_a_gpu_it_records_and_compares(monkeypatch, tmp_path):
    few = {"config": "configs/bench/backward.yaml", "set": ["graphs=[cora]", "shapes=[1x64]"]}
    for name, value in (("PARTS", [few]), ("NEW", tmp_path / "new"), ("OWN", tmp_path / "own")):
        monkeypatch.setattr(SCRIPT, name, value)
    monkeypatch.chdir(SCRIPT.ROOT)
    recorded = CliRunner().invoke(SCRIPT.app, ["--record"])
    assert recorded.exit_code == 0, recorded.output
    compared = CliRunner().invoke(SCRIPT.app, ["--reference", str(tmp_path / "own"), "--limit", "900"])
    assert compared.exit_code == 0, compared.output
    assert "2 times, 0 over the limit" in compared.stdout  # two passes
