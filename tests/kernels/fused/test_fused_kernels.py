"""Calls of the fused kernels on a GPU: strides, streams, threads and CUDA graphs; skewed and huge graphs. Every row
against float64: test_cuda_on_cpu.py; random graphs: tests/kernels/test_properties.py."""

import threading

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES
from gpu_calls import inputs
from tolerance import assert_within_bound, edges_of

from fused3s import plan_attention, sparse_attention

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


@pytest.fixture(params=["fused3s_paper", "fused3s"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def test_strided_views_of_a_fused_projection_need_no_copy(monkeypatch, backend):
    graph = EDGE_CASES["n_one_past_16"]()
    fused = torch.randn(65, 3, 4, 32, device="cuda").half()
    q, k, v = fused.unbind(1)
    plan = plan_attention(graph, backend=backend, dtype=q.dtype, head_dim=32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", lambda *args, **kwargs: pytest.fail("copied"))
        output = plan(q, k, v)
    expected = sparse_attention(q.contiguous(), k.contiguous(), v.contiguous(), graph, backend=backend)
    assert torch.equal(output, expected)


def test_runs_on_the_current_stream(backend):
    """A kernel on a side stream reads an input that is written late on that stream."""
    graph = EDGE_CASES["n_one_past_16"]()
    plan = plan_attention(graph, backend=backend, dtype=torch.float16, head_dim=64)
    q, k, v = inputs(65, 65, 1, 64, torch.float16)
    expected = plan(q, k, v)
    late = torch.full_like(v, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late.copy_(v)
        output = plan(q, k, late)
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


def test_two_threads_compile_and_run_at_once(monkeypatch, backend):
    monkeypatch.setattr("fused3s.runtime.jit._kernels", {})
    graph = EDGE_CASES["n_one_past_16"]()
    jobs = {dim: inputs(65, 65, 1, dim, torch.float16) for dim in (40, 104)}
    expected = {dim: sparse_attention(*tensors, graph, backend=backend) for dim, tensors in jobs.items()}
    monkeypatch.setattr("fused3s.runtime.jit._kernels", {})
    torch.cuda.synchronize()
    results: dict[int, list[torch.Tensor]] = {dim: [] for dim in jobs}

    def work(dim: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                results[dim].append(sparse_attention(*jobs[dim], graph, backend=backend))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(dim,)) for dim in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dim, outputs in results.items():
        assert len(outputs) == 50
        assert all(torch.equal(output, expected[dim]) for output in outputs)


def test_offsets_past_2_to_31_elements(backend):
    """The rows of K and V with edges start more than 2^31 elements into the tensor."""
    num_cols, dim = 2**31 // 256 + 1000, 256
    last = np.arange(num_cols - 100, num_cols)
    graph = sp.csr_array((np.ones(100, np.int8), last, np.array([0, 100])), shape=(1, num_cols))
    k = torch.zeros(num_cols, 1, dim, device="cuda", dtype=torch.float16)
    k[-100:] = torch.randn(100, 1, dim, device="cuda").half()
    q = torch.randn(1, 1, dim, device="cuda").half()
    output = sparse_attention(q, k, k, graph, backend=backend)
    dense = sparse_attention(q, k[-100:], k[-100:], sp.csr_array(np.ones((1, 100))), backend=backend)
    assert torch.equal(output, dense)


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
