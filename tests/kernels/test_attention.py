"""The public call on the CPU: backends against dense float64, the contract of docs/semantics.md, error messages."""

import logging
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import dense_attention, mask_of
from edge_cases import qkv
from tolerance import row_errors

from bench.baselines import REGISTRY
from fused3s import (
    SlowerBackendWarning,
    attention,
    plan_attention,
    sparse_attention,
)
from fused3s.attention import _choose
from fused3s.backends.base import InputSpec
from fused3s.runtime.device import _lacks

FLOAT32_BACKENDS = ["dgl", "reference", "csr_unfused", "scatter"]  # convert 16-bit inputs; the others keep them
SPARSE_BACKENDS = [*FLOAT32_BACKENDS, "pyg"]  # a NaN stays in the rows that use it
CPU_BACKENDS = [*SPARSE_BACKENDS, "sdpa_padded"]


def random_graph(rows: int = 40, cols: int = 40) -> sp.csr_array:
    return sp.random_array((rows, cols), density=0.15, format="csr", rng=np.random.default_rng(1))


# Scores of 0 are edges, huge ones do not overflow, and -300 in all scores of a row changes nothing (docs/semantics.md).
QUERIES = {"normal": lambda q: q, "zero": torch.zeros_like, "huge": lambda q: 1e4 * q, "shifted": lambda q: q}


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_against_dense_float64(edge_case, backend, query):
    q, k, v = qkv(edge_case.shape, 2, 16)
    q = QUERIES[query](q)
    if query == "shifted":
        q[..., 0], k[..., 0] = 1.0, -1200.0
    scale = (None, 1.0, -0.5)[(edge_case.nnz + CPU_BACKENDS.index(backend)) % 3] if query == "normal" else None
    output = sparse_attention(q, k, v, edge_case, backend=backend, scale=scale)
    expected = dense_attention(q, k, v, mask_of(edge_case), 0.25 if scale is None else scale)
    assert output.dtype == torch.float32
    # A few hundred float32 roundings a row; of large scores, those of a score.
    bound = {"huge": None, "shifted": 1e-3}.get(query, 2e-5)
    assert output.isfinite().all() if bound is None else row_errors(output, expected).max() < bound


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_and_two_dimensions(backend, dtype):
    graph = sp.vstack([random_graph(39, 40), sp.csr_array((1, 40))]).tocsr()
    q, k, v = (tensor[:, 0] for tensor in qkv((40, 40), 2, 16, dtype))
    output = sparse_attention(q, k, v, graph, backend=backend)
    assert output.shape == q.shape
    assert output.dtype == dtype
    expected = dense_attention(q[:, None], k[:, None], v[:, None], mask_of(graph), 0.25)[:, 0]
    unit = torch.finfo(dtype).eps
    # One rounding of the output, or a few of scores and weights too.
    roundings = 1 if backend in FLOAT32_BACKENDS else 8
    assert row_errors(output, expected).max() < max(roundings * unit, 1e-6)
    assert sparse_attention(q, k, v, graph, backend=backend, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
@pytest.mark.parametrize("backend", SPARSE_BACKENDS)
def test_nan_reaches_the_rows_that_use_it_and_no_others(backend, poisoned):
    graph = random_graph()
    tensors = dict(zip("qkv", qkv((40, 40), 2, 16), strict=True))
    tensors[poisoned][7] = torch.nan
    output = sparse_attention(*tensors.values(), graph, backend=backend)
    uses = torch.arange(40) == 7 if poisoned == "q" else mask_of(graph)[:, 7]
    assert uses.any()
    assert torch.isnan(output[uses]).all()
    assert torch.isfinite(output[~uses]).all()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Choices for a GPU, where all backends of "auto" but DGL can run."""
    monkeypatch.setattr(attention, "_warned", set())
    for backend in REGISTRY.values():
        reason = "built without CUDA" if backend.name == "dgl" else None
        monkeypatch.setattr(backend, "unavailable", lambda device, reason=reason: reason)
    return lambda *inputs: _choose("auto", torch.device("cuda", 0), InputSpec(*inputs), "none").name


def test_auto_says_once_for_a_reason_why_it_leaves_fused3s(on_a_gpu, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_a_gpu(torch.bfloat16, 64, 8) == "fused3s"
    for dtype, head_dim, reason in ((torch.float64, 64, "torch.float64"), (torch.bfloat16, 300, "300")):
        with pytest.warns(SlowerBackendWarning, match=f"backend scatter and not with fused3s.* got .*{reason}"):
            assert on_a_gpu(dtype, head_dim, 8) == "scatter"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert on_a_gpu(dtype, head_dim, 8) == "scatter"
    for name in ("fused3s", "fused3s_paper"):
        monkeypatch.setattr(REGISTRY[name], "unavailable", lambda device: "the package cupy is not installed")
    with pytest.warns(SlowerBackendWarning, match="scatter and not .* the package cupy is not installed"):
        assert on_a_gpu(torch.float16, 64, 8) == "scatter"


def test_auto_logs_its_choice(caplog):
    graph = random_graph()
    q, k, v = qkv((40, 40), 2, 16)
    with caplog.at_level(logging.INFO, logger="fused3s"):
        plan = plan_attention(graph, device="cpu", dtype=torch.float32, head_dim=16)
    assert plan.backend == "csr_unfused"
    assert "attention backend: csr_unfused on cpu (not fused3s: " in caplog.text
    torch.testing.assert_close(plan(q, k, v), sparse_attention(q, k, v, graph))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "chosen"),
    [(torch.float32, 64, "fused3s"), (torch.float64, 64, "csr_unfused"), (torch.float16, 260, "csr_unfused")],
)
def test_auto_passes_over_backends_that_cannot_take_the_inputs(monkeypatch, dtype, head_dim, chosen):
    for backend in REGISTRY.values():
        monkeypatch.setattr(backend, "unavailable", lambda device: None)
    assert _choose("auto", torch.device("cpu"), InputSpec(dtype, head_dim), "none").name == chosen


def test_log_sum_exp_is_that_of_the_dense_scores():
    graph = sp.vstack([random_graph(39, 40), sp.csr_array((1, 40))]).tocsr()
    q, k, v = (tensor[:, 0] for tensor in qkv((40, 40), 2, 16))
    output, lse = plan_attention(graph, device="cpu", backend="reference")(q, k, v, scale=0.3, return_lse=True)
    score = (q.double() @ k.double().T * 0.3).masked_fill(~mask_of(graph), -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(score, 1).float())
    assert (lse == -torch.inf).any(), "a row without an edge"
    torch.testing.assert_close(output, sparse_attention(q, k, v, graph, scale=0.3, backend="reference"))
    with pytest.raises(ValueError, match="return_lse: backend dgl has no log-sum-exp; these have: fused3s, reference"):
        plan_attention(graph, device="cpu", backend="dgl")(q, k, v, return_lse=True)


@pytest.fixture
def no_gpu_seen():
    """What GPUs lack is looked for anew, in the test and after it."""
    _lacks.cache_clear()
    yield
    _lacks.cache_clear()


@pytest.mark.usefixtures("no_gpu_seen")
def test_gpu_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())  # CuPy may be left out
    for name in ("fused3s_paper", "dfgnn_tiling", "flashsparse_stable"):
        reason = REGISTRY[name].unavailable(torch.device("cuda", 0))
        assert reason == "Tesla T4 has compute capability 7.5; 8.0 or higher is needed"


@pytest.mark.parametrize("is_installed", [False, True])
@pytest.mark.usefixtures("no_gpu_seen")
def test_missing_cupy_is_named(is_installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object() if is_installed else None)
    reason = REGISTRY["fused3s"].unavailable(torch.device("cuda", 0))
    assert reason is None if is_installed else reason.startswith("the package cupy is not installed")
