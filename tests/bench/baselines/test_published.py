"""The wrappers of the authors' codes, with stand-ins for the functions of their packages."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bench_runs import config, run

from bench.baselines import REGISTRY
from fused3s import UnsupportedGraphError, plan_attention
from fused3s.graph.csr import CSRPattern

NODES, DIM = 37, 64  # 37 is no multiple of 8 or 16


def attention(indptr, indices, q, k, v, scale):
    """By rows, in float64."""
    output = torch.zeros(len(q), v.shape[1], dtype=torch.float64)
    for row, (first, last) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        columns = indices[first:last].long()
        weight = torch.softmax(k[columns].double() @ q[row].double() * scale, 0)
        output[row] = weight @ v[columns].double()
    return output


def preprocess_gpu(indices, indptr, nodes, height, width, windows, *per_edge):
    assert (nodes, height, width, len(windows)) == (NODES, 16, 16, 3)
    assert all(len(one) == len(indices) and one.dtype == torch.int32 for one in per_edge)
    assert per_edge[1].equal(torch.repeat_interleave(torch.arange(nodes, dtype=torch.int32), indptr.diff()))
    return indptr, None, None, None, None, indices, None, 0


def fused3s(indptr, order, indices, bitmaps, nodes, q, k, v, divisor, warps):
    assert (len(q) % 16, nodes, warps, q.dtype) == (0, NODES, 8, torch.float16)
    return torch.tensor(1.0), attention(indptr, indices, q[:nodes], k, v, 1 / divisor), None  # as F3S_kernel.cu


def blocks(indptr, indices, window, width, part):
    """The stored entries are the edges here: a row for each pointer."""
    assert (window, width, part, (len(indptr) - 1) % 16) == (8, 16, 32, 0)
    return indptr, indices, torch.ones(len(indices)), torch.zeros(1), torch.zeros(1)


def sddmm(dim, indptr, indices, stored, windows, q, k, most):
    rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
    assert most == -(-int(indptr.diff().max()) // 64) * 4
    return [(q[rows].float() * k[indices.long()].float()).sum(1)]


def spmm(indptr, indices, weight, windows, atomic, value, padded, width, nodes):
    assert (padded, width, nodes) == (48, value.shape[1], NODES)
    rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
    output = torch.zeros(padded, width).index_add(0, rows, weight[:, None] * value[indices.long()].float())
    return [torch.tensor(1.0), output[:nodes]]


def tiling(indptr, indices, ones, floats, q, k, v):
    assert (q.shape, q.dtype, floats) == ((NODES, 1, DIM), torch.float32, 128)
    return [attention(indptr, indices, q[:, 0], k[:, 0], v[:, 0], 1.0).float()[:, None]]


def hyper(indptr, indices, rows, ones, floats, q, k, v):
    assert rows.equal(torch.repeat_interleave(torch.arange(NODES), indptr.diff()).int())
    assert floats == 8 * int(indptr.diff().max())
    return [attention(indptr, indices, q[:, 0], k[:, 0], v[:, 0], 1.0).float()[:, None]]


def turbo(graph, x, Q, K, V, scale):  # noqa: N803 (its names)
    return attention(*graph, K[:, 0], Q[:, 0], V[:, 0], scale)[:, None]  # a row has a key there


def both_directions(indptr, indices, *transposed):
    sizes = (len(indptr) - 1,) * 2
    there, back = (
        torch.sparse_csr_tensor(*csr, torch.ones(len(indices)), sizes) for csr in ((indptr, indices), transposed)
    )
    assert there.to_dense().T.equal(back.to_dense())
    return indptr, indices


PACKAGES = {
    "F3S": {"preprocess_gpu": preprocess_gpu, "f3s_1tb1rw_scheduled_permuteV_scaleQK": fused3s},
    "FS_Block": {"blockProcess_sddmm_balance_gnn": blocks},
    "FS_SDDMM": {"forward_gen_fp16_gnn": sddmm},
    "FS_SpMM": {"forward_fp16_gnn": spmm, "forward_fp16_gnn_ones": spmm},
    "fused_gtconv": {"gt_tiling_inference": tiling, "gt_hyper_inference": hyper},
    "turbo_gnn": {
        "graph_transformer_aggr": turbo,
        "AdjacencyForwardBackwardWithNodeBuckets": SimpleNamespace(from_csr=both_directions),
    },
}
NAMES = [name for name in REGISTRY if name.startswith("published_") or name == "turbo_gnn"]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    for name, functions in PACKAGES.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    for name in NAMES:
        monkeypatch.setattr(REGISTRY[name], "unavailable", lambda device: None)


def problem(seed=0):
    torch.manual_seed(seed)
    mask = torch.rand(NODES, NODES) < 0.2
    mask[torch.arange(NODES), torch.arange(NODES)] = True
    csr = mask.to_sparse_csr()
    return CSRPattern(csr.crow_indices(), csr.col_indices(), (NODES, NODES)), torch.randn(3, NODES, 1, DIM) / 4


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("stable")])
def test_each_function_gets_its_arguments(name, scale):
    pattern, tensors = problem()
    q, k, v = tensors.to(REGISTRY[name].computes_in)
    output = plan_attention(pattern, backend=name, device="cpu")(q, k, v, scale=scale, out_dtype=torch.float32)
    expected = attention(pattern.indptr, pattern.indices, q[:, 0], k[:, 0], v[:, 0], scale)
    torch.testing.assert_close(output[:, 0].double(), expected, rtol=2e-3, atol=2e-3)


def test_gradients_of_turbo_gnn_are_measured_and_checked(tmp_path):
    settings = config("backward", "backends=[turbo_gnn, published_fused3s]", "shapes=[1x64]", "repeats=2")
    status, rows = run(settings, tmp_path / "backward.csv")
    times = [row for row in rows if row.metric == "time"]
    assert (status, [(row.backend, row.region, row.status) for row in times]) == (
        0,
        [
            ("turbo_gnn", "forward", "ok"),
            ("turbo_gnn", "backward", "ok"),
            ("published_fused3s", "forward", "unsupported"),
            ("published_fused3s", "backward", "unsupported"),
        ],
    )


def test_the_stable_softmax_is_dropped_as_in_the_authors_benchmark():
    pattern, tensors = problem()
    q, k, v = tensors.half()
    output = plan_attention(pattern, backend="published_flashsparse_stable", device="cpu")(q, k, v, scale=1.0)
    mask = pattern.indptr.new_zeros(NODES, NODES).bool()
    rows = torch.repeat_interleave(torch.arange(NODES), pattern.indptr.diff())
    mask[rows, pattern.indices.long()] = True
    unweighted = torch.where(mask, q[:, 0].float() @ k[:, 0].float().T, 0) @ v[:, 0].float()
    torch.testing.assert_close(output[:, 0].float(), unweighted, rtol=2e-2, atol=2e-2)


def test_what_a_code_cannot_take_is_refused():
    pattern, tensors = problem()
    with pytest.raises(ValueError, match="got 2 heads; backend published_fused3s takes one"):
        plan_attention(pattern, backend="published_fused3s", device="cpu")(*tensors.half().repeat(1, 1, 2, 1))
    wide = CSRPattern(pattern.indptr, pattern.indices, (NODES, NODES + 1))
    with pytest.raises(UnsupportedGraphError, match="a square graph is needed"):
        plan_attention(wide, backend="turbo_gnn", device="cpu")
    full = torch.ones(1600, 1600).to_sparse_csr()
    dense = CSRPattern(full.crow_indices(), full.col_indices(), (1600, 1600))
    with pytest.raises(UnsupportedGraphError, match="the longest row takes 51200 bytes"):
        plan_attention(dense, backend="published_dfgnn_hyper", device="cpu")
    assert "128 or 256 columns" in REGISTRY["turbo_gnn"].unsupported(torch.float16, 16)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_named_with_its_repository_and_commit(monkeypatch, tmp_path, name):
    monkeypatch.undo()
    settings = config("codes", "shapes=[1x64]", f"backends=[{name}]")
    status, (row, *_) = run(settings, tmp_path / "codes.csv")
    assert (status, row.backend, row.status) == (0, name, "unavailable")
    assert row.reason.startswith("its authors' package cannot be imported (No module named '")
    assert re.search(r"; build it from github\.com/\S+, commit [0-9a-f]{7}$", row.reason)
