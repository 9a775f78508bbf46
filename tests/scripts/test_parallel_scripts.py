"""scripts/infer.py, train.py and partition.py for one graph on several ranks, as torchrun starts them."""

import csv
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import parallel_jobs
import pytest
from rank_pool import run_alone
from safetensors.numpy import load_file
from scripts_as_modules import load_script
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
METHOD = "metis" if find_spec("pymetis") else "contiguous"  # of a partition that a script makes


@pytest.fixture
def setting(user_graph, tmp_path, monkeypatch):
    """Options of the scripts for that graph."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.yaml").write_text(
        f"""
        data: {{name: mine, source: file, path: '{user_graph}', root: '{tmp_path}/data'}}
        model: {{dim: 8, heads: 2, blocks: 2, checkpoint: null}}
        attention: {{backend: reference}}
        runtime: {{device: cpu, repeats: 4}}
        training: {{epochs: 4, checkpoint_seconds: 0}}
        """
    )
    return ["--config", str(tmp_path / "mine.yaml"), "--results", str(tmp_path / "r.csv")]


def on_ranks(name, *of_ranks):
    """Exit status and output of each rank of a script, in processes of their own."""
    return run_alone(parallel_jobs.run_script, len(of_ranks), [name, [list(map(str, one)) for one in of_ranks]])


def on_one(name, *arguments):
    return CliRunner().invoke(load_script(name).app, [*map(str, arguments)])


def rows(tmp_path):
    with (tmp_path / "r.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_inference_gives_the_predictions_and_the_report_of_one_process(setting, tmp_path):
    arguments = [*setting, "--verify", "--accuracy", "--output", tmp_path / "several.npz"]
    (status, text), *others = on_ranks("infer", *[arguments] * 3)
    assert status == 0, text
    assert others == [(0, "")] * 2  # rank 0 alone reports
    for part in ("agrees with the reference", "3 over gloo", METHOD, "halo columns"):
        assert part in text
    written = rows(tmp_path)
    assert len(written) == len({row["run_id"] + row["metric"] + row["scope"] for row in written})
    assert {(row["ranks"], row["link"], row["variant"]) for row in written} == {("3", "gloo", "halo")}
    on_one("infer", *setting, "--output", tmp_path / "one.npz")
    with np.load(tmp_path / "several.npz") as several, np.load(tmp_path / "one.npz") as one:
        assert set(several) == set(one)
        np.testing.assert_array_equal(several["labels"], one["labels"])
        np.testing.assert_allclose(several["logits"], one["logits"], rtol=1e-5, atol=1e-6)


def test_a_collection_is_refused_by_every_rank(setting, tmp_path):
    counts = np.array([2, 3])
    ends = {"u": np.array([0, 0, 1]), "v": np.array([1, 1, 2])}
    np.savez(tmp_path / "mine.npz", node_counts=counts, edge_counts=counts - 1, **ends)
    for name in ("infer", "train"):
        found = on_ranks(name, *[setting] * 2)
        assert [status for status, _ in found] == [2, 2]
        assert all("data.name = 'mine': a collection of graphs; ranks divide one graph" in text for _, text in found), (
            found
        )


def test_training_writes_once_what_inference_reads(setting, tmp_path):
    output = tmp_path / "several"
    (status, text), *others = on_ranks("train", *[[*setting, "--output", output]] * 2)
    assert status == 0, text
    assert others == [(0, "")]
    assert "30 train, 10 valid, 30 test nodes" in text
    assert "2 over gloo" in text
    assert {(row["ranks"], row["order"]) for row in rows(tmp_path)} == {("2", METHOD)}
    on_one("train", *setting, "--output", tmp_path / "one")
    several, one = (load_file(tmp_path / name / "best.safetensors") for name in ("several", "one"))
    for name, weight in one.items():
        np.testing.assert_allclose(several[name], weight, rtol=1e-3, atol=2e-5, err_msg=name)
    trained = [*setting, "--checkpoint", output / "best.safetensors"]
    done = on_one("infer", *trained)
    assert done.exit_code == 0, done.output
    assert on_ranks("infer", *[trained] * 2)[0][0] == 0  # by the partition of the training
    accuracies = {
        (row["bench"], row["ranks"]): row["value"] for row in rows(tmp_path) if row["metric"] == "test_accuracy"
    }
    assert set(accuracies) == {("train", "2"), ("train", "0"), ("infer", "0"), ("infer", "2")}
    del accuracies["train", "0"]  # of the other run
    assert len(set(accuracies.values())) == 1


def test_partitions_are_made_where_the_ranks_look_for_them(setting, tmp_path):
    done = on_one("partition", *setting[:2], "--parts", "2", "--method", "contiguous")
    assert done.exit_code == 0, done.output
    (file,) = (tmp_path / "data" / "parts").iterdir()
    assert str(file) in done.output.replace("\n", "")
    status, text = on_ranks("infer", *[setting] * 2)[0]
    assert (status, "contiguous rows" in text) == (0, True), text
    assert list(file.parent.iterdir()) == [file]
