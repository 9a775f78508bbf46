"""Formats of the baselines on the CPU: FlashSparse's parts, packing, block masks, and refusals."""

import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES, dense_attention, load_real_graph, mask_of
from tolerance import edges_of, row_errors
from torch.nn.attention.flex_attention import flex_attention

from baselines import REGISTRY
from baselines.dfgnn import DFGNNHyperBackend, DFGNNTilingBackend, hyper_shared_bytes
from baselines.flashsparse import SOURCE, TCBS_PER_PART, TILE, Kernels, Parts
from baselines.flex_attention import graph_block_mask
from baselines.sdpa_padded import Packing, diagonal_blocks
from kernels import BSB, BackendUnavailableError, plan_attention, sparse_attention
from kernels.attention import _choose
from kernels.backends import AUTO
from kernels.backends.base import InputSpec
from kernels.backends.cuda import aligned_rows
from kernels.errors import UnsupportedGraphError
from kernels.runtime.jit import KernelInstance

BASELINES = [name for name in REGISTRY if name not in AUTO]


def test_auto_never_takes_a_baseline(monkeypatch):
    assert {"dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable"} <= set(BASELINES)
    for backend in REGISTRY.values():
        reason = None if backend.name in BASELINES else "not today"
        monkeypatch.setattr(backend, "unavailable", lambda device, reason=reason: reason)
    with pytest.raises(BackendUnavailableError, match="no attention backend can run"):
        _choose("auto", torch.device("cpu"), InputSpec(torch.float16, 64), "none")


@pytest.mark.parametrize("name", BASELINES)
def test_unavailable_baselines_give_the_reason(name, monkeypatch):
    backend = REGISTRY[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    if name != "sdpa_padded":
        missing = {"pyg": "torch_geometric is not installed", "dgl": "the package dgl is not installed"}
        expected = missing.get(name, "no NVIDIA GPU found")
        assert expected in backend.unavailable(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "dtype", "dim", "message"),
    [
        ("dfgnn_tiling", torch.float64, 64, r"takes torch\.float32, .* got torch\.float64"),
        ("dfgnn_hyper", torch.float32, 257, "up to 256, got 257"),
        ("flashsparse_naive", torch.float32, 64, r"torch\.float16 and torch\.bfloat16, got torch\.float32"),
        ("flashsparse_stable", torch.float16, 60, "multiple of 8 up to 256, got 60"),
        ("flex_attention", torch.float64, 64, r"got torch\.float64"),
        ("flex_attention", torch.float16, 8, "at least 16, got 8"),
    ],
)
def test_unsupported_inputs_are_named(name, dtype, dim, message):
    assert re.search(message, REGISTRY[name].unsupported(dtype, dim))


def test_instances_cover_every_head_dimension():
    for dim in range(1, 257):
        (warps,) = DFGNNTilingBackend().instance(dim).arguments
        assert 32 * (warps - 1) < dim <= 32 * warps
        vector, chunks = DFGNNHyperBackend().instance(dim).arguments
        assert dim % vector == 0
        assert 32 * vector * (chunks - 1) < dim <= 32 * vector * chunks
    assert DFGNNHyperBackend().instance(128).name == "dfgnn_hyper<4, 1>"
    spmm = Kernels.of(torch.float16, torch.float32, 64, stable=True).spmm
    assert spmm == KernelInstance(SOURCE, "flashsparse_spmm", (torch.float16, torch.float32, 64))
    assert spmm.name == "flashsparse_spmm<Element::kHalf, Element::kFloat, 64>"


def test_parts_cover_every_tcb_once(edge_case):
    bsb = BSB.from_scipy(edge_case, TILE)
    parts = Parts.of(bsb)
    offset, window_part = bsb.tcb_row_offset.tolist(), parts.window_part.tolist()
    part_tcb, part_window, slots = (x.tolist() for x in (parts.part_tcb, parts.part_window, parts.part_slot))
    assert window_part[0] == 0
    assert window_part[-1] == len(part_window) == len(part_tcb) - 1
    next_slot = 0
    for window in range(bsb.num_row_windows):
        own = range(window_part[window], window_part[window + 1])
        assert len(own) >= 1, "every window needs a part to write its rows"
        assert [part_window[part] for part in own] == [window] * len(own)
        assert part_tcb[own.start] == offset[window]
        assert part_tcb[own.stop] == offset[window + 1]
        for part in own:
            assert part_tcb[part + 1] - part_tcb[part] <= TCBS_PER_PART
            assert slots[part] == (next_slot if len(own) > 1 else -1)
            next_slot += len(own) > 1
        assert (window in parts.split_window.tolist()) == (len(own) > 1)
    assert parts.num_slots == next_slot
    tcb_windows = np.repeat(np.arange(bsb.num_row_windows), np.diff(offset)).tolist()
    assert parts.tcb_window.tolist() == tcb_windows


def test_parts_split_a_hub():
    parts = Parts.of(BSB.from_scipy(EDGE_CASES["hub"](), TILE))
    assert parts.split_window.tolist() == [1000 // 8]
    assert parts.num_slots == -(-2000 // (16 * TCBS_PER_PART))


def test_a_bsb_with_another_tile_is_built_anew():
    graph = EDGE_CASES["n_one_past_16"]()
    paper = BSB.from_scipy(graph)
    built = BSB.from_graph(paper, TILE, torch.device("cpu"))
    assert built.tile == TILE
    assert BSB.from_graph(built, TILE, torch.device("cpu")) is built
    for found, expected in zip(built.to_csr(), paper.to_csr(), strict=True):
        assert torch.equal(found, expected)


def test_hyper_needs_the_largest_eight_rows():
    def needed(degrees: list[int]) -> int:
        return hyper_shared_bytes(torch.tensor([0, *np.cumsum(degrees)]))

    assert needed([]) == 0
    assert needed([3] * 8 + [5]) == 4 * 24
    assert needed([1] * 8 + [9] * 3) == 4 * 27
    assert needed([12288]) == 48 * 1024
    with pytest.raises(
        UnsupportedGraphError, match=r"needs 98 KB of shared memory, this GPU offers 48 KB.*rows 8 to 15"
    ):
        needed([0] * 8 + [25_000])


@pytest.mark.parametrize("name", ["musae-github", "ogbn-arxiv"])
def test_hyper_on_real_hubs(name, real_graph_dir):
    graph = load_real_graph(real_graph_dir, name)
    degrees = np.diff(graph.indptr)
    blocks = np.add.reduceat(degrees, np.arange(0, graph.shape[0], 8))
    indptr = torch.from_numpy(graph.indptr.astype(np.int64))
    if blocks.max() * 4 <= 48 * 1024:
        assert hyper_shared_bytes(indptr) == 4 * blocks.max()
    else:
        with pytest.raises(UnsupportedGraphError, match=f"have {blocks.max()} edges"):
            hyper_shared_bytes(indptr)


def test_diagonal_blocks():
    blocks = [np.ones((3, 3)), np.zeros((1, 1)), np.eye(4)[::-1], np.zeros((2, 2))]
    graph = sp.csr_array(sp.block_diag(blocks))
    graph.eliminate_zeros()
    bounds = diagonal_blocks(*edges_of(graph), graph.shape[0])
    assert bounds.tolist() == [0, 3, 4, 8, 9, 10]
    # An edge in one direction joins all nodes between its ends.
    row, col = torch.tensor([0, 5]), torch.tensor([3, 5])
    assert diagonal_blocks(row, col, 7).tolist() == [0, 4, 5, 6, 7]
    assert diagonal_blocks(row[:0], col[:0], 0).tolist() == [0]


def test_packing_puts_neighbouring_blocks_into_an_item():
    blocks = [np.ones((n, n)) for n in (20, 5, 7, 8, 1, 19, 2)]
    graph = sp.csr_array(sp.block_diag(blocks))
    packing = Packing.of(*edges_of(graph), graph.shape)
    assert packing.num_items == 4  # 20 | 5 7 8 | 1 19 | 2
    assert packing.num_keys == packing.num_queries == 32
    first = [int(packing.row_slot[node]) for node in (0, 20, 25, 32, 40, 41, 60)]
    assert first == [0, 32, 37, 44, 64, 65, 96]


@pytest.mark.parametrize("name", ["ogbg-molhiv", "peptides"])
def test_packing_of_a_real_batch_is_tighter_than_a_graph_an_item(name, real_graph_dir):
    graph = load_real_graph(real_graph_dir, name)
    packing = Packing.of(*edges_of(graph), graph.shape)
    assert packing.num_items < 1024
    padding = packing.num_items * packing.num_queries / graph.shape[0]
    assert padding < 2
    q, k, v = (torch.randn(graph.shape[0], 1, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    output = sparse_attention(q, k, v, graph, backend="sdpa_padded")
    assert row_errors(output, sparse_attention(q.double(), k.double(), v.double(), graph)).max() < 2e-5


def test_dense_attention_that_is_too_large_names_its_size():
    num_nodes = 200_000
    ring = sp.csr_array((np.ones(num_nodes), (np.arange(num_nodes), np.roll(np.arange(num_nodes), 1))))
    with pytest.raises(UnsupportedGraphError, match=r"needs 149\.0 GiB .*1 dense problems of 200000 x 200000"):
        plan_attention(ring, backend="sdpa_padded", device="cpu")


def test_block_mask_that_is_too_large_names_its_size():
    row = torch.tensor([0])
    with pytest.raises(UnsupportedGraphError, match=r"needs 80\.0 GiB for its block mask, .* 1 of 4294967296 blocks"):
        graph_block_mask(row, row, (128 << 16, 128 << 16))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_mask_is_the_graph(edge_case):
    if edge_case.nnz == 0:
        pytest.skip("the backend answers a graph without edges itself")
    q, k, v = (torch.randn(n, 2, 16) for n in (edge_case.shape[0], edge_case.shape[1], edge_case.shape[1]))
    mask = graph_block_mask(*edges_of(edge_case), edge_case.shape)
    by_head = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    output = flex_attention(*by_head, block_mask=mask, scale=0.3)[0].transpose(0, 1)
    assert row_errors(output, dense_attention(q, k, v, mask_of(edge_case), 0.3)).max() < 2e-5


def test_block_mask_lists_the_occupied_blocks():
    graph = sp.random_array((700, 900), density=3e-5, format="csr", rng=np.random.default_rng(3))
    mask = graph_block_mask(*edges_of(graph), graph.shape)
    row, col = graph.tocoo().coords
    occupied = np.zeros((6, 8), dtype=bool)
    occupied[row // 128, col // 128] = True
    assert mask.kv_num_blocks[0, 0].tolist() == occupied.sum(1).tolist()
    for block_row, count in enumerate(occupied.sum(1)):
        listed = mask.kv_indices[0, 0, block_row, :count].tolist()
        assert listed == np.flatnonzero(occupied[block_row]).tolist()


def test_rows_are_copied_only_where_they_are_not_aligned():
    fused = torch.zeros(5, 3, 2, 8)
    query = fused[:, 0]
    assert aligned_rows(query, 16) is query
    odd = torch.zeros(5 * 16 + 1)[1:].view(5, 2, 8)
    assert aligned_rows(odd, 4) is odd
    for tensor in (odd, query.transpose(0, 2), torch.zeros(5, 2, 6)[..., :5]):
        copy = aligned_rows(tensor, 16)
        assert copy is not tensor
        assert copy.is_contiguous()
