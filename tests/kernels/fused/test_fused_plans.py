"""Forward calls of plans of `fused3s`, on the CPU (tests/cuda_shim) and on a GPU: shapes of heads, strides, edge data
over KV tiles and edge by edge, the choice of the kernel, streams, CUDA graphs."""

import re
from dataclasses import replace

import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES, load_real_graph
from devices import kernels_of
from edge_cases import (
    EDGE_LISTS,
    FORMS,
    KINDS,
    EdgeList,
    assert_edge_attention,
    edge_inputs,
    in_order,
    map_tensors,
    qkv,
)  # fmt: skip
from gpu_calls import no_waits
from poison import poisoned_buffers
from tolerance import assert_within_bound, edges_of

from fused3s import AttentionPlan, Dropout, EdgeData, ScoreTerm, plan_attention
from fused3s.fused import backend as fused3s
from fused3s.fused.planning import plan as fused3s_planning
from fused3s.fused.tuning import SM90
from fused3s.runtime.source import CUDA_FOLDER
from tests.cuda_shim.oracle import GRAPHS, assert_attention, inputs

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Odd dimensions are padded; 9 heads of 8 columns are groups of five and of four.
SHAPES = [(1, 1), (2, 3), (9, 8), (4, 13), (8, 16), (3, 31), (5, 32), (2, 50), (3, 64), (2, 129), (32, 8), (1, 256)]
GPU_SHAPES = [(1, 128), (8, 16), (8, 8), (4, 16), (4, 13), (8, 10), (16, 64), (32, 8), (1, 256), (1, 1)]
REAL_GRAPHS = ["cora", "ogbg-molhiv"]

on_a_gpu = pytest.mark.parametrize(("heads", "dim"), GPU_SHAPES)


def planned(graph, heads: int, dim: int, dtype: torch.dtype = HALF, device: str = "cpu", **options) -> AttentionPlan:
    options |= {"dtype": dtype, "head_dim": dim, "num_heads": heads}
    return plan_attention(graph, backend="fused3s", device=device, **options)


def moved(given, device: str = "cuda"):
    """Tensors, or edge data, on the device."""
    return map_tensors(given, lambda x: x.to(device)) if isinstance(given, EdgeData) else [x.to(device) for x in given]


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_every_shape_of_heads_matches_float64(monkeypatch, heads, dim):
    dtype = (HALF, BFLOAT)[SHAPES.index((heads, dim)) % 2]
    for name, reorder, mode in (("hub", "none", "late"), ("empty_rows_and_windows", "communities", "random")):
        graph = GRAPHS[name]()
        with kernels_of("cpu", mode):
            plan = planned(graph, heads, dim, dtype, reorder=reorder)
            for heads_last in (False, True):
                tensors = inputs(graph, heads, dim, dtype)
                given = tensors
                if heads_last:  # stored [N, d, H]
                    given = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in tensors]
                with poisoned_buffers(monkeypatch):
                    output, lse = plan(*given, scale=0.3, return_lse=True)
                assert (output.shape, output.dtype) == (tensors[0].shape, dtype)
                assert output.is_contiguous()
                label = f"{name}, heads last: {heads_last}, {plan!r}"
                assert_attention(output, tensors, graph, 0.3, label, lse=lse)


def dense(rows: int, cols: int, density: float) -> EdgeList:
    mask = torch.rand(rows, cols, generator=torch.Generator().manual_seed(rows)) < density
    row, col = mask.nonzero().T
    return EdgeList(row, col, (rows, cols))


# Steps of 16 slots in a KV tile: 1 and 2, and more than a buffer holds.
DENSE = {density: dense(40, 70, density) for density in (0.1, 0.3)} | {1.0: dense(20, 33, 1.0)}
SPARSE = ("one_node_self_loop", "empty_rows_and_windows", "hub", "repeated", "wide")


def check_edge_data(
    monkeypatch, graph, edges, heads, dim, dtype, mode="late", reorder="none", scale=0.4, instance="", **shim
) -> None:
    """A call that takes the kernel with tiles, whose name ends with `instance`, on a GPU of `num_sms`: few have many
    split windows."""
    tensors, (made, order) = qkv(graph.shape, heads, dim, dtype), FORMS["scipy_coo"](graph)
    with kernels_of("cpu", mode, **shim) as gpu:
        plan = planned(made, heads, dim, dtype, edge_data=True, reorder=reorder)
        with poisoned_buffers(monkeypatch):
            output = plan(*tensors, scale=scale, edges=in_order(edges, order))
        assert re.fullmatch(f"fused3s<.*{instance}", gpu.launched[-1]), gpu.launched
    assert_edge_attention(output, graph, tensors, edges, scale, repr(plan))


@pytest.mark.parametrize(
    ("kind", "dim", "dtype", "mode", "reorder", "num_sms"),
    [
        ("features", 64, HALF, "late", "none", 132),
        ("features", 40, BFLOAT, "random", "communities", 2),
        ("key_features", 64, BFLOAT, "random", "none", 132),
        ("value_features", 64, HALF, "late", "communities", 2),
    ],
)
def test_features_over_tiles(monkeypatch, kind, dim, dtype, mode, reorder, num_sms):
    for graph in (*(EDGE_LISTS[name]() for name in SPARSE), *DENSE.values()):
        edges = edge_inputs(kind, graph.num_edges, 1, dim, dtype)
        check_edge_data(monkeypatch, graph, edges, 1, dim, dtype, mode, reorder, num_sms=num_sms)


@pytest.mark.parametrize(("heads", "dim", "group"), [(4, 16, 4), (5, 10, 3), (8, 8, 8), (2, 32, 2)])
def test_values_of_edges_of_a_group_of_heads(monkeypatch, heads, dim, group):
    """A value for all heads, or for each; the last group of 5 heads has an idle one."""
    tuning = replace(SM90, with_terms=())  # else sparse graphs go edge by edge
    for module in (fused3s, fused3s_planning):
        monkeypatch.setattr(module, "tuning_for", lambda gpu: tuning)
    for number, graph in enumerate([*(EDGE_LISTS[name]() for name in SPARSE), *DENSE.values()]):
        for kind in ("bias", "multiplier_per_head", "bias_minus_infinity")[number % 2 :]:
            edges = edge_inputs(kind, graph.num_edges, heads, dim, HALF)
            mode, reorder = ("late", "random", "early")[number % 3], ("none", "communities")[number % 2]
            instance = f"{dim}, {group}, 4, 16, 1>"
            check_edge_data(monkeypatch, graph, edges, heads, dim, HALF, mode, reorder, instance=instance)


def test_features_of_many_columns_on_sm_120(monkeypatch, tmp_path):
    """On other architectures than sm_90, wide instances read rows and the number of keys again."""
    common = (CUDA_FOLDER / "common.cuh").read_text(encoding="utf-8")
    (tmp_path / "common.cuh").write_text(common.replace("__CUDA_ARCH__", "1200"), encoding="utf-8")
    for name in SPARSE:
        graph = EDGE_LISTS[name]()
        edges = edge_inputs("features", graph.num_edges, 1, 200, HALF)
        check_edge_data(monkeypatch, graph, edges, 1, 200, HALF, reorder="communities", folder=tmp_path)


def test_features_of_other_terms_heads_and_numbers(monkeypatch):
    """An odd dimension; every number of features."""
    graph = EDGE_LISTS["hub"]()
    for scale in (0.4, -0.4, 0.0):
        edges = replace(edge_inputs("all", graph.num_edges, 2, 35, HALF), types=None, type_weight=None)
        check_edge_data(monkeypatch, graph, edges, 2, 35, HALF, scale=scale)
    graph = EDGE_LISTS["self_loops"]()
    for rank in (1, 2, 8, 9, 16):
        edges = edge_inputs("features", graph.num_edges, 1, 64, HALF, rank)
        check_edge_data(monkeypatch, graph, edges, 1, 64, HALF)


def test_products_beyond_fp16(monkeypatch):
    """u = W^T q and the sum of features over many edges do not fit fp16; scores and output do."""
    graph = dense(16, 300, 1.0)
    edges = edge_inputs("features", graph.num_edges, 1, 64, HALF)
    big = replace(edges, features=edges.features / 4096, key_weight=edges.key_weight * 8192)
    check_edge_data(monkeypatch, graph, big, 1, 64, HALF, scale=0.05)
    wide = EdgeData(features=edges.features.abs() * 1000, value_weight=edges.value_weight / 1000)
    check_edge_data(monkeypatch, graph, wide, 1, 64, HALF, scale=0.0)


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
        with kernels_of("cpu", "random", num_sms=num_sms) as gpu:
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


def _scattered(edges_per_row: int) -> sp.csr_array:
    """480 rows without a common key: 16 edges a KV tile."""
    row = torch.arange(480).repeat_interleave(edges_per_row)
    col = row * edges_per_row + torch.arange(edges_per_row).repeat(480)
    return sp.csr_array((torch.ones(len(row)).numpy(), (row.numpy(), col.numpy())), shape=(480, 480 * edges_per_row))


def _filled_tiles(edges_per_tile: int) -> sp.csr_array:
    """One row window of 16 KV tiles of 16 columns, each with so many edges, along its diagonals: no column is empty."""
    edge = torch.arange(edges_per_tile)
    col = edge % 16
    row = (col + edge // 16) % 16
    tile = torch.zeros(16, 16).index_put((row, col), torch.tensor(1.0))
    return sp.csr_array(tile.repeat(1, 16).numpy())


CHOICE_GRAPHS = {
    "2 edges a row, 16 a tile": lambda: _scattered(2),
    "8 edges a row, 16 a tile": lambda: _scattered(8),
    "32 edges a tile": lambda: _filled_tiles(32),
    "40 edges a tile": lambda: _filled_tiles(40),
    "60 edges a tile": lambda: _filled_tiles(60),
    "256 edges a tile": EDGE_CASES["dense"],
}


def called(monkeypatch, plan: AttentionPlan, tensors: list[torch.Tensor], **arguments) -> torch.Tensor:
    with poisoned_buffers(monkeypatch):
        return plan(*tensors, scale=0.3, **arguments)


def launched_by(monkeypatch, gpu, plan: AttentionPlan, tensors: list[torch.Tensor], **arguments) -> str:
    """Name of the attention kernel of a call; products with weights of features have kernels of their own."""
    before = len(gpu.launched)
    called(monkeypatch, plan, tensors, **arguments)
    (name,) = (name for name in gpu.launched[before:] if name.startswith("fused3s"))
    return name


@pytest.mark.parametrize(
    ("name", "by_edge", "by_tile"),
    [
        ("2 edges a row, 16 a tile", [(8, 8), (2, 7), (8, 16), (4, 13)], [(1, 8), (1, 128), (4, 32), (2, 64)]),
        ("8 edges a row, 16 a tile", [(8, 8), (8, 16), (4, 32), (2, 31)], [(1, 16), (1, 128), (2, 34), (2, 64)]),
        ("32 edges a tile", [(8, 8), (2, 3), (8, 16), (2, 9)], [(1, 8), (1, 16), (4, 32), (2, 17)]),
        ("40 edges a tile", [(8, 8), (2, 3)], [(1, 8), (8, 16), (4, 32), (2, 9)]),
        ("256 edges a tile", [], [(8, 8), (8, 16), (4, 32), (2, 13)]),
    ],
)
def test_choice_of_the_kernel_without_edge_data(monkeypatch, name, by_edge, by_tile):
    graph = CHOICE_GRAPHS[name]()
    with kernels_of("cpu") as gpu:
        for heads, dim in by_edge + by_tile:
            plan = planned(graph, heads, dim)
            kernel = launched_by(monkeypatch, gpu, plan, inputs(graph, heads, dim, HALF)).partition("<")[0]
            assert kernel == ("fused3s_edges" if (heads, dim) in by_edge else "fused3s"), (heads, dim)
            assert (plan.data.arrays.row_items is not None) == ((heads, dim) in by_edge), "arrays that no call reads"


@pytest.mark.parametrize(
    ("name", "kind", "heads", "dim", "instance"),
    [
        ("256 edges a tile", "bias", 1, 128, "fused3s<Element::kHalf, Element::kHalf, 128, 1, 4, 16, 1>"),
        ("256 edges a tile", "clamp", 1, 64, "fused3s<Element::kHalf, Element::kHalf, 64, 1, 4, 16, 1>"),
        ("256 edges a tile", "multiplier_per_head", 4, 16, "fused3s<Element::kHalf, Element::kHalf, 16, 4, 4, 16, 1>"),
        ("256 edges a tile", "types", 1, 128, "fused3s_edges<Element::kHalf, Element::kHalf, 128, 1, 1>"),
        ("2 edges a row, 16 a tile", "key_features", 1, 64, "fused3s<Element::kHalf, Element::kHalf, 64, 1, 4, 2, 1>"),
        ("256 edges a tile", "features", 2, 64, "fused3s<Element::kHalf, Element::kHalf, 64, 1, 4, 6, 1>"),
        ("256 edges a tile", "features", 1, 16, "fused3s<Element::kHalf, Element::kHalf, 16, 1, 4, 6, 1>"),
        ("256 edges a tile", "features", 2, 16, "fused3s_edges<Element::kHalf, Element::kHalf, 16, 2, 6>"),
        ("2 edges a row, 16 a tile", "features", 1, 16, "fused3s_edges<Element::kHalf, Element::kHalf, 16, 1, 6>"),
        ("256 edges a tile", "all", 2, 16, "fused3s_edges<Element::kHalf, Element::kHalf, 16, 2, 23>"),
        ("8 edges a row, 16 a tile", "bias", 1, 32, "fused3s<Element::kHalf, Element::kHalf, 32, 1, 4, 16, 1>"),
        ("8 edges a row, 16 a tile", "bias", 4, 16, "fused3s_edges<Element::kHalf, Element::kHalf, 16, 4, 16>"),
        ("8 edges a row, 16 a tile", "bias", 2, 64, "fused3s_edges<Element::kHalf, Element::kHalf, 64, 2, 16>"),
        ("2 edges a row, 16 a tile", "bias", 2, 64, "fused3s<Element::kHalf, Element::kHalf, 64, 1, 4, 16, 1>"),
    ],
)
def test_choice_of_the_kernel_with_edge_data(monkeypatch, name, kind, heads, dim, instance):
    graph = CHOICE_GRAPHS[name]()
    edges = edge_inputs(kind, graph.nnz, heads, dim, HALF)
    with kernels_of("cpu") as gpu:
        plan = planned(graph, heads, dim, edge_data=True)
        assert launched_by(monkeypatch, gpu, plan, inputs(graph, heads, dim, HALF), edges=edges) == instance


@pytest.mark.parametrize(
    ("name", "heads", "dim", "by_tile"),
    [
        ("8 edges a row, 16 a tile", 1, 64, False),
        ("40 edges a tile", 1, 64, False),
        ("60 edges a tile", 1, 64, True),
        ("60 edges a tile", 4, 16, False),
        ("256 edges a tile", 4, 16, True),
    ],
)
def test_choice_of_the_backward_kernel_with_values_of_edges(monkeypatch, name, heads, dim, by_tile):
    """A second value takes the other kernel."""
    graph = CHOICE_GRAPHS[name]()
    bias, factor = torch.zeros(graph.nnz, dtype=HALF), torch.ones(graph.nnz, dtype=HALF)
    with kernels_of("cpu") as gpu:
        plan = planned(graph, heads, dim, edge_data=True, backward=True)
        assert (plan.data.arrays.column_slot_edges is not None) == by_tile, "arrays that no call reads"
        for edges, tiles in ((EdgeData(bias=bias), by_tile), (EdgeData(bias=bias, multiplier=factor), False)):
            query, key, value = (each.requires_grad_() for each in inputs(graph, heads, dim, HALF))
            with poisoned_buffers(monkeypatch):
                output, before = plan(query, key, value, edges=edges), len(gpu.launched)
                output.sum().backward()
            kernels = {launched.partition("<")[0] for launched in gpu.launched[before:]}
            assert kernels == ({"fused3s_backward"} if tiles else {"gradients_over_rows", "gradients_over_columns"})


@pytest.mark.parametrize(("heads", "dim", "group"), [(8, 8, 8), (4, 16, 4), (5, 10, 3), (2, 32, 2), (3, 24, 2)])
def test_a_term_of_all_heads_is_computed_for_a_group_of_them(monkeypatch, heads, dim, group):
    """A value of each column or row, or none; values of single heads take the kernel for one head."""
    graph = CHOICE_GRAPHS["256 edges a tile"]()
    num_rows, num_cols = graph.shape
    generator = torch.Generator().manual_seed(heads)
    weight = torch.randn(num_cols, generator=generator).masked_fill_(torch.arange(num_cols) % 5 == 0, -torch.inf)
    tensors = inputs(graph, heads, dim, HALF)
    terms = {
        "column": (ScoreTerm("s + w", col={"w": weight}), group),
        "row": (ScoreTerm("s * w", row={"w": torch.randn(num_rows, generator=generator)}), group),
        "cap": (ScoreTerm("cap * tanh(s / cap)", cap=0.7), group),
        "heads": (ScoreTerm("s * w", head={"w": torch.randn(heads, generator=generator)}), 1),
    }
    reference = plan_attention(graph, backend="reference", device="cpu")
    with kernels_of("cpu") as gpu:
        plan = planned(graph, heads, dim)
        for name, (term, folded) in terms.items():
            for scale in (0.3, -0.3):
                data = EdgeData(score=term)
                with poisoned_buffers(monkeypatch):
                    output = plan(*tensors, scale=scale, edges=data)
                assert gpu.launched[-1] == f"fused3s<Element::kHalf, Element::kHalf, {dim}, {folded}, 4, 16, 1>", name
                expected = reference(*tensors, scale=scale, edges=data, out_dtype=torch.float64)
                size = tensors[2].double().norm(dim=-1).max()
                error = (output.double() - expected).norm(dim=-1).max()
                assert error <= 4 * torch.finfo(HALF).eps * size, f"{name}, scale {scale}: off by {error:.2e}"


def test_a_plan_takes_heads_that_it_was_not_made_for(monkeypatch):
    graph = CHOICE_GRAPHS["8 edges a row, 16 a tile"]()
    with kernels_of("cpu") as gpu:
        plan = planned(graph, 1, 128)
        for heads, dim, group in ((8, 16, 4), (9, 8, 5), (1, 128, 1), (2, 13, 2)):
            tensors = inputs(graph, heads, dim, HALF)
            with poisoned_buffers(monkeypatch):
                output = plan(*tensors)
            assert_attention(output, tensors, graph, dim**-0.5, f"{heads} x {dim}")
            padded = dim + dim % 2 * (-dim % 8)
            assert gpu.launched[-1] == f"fused3s<Element::kHalf, Element::kHalf, {padded}, {group}, 4, 0, 1>"


@pytest.mark.parametrize("reorder", ["none", "communities"])
@pytest.mark.parametrize("kind", ["bias_per_head", "all"])
def test_a_plan_takes_edge_data_of_heads_that_it_was_not_made_for(monkeypatch, kind, reorder):
    """Both kernels: one head of 32 columns with a bias goes tile by tile."""
    graph = EDGE_LISTS["repeated"]()
    made, order = FORMS["scipy_coo"](graph)
    with kernels_of("cpu") as gpu:
        plan = planned(made, 1, 32, edge_data=True, reorder=reorder)
        for heads, dim in ((4, 8), (1, 32)):
            tensors, edges = qkv(graph.shape, heads, dim, HALF), edge_inputs(kind, graph.num_edges, heads, dim, HALF)
            ordered = in_order(edges, order)
            output = called(monkeypatch, plan, tensors, edges=plan.bind_edges(ordered))
            assert_edge_attention(output, graph, tensors, edges, 0.3, f"{kind}, {reorder}")
            assert torch.equal(output, called(monkeypatch, plan, tensors, edges=ordered))
        kernel = launched_by(monkeypatch, gpu, plan, tensors, edges=ordered)
    assert kernel.startswith("fused3s_edges<" if kind == "all" else "fused3s<")


@pytest.mark.gpu
@on_a_gpu
def test_every_kind_on_every_edge_list(monkeypatch, heads, dim):
    for index, (name, make_graph) in enumerate(EDGE_LISTS.items()):
        graph, dtype = make_graph(), (HALF, BFLOAT)[index % 2]
        made, order = FORMS["scipy_coo"](graph)
        plan = planned(made, heads, dim, dtype, "cuda", edge_data=True, reorder=("none", "communities")[index // 2 % 2])
        tensors = qkv(graph.shape, heads, dim, dtype)
        given = moved(tensors)
        for kind in KINDS:
            edges = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
            bound = plan.bind_edges(in_order(moved(edges), order.to("cuda")))
            with poisoned_buffers(monkeypatch):
                output = plan(*given, scale=0.4, edges=bound)
            assert_edge_attention(output.cpu(), graph, tensors, edges, 0.4, f"{name}, {kind}, {dtype}")
            assert torch.equal(plan(*given, scale=0.4, edges=bound), output), f"{name}, {kind}: other bits"


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", [*REAL_GRAPHS, "empty_rows_and_windows", "hub", "dense"])
def test_every_shape_without_edge_data(monkeypatch, real_graph_dir, name, heads, dim):
    graph = EDGE_CASES[name]() if name in EDGE_CASES else load_real_graph(real_graph_dir, name)
    for dtype, reorder in ((HALF, "none"), (BFLOAT, "communities")):
        plan = planned(graph, heads, dim, dtype, "cuda", reorder=reorder)
        q, k, v = moved(qkv(graph.shape, heads, dim, dtype))
        heads_last = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)]
        with poisoned_buffers(monkeypatch):
            output = plan(q, k, v, scale=0.3)
        assert_within_bound(output, q, k, v, *edges_of(graph, "cuda"), 0.3, f"{name}, {dtype}, {reorder}")
        assert torch.equal(plan(*heads_last, scale=0.3), output)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "bias_per_head", "all"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (8, 16), (4, 13)])
def test_cuda_graph_capture_and_replay(real_graph_dir, kind, heads, dim):
    """With edge data bound before the capture."""
    graph = load_real_graph(real_graph_dir, "cora")
    plan = planned(graph, heads, dim, HALF, "cuda", edge_data=kind is not None)
    bound = kind and plan.bind_edges(moved(edge_inputs(kind, graph.nnz, heads, dim, HALF)))
    tensors = moved(qkv(graph.shape, heads, dim, HALF))
    plan(*tensors, edges=bound)  # compiles
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        output = plan(*tensors, edges=bound)
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    for _ in range(2):
        output.fill_(torch.nan)
        cuda_graph.replay()
        assert torch.equal(output, plan(*tensors, edges=bound))


@pytest.mark.gpu
def test_a_bound_call_does_not_wait_for_the_gpu(real_graph_dir):
    graph = load_real_graph(real_graph_dir, "cora")
    for heads, dim in ((1, 128), (8, 16), (4, 13)):
        plan = planned(graph, heads, dim, HALF, "cuda", edge_data=True)
        edges = moved(edge_inputs("all", graph.nnz, heads, dim, HALF))
        bound = plan.bind_edges(edges)
        tensors = moved(qkv(graph.shape, heads, dim, HALF))
        plan(*tensors, edges=bound)
        with no_waits():
            plan(*tensors, edges=bound)
