"""Plans of `fused3s` on the CPU (tests/cuda_shim): shapes of heads, strides, the choice of the kernel, other inputs."""

import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES
from edge_cases import EDGE_LISTS, FORMS, assert_edge_attention, edge_inputs, in_order, qkv
from poison import poisoned_buffers

from fused3s import AttentionPlan, EdgeData, ScoreTerm, plan_attention
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu
from tests.cuda_shim.oracle import GRAPHS, assert_attention, inputs

pytestmark = ON_SHIM

HALF, BFLOAT = torch.float16, torch.bfloat16
# Odd dimensions are padded; 9 heads of 8 columns are groups of five and of four.
SHAPES = [(1, 1), (2, 3), (9, 8), (4, 13), (8, 16), (3, 31), (5, 32), (2, 50), (3, 64), (2, 129), (32, 8), (1, 256)]


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


def planned(graph, heads: int, dim: int, dtype: torch.dtype = HALF, **options) -> AttentionPlan:
    return plan_attention(graph, backend="fused3s", device="cpu", dtype=dtype, head_dim=dim, num_heads=heads, **options)


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_every_shape_of_heads_matches_float64(monkeypatch, heads, dim):
    dtype = (HALF, BFLOAT)[SHAPES.index((heads, dim)) % 2]
    for name, reorder, mode in (("hub", "none", "late"), ("empty_rows_and_windows", "communities", "random")):
        graph = GRAPHS[name]()
        with cuda_on_cpu(MODES[mode]):
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
    with cuda_on_cpu() as gpu:
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
    with cuda_on_cpu() as gpu:
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
    with cuda_on_cpu() as gpu:
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
    with cuda_on_cpu() as gpu:
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
    with cuda_on_cpu() as gpu:
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
    with cuda_on_cpu() as gpu:
        plan = planned(made, 1, 32, edge_data=True, reorder=reorder)
        for heads, dim in ((4, 8), (1, 32)):
            tensors, edges = qkv(graph.shape, heads, dim, HALF), edge_inputs(kind, graph.num_edges, heads, dim, HALF)
            ordered = in_order(edges, order)
            output = called(monkeypatch, plan, tensors, edges=plan.bind_edges(ordered))
            assert_edge_attention(output, graph, tensors, edges, 0.3, f"{kind}, {reorder}")
            assert torch.equal(output, called(monkeypatch, plan, tensors, edges=ordered))
        kernel = launched_by(monkeypatch, gpu, plan, tensors, edges=ordered)
    assert kernel.startswith("fused3s_edges<" if kind == "all" else "fused3s<")
