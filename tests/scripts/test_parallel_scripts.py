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


def on_ranks(name, *of_ranks, job=parallel_jobs.run_script):
    """Exit status and output of each rank of a script, in processes of their own."""
    return run_alone(job, len(of_ranks), [name, [list(map(str, one)) for one in of_ranks]])


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
    for part in ("agrees with the reference", "3 over gloo", METHOD, "halo columns", "(predicted for a layer's"):
        assert part in text
    written = rows(tmp_path)
    assert len(written) == len({row["run_id"] + row["metric"] + row["scope"] for row in written})
    assert {(row["ranks"], row["link"], row["variant"]) for row in written} == {("3", "gloo", "halo")}
    on_one("infer", *setting, "--output", tmp_path / "one.npz")
    with np.load(tmp_path / "several.npz") as several, np.load(tmp_path / "one.npz") as one:
        assert set(several) == set(one)
        np.testing.assert_array_equal(several["labels"], one["labels"])
        np.testing.assert_allclose(several["logits"], one["logits"], rtol=1e-5, atol=1e-6)


def test_a_collection_is_shared_out(setting, tmp_path):
    counts = np.random.default_rng(0).integers(2, 6, 11)
    ends = [np.arange(count - 1) for count in counts]
    features = np.random.default_rng(1).standard_normal((counts.sum(), 4)).astype(np.float32)
    np.savez(
        tmp_path / "mine.npz",
        **{"node_counts": counts, "edge_counts": counts - 1, "u": np.concatenate(ends), "v": np.concatenate(ends) + 1},
        feat=features,
    )
    batches = ["--set", "data.batch_size=2", "--set", "data.batches=all"]
    arguments = [*setting, *batches, "--verify", "--output"]
    (status, text), *_ = on_ranks("infer", *[[*arguments, tmp_path / "several.npz"]] * 3)
    assert status == 0, text
    assert "11 graphs in 6 batches" in text
    assert "agrees with the reference" in text
    on_one("infer", *arguments, tmp_path / "one.npz")
    with np.load(tmp_path / "several.npz") as several, np.load(tmp_path / "one.npz") as one:
        for name in one:
            np.testing.assert_allclose(several[name], one[name], atol=1e-6)
    (status, text), _ = on_ranks("infer", *[[*setting, "--set", "data.batch_size=11"]] * 2)
    assert status == 2
    assert "rank 0: data.batches: 11 graphs in batches of data.batch_size = 11 are 1, and 2 ranks run" in text


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


def test_one_rank_computes_where_it_is_predicted_to_be_faster(setting, tmp_path):
    for name, output in (("infer", tmp_path / "one.npz"), ("train", tmp_path / "run")):
        arguments = [*setting, "--output", output]
        (status, text), *others = on_ranks(name, *[arguments] * 2, job=parallel_jobs.run_script_faster_on_one)
        assert (status, others) == (0, [(0, "")]), text
        assert "rank 0 computes alone (predicted; runtime.partition: halo takes all ranks)" in text
        assert output.exists()
    assert {row.get("ranks") for row in rows(tmp_path)} == {None}


def test_partitions_are_made_where_the_ranks_look_for_them(setting, tmp_path):
    config = setting[:2]
    done = on_one("partition", *config, "--parts", "2", "--method", "contiguous")
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "data" / "parts").iterdir()
    assert str(folder) in done.output
    (tmp_path / "mine.npz").touch()  # the file is newer now: another partition
    assert on_ranks("infer", *[setting] * 2)[0][0] == 0
    assert len(list(folder.parent.iterdir())) == 2
