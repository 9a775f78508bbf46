"""The CUDA kernels of `fused3s` on parts of a graph, run on the CPU (tests/cuda_shim), against dense attention."""

import numpy as np
import parallel_jobs
import pytest
import scipy.sparse as sp
import torch
from edge_cases import dense_edge_attention

from parallel import builder, partition_graph, source_from_csr
from tests.cuda_shim.cuda_on_cpu import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")

NODES = 70
ERROR = 2e-3  # relative, of a whole tensor: a few roundings to float16


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two parts of rows at random: an empty row, and a column that every other row has."""
    mask = np.random.default_rng(0).random((NODES, NODES)) < 0.1
    mask[:, 5] = True
    mask[3] = False
    parts = np.random.default_rng(1).integers(2, size=NODES).astype(np.int32)
    monkeypatch.setattr(builder, "_assign", lambda *_: parts)
    matrix = sp.csr_array(mask)
    partition_graph(source_from_csr(matrix.indptr, matrix.indices), tmp_path, 2, "contiguous")
    return str(tmp_path), torch.from_numpy(mask)


@pytest.mark.parametrize("scheme", ["halo", "heads", "allgather"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (4, 8)])
def test_outputs_and_gradients(pool, folder, scheme, heads, dim):
    generator = torch.Generator().manual_seed(2)
    *inputs, grad_output = (torch.randn((NODES, heads, dim), generator=generator).half() for _ in range(4))
    found = pool.run(parallel_jobs.attend_by_fused3s, 2, [(folder[0], inputs, grad_output)], scheme, {})
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    output, _ = dense_edge_attention(*leaves, folder[1], dim**-0.5)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, grad_output.double())]
    rows, *computed = (torch.cat(tensors) for tensors in zip(*(of_rank[0] for of_rank in found), strict=True))
    for what, got, right in zip(("output", "dq", "dk", "dv"), computed, expected, strict=True):
        assert got.dtype == torch.float16
        error = ((got.double() - right[rows]).norm() / right.norm()).item()
        assert error < ERROR, f"{what}: relative error {error:.1e}"
    assert (computed[0][rows == 3] == 0).all()
