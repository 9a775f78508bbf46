"""Low-rank edge features and dropout in cuda/tiles/forward.cu on the CPU (tests/cuda_shim), against dense float64."""

import re
from dataclasses import replace

import pytest
import torch
from edge_cases import EDGE_LISTS, FORMS, EdgeList, assert_edge_attention, edge_inputs, in_order, qkv
from poison import poisoned_buffers

from fused3s import Dropout, EdgeData, plan_attention
from fused3s.fused import backend as fused3s
from fused3s.fused.planning import plan as fused3s_planning
from fused3s.fused.tuning import SM90
from fused3s.runtime.source import CUDA_FOLDER
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def run(
    monkeypatch,
    graph,
    tensors,
    edges,
    mode="late",
    reorder="none",
    scale=0.4,
    num_sms=2,
    folder=CUDA_FOLDER,
    instance="",
    **arguments,
):
    """Output of a call that takes the kernel with tiles, whose name ends with `instance`, on a GPU of `num_sms`: many
    split windows."""
    heads, dim = tensors[0].shape[1:]
    made, order = FORMS["scipy_coo"](graph)
    with cuda_on_cpu(MODES[mode], num_sms=num_sms, folder=folder) as gpu:
        plan = plan_attention(
            made, backend="fused3s", device="cpu", dtype=tensors[0].dtype, head_dim=dim, num_heads=heads,
            edge_data=True, reorder=reorder,
        )  # fmt: skip
        with poisoned_buffers(monkeypatch):
            output = plan(*tensors, scale=scale, edges=in_order(edges, order), **arguments)
        assert re.fullmatch(f"fused3s<.*{instance}", gpu.launched[-1]), gpu.launched
    return output


def dense(rows: int, cols: int, density: float) -> EdgeList:
    mask = torch.rand(rows, cols, generator=torch.Generator().manual_seed(rows)) < density
    row, col = mask.nonzero().T
    return EdgeList(row, col, (rows, cols))


# Steps of 16 slots in a KV tile: 1 and 2, and more than a buffer holds.
DENSE = {density: dense(40, 70, density) for density in (0.1, 0.3)} | {1.0: dense(20, 33, 1.0)}
SPARSE = ("one_node_self_loop", "empty_rows_and_windows", "hub", "repeated", "wide")


@pytest.mark.parametrize(
    ("kind", "dim", "dtype", "mode", "reorder", "num_sms"),
    [
        ("features", 64, HALF, "late", "none", 132),
        ("features", 40, BFLOAT, "random", "communities", 2),
        ("key_features", 64, BFLOAT, "random", "none", 132),
        ("value_features", 64, HALF, "late", "communities", 2),
    ],
)
def test_features(monkeypatch, kind, dim, dtype, mode, reorder, num_sms):
    graphs = {name: EDGE_LISTS[name]() for name in SPARSE} | {f"density {d}": g for d, g in DENSE.items()}
    for name, graph in graphs.items():
        tensors = qkv(graph.shape, 1, dim, dtype)
        edges = edge_inputs(kind, graph.num_edges, 1, dim, dtype)
        output = run(monkeypatch, graph, tensors, edges, mode, reorder, num_sms=num_sms)
        assert_edge_attention(output, graph, tensors, edges, 0.4, f"{name}, {kind}")


@pytest.mark.parametrize(("heads", "dim", "group"), [(4, 16, 4), (5, 10, 3), (8, 8, 8), (2, 32, 2)])
def test_values_of_edges_of_a_group_of_heads(monkeypatch, heads, dim, group):
    """A value for all heads, or for each; the last group of 5 heads has an idle one."""
    tuning = replace(SM90, with_terms=())  # else sparse graphs go edge by edge
    for module in (fused3s, fused3s_planning):
        monkeypatch.setattr(module, "tuning_for", lambda gpu: tuning)
    graphs = {name: EDGE_LISTS[name]() for name in SPARSE} | {f"density {d}": g for d, g in DENSE.items()}
    for number, (name, graph) in enumerate(graphs.items()):
        tensors = qkv(graph.shape, heads, dim, HALF)
        for kind in ("bias", "multiplier_per_head", "bias_minus_infinity")[number % 2 :]:
            edges = edge_inputs(kind, graph.num_edges, heads, dim, HALF)
            mode, reorder = ("late", "random", "early")[number % 3], ("none", "communities")[number % 2]
            output = run(monkeypatch, graph, tensors, edges, mode, reorder, instance=f"{dim}, {group}, 4, 16, 1>")
            assert_edge_attention(output, graph, tensors, edges, 0.4, f"{name}, {kind}")


def test_features_of_many_columns_on_sm_120(monkeypatch, tmp_path):
    """On other architectures than sm_90, wide instances read rows and the number of keys again."""
    common = (CUDA_FOLDER / "common.cuh").read_text(encoding="utf-8")
    (tmp_path / "common.cuh").write_text(common.replace("__CUDA_ARCH__", "1200"), encoding="utf-8")
    for name in SPARSE:
        graph = EDGE_LISTS[name]()
        tensors = qkv(graph.shape, 1, 200, HALF)
        edges = edge_inputs("features", graph.num_edges, 1, 200, HALF)
        output = run(monkeypatch, graph, tensors, edges, reorder="communities", folder=tmp_path)
        assert_edge_attention(output, graph, tensors, edges, 0.4, name)


def test_features_with_other_terms_heads_and_an_odd_dimension(monkeypatch):
    graph = EDGE_LISTS["hub"]()
    for scale in (0.4, -0.4, 0.0):
        tensors = qkv(graph.shape, 2, 35, HALF)
        edges = replace(edge_inputs("all", graph.num_edges, 2, 35, HALF), types=None, type_weight=None)
        output = run(monkeypatch, graph, tensors, edges, scale=scale)
        assert_edge_attention(output, graph, tensors, edges, scale, f"scale {scale}")


def test_every_number_of_features(monkeypatch):
    graph = EDGE_LISTS["self_loops"]()
    tensors = qkv(graph.shape, 1, 64, HALF)
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 2, 8, 9, 16):
        features = torch.randn(graph.num_edges, rank, generator=generator).half()
        weights = (torch.randn(1, 64, rank, generator=generator).half() for _ in range(2))
        edges = EdgeData(features=features, **dict(zip(("key_weight", "value_weight"), weights, strict=True)))
        output = run(monkeypatch, graph, tensors, edges)
        assert_edge_attention(output, graph, tensors, edges, 0.4, f"{rank} features")


def test_products_beyond_fp16(monkeypatch):
    """u = W^T q and the sum of features over many edges do not fit fp16; scores and output do."""
    graph = dense(16, 300, 1.0)
    tensors = qkv(graph.shape, 1, 64, HALF)
    edges = edge_inputs("features", graph.num_edges, 1, 64, HALF)
    big = replace(edges, features=edges.features / 4096, key_weight=edges.key_weight * 8192)
    output = run(monkeypatch, graph, tensors, big, scale=0.05)
    assert_edge_attention(output, graph, tensors, big, 0.05, "large u")
    wide = EdgeData(features=edges.features.abs() * 1000, value_weight=edges.value_weight / 1000)
    output = run(monkeypatch, graph, tensors, wide, scale=0.0)
    assert_edge_attention(output, graph, tensors, wide, 0.0, "large s")


@pytest.mark.parametrize(
    ("kind", "heads", "dim", "dtype", "reorder", "num_sms"),
    [
        (None, 2, 64, HALF, "communities", 2),
        (None, 1, 35, BFLOAT, "none", 132),
        ("features", 1, 64, BFLOAT, "communities", 132),
        ("bias", 1, 64, HALF, "none", 2),
    ],
)
def test_dropout(monkeypatch, kind, heads, dim, dtype, reorder, num_sms):
    """The mask of kernels/terms/dropout.py; without edge data also from a plan without edge data."""
    for name in ("hub", "repeated", "empty_rows_and_windows"):
        graph = EDGE_LISTS[name]()
        tensors = qkv(graph.shape, heads, dim, dtype)
        made, order = FORMS["scipy_coo"](graph)
        edges = None if kind is None else edge_inputs(kind, graph.num_edges, heads, dim, dtype)
        ordered = None if edges is None else in_order(edges, order)
        arguments = {"scale": 0.4, "dropout": Dropout(0.3, -(7**20)), "return_lse": True, "edges": ordered}
        with cuda_on_cpu(MODES["random"], num_sms=num_sms) as gpu:
            options = {"device": "cpu", "dtype": dtype, "head_dim": dim, "num_heads": heads}
            plan = plan_attention(made, backend="fused3s", reorder=reorder, edge_data=kind is not None, **options)
            with poisoned_buffers(monkeypatch):
                output, lse = plan(*tensors, **arguments)
        assert gpu.launched[-1].startswith("fused3s<"), gpu.launched
        reference = plan_attention(made, backend="reference", edge_data=kind is not None, **options)
        expected, expected_lse = reference(*tensors, out_dtype=torch.float64, **arguments)
        # Rounded as torch would: keys, values and weights in the inputs' type cost as much as without dropout.
        size = tensors[2].double().norm(dim=-1).max()
        unit = torch.finfo(dtype).eps
        assert ((output.double() - expected).norm(dim=-1) <= 8 * unit * size).all(), f"{name}, {kind}"
        finite = expected_lse.isfinite()
        assert torch.equal(finite, lse.isfinite())
        assert ((lse - expected_lse)[finite].abs() <= 8 * unit).all(), f"{name}, {kind}: lse"
