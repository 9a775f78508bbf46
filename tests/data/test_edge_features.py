"""Edge features from every source: each stays with its edge."""

import numpy as np
import pytest
import torch
from ogb.utils.features import get_atom_feature_dims, get_bond_feature_dims

import data

WITH_EDGES = {"edge_features": True}


def features_by_edge(loaded):
    """{(query, key): the row of edge_data["feat"]}"""
    rows = np.repeat(np.arange(loaded.meta.num_nodes), loaded.row_pointers.diff()).tolist()
    return dict(zip(zip(rows, loaded.columns.tolist(), strict=True), loaded.edge_data["feat"].tolist(), strict=True))


SOURCE, TARGET = np.array([2, 0, 2, 1]), np.array([1, 2, 1, 1])  # the third repeats the first


def npz(path, **arrays):
    np.savez(path, src_li=SOURCE, dst_li=TARGET, num_nodes=3, **arrays)
    return path


@pytest.mark.parametrize(
    ("values", "dtype", "cardinalities"),
    [
        ([[1.5], [2.5], [3.5], [4.5]], torch.float32, None),
        ([[1, 0], [2, 3], [9, 9], [4, 0]], torch.int64, (5, 4)),
    ],
)
def test_a_file_of_the_user(tmp_path, values, dtype, cardinalities):
    path = npz(tmp_path / "mine.npz", edge_feat=np.array(values))
    loaded = data.load("mine", source="file", path=path, **WITH_EDGES)
    assert features_by_edge(loaded) == {(2, 1): values[0], (0, 2): values[1], (1, 1): values[3]}
    assert loaded.edge_data["feat"].dtype == dtype
    assert loaded.meta.edge_feature_cardinalities == cardinalities
    assert loaded.meta.edge_features == "original"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((3, 1)), r"feat of edges has shape \(3, 1\); 4 rows"),
        (np.full((4, 1), np.nan), "edge features hold NaN"),
        (np.full((4, 1), -2), "edge features hold the code -2 in row 0, column 0; 0 to"),
        (np.zeros((4, 1), bool), "dtype bool"),
    ],
)
def test_bad_edge_features_of_a_file(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        data.load("mine", source="file", path=npz(tmp_path / "mine.npz", edge_feat=values), **WITH_EDGES)


def test_a_collection_of_the_user(tmp_path):
    path, counts = tmp_path / "mine.npz", {"node_counts": np.array([2, 3]), "edge_counts": np.array([1, 2])}
    np.savez(path, **counts, u=np.array([1, 2, 0]), v=np.array([0, 0, 1]), edge_feat=np.array([[5.0], [6.0], [7.0]]))
    loaded = data.load("mine", path=path, batch_size=None, **WITH_EDGES)
    expected = {(1, 0): [5.0], (4, 2): [6.0], (2, 3): [7.0]}
    assert features_by_edge(loaded) == expected | {(key, query): value for (query, key), value in expected.items()}


def test_atom_and_bond_codes_are_those_of_ogb():
    for name in ("ogbg-molhiv", "ogbg-molpcba", "peptides-func", "peptides-struct"):
        assert data.info(name).feature_cardinalities == tuple(get_atom_feature_dims())
        assert data.info(name).edge_feature_cardinalities == tuple(get_bond_feature_dims())


@pytest.mark.parametrize("name", ["zinc", "pascalvoc-sp"])
def test_surrogates_have_random_edge_features_of_the_original_kind(name, tmp_path):
    entry = data.info(name)
    options = {"root": tmp_path, "source": "synthetic", "batch_size": 64, **WITH_EDGES}
    loaded, same, other = (data.load(name, seed=seed, **options) for seed in (0, 0, 1))
    feat = loaded.edge_data["feat"]
    assert feat.shape == (loaded.meta.num_edges, entry.edge_feature_dim)
    assert (loaded.meta.edge_features, loaded.meta.edge_feature_dim) == ("random", entry.edge_feature_dim)
    if entry.edge_feature_cardinalities:
        assert (feat.amax(0) + 1).tolist() == list(entry.edge_feature_cardinalities)
    else:
        assert feat.dtype == torch.float32
    assert torch.equal(feat, same.edge_data["feat"])
    assert not torch.equal(feat[:100], other.edge_data["feat"][:100])


def test_a_graph_without_edge_features_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"cora: has no edge features \(.*these have: ogbg-molhiv.*zinc"):
        data.load("cora", root=tmp_path, source="synthetic", **WITH_EDGES)
    with pytest.raises(ValueError, match=r"mine: has no edge features .*\.npz files with edge_feat"):
        data.load("mine", source="file", path=npz(tmp_path / "mine.npz"), **WITH_EDGES)
