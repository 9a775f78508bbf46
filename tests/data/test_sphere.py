"""Neighbourhoods on the sphere against distances of points in space, and quadrature weights against integrals."""

import numpy as np
import pytest

import data
from data.selection import Selection
from data.sources.sphere import CUTOFF_MARGIN, Sphere

NAMES = [name for name in data.names() if isinstance(data.info(name).official, Sphere)]


def points(nlat: int, nlon: int) -> np.ndarray:
    """[nlat * nlon, 3] points of a grid on the unit sphere."""
    theta, phi = np.meshgrid(np.linspace(0, np.pi, nlat), np.arange(nlon) * 2 * np.pi / nlon, indexing="ij")
    return np.stack([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], -1).reshape(-1, 3)


@pytest.mark.parametrize(
    ("queries", "cutoff", "keys"),
    [
        ((9, 16), 0.5, None),
        ((7, 5), 1.3, None),
        ((4, 6), 0.01, None),
        ((5, 7), np.pi, None),
        ((6, 8), 0.45, (11, 16)),
        ((9, 3), 0.8, (5, 9)),
    ],
)
def test_neighbours_are_the_points_within_the_cutoff(queries, cutoff, keys):
    sphere = Sphere(*queries, cutoff, keys)
    graph = sphere.load("nowhere", Selection())
    # The chord between two points is 2 sin(distance / 2).
    chord = np.linalg.norm(points(*queries)[:, None] - points(*(keys or queries)), axis=2)
    expected = chord <= 2 * np.sin(min(CUTOFF_MARGIN * cutoff, np.pi) / 2) + 1e-9
    found = np.zeros(expected.shape, int)
    np.add.at(found, (graph.row, graph.col), 1)
    np.testing.assert_array_equal(found, expected)
    assert all((np.diff(graph.col[a:b]) > 0).all() for a, b in zip(graph.indptr, graph.indptr[1:], strict=False))
    assert (graph.indptr.dtype, graph.col.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize("nlat", [2, 3, 8, 9])
def test_quadrature_weights_integrate_polynomials(nlat):
    weights, height = Sphere(nlat, 6, 0.5).quadrature_weights(), points(nlat, 6)[:, 2]
    assert (weights > 0).all()
    for power in range(nlat):
        integral = 4 * np.pi / (power + 1) if power % 2 == 0 else 0
        assert weights @ height**power == pytest.approx(integral, abs=1e-12)


def test_weights_belong_to_the_keys():
    assert Sphere(4, 6, 0.5, (7, 12)).quadrature_weights().shape == (84,)


@pytest.mark.parametrize("name", NAMES)
def test_registered_spheres_load_without_files(name, tmp_path):
    entry = data.info(name)
    loaded = data.load(name, root=tmp_path, features=False)
    assert list(tmp_path.iterdir()) == []
    assert (loaded.meta.num_nodes, loaded.meta.num_edges) == (entry.num_nodes, entry.nnz)
    nlat, nlon = entry.official.key_grid
    assert loaded.meta.shape == (entry.official.nlat * entry.official.nlon, nlat * nlon)
    assert len(loaded.row_pointers) - 1 == entry.num_nodes
    assert loaded.columns.max() == nlat * nlon - 1


def test_a_model_is_refused_a_graph_with_other_nodes_as_keys():
    with pytest.raises(ValueError, match=r"sphere-360x720-to-180x360-0\.03: its keys are other nodes than its queries"):
        data.load("sphere-360x720-to-180x360-0.03")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 8, 0.5), "grid: got 1 x 8; 2 latitudes"),
        ((4, 8, 0.5, (4, 12)), "keys: got 12 longitudes; a multiple of the queries' 8"),
        ((4, 8, 0.0), "cutoff: got 0.0; radians above 0"),
        ((4, 8, 4.0), "cutoff: got 4.0"),
    ],
)
def test_what_is_no_grid_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sphere(*arguments)
