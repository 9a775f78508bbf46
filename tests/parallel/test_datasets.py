"""Data sets over ranks, against the graph that `data.load` gives, and the file that keeps their partition."""

import numpy as np
import parallel_jobs
import pytest
import torch
from full_disk import full_after

import data
from configs import Config
from parallel import PartitionError
from parallel.datasets import divided, load_graph, partition_file

NODES, EDGES = 40, 150
METHOD = "contiguous"


def config_of(path, **settings):
    own = {"name": "mine", "source": "file", "path": str(path), "root": str(path.parent)}
    return Config.model_validate({"data": own | settings, "runtime": {"device": "cpu"}})


@pytest.fixture
def path(tmp_path):
    """A directed graph with repeated edges."""
    rng = np.random.default_rng(0)
    (source, target), ids = rng.integers(0, NODES, (2, EDGES)), rng.permutation(NODES)
    arrays = {"src_li": source, "dst_li": target, "num_nodes": NODES, "label": np.arange(NODES) % 3}
    splits = {"train_ids": ids[:20], "valid_ids": ids[20:22], "test_ids": ids[22:]}
    np.savez(tmp_path / "mine.npz", feat=rng.standard_normal((NODES, 5)).astype(np.float32), **arrays, **splits)
    return tmp_path / "mine.npz"


@pytest.mark.parametrize("self_loops", [False, True])
def test_parts_are_the_graph_that_load_gives(pool, path, self_loops):
    config = config_of(path, self_loops=self_loops)
    loaded = data.load(**config.load_arguments())
    divided(loaded, str(path.parent), 3, METHOD, lambda text: None)  # the ranks take the partition that is there
    rank_0, *others = pool.run(parallel_jobs.open_data, 3, config)
    assert [whole for _, _, whole in others] == [None, None]
    assert torch.equal(rank_0[2].labels, loaded.labels)
    assert all(torch.equal(ids, loaded.splits[name]) for name, ids in rank_0[2].splits.items())
    row, col = (ids.numpy() for ids in loaded.graph.edges()[::-1])
    expected = np.zeros((NODES, NODES), bool)
    expected[row, col] = True
    for part, own, _ in (rank_0, *others):
        assert part.partition.method == METHOD
        columns = np.concatenate([part.rows, part.halo])
        assert (part.matrix.toarray() == expected[part.rows][:, columns]).all()
        assert expected[part.rows].sum() == part.matrix.nnz
        assert (own.node_data["feat"] == loaded.node_data["feat"][part.rows]).all()
        assert torch.equal(own.labels, loaded.labels[part.rows])
        assert (own.meta, own.metric) == (loaded.meta, loaded.metric)
        for name, ids in loaded.splits.items():
            assert set(part.rows[own.splits[name].numpy()]) == set(ids.tolist()) & set(part.rows)


def test_parts_keep_the_ids_of_an_edge_list(pool, tmp_path):
    (tmp_path / "mine.csv").write_text("30,7\n7,500\n12,30\n500,30\n")
    found = pool.run(parallel_jobs.open_data, 2, config_of(tmp_path / "mine.csv"))
    assert found[0][2].node_data["id"].tolist() == [7, 12, 30, 500]
    for part, own, _ in found:
        assert own.node_data["id"].tolist() == np.array([7, 12, 30, 500])[part.rows].tolist()


def test_collections_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.name = 'ogbg-molhiv': a collection of graphs; ranks divide one graph"):
        load_graph(Config.model_validate({"data": {"name": "ogbg-molhiv", "root": str(tmp_path)}}))
    counts = {"node_counts": [2, 3], "edge_counts": [1, 2], "u": [0, 0, 1], "v": [1, 1, 2]}
    np.savez(tmp_path / "mine.npz", **{key: np.array(values) for key, values in counts.items()})
    with pytest.raises(ValueError, match=r"data\.name = 'mine': a collection of graphs"):
        load_graph(config_of(tmp_path / "mine.npz"))


def test_a_partition_is_made_once_and_a_damaged_one_is_named(path):
    loaded, said = load_graph(config_of(path)), []
    first, again = (divided(loaded, str(path.parent), 2, METHOD, said.append)[1] for _ in range(2))
    file = partition_file(loaded, str(path.parent), 2, METHOD)
    assert said == [f"partitioning mine into 2 parts by contiguous, once: {file}"]
    assert (first.rows == again.rows).all()
    content = file.read_bytes()
    for damage in (content[:-1], content[:3], b"", content[:-4] + b"\x02\0\0\0"):  # the last one: of a third part
        file.write_bytes(damage)
        with pytest.raises(PartitionError, match=r"-contiguous-2-.*npy: damaged \(.*; remove it, and it is made again"):
            divided(loaded, str(path.parent), 2, METHOD, said.append)


def test_a_full_disk_leaves_no_partition(path):
    loaded = load_graph(config_of(path))
    with full_after(200), pytest.raises(OSError, match=r"npy: cannot be written.*File too large"):
        divided(loaded, str(path.parent), 2, METHOD, lambda text: None)
    assert not partition_file(loaded, str(path.parent), 2, METHOD).exists()
