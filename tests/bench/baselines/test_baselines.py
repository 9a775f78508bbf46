"""The baselines on a GPU: every row against float64, NaN, launches, and refusals."""

import logging

import pytest
import torch
from attention_cases import EDGE_CASES, REAL_GRAPHS, REPEATED, load_real_graph
from gpu_calls import inputs
from poison import poisoned_buffers
from tolerance import assert_within_bound, edges_of

from bench.baselines import REGISTRY
from fused3s import plan_attention, sparse_attention
from fused3s.errors import UnsupportedGraphError

pytestmark = pytest.mark.gpu
logger = logging.getLogger(__name__)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CUDA_BACKENDS = {  # compiled by CuPy: type of the inputs, type of the output
    "dfgnn_tiling": (F32, F32),
    "dfgnn_hyper": (F32, F32),
    "flashsparse_naive": (F16, F32),
    "flashsparse_stable": (F16, F32),
}
TORCH_BACKENDS = {"csr_unfused": (F32, F32), "pyg": (F32, F32), "sdpa_padded": (F16, F16)}
EAGER_BACKENDS = CUDA_BACKENDS | TORCH_BACKENDS
MAY_REFUSE = {"dfgnn_hyper", "sdpa_padded", "flex_attention"}  # graphs that are too large for the method


def planned(backend: str, graph, dtype: torch.dtype, dim: int):
    """The plan; a skip with the reason if the backend is missing or the graph is too large for it."""
    if reason := REGISTRY[backend].unavailable(torch.device("cuda", 0)):
        pytest.skip(f"{backend}: {reason}")
    try:
        return plan_attention(graph, backend=backend, device="cuda", dtype=dtype, head_dim=dim)
    except UnsupportedGraphError as error:
        if backend not in MAY_REFUSE:
            raise
        pytest.skip(f"{backend}: {error}")


def check(monkeypatch, backend, graph, tensors, *, scale, label, out_dtype=None) -> float:
    q, k, v = tensors
    out_dtype = out_dtype or q.dtype
    plan = planned(backend, graph, q.dtype, q.shape[-1])
    if backend in CUDA_BACKENDS:
        with poisoned_buffers(monkeypatch):
            output = plan(q, k, v, scale=scale, out_dtype=out_dtype)
    else:
        output = plan(q, k, v, scale=scale, out_dtype=out_dtype)
    assert output.shape == q.shape
    assert output.dtype == out_dtype
    assert output.is_contiguous()
    label = f"{backend}, {label}, q {tuple(q.shape)} {q.dtype} -> {out_dtype}"
    normalised = backend.startswith("flashsparse")
    error = assert_within_bound(output, q, k, v, *edges_of(graph, "cuda"), scale, label, normalised)
    logger.info("%s: relative error %.1e", label, error)
    return error


@pytest.mark.parametrize("backend", EAGER_BACKENDS)
def test_repeated_edges_count_as_often_as_they_occur(monkeypatch, backend):
    dtype, out_dtype = EAGER_BACKENDS[backend]
    if backend == "csr_unfused":
        with pytest.raises(UnsupportedGraphError, match="repeats edges, which cuSPARSE does not add up"):
            plan_attention(REPEATED["one_repeated_edge"](), backend=backend, device="cuda")
        return
    for name, make_graph in REPEATED.items():
        graph = make_graph()
        tensors = inputs(*graph.shape, 2, 64, dtype)
        check(monkeypatch, backend, graph, tensors, scale=0.3, label=name, out_dtype=out_dtype)


@pytest.mark.parametrize("name", REAL_GRAPHS)
@pytest.mark.parametrize("backend", EAGER_BACKENDS)
def test_real_graphs(monkeypatch, real_graph_dir, backend, name):
    graph = load_real_graph(real_graph_dir, name)
    dtype, out_dtype = EAGER_BACKENDS[backend]
    tensors = inputs(*graph.shape, 1, 128, dtype)
    error = check(monkeypatch, backend, graph, tensors, scale=128**-0.5, label=name, out_dtype=out_dtype)
    assert error < (2e-5 if dtype == F32 else 2e-3)


@pytest.mark.parametrize("backend", EAGER_BACKENDS)
def test_edge_cases(monkeypatch, edge_case, backend):
    dtype, out_dtype = EAGER_BACKENDS[backend]
    tensors = inputs(*edge_case.shape, 2, 64, dtype)
    check(monkeypatch, backend, edge_case, tensors, scale=0.3, label="edge case", out_dtype=out_dtype)


@pytest.mark.parametrize("dim", [5, 8, 31, 32, 33, 64, 72, 96, 100, 128, 160, 192, 200, 224, 256])
@pytest.mark.parametrize("case", ["n_one_past_16", "wide", "hub"])
@pytest.mark.parametrize("backend", ["dfgnn_tiling", "dfgnn_hyper", "csr_unfused"])
def test_float32_dimensions(monkeypatch, backend, case, dim):
    """65 to 96 and 129 to 224 dimensions are wrong in the published dfgnn_tiling."""
    graph = EDGE_CASES[case]()
    check(monkeypatch, backend, graph, inputs(*graph.shape, 3, dim, F32), scale=dim**-0.5, label=case)


@pytest.mark.parametrize("dim", [8, 16, 24, 32, 64, 72, 96, 128, 200, 256])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(F16, F32), (F16, F16), (BF16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("case", ["n_one_past_16", "wide", "hub"])
@pytest.mark.parametrize("backend", ["flashsparse_naive", "flashsparse_stable"])
def test_half_dimensions(monkeypatch, backend, case, dtype, out_dtype, dim):
    graph = EDGE_CASES[case]()
    tensors = inputs(*graph.shape, 3, dim, dtype)
    check(monkeypatch, backend, graph, tensors, scale=dim**-0.5, label=case, out_dtype=out_dtype)


@pytest.mark.parametrize("name", ["cora", "musae-github", "ogbg-molhiv"])
def test_flex_attention_on_real_graphs(monkeypatch, real_graph_dir, name):
    graph = load_real_graph(real_graph_dir, name)
    check(monkeypatch, "flex_attention", graph, inputs(*graph.shape, 1, 128, F16), scale=128**-0.5, label=name)


@pytest.mark.parametrize("case", ["n_one_past_16", "empty_rows_and_windows", "hub", "wide", "no_edges"])
def test_flex_attention_edge_cases(monkeypatch, case):
    graph = EDGE_CASES[case]()
    check(monkeypatch, "flex_attention", graph, inputs(*graph.shape, 2, 64, F16), scale=0.3, label=case)


def test_naive_softmax_overflows_and_stable_does_not():
    """The paper's section on stability: exp(89) is infinite in float32."""
    graph = EDGE_CASES["n_one_short_of_16"]()
    q, k, v = inputs(*graph.shape, 1, 64, F16)
    row, col = edges_of(graph, "cuda")
    k[5] = 60 * k[5]
    scores = (q[row, 0].float() * k[col, 0].float()).sum(-1)
    largest = torch.full((graph.shape[0],), -torch.inf, device="cuda").scatter_reduce(0, row, scores, "amax")
    overflows, holds = largest > 89, largest < 80
    assert overflows.any()
    naive, stable = (
        sparse_attention(q, k, v, graph, scale=1.0, backend=f"flashsparse_{softmax}", out_dtype=F32)[:, 0]
        for softmax in ("naive", "stable")
    )
    assert torch.isfinite(stable).all()
    assert torch.isnan(naive[overflows]).all()
    assert torch.isfinite(naive[holds]).all()
    torch.testing.assert_close(naive[holds], stable[holds], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_nan_stays_where_the_contract_says(backend):
    graph = EDGE_CASES["n_one_past_16"]()
    dense = torch.from_numpy(graph.toarray() != 0)
    dtype, _ = CUDA_BACKENDS[backend]
    window = 8 if backend.startswith("flashsparse") else 1
    for poisoned in range(3):
        tensors = inputs(*graph.shape, 1, 64, dtype)
        tensors[poisoned][3] = torch.nan
        output = sparse_attention(*tensors, graph, backend=backend).cpu()
        bad = torch.isnan(output).any(-1).any(-1)
        if poisoned == 0:
            uses = may = torch.arange(65) == 3
        else:
            uses = may = dense[:, 3]
        if poisoned == 2:
            may = torch.cat([rows.any().expand(len(rows)) for rows in uses.split(window)])
        assert bad[uses].all(), f"{backend}: NaN in {'qkv'[poisoned]} is lost"
        wrong = torch.nonzero(bad & ~may).flatten().tolist()
        assert not wrong, f"{backend}: NaN in {'qkv'[poisoned]} reaches rows {wrong}"


@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_results_are_the_same_bits_every_time(real_graph_dir, backend):
    graph = load_real_graph(real_graph_dir, "musae-github")
    dtype, out_dtype = CUDA_BACKENDS[backend]
    plan = planned(backend, graph, dtype, 64)
    tensors = inputs(*graph.shape, 1, 64, dtype)
    first = plan(*tensors, out_dtype=out_dtype)
    assert all(torch.equal(plan(*tensors, out_dtype=out_dtype), first) for _ in range(20))


@pytest.mark.parametrize("backend", EAGER_BACKENDS)
def test_cuda_graph_capture_and_replay(backend):
    graph = EDGE_CASES["wide"]()
    dtype, out_dtype = EAGER_BACKENDS[backend]
    plan = planned(backend, graph, dtype, 64)
    q, k, v = inputs(*graph.shape, 2, 64, dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plan(q, k, v, out_dtype=out_dtype)
    torch.cuda.synchronize()
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        output = plan(q, k, v, out_dtype=out_dtype)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    cuda_graph.replay()
    torch.testing.assert_close(output, plan(q, k, v, out_dtype=out_dtype))
