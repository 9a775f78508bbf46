"""cuda/plan_edges.cu on the CPU (tests/cuda_shim): the bits of `csr_of_tiles` and `make_tile_slots`."""

import pytest
import scipy.sparse as sp
import torch
from gpu_plan_on_cpu import gpu_on_cpu

from kernels.formats.bsb import BSB
from kernels.formats.gpu_edges import gpu_csr_of_tiles, make_gpu_tile_slots
from kernels.formats.schedule import csr_of_tiles, make_kv_tiles, make_tile_slots
from tests.cuda_shim.cuda_on_cpu import COMPILER
from tests.cuda_shim.oracle import GRAPHS

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("mode", ["late", "random"])
def test_every_case(monkeypatch, name, mode):
    bsb = BSB.from_graph(GRAPHS[name](), (16, 16))
    tiles = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap), bsb.tcb_row_offset
    with gpu_on_cpu(monkeypatch, mode):
        indptr, indices = gpu_csr_of_tiles(*tiles)
        again = gpu_csr_of_tiles(*tiles, bsb.nnz)
        slots = make_gpu_tile_slots(*tiles, bsb.nnz, indptr if mode == "late" else None)
    expected_indptr, expected_indices = csr_of_tiles(*tiles)
    assert torch.equal(indptr, expected_indptr)
    assert torch.equal(indices, expected_indices)
    assert torch.equal(again[1], expected_indices)
    expected = make_tile_slots(*tiles)
    assert torch.equal(slots.tile_slots, expected.tile_slots)
    assert torch.equal(slots.slot_edges, expected.slot_edges)
    assert torch.equal(slots.slot_places, expected.slot_places)


def test_windows_of_many_tiles(monkeypatch):
    graph = sp.random_array((50, 3000), density=0.4, format="csr", rng=1)
    bsb = BSB.from_graph(graph, (16, 16))
    tiles = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap), bsb.tcb_row_offset
    with gpu_on_cpu(monkeypatch):
        indptr, indices = gpu_csr_of_tiles(*tiles, bsb.nnz)
        slots = make_gpu_tile_slots(*tiles, bsb.nnz, indptr)
    assert torch.equal(indices, torch.from_numpy(graph.indices).int())
    expected = make_tile_slots(*tiles)
    for field in ("tile_slots", "slot_edges", "slot_places"):
        assert torch.equal(getattr(slots, field), getattr(expected, field)), field
