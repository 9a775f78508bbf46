"""Formats of the baselines on the CPU: FlashSparse's parts, packing, block masks, and refusals."""

import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import dense_attention, load_real_graph, mask_of
from tolerance import edges_of, row_errors
from torch.nn.attention.flex_attention import flex_attention

from bench.baselines import REGISTRY
from bench.baselines.bsb import BSB
from bench.baselines.dfgnn import hyper_shared_bytes
from bench.baselines.flashsparse import TCBS_PER_PART, TILE, Parts
from bench.baselines.flex_attention import graph_block_mask
from bench.baselines.sdpa_padded import Packing, diagonal_blocks
from fused3s import BackendUnavailableError, plan_attention, sparse_attention
from fused3s.attention import _choose
from fused3s.backends import AUTO
from fused3s.backends.base import InputSpec
from fused3s.backends.cuda import aligned_rows
from fused3s.errors import UnsupportedGraphError

BASELINES = [name for name in REGISTRY if name not in AUTO]


def test_auto_never_takes_a_baseline(monkeypatch):
    assert {"dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable"} <= set(BASELINES)
    for backend in REGISTRY.values():
        reason = None if backend.name in BASELINES else "not today"
        monkeypatch.setattr(backend, "unavailable", lambda device, reason=reason: reason)
    with pytest.raises(BackendUnavailableError, match="no attention backend can run"):
        _choose("auto", torch.device("cpu"), InputSpec(torch.float16, 64), "none")


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


def test_parts_cover_every_tcb_once(edge_case):
    bsb = BSB.from_graph(edge_case, TILE)
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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_mask_is_the_graph(edge_case):
    if edge_case.nnz == 0:
        pytest.skip("the backend answers a graph without edges itself")
    q, k, v = (torch.randn(n, 2, 16) for n in (edge_case.shape[0], edge_case.shape[1], edge_case.shape[1]))
    mask = graph_block_mask(*edges_of(edge_case), edge_case.shape)
    by_head = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    output = flex_attention(*by_head, block_mask=mask, scale=0.3)[0].transpose(0, 1)
    assert row_errors(output, dense_attention(q, k, v, mask_of(edge_case), 0.3)).max() < 2e-5


def test_rows_are_copied_only_where_they_are_not_aligned():
    fused = torch.zeros(5, 3, 2, 8)
    query = fused[:, 0]
    assert aligned_rows([query], 16)[0] is query
    odd = torch.zeros(5 * 16 + 1)[1:].view(5, 2, 8)
    assert aligned_rows([odd], 4)[0] is odd
    for tensor in (odd, query.transpose(0, 2), torch.zeros(5, 2, 6)[..., :5]):
        (copy,) = aligned_rows([tensor], 16)
        assert copy is not tensor
        assert copy.is_contiguous()
