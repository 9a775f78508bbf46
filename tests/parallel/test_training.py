"""Training on several ranks against the same run on one process."""

import numpy as np
import parallel_jobs
import pytest
import torch
from rank_pool import GPUS, run_alone

import data
from configs import TrainConfig
from training import Trainer

NODES, FEATURES, GRAPHS = 70, 6, 23
COLLECTION = {"data__name": "ogbg-molhiv", "data__batch_size": 5}


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


@pytest.fixture
def graph_file(tmp_path):
    """Rings with a label each, some missing in training, under a name whose metric is ROC-AUC."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(3, 9, GRAPHS)
    ends = [np.stack([np.arange(size), np.roll(np.arange(size), 1)]) for size in sizes]
    features = rng.standard_normal((sizes.sum(), FEATURES)).astype(np.float32)
    labels = (np.arange(GRAPHS) % 2)[:, None].astype(np.float32)
    labels[[2, 3, 7]] = np.nan
    ids = {"train_ids": np.arange(13), "valid_ids": np.arange(13, 18), "test_ids": np.arange(18, GRAPHS)}
    u, v = np.concatenate(ends, 1)
    np.savez(
        tmp_path / "mine.npz", node_counts=sizes, edge_counts=sizes, u=u, v=v, feat=features, graph_label=labels, **ids
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


@pytest.mark.parametrize(("size", "scheme", "backend"), [(2, "heads", "reference"), (3, "halo", "split")])
def test_a_partitioned_graph_trains_as_on_one_process(pool, node_file, tmp_path, one_thread, size, scheme, backend):
    asked = settings(node_file)
    expected = one_process(asked, tmp_path / "one")
    asked["runtime"]["partition"] = scheme
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
@pytest.mark.parametrize("scheme", ["halo", "heads"])
def test_gpus_train_what_one_trains_also_by_a_cuda_graph(node_file, tmp_path, size, scheme):
    asked = settings(node_file, training__precision="bfloat16", runtime__device="cuda", attention__backend="fused3s")
    asked["model"] |= {"dim": 64, "heads": 8}
    expected = one_process(asked, tmp_path / "one")
    asked["runtime"]["partition"] = scheme
    runs = []
    for captured in (False, "auto" if torch.cuda.device_count() < size else True):
        asked["runtime"]["cuda_graph"] = captured
        folder = tmp_path / f"captured_{captured}"
        runs.append(run_alone(parallel_jobs.train_on_gpus, size, [asked, str(folder)], seconds=300))
    eager, captured = ([record.loss for record in found[0][0]] for found in runs)
    assert captured == pytest.approx(eager, rel=1e-3)
    assert eager == pytest.approx([record.loss for record in expected[0]], abs=0.02)


# Batches of 5 graphs and then of 3: with 4 ranks one has no graph of the last one.
@pytest.mark.parametrize("size", [2, 4])
def test_a_collection_trains_as_on_one_process(pool, graph_file, tmp_path, one_thread, size):
    asked = settings(graph_file, **COLLECTION)
    expected = one_process(asked, tmp_path / "one")
    assert_same_run(pool.run(parallel_jobs.train, size, asked, str(tmp_path / "several")), expected)


@pytest.mark.parametrize("kind", ["node", "graph"])
def test_runs_with_dropout_repeat_their_bits_also_after_a_stop(pool, request, tmp_path, kind):
    asked = settings(request.getfixturevalue(f"{kind}_file"), **(COLLECTION if kind == "graph" else {}))
    asked["training"]["precision"] = "bfloat16" if kind == "graph" else "float32"
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
    ("kind", "changes", "message"),
    [
        ("node", {"model__norm": "batch"}, "model.norm = 'batch'"),
        ("graph", {"model__norm": "batch"}, "model.norm = 'batch' on several ranks"),
        ("node", {"model__pos_enc": 2}, "model.pos_enc = 2"),
        ("node", {"training__sampler": "neighbor"}, "training.sampler = 'neighbor'"),
        ("node", {"attention__reorder": "communities"}, "attention.reorder = 'communities'"),
        ("node", {"runtime__partition": "heads", "model__heads": 2}, "got 'heads' with 2 heads on 3 ranks"),
    ],
)
def test_what_ranks_cannot_train_is_refused(pool, request, tmp_path, kind, changes, message):
    asked = settings(request.getfixturevalue(f"{kind}_file"), **(COLLECTION if kind == "graph" else {}) | changes)
    if "attention__reorder" in changes:
        asked["attention"]["backend"] = "auto"
    texts = pool.run(parallel_jobs.error_of_training, 3, asked, str(tmp_path / "run"))
    assert all(message in text for text in texts), texts
