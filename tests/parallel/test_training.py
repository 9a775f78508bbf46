"""Training on several ranks against the same run on one process."""

import numpy as np
import parallel_jobs
import pytest
import torch
from rank_pool import GPUS, run_alone

import data
from configs import TrainConfig
from models.training import Trainer

NODES, FEATURES = 70, 6


@pytest.fixture
def node_file(tmp_path):
    """A directed graph; contiguous parts of three: the last one has no training node."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((NODES, FEATURES)).astype(np.float32)
    np.savez(
        tmp_path / "mine.npz",
        **{"src_li": rng.integers(0, NODES, 300), "dst_li": rng.integers(0, NODES, 300), "num_nodes": NODES},
        **{"feat": features, "label": features[:, :3].argmax(1)},
        **{"train_ids": np.arange(25), "valid_ids": np.arange(25, 45), "test_ids": np.arange(45, NODES)},
    )
    return tmp_path / "mine.npz"


def settings(path, **changes):
    sections = {
        "data": {"name": "mine", "source": "file", "path": str(path), "root": str(path.parent)},
        "model": {"dim": 8, "blocks": 2, "heads": 4, "checkpoint": None},
        "attention": {"backend": "reference"},
        "runtime": {"device": "cpu"},
        "training": {"epochs": 3, "lr": 0.01, "checkpoint_seconds": 0.0, "clip_norm": 0.5},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        sections[section][key] = value
    return sections


def one_process(asked, folder):
    config = TrainConfig.model_validate(asked)
    loaded = data.load(**config.data.load_arguments() | {"batch_size": None})
    trainer = Trainer(config, loaded, folder, seed=0)
    return list(trainer.run()), trainer.result, trainer.step.model.state_dict()


def assert_same_run(found, expected, tolerance=2e-5):
    """Records, result and weights of all ranks are the same bits, and close to those of one process."""
    records, result, weights = expected
    for of_rank in found:
        assert [record.loss for record in of_rank[0]] == [record.loss for record in found[0][0]]
        for name, tensor in of_rank[2].items():
            assert torch.equal(tensor, found[0][2][name]), name
        for record, wanted in zip(of_rank[0], records, strict=True):
            assert record.loss == pytest.approx(wanted.loss, abs=tolerance)
            assert record.valid_loss == pytest.approx(wanted.valid_loss, abs=tolerance)
        assert (of_rank[1].best_epoch, of_rank[1].test) == (result.best_epoch, pytest.approx(result.test))
        for name, tensor in of_rank[2].items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=tolerance, msg=name)


@pytest.mark.parametrize(("size", "backend"), [(2, "reference"), (3, "split")])
def test_a_divided_graph_trains_as_on_one_process(pool, node_file, tmp_path, one_thread, size, backend):
    asked = settings(node_file)
    expected = one_process(asked, tmp_path / "one")
    asked["attention"]["backend"] = backend
    found = pool.run(parallel_jobs.train, size, asked, str(tmp_path / "several"))
    assert_same_run(found, expected)


@pytest.mark.parametrize(("failing", "reason", "graphs"), [((), "chosen by auto", 2), ((1,), "rank 1: it waits", 0)])
def test_all_ranks_capture_the_step_or_none_does(pool, node_file, tmp_path, one_thread, failing, reason, graphs):
    """Here a replay calls the step again."""
    asked = settings(node_file)
    expected = one_process(asked, tmp_path / "one")
    found = pool.run(parallel_jobs.train_captured, 3, asked, str(tmp_path / "several"), failing)
    assert_same_run(found, expected)
    assert all(reason in of_rank[3] and of_rank[4] == graphs for of_rank in found)


@pytest.mark.gpu
@pytest.mark.parametrize("size", GPUS)
def test_gpus_train_what_one_trains_also_by_a_cuda_graph(node_file, tmp_path, size):
    asked = settings(node_file, training__precision="bfloat16", runtime__device="cuda", attention__backend="fused3s")
    asked["model"] |= {"dim": 64, "heads": 8}
    expected = one_process(asked, tmp_path / "one")
    runs = []
    for captured in (False, "auto" if torch.cuda.device_count() < size else True):
        asked["runtime"]["cuda_graph"] = captured
        folder = tmp_path / f"captured_{captured}"
        runs.append(run_alone(parallel_jobs.train_on_gpus, size, [asked, str(folder)], seconds=300))
    eager, captured = ([record.loss for record in found[0][0]] for found in runs)
    assert captured == pytest.approx(eager, rel=1e-3)
    assert eager == pytest.approx([record.loss for record in expected[0]], abs=0.02)


def test_runs_with_dropout_repeat_their_bits_also_after_a_stop(pool, node_file, tmp_path):
    asked = settings(node_file)
    asked["model"] |= {"dropout": 0.2, "attention_dropout": 0.3, "input_dropout": 0.1}
    whole, again = (pool.run(parallel_jobs.train, 2, asked, str(tmp_path / name)) for name in ("whole", "again"))
    pool.run(parallel_jobs.train_until, 2, asked, str(tmp_path / "stopped"), 1)
    resumed = pool.run(parallel_jobs.train, 2, asked, str(tmp_path / "stopped"), True)
    assert len(resumed[0][0]) == 2
    for found in (again, resumed):
        for of_rank, wanted in zip(found, whole, strict=True):
            assert [record.loss for record in of_rank[0]] == [record.loss for record in wanted[0]][-len(of_rank[0]) :]
            assert all(torch.equal(tensor, wanted[2][name]) for name, tensor in of_rank[2].items())


def test_only_rank_0_writes_and_any_rank_stops_all(pool, node_file, tmp_path):
    asked = settings(node_file)
    found = pool.run(parallel_jobs.train_until, 3, asked, str(tmp_path / "run"), 2)
    assert found == [2, 2, 2]
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3
    texts = pool.run(parallel_jobs.error_of_training, 3, asked, str(tmp_path / "run"))
    assert all("holds a run; --resume continues it" in text for text in texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm": "batch"}, "model.norm = 'batch'"),
        ({"model__pos_enc": 2}, "model.pos_enc = 2"),
        ({"model__kind": "gat_conv"}, "model.kind = 'gat_conv'"),
        ({"training__sampler": "neighbor"}, "training.sampler = 'neighbor'"),
        ({"attention__reorder": "communities"}, "attention.reorder = 'communities'"),
    ],
)
def test_what_ranks_cannot_train_is_refused(pool, node_file, tmp_path, changes, message):
    asked = settings(node_file, **changes)
    if "attention__reorder" in changes:
        asked["attention"]["backend"] = "auto"
    texts = pool.run(parallel_jobs.error_of_training, 3, asked, str(tmp_path / "run"))
    assert all(message in text for text in texts), texts
