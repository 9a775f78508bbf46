"""cuda/plan_rows.cu on the CPU (tests/cuda_shim): the bits of `make_row_items`."""

import numpy as np
import pytest
import torch
from gpu_plan_on_cpu import gpu_on_cpu

from kernels.formats.gpu_row_items import make_gpu_row_items
from kernels.formats.row_items import make_row_items
from tests.cuda_shim.cuda_on_cpu import COMPILER
from tests.cuda_shim.oracle import GRAPHS

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]


def check(monkeypatch, indptr, part_edges, mode="late", row_ids=None):
    with gpu_on_cpu(monkeypatch, mode):
        made = make_gpu_row_items(indptr, int(indptr[-1]), row_ids, part_edges)
    expected = make_row_items(indptr, row_ids, part_edges)
    assert torch.equal(made.items, expected.items)
    assert torch.equal(made.parts, expected.parts)
    assert made.part_edges == part_edges
    return made


@pytest.mark.parametrize("name", GRAPHS)
def test_every_case(monkeypatch, name):
    indptr = torch.from_numpy(GRAPHS[name]().indptr).long()
    row_ids = torch.randperm(len(indptr) - 1, generator=torch.Generator().manual_seed(1)).int()
    for part_edges, mode, ids in ((1, "random", row_ids), (16, "late", None), (256, "early", row_ids)):
        check(monkeypatch, indptr, part_edges, mode, ids)


def test_many_rows(monkeypatch):
    lengths = np.random.default_rng(1).choice(
        [0, 1, 3, 16, 17, 100, 5000], 2500, p=[0.2, 0.3, 0.3, 0.1, 0.07, 0.02, 0.01]
    )
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    for mode in ("late", "random"):
        made = check(monkeypatch, indptr, 16, mode)
    assert len(made.parts) > 5000
    assert len(made.items) > 2500
