"""The baseline `anemoi`: every row against float64, on a GPU and with its kernel in Triton's interpreter on the CPU."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES
from packaging.version import Version
from tolerance import FLOOR, assert_within_bound, edges_of, row_errors, torch_same_types

from bench.baselines import REGISTRY
from fused3s import plan_attention
from fused3s.backends.base import InputSpec
from fused3s.graph.csr import csr_pattern
from fused3s.terms.edge_data import BoundEdges, EdgeData, padded_columns

ROOT = Path(__file__).resolve().parents[3]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
BACKEND = REGISTRY["anemoi"]
# Triton reads the variable when it is imported, so the interpreter needs a process of its own, which
# `test_numbers_in_tritons_interpreter` starts with this file.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
numerical = pytest.mark.usefixtures("kernel") if INTERPRETED else pytest.mark.gpu
CASES = [name for name, graph in EDGE_CASES.items() if not INTERPRETED or graph().nnz < 850]  # 2 ms an edge there


@pytest.fixture
def kernel(monkeypatch):
    """The backend runs on DEVICE; skips with the reason where it cannot."""
    if not INTERPRETED:
        if reason := BACKEND.unavailable(torch.device("cuda", 0)):
            pytest.skip(reason)
        return
    from anemoi.models.triton.gt import graph_transformer_attention as operator

    monkeypatch.setattr(BACKEND, "unavailable", lambda device: None)
    operator.register_kernel("cpu")(operator._init_fn)  # anemoi registers it for CUDA alone


def inputs(graph, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(graph.shape) + 13 * heads + dim)
    rows, cols = graph.shape
    return [torch.randn(n, heads, dim, generator=generator).to(dtype).to(DEVICE) for n in (rows, cols, cols)]


def features_and_weight(num_edges: int, heads: int, dim: int, rank: int, dtype: torch.dtype, device: str = DEVICE):
    generator = torch.Generator().manual_seed(num_edges + rank)
    shapes = (num_edges, rank), (heads, dim, rank)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def exact_with_features(q, k, v, row, col, scale, features, weight) -> torch.Tensor:
    """The formula of `fused3s.terms.edge_data` in float64, row by row; features in edge order (row, col)."""
    q, k, v, features, weight = (tensor.double().cpu().numpy() for tensor in (q, k, v, features, weight))
    row, col = row.cpu().numpy(), col.cpu().numpy()
    output = np.zeros_like(q)
    for i in np.unique(row):
        edges = np.flatnonzero(row == i)
        added = np.einsum("hdr,er->ehd", weight, features[edges])
        score = np.einsum("hd,ehd->eh", q[i], k[col[edges]] + added) * scale
        p = np.exp(score - score.max(0))
        output[i] = np.einsum("eh,ehd->hd", p / p.sum(0), v[col[edges]] + added)
    return torch.from_numpy(output).to(DEVICE)


def assert_features_within_bound(output, q, k, v, row, col, scale, features, weight) -> None:
    """At most twice the error of PyTorch with k + E and v + E of every edge as keys and values of the inputs' type."""
    expected = exact_with_features(q, k, v, row, col, scale, features, weight)
    added = torch.einsum("hdr,er->ehd", weight.float(), features.float()).to(q.dtype)
    edge_keys, edge_values = k[col] + added, v[col] + added
    each = torch.arange(len(col), device=col.device)
    same_types = torch_same_types(q, edge_keys, edge_values, row, each, scale).to(output.dtype)
    allowed = 2 * row_errors(same_types, expected).max() + FLOOR
    errors = row_errors(output, expected)
    assert torch.isfinite(output).all()
    assert errors.max() <= allowed, f"row {divmod(int(errors.argmax()), q.shape[1])} is off by {errors.max():.2e}"


def assert_not_rounded(output, plan, q, k, v, scale=None) -> None:
    """A float32 output of 16-bit inputs is that of the same numbers in float32: nothing in between has 16 bits."""
    torch.testing.assert_close(output, plan(q.float(), k.float(), v.float(), scale=scale), rtol=1e-5, atol=1e-6)


def test_numbers_in_tritons_interpreter():
    """The numerical tests below with the kernel run by NumPy, statement by statement."""
    if INTERPRETED:
        pytest.skip("this is the interpreter")
    if torch.cuda.is_available():
        pytest.skip("the numerical tests run on the GPU")
    for package in ("triton", "anemoi-models"):
        if not any(importlib.metadata.distributions(name=package)):
            pytest.skip(f"the package {package} is not installed")
    if Version(importlib.metadata.version("triton")) < Version("3.9"):
        pytest.skip("the interpreter of older Triton (seen: 3.6) fails with NumPy 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "usefixtures", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout), run.stdout
    assert "skipped" not in run.stdout, run.stdout


@numerical
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_edge_cases(kernel, case, dtype):
    graph = EDGE_CASES[case]()
    q, k, v = inputs(graph, 2, 16, dtype)
    output = plan_attention(graph, backend="anemoi", device=DEVICE, dtype=dtype, head_dim=16, num_heads=2)(q, k, v)
    assert output.dtype == dtype
    assert output.is_contiguous()
    assert_within_bound(output, q, k, v, *edges_of(graph, DEVICE), 16**-0.5, case)


@numerical
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 64), (3, 5), (4, 10), (5, 16), (16, 64)])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(F16, F16), (F16, F32), (BF16, BF16), (F32, F32)], ids=str)
def test_heads_and_types(kernel, heads, dim, dtype, out_dtype):
    """Heads and columns that are no power of two are masked in the kernel."""
    graph = EDGE_CASES["fewer_rows_than_a_window"]()
    q, k, v = inputs(graph, heads, dim, dtype)
    plan = plan_attention(graph, backend="anemoi", device=DEVICE)
    output = plan(q, k, v, out_dtype=out_dtype)
    assert output.dtype == out_dtype
    assert_within_bound(output, q, k, v, *edges_of(graph, DEVICE), dim**-0.5, f"{heads} x {dim}")
    if out_dtype == F32:
        assert_not_rounded(output, plan, q, k, v)


@numerical
@pytest.mark.parametrize(("heads", "dim", "rank"), [(2, 16, 11), (3, 5, 1), (1, 8, 16)])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("case", ["empty_rows_and_windows", "one_edge_a_row", "fewer_rows_than_a_window", "no_edges"])
def test_edge_features(kernel, case, dtype, heads, dim, rank):
    graph = EDGE_CASES[case]()
    q, k, v = inputs(graph, heads, dim, dtype)
    features, weight = features_and_weight(graph.nnz, heads, dim, rank, dtype)
    plan = plan_attention(
        graph, backend="anemoi", device=DEVICE, dtype=dtype, head_dim=dim, num_heads=heads, edge_data=True
    )
    bound = plan.bind_edges(EdgeData(features=features, key_weight=weight, value_weight=weight))
    output = plan(q, k, v, edges=bound)
    assert_features_within_bound(output, q, k, v, *edges_of(graph, DEVICE), dim**-0.5, features, weight)


@pytest.mark.gpu
def test_cuda_graph_capture_and_replay(kernel):
    graph = EDGE_CASES["wide"]()
    plan = plan_attention(graph, backend="anemoi", device="cuda", dtype=F16, head_dim=64, num_heads=2)
    q, k, v = inputs(graph, 2, 64, F16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plan(q, k, v)
    torch.cuda.synchronize()
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        output = plan(q, k, v)
    q.copy_(torch.randn_like(q))
    cuda_graph.replay()
    torch.testing.assert_close(output, plan(q, k, v))


def test_format_is_csc_sorted_by_target():
    """Against SciPy's CSC of the adjacency with a row for each source: anemoi's own convention."""
    rng = np.random.default_rng(0)
    row, col = rng.integers(0, 30, 200), rng.integers(0, 20, 200)  # rows without an edge
    row[row % 5 == 0] = 1
    places = np.unique(row * 20 + col, return_index=True)[1]  # each edge once: SciPy adds repeated ones up
    graph = sp.coo_array((np.ones(len(places)), (row[places], col[places])), shape=(30, 20))
    from_source = sp.coo_array((np.ones(len(places)), (col[places], row[places])), shape=(20, 30)).tocsc()
    data = BACKEND.build(csr_pattern(graph), CPU, InputSpec())
    assert data.row.dtype == data.colptr.dtype == torch.int64
    np.testing.assert_array_equal(data.colptr, from_source.indptr)
    np.testing.assert_array_equal(data.row, from_source.indices)


@pytest.fixture
def few_edges():
    """The format of five edges on the CPU, a key, features [5, 3] and a weight [2, 8, 3]."""
    graph = sp.coo_array((np.ones(5), ([0, 0, 1, 3, 3], [2, 1, 0, 0, 3])), shape=(4, 4))
    data = BACKEND.build(csr_pattern(graph), CPU, InputSpec())
    return data, torch.randn(4, 2, 8), *features_and_weight(5, 2, 8, 3, F32, "cpu")


def edges_with(features: torch.Tensor, **weights: object) -> BoundEdges:
    num_features = features.shape[1]
    padded = torch.nn.functional.pad(features, (0, padded_columns(num_features) - num_features))
    return BoundEdges(padded_features=padded, num_features=num_features, **weights)


def test_edge_tensor_is_weight_times_features(few_edges):
    data, key, features, weight = few_edges
    expected = np.zeros((5, 2, 8))
    for e, h, d in np.ndindex(expected.shape):
        expected[e, h, d] = sum(float(weight[h, d, r]) * float(features[e, r]) for r in range(3))
    edges = edges_with(features, key_weight=weight, value_weight=weight.clone())
    for made in (BACKEND._edge_tensor(data, key, edges), BACKEND.keep_edge_tensor(edges)):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)
        assert made.is_contiguous()
    half = BACKEND._edge_tensor(data, key, edges.to(F16))
    assert half.dtype == F16
    np.testing.assert_allclose(half.float(), expected, rtol=5e-3, atol=5e-3)
