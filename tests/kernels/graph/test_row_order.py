"""Row orders: bijections, savings on planted structure and on real graphs, counts, and malformed input."""

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES, Csr, load_real_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from fused3s.graph.csr import CSRPattern, csr_from_scipy
from fused3s.graph.reorder.row_order import METHODS, RowOrder, permute_rows
from fused3s.graph.reorder.search import find_row_order

pytest.importorskip("numba", reason="Numba, which compiles the search for communities, is not installed")

# Natural over new order, gathered columns of 16-row windows: modularity communities with minhash inside.
SAVED_BY_MODULARITY = {
    "cora": 1.51,
    "citeseer": 1.63,
    "pubmed": 1.41,
    "facebook-large": 2.16,
    "fb100-cornell5": 1.42,
    "musae-github": 1.21,
}


def gathered(csr: Csr, perm: np.ndarray, rows: int = 16) -> tuple[int, int]:
    """(columns, KV tiles), counted window by window with sets."""
    columns = tiles = 0
    for start in range(0, csr.shape[0], rows):
        window = perm[start : start + rows]
        distinct = set().union(*(csr.indices[csr.indptr[row] : csr.indptr[row + 1]].tolist() for row in window))
        columns += len(distinct)
        tiles += -(-len(distinct) // 16)
    return columns, tiles


def check(csr: Csr, order: RowOrder) -> None:
    """`order` is a permutation of the rows of `csr`, or none, and its counts are right."""
    natural = np.arange(csr.shape[0])
    perm = natural
    if order.perm is not None:
        assert (order.perm.dtype, order.perm.device.type) == (torch.int32, "cpu")
        perm = order.perm.numpy()
        np.testing.assert_array_equal(np.sort(perm), natural)
    assert (order.perm is None) == (order.method == "none")
    assert (order.columns_before, order.tiles_before) == gathered(csr, natural)
    assert (order.columns_after, order.tiles_after) == gathered(csr, perm)
    assert order.seconds >= 0


def planted(groups: int, rows: int, cols: int, seed: int = 0) -> Csr:
    """Disjoint blocks of ones, rows and columns shuffled."""
    rng = np.random.default_rng(seed)
    blocks = np.kron(np.eye(groups, dtype=np.int8), np.ones((rows, cols), np.int8))
    return sp.csr_array(blocks[rng.permutation(groups * rows)][:, rng.permutation(groups * cols)])


@st.composite
def matrices(draw) -> Csr:
    rows, cols = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    density = draw(st.sampled_from([0.0, 0.02, 0.1, 0.5]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return sp.csr_array((rng.random((rows, cols)) < density).astype(np.int8))


@settings(max_examples=60, deadline=None)
@given(matrices(), st.sampled_from(METHODS))
def test_any_matrix(csr: Csr, method: str):
    order = find_row_order(csr_from_scipy(csr), method)
    check(csr, order)
    assert order.method in ({"none", "communities"} if method == "auto" else {method})


@pytest.mark.parametrize("name", ["hub", "tall", "one_node_no_edge"])
def test_edge_cases(name: str):
    check(EDGE_CASES[name](), find_row_order(csr_from_scipy(EDGE_CASES[name]()), "communities"))


@pytest.mark.parametrize("method", ["communities", "auto"])
def test_planted_blocks_are_found(method: str):
    csr = planted(groups=40, rows=32, cols=48)
    order = find_row_order(csr_from_scipy(csr), method)
    assert (order.columns_after, order.tiles_after) == (40 * 2 * 48, 40 * 2 * 3)  # the least: a block is two windows
    assert order.columns_before > 5 * order.columns_after


def test_auto_leaves_a_good_order_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "fused3s.graph.reorder.search._group_windows", lambda *_: pytest.fail("windows were grouped for nothing")
    )
    band = sp.csr_array(sp.diags_array([1, 1, 1], offsets=[-1, 0, 1], shape=(800, 800), dtype=np.int8))
    order = find_row_order(csr_from_scipy(band), "auto")
    assert (order.perm, order.method, order.columns_after) == (None, "none", order.columns_before)


@pytest.mark.parametrize("name", SAVED_BY_MODULARITY)
def test_real_graphs(real_graph_dir: Path, name: str):
    csr = load_real_graph(real_graph_dir, name)
    order = find_row_order(csr_from_scipy(csr), "auto")
    check(csr, order)
    assert order.columns_before > SAVED_BY_MODULARITY[name] * order.columns_after


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_permute_rows(edge_case: Csr, kind: str):
    perm = np.random.default_rng(0).permutation(edge_case.shape[0]).astype(np.int32)
    expected = edge_case[perm]
    pattern = csr_from_scipy(edge_case)
    if kind == "torch":
        pattern = CSRPattern(torch.tensor(pattern.indptr), torch.tensor(pattern.indices.copy()), pattern.shape)
        perm = torch.from_numpy(perm)
    permuted = permute_rows(pattern, perm)
    assert permuted.shape == expected.shape
    np.testing.assert_array_equal(permuted.indptr.numpy(), expected.indptr)
    np.testing.assert_array_equal(permuted.indices.numpy(), expected.indices)


def test_bad_arguments_are_named():
    pattern = csr_from_scipy(planted(2, 16, 4))
    with pytest.raises(ValueError, match=r"indices: row 0 holds column 8; allowed are 0 to 7"):
        find_row_order(CSRPattern(np.array([0, 1]), np.array([8]), (1, 8)), "none")
    perm = np.arange(32)
    with pytest.raises(ValueError, match=r"perm: got shape \(31,\); \[32\]"):
        permute_rows(pattern, perm[:-1])
    with pytest.raises(ValueError, match=r"perm: entry 3 is 32; allowed are 0 to 31"):
        permute_rows(pattern, np.where(perm == 3, 32, perm))
    with pytest.raises(ValueError, match=r"perm: row 4 occurs more than once"):
        permute_rows(pattern, np.where(perm == 3, 4, perm))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_patterns_on_the_gpu(edge_case: Csr, library: str):
    pattern = csr_from_scipy(edge_case)
    arrays = pattern.indptr, pattern.indices.copy()
    if library == "torch":
        on_gpu = CSRPattern(*(torch.from_numpy(array).cuda() for array in arrays), pattern.shape)
    else:
        cupy = pytest.importorskip("cupy")
        on_gpu = CSRPattern(*map(cupy.asarray, arrays), pattern.shape)
    order = find_row_order(on_gpu, "communities")
    expected = find_row_order(pattern, "communities").perm
    assert torch.equal(order.perm, expected)
    permuted = permute_rows(on_gpu, order.perm)
    assert permuted.indptr.is_cuda
    assert permuted.indices.is_cuda
    wanted = permute_rows(pattern, expected)
    assert torch.equal(permuted.indptr.cpu(), wanted.indptr)
    assert torch.equal(permuted.indices.cpu(), wanted.indices)
