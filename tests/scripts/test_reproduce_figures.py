"""`make reproduce-figures`: what is run, what is left out, and the exit status."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import reproduce_figures as script
from typer.testing import CliRunner

from common.cli import NOT_LOADED
from configs import load_config
from configs.bench import BenchConfig
from configs.schema import Config, TrainConfig

ROOT = Path(__file__).resolve().parents[2]


def options(command: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(command) if option == name]


def test_every_command_has_a_script_and_a_valid_configuration():
    for command in (command for step in script.STEPS.values() for command in script.commands(step, None)):
        assert (ROOT / "scripts" / command[0]).is_file()
        (path,), overrides = options(command, "--config"), options(command, "--set")
        if command[0] == "bench.py":
            load_config(ROOT / path, overrides, schema=BenchConfig)
        else:
            load_config(ROOT / path, overrides, TrainConfig if command[0] == "train.py" else Config)


def test_commands_are_all_combinations_but_those_left_out():
    step = {"run": ["infer.py {a}{b}"], "each": {"a": [1, 2], "b": [3, 4, 5]}, "without": [{"a": 1, "b": 3}, {"b": 4}]}
    assert list(script.commands(step, None)) == [["infer.py", pair] for pair in ("15", "23", "25")]


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """A machine with a GPU called "my GPU"; the folder of its measurements."""
    gpu = SimpleNamespace(name="my GPU", total_memory=80e9)
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(script, "provenance", lambda device: {"commit": "abc", "device": "my GPU"})
    monkeypatch.setattr(script, "MEASURED", tmp_path / "local")
    monkeypatch.setattr(script, "DATASETS", tmp_path)
    return tmp_path / "local"


@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [
        ({"bench.py": (NOT_LOADED, ["zinc: no such host"])}, 0, ["left out   zinc: no such host"]),
        ({"report.py": (2, [])}, 2, ["failed     report.py: exit status 2"]),
    ],
)
def test_what_failed_is_listed_and_the_rest_goes_on(monkeypatch, on_gpu, statuses, status, said):
    ran = []
    monkeypatch.setattr(script, "run", lambda command: ran.append(command) or statuses.get(command[0], (0, [])))
    done = CliRunner().invoke(script.app, ["smoke"])
    assert done.exit_code == status, done.output
    assert [command[0] for command in ran] == ["bench.py", "bench.py", "report.py"]
    assert ran[-1] == ["report.py", "--results", str(on_gpu)]
    assert all(line in done.stdout for line in said)
    assert (on_gpu / "durations.csv").exists() == ("bench.py" not in statuses)  # a part of a step tells no time


@pytest.mark.parametrize(("steps", "absent"), [(["train", "use_of_weights"], "citeseer"), (["collections"], "molhiv")])
def test_a_data_set_that_train_or_infer_cannot_have_is_left_out_and_asked_for_once(monkeypatch, on_gpu, steps, absent):
    ran = []

    def run(command):
        ran.append(command)
        is_absent = any(absent in word for word in command)
        return (NOT_LOADED, [f"{absent}: no such host"]) if is_absent else (0, [])

    monkeypatch.setattr(script, "run", run)
    done = CliRunner().invoke(script.app, steps)
    assert done.exit_code == 0, done.output
    assert done.stdout.count(f"left out   {absent}: no such host") == 1
    asked = [command for command in ran if any(absent in word for word in command)]
    assert [command[0] for command in asked] == ["train.py" if absent == "citeseer" else "infer.py"]
    if absent == "citeseer":
        assert "data.source=official" in options(asked[0], "--set")  # a surrogate has no labels: another error
    assert not (on_gpu / "durations.csv").exists()


def test_the_default_is_the_paper_and_says_time_downloads_and_memory_first(monkeypatch, on_gpu):
    monkeypatch.setattr(script, "run", lambda command: (0, []))
    told = script.estimate(script.chosen_steps(["paper"]), None)
    assert "kernels                   5 min  measured on NVIDIA H200" in told  # 290 s are recorded
    assert "  an estimate" not in told
    assert "min  an estimate" in script.estimate(["train"], None)  # no time of it is recorded
    (downloads,) = [line for line in told.splitlines() if line.startswith("downloads")]
    assert "reddit" in downloads
    assert "cora" not in downloads  # it ships with the clone
    assert "28.0 GB of the host" in told
    assert "disk       up to 60 GB for downloads; " in told
    assert "ogbg-molhiv" in script.set_names(["train"], None)[1]
    assert script.duration("smoke", "my GPU") == (91, "NVIDIA H200")
    CliRunner().invoke(script.app, ["smoke"])
    assert script.duration("smoke", "my GPU")[1] == "my GPU"
    assert "layers" not in told


def test_the_longest_time_counts_of_a_step_that_was_resumed(on_gpu):
    recorded = pd.read_csv(ROOT / "results" / "durations.csv")
    on_gpu.mkdir()
    recorded.assign(seconds=recorded["seconds"] + [100, *[-1] * (len(recorded) - 1)]).to_csv(on_gpu / "durations.csv")
    (first, seconds, _, gpu), (second, fewer, *_) = recorded.to_numpy()[:2]
    assert script.duration(first, gpu) == (seconds + 100, gpu)
    assert script.duration(second, gpu)[0] == fewer


def test_without_a_gpu_the_recorded_rows_are_drawn(monkeypatch):
    ran = []
    monkeypatch.setattr(script, "run", lambda command: ran.append(command) or (0, []))
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(script.app, [])
    assert (done.exit_code, ran) == (0, [["report.py", "--results", "results"]])
    assert "no NVIDIA GPU found" in done.stdout


def test_errors_of_a_script_are_shown_and_kept(capfd):
    status, problems = script.run(["bench.py", "--config", "configs/bench/nothing.yaml"])
    assert status == 2
    assert problems == [line.removeprefix("error: ") for line in capfd.readouterr().err.splitlines()]
    assert "nothing.yaml: no such file" in problems[0]


def test_an_unknown_step_is_named_with_the_closest_one():
    done = CliRunner().invoke(script.app, ["end_to_end_fp32"])
    assert done.exit_code == 2
    assert "unknown: end_to_end_fp32; did you mean 'end_to_end'? allowed are paper, all," in " ".join(
        done.output.replace("│", " ").split()
    )
