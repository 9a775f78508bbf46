"""`scripts/train.py` as a user runs it, on a small graph of the user's."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from scripts_as_modules import load_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from common.cli import NOT_LOADED
from common.records import read_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def arguments(user_graph, tmp_path):
    """Arguments for a run of the template in `tmp_path`/NAME."""
    settings = [
        *(f"data.path={user_graph}", "model.dim=8", "model.blocks=1", "model.attention_dropout=0.2"),
        *("attention.backend=reference", "runtime.device=cpu", "training.patience=null", "training.lr=1e-2"),
        *("training.epochs=4", "training.checkpoint_seconds=0"),
    ]

    def arguments(name, *more):
        paths = ["--config", "configs/mine.yaml", "--output", tmp_path / name, "--results", tmp_path / "r.csv"]
        return [*map(str, paths), *(word for one in settings for word in ("--set", one)), *more]

    return arguments


@pytest.fixture
def train(arguments, monkeypatch, one_thread):
    """Run the script in this process."""
    script = load_script("train")

    def train(name, *more):
        monkeypatch.chdir(ROOT)
        return CliRunner().invoke(script.app, arguments(name, *more))

    return train


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        (("cora", "cora", ["training.seeds=[0, 1]"]), "cora"),
        (("cora-10-blocks", "cora", []), "cora-10-blocks"),
        (("cora", "mine", ["data.name=mine", "data.path=../mine.npz"]), "cora-mine"),
        (("cora", "co", []), "cora-co"),
        (("mine", "mine", ["training.lr = 1e-3", "attention.backend=dgl"]), "mine-lr=1e-3-backend=dgl"),
        (("mine", "a b", ["model.checkpoint=../x/y"]), "mine-a_b-checkpoint=.._x_y"),
    ],
)
def test_a_run_is_named_after_its_config_its_data_and_its_settings(given, folder):
    assert load_script("train").run_folder(*given) == Path("runs", folder)


def wait_for_rows(log, count, is_running):
    end = time.monotonic() + 120
    while not log.is_file() or len(log.read_text().splitlines()) <= count:
        assert is_running()
        assert time.monotonic() < end, "no progress in two minutes"
        time.sleep(0.005)


def test_report_files_and_rows(train, tmp_path, monkeypatch):
    monkeypatch.setattr("models.training.rows.CURVE_POINTS", 3)
    done = train("run", "--set", "training.seeds=[3, 4]")
    assert done.exit_code == 0, done.output
    tests, curves = [], []
    for seed in (3, 4):
        folder = tmp_path / "run" / f"seed_{seed}"
        assert {path.name for path in folder.iterdir()} == {
            *("last.pt", "best.safetensors", "best.json", "metrics.csv", "tensorboard", ".lock")
        }
        with (folder / "metrics.csv").open() as log:
            curves.append([float(epoch["valid_metric"]) for epoch in csv.DictReader(log)])
        about = json.loads((folder / "best.json").read_text())
        board = EventAccumulator(str(folder / "tensorboard")).Reload()
        (test,) = board.Scalars("test_metric")
        assert (test.step, test.value) == (about["epoch"], pytest.approx(about["test"]))
        assert [point.step for point in board.Scalars("valid_metric")] == [1, 2, 3, 4]
        assert (about["seed"], about["metric"], about["data"]) == (seed, "accuracy", "mine")
        tests.append(about["test"])
    rows = read_rows(tmp_path / "r.csv")
    rows, points = rows[:8], rows[8:]
    assert [(row.bench, row.variant, row.metric) for row in rows] == [
        ("train", f"seed {seed}", metric)
        for seed in (3, 4)
        for metric in ("valid_accuracy", "test_accuracy", "epoch_time", "training_time")
    ]
    assert [row.value for row in rows if row.metric == "test_accuracy"] == tests
    means = [(first + second) / 2 for first, second in zip(*curves, strict=True)]
    assert [(row.region, row.value) for row in points] == [(f"epoch {nth}", means[nth - 1]) for nth in (1, 2, 4)]


def test_a_run_that_is_over_adds_no_rows_a_second_time(train, tmp_path):
    assert train("run", "--set", "training.seeds=[3, 4]").exit_code == 0
    rows = (tmp_path / "r.csv").read_text()
    again = train("run", "--set", "training.seeds=[3, 4]", "--resume")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "r.csv").read_text() == rows
    (tmp_path / "r.csv").unlink()  # as if it had ended between its last epoch and its rows
    assert train("run", "--set", "training.seeds=[3, 4]", "--resume").exit_code == 0
    assert [row.value for row in read_rows(tmp_path / "r.csv") if row.metric == "test_accuracy"] == [
        float(line.split(",")[rows.split("\n")[0].split(",").index("value")])
        for line in rows.splitlines()
        if ",test_accuracy," in line
    ]


def test_a_log_without_the_first_epochs_keeps_the_numbers_of_the_others(train, tmp_path):
    assert train("run").exit_code == 0
    log = tmp_path / "run" / "metrics.csv"
    header, _, _, *rest = log.read_text().splitlines(keepends=True)
    log.write_text("".join([header, *rest]))
    (tmp_path / "r.csv").unlink()
    assert train("run", "--resume").exit_code == 0
    points = [(row.region, row.value) for row in read_rows(tmp_path / "r.csv") if row.region != "none"]
    assert points == [(f"epoch {nth}", float(line.split(",")[4])) for nth, line in zip((3, 4), rest, strict=True)]


def test_a_killed_run_resumes_to_the_same_bits(train, arguments, tmp_path):
    """SIGKILL at an arbitrary moment."""
    more = ["--set", "training.epochs=60"]
    command = [sys.executable, "scripts/train.py", *arguments("killed", *more)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=pipe, stderr=pipe)
    wait_for_rows(tmp_path / "killed" / "metrics.csv", 7, lambda: process.poll() is None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    more += ["--set", "training.checkpoint_seconds=30"]
    whole = train("whole", *more)
    assert whole.exit_code == 0, whole.output
    resumed = train("killed", *more, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "resumed      after epoch " in resumed.stdout
    a, b = (load_file(tmp_path / name / "best.safetensors") for name in ("whole", "killed"))
    assert a.keys() == b.keys()
    assert all((a[name] == b[name]).all() for name in a)
    logs = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("whole", "killed")]
    without_time = [[row.split(",")[:5] for row in log] for log in logs]
    assert without_time[0] == without_time[1]


def test_ctrl_c_says_what_was_kept(train, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    log = tmp_path / "run" / "metrics.csv"

    def interrupt():
        wait_for_rows(log, 2, lambda: True)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done = train("run", "--set", "training.epochs=100000")
    thread.join()
    assert done.exit_code == 130, done.output
    epochs = len(log.read_text().splitlines()) - 1
    assert done.stderr.splitlines() == [
        "stopping after this epoch; Ctrl-C again stops at once",
        f"interrupted: {tmp_path}/run keeps epoch {epochs}; --resume continues",
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["attention.backend=fused3s_paper"], "attention.backend = 'fused3s_paper' and runtime.device = 'cpu'"),
        (["training.lr=1e6", "training.clip_norm=null"], "try a lower training.lr"),
    ],
    ids=str,
)
def test_a_user_error_is_a_message(train, tmp_path, settings, part):
    done = train("run", *(word for setting in settings for word in ("--set", setting)))
    assert done.exit_code == 2, done.output
    assert part in done.stderr
    assert not (tmp_path / "r.csv").exists()


def test_a_data_set_that_cannot_be_had_has_its_own_status(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(ROOT)
    paths = ["--config", "configs/train/citeseer.yaml", "--output", tmp_path / "run", "--results", tmp_path / "r.csv"]
    settings = ["--set", "data.source=official", "--set", f"data.root={tmp_path}", "--set", "runtime.device=cpu"]
    done = CliRunner().invoke(load_script("train").app, [*map(str, paths), *settings])
    assert done.exit_code == NOT_LOADED, done.output
    assert f"error: citeseer: not under {tmp_path}; no such host" in done.stderr


def test_an_error_of_the_data_stands_alone_without_the_configuration(train, tmp_path):
    done = train("run", "--set", f"data.path={tmp_path}/none.npz")
    assert done.exit_code in (2, NOT_LOADED)
    assert "none.npz" in done.stderr
    assert len(done.output.splitlines()) == 2  # loading mine; error
