"""`scripts/reproduce_figures.py`: its measurements and figures, with and without a GPU."""

from pathlib import Path

import pytest
import torch
from scripts_as_modules import load_script
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
DRAWING = ("report.py",)
RECORDED = [("report.py", "--results", "results")]


@pytest.fixture
def script():
    return load_script("reproduce_figures")


@pytest.fixture
def call(script, monkeypatch):
    """Calls it with a GPU or none, and fails the scripts named; the exit status, the output, and what it ran."""

    def invoke(*steps: str, gpu: bool, failing: tuple[str, ...] = ()):
        ran = []

        def run(*command: str) -> int:
            ran.append(command)
            return 2 if command[0] in failing else 0

        monkeypatch.setattr(script, "run", run)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        done = CliRunner().invoke(script.app, steps)
        return done.exit_code, done.output, ran

    return invoke


def test_without_a_gpu_the_recorded_csvs_are_drawn(call):
    status, output, ran = call(gpu=False)
    assert (status, ran) == (0, RECORDED)
    assert "no NVIDIA GPU found: nothing is measured; drawing from the CSVs recorded in results" in output


def test_with_a_gpu_it_measures_into_local_and_draws_that(call):
    status, _, ran = call("smoke", gpu=True)
    assert status == 0
    assert [command[0] for command in ran[-1:]] == [*DRAWING]
    assert len(ran) > 3
    assert all("results/local" in " ".join(command) for command in ran)
    assert any("configs/bench/smoke.yaml" in command for command in ran)


def test_the_source_of_the_graphs_goes_to_every_bench_that_leaves_it_open(call):
    *_, ran = call("smoke", "masks", "plans", "stability", "--source", "auto", gpu=True)
    chosen = {(command[0], command[command.index("--config") + 1]) for command in ran if "data.source=auto" in command}
    assert chosen == {
        ("bench_kernels.py", "configs/bench/smoke.yaml"),
        ("bench_end_to_end.py", "configs/end_to_end/smoke.yaml"),
        ("bench_plans.py", "configs/plan_bench/graphs.yaml"),
    }  # masks.yaml and reddit.yaml name theirs
    *_, ran = call("smoke", gpu=True)
    assert not any("data.source" in " ".join(command) for command in ran)
    assert call("smoke", "--source", "web", gpu=True)[0] == 2


def test_none_draws_what_is_recorded_also_with_a_gpu(call):
    assert call("none", gpu=True)[2] == RECORDED


def test_all_runs_every_step_but_smoke_and_huge_once(call, script, monkeypatch):
    monkeypatch.setattr(script, "NEEDED", {})
    _, _, ran = call("all", "kernels", gpu=True)
    assert len(ran) == len(set(ran))
    ran = [" ".join(command) for command in ran]
    assert not any("smoke" in command or "huge" in command for command in ran)
    files = {path.name for path in (ROOT / "results" / "h200").iterdir()}
    assert files <= {word.rpartition("/")[2] for command in ran for word in command.split()}  # every recorded CSV
    configs = {
        path.relative_to(ROOT) for name in ("bench", "end_to_end") for path in (ROOT / "configs" / name).iterdir()
    }
    measured = {path for path in configs if path.stem not in ("smoke", "huge", "sm_active")}  # sm_active is a default
    assert {path for path in measured if any(str(path) in command for command in ran)} == measured
    assert sum("kernel.out_dtype=float16" in command for command in ran) == 3


def test_a_step_whose_file_is_missing_is_left_out_with_a_sentence(call, script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    status, output, ran = call("superpixels", "masks", gpu=True)
    assert status == 0
    assert [command[-1] for command in ran[:-1]] == ["configs/bench/masks.yaml"]
    assert "left out   superpixels: reads datasets/superpixel-bsds500.npz" in output
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "superpixel-bsds500.npz").touch()
    status, output, ran = call("superpixels", gpu=True)
    assert ran[0][-1] == "configs/bench/surrogate_superpixels.yaml"
    assert "left out" not in output


def test_a_failed_step_stops_neither_the_others_nor_the_drawing(call):
    status, output, ran = call("ablation", "stability", gpu=True, failing=("bench_kernels.py",))
    assert status == 2
    assert [command[0] for command in ran] == ["bench_kernels.py", "stability.py", *DRAWING]
    assert "failed     ablation: exit status 2" in output


def test_an_unknown_step_names_the_steps(call):
    status, output, ran = call("kernel", gpu=True)
    assert (status, ran) == (2, [])
    assert "kernels" in output


def test_every_script_and_config_of_a_step_exists(script):
    for step in script.STEPS.values():
        for name, *arguments in step:
            assert (ROOT / "scripts" / name).is_file()
            assert all((ROOT / path).is_file() for path in arguments if path.endswith(".yaml"))
