"""`make reproduce-figures`: what is run, what is left out, and the exit status."""

from itertools import pairwise
from pathlib import Path

import pytest
import reproduce_figures as script
import yaml
from typer.testing import CliRunner

from bench.runner import NOT_LOADED
from configs import load_config
from configs.bench import load_bench_config
from configs.schema import Config, TrainConfig

ROOT = Path(__file__).resolve().parents[2]
ALL = [command for step in script.STEPS.values() for command in script.commands(step, None)]


def options(command: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(command) if option == name]


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_every_command_has_a_script_and_a_valid_configuration(command):
    assert (ROOT / "scripts" / command[0]).is_file()
    (path,), overrides = options(command, "--config"), options(command, "--set")
    if command[0] == "bench.py":
        load_bench_config(ROOT / path, overrides)
    else:
        load_config(ROOT / path, overrides, TrainConfig if command[0] == "train.py" else Config)


def test_every_configuration_of_a_benchmark_is_in_the_suite():
    used = {value for command in ALL for value in options(command, "--config")}
    assert {f"configs/bench/{path.name}" for path in (ROOT / "configs" / "bench").glob("*.yaml")} <= used


def test_all_has_no_file_that_cannot_be_fetched_and_no_step_for_larger_gpus():
    assert {*script.STEPS} - {*script.GROUPS["all"]} == {"smoke", "superpixels", "huge"}
    assert script.chosen_steps(["ablation", "all"]) == script.GROUPS["all"]
    assert script.chosen_steps(["none"]) == []


def test_time_and_disk_are_estimated():
    total, *lines = script.estimate(["kernels", "ablation"]).splitlines()
    assert total.startswith("about 0 h 25 min on one H200, and 60 GB")
    assert [line.split()[0] for line in lines] == ["kernels", "ablation"]


def test_a_source_is_handed_on_unless_the_configuration_has_one():
    for name in ("kernels", "masks", "huge", "superpixels"):
        for command in script.commands(script.STEPS[name], "auto"):
            own = yaml.safe_load((ROOT / command[2]).read_text()).get("source") or name == "superpixels"
            assert ("source=auto" in command) == (not own)


@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [
        ({}, 0, []),
        ({"bench.py": (NOT_LOADED, ["zinc: no such host"])}, 0, ["left out   zinc: no such host"]),
        ({"bench.py": (1, [])}, 1, ["failed     smoke: exit status 1"]),
        ({"report.py": (2, [])}, 2, ["failed     report.py: exit status 2"]),
    ],
)
def test_what_failed_is_listed_and_the_rest_goes_on(monkeypatch, statuses, status, said):
    ran = []
    monkeypatch.setattr(script, "run", lambda command: ran.append(command) or statuses.get(command[0], (0, [])))
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    done = CliRunner().invoke(script.app, ["smoke"])
    assert done.exit_code == status, done.output
    assert [command[0] for command in ran] == ["bench.py", "bench.py", "report.py"]
    assert ran[-1] == ["report.py", "--results", "results/local"]
    assert all(line in done.stdout for line in said)


def test_without_a_gpu_the_recorded_rows_are_drawn(monkeypatch):
    ran = []
    monkeypatch.setattr(script, "run", lambda command: ran.append(command) or (0, []))
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(script.app, [])
    assert (done.exit_code, ran) == (0, [["report.py", "--results", "results"]])
    assert "no NVIDIA GPU found" in done.stdout


def test_an_unknown_step_names_all():
    done = CliRunner().invoke(script.app, ["kernel"])
    assert done.exit_code == 2
    assert "unknown: kernel" in done.output


def test_errors_of_a_script_are_shown_and_kept(capfd):
    status, problems = script.run(["bench.py", "--config", "configs/bench/nothing.yaml"])
    assert status == 2
    assert problems == [line.removeprefix("error: ") for line in capfd.readouterr().err.splitlines()]
    assert "nothing.yaml: cannot be read" in problems[0]
