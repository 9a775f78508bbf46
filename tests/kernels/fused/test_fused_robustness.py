"""The fused kernels on a GPU: skewed and huge graphs. Random ones: tests/kernels/test_properties.py."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from gpu_calls import inputs
from tolerance import assert_within_bound, edges_of

from fused3s import plan_attention

pytestmark = pytest.mark.gpu

BACKENDS = ["fused3s", "fused3s_paper"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hub_of_a_hundred_thousand_edges_among_a_million_empty_rows(backend):
    num_rows, hubs = 1_000_003, [0, 17, 500_000, 1_000_002]
    rng = np.random.default_rng(5)
    columns = [rng.choice(num_rows, 100_000, replace=False) for _ in hubs]
    row = np.repeat(hubs, 100_000)
    graph = sp.coo_array((np.ones(row.size, np.int8), (row, np.concatenate(columns))), shape=(num_rows,) * 2).tocsr()
    q, k, v = inputs(num_rows, num_rows, 1, 64, torch.half)
    output = plan_attention(graph, backend=backend)(q, k, v, scale=0.3, out_dtype=torch.float32)
    assert_within_bound(output, q, k, v, *edges_of(graph, "cuda"), 0.3, backend)
    empty = torch.ones(num_rows, dtype=torch.bool)
    empty[hubs] = False
    assert (output[empty.cuda()] == 0).all()


def test_nearly_as_many_edges_as_an_int32_counts():
    """A complete graph of 46,340 nodes and 2^31 - 88,048 edges; every row against dense attention by torch."""
    num_nodes = 46_340
    if torch.cuda.mem_get_info()[0] < 120 << 30:
        pytest.skip("needs 120 GiB of free GPU memory")
    indptr = torch.arange(num_nodes + 1, device="cuda") * num_nodes
    indices = torch.arange(num_nodes, dtype=torch.int32, device="cuda").repeat(num_nodes)
    graph = torch.sparse_csr_tensor(
        indptr, indices, torch.ones(1, dtype=torch.int8, device="cuda").expand(len(indices)), (num_nodes,) * 2
    )
    q, k, v = (tensor[:, 0] for tensor in inputs(num_nodes, num_nodes, 1, 64, torch.half))
    plan = plan_attention(graph, backend="fused3s")
    output, lse = plan(q, k, v, scale=0.1, out_dtype=torch.float32, return_lse=True)
    for rows in torch.arange(num_nodes, device="cuda").split(4096):
        score = q[rows].double() @ k.double().T * 0.1
        expected = torch.softmax(score, 1) @ v.double()
        error = (output[rows] - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 5e-3  # a mean of 46,340 values is small beside their rounding
        torch.testing.assert_close(lse[rows].double(), torch.logsumexp(score, 1), rtol=0, atol=1e-3)
