"""Grouped queries, batches and values of another width with the kernels of `fused3s` on the CPU (tests/cuda_shim)."""

import pytest
import torch
from edge_cases import EDGE_LISTS, FORMS, assert_near, edge_inputs, in_order
from poison import poisoned_buffers
from shape_cases import head_options, shaped, shaped_attention

from fused3s import EdgeData, plan_attention
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT, SCALE = torch.float16, torch.bfloat16, torch.float32, 0.3
# H, H_kv, d, d_v, B (0: no batch), of each kernel: tiles of one head, folded heads, edge by edge.
SIZES = {
    "16 heads of one": (16, 1, 64, 64, 0),
    "groups of 3": (6, 2, 16, 16, 0),
    "groups of 4, narrow": (8, 2, 8, 8, 0),
    "wide values": (2, 2, 20, 33, 0),
    "narrow values of groups": (4, 1, 40, 24, 0),
    "a batch of groups": (4, 2, 16, 16, 3),
}


def planned(graph, sizes, dtype=HALF, **options):
    return plan_attention(graph, backend="fused3s", device="cpu", dtype=dtype, **(head_options(sizes) | options))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_output_and_lse(monkeypatch, sizes):
    for number, (name, form) in enumerate(
        (("hub", "torch_coo"), ("empty_rows_and_windows", "dgl"), ("repeated", "torch_csr"))
    ):
        graph, dtype = EDGE_LISTS[name](), (HALF, BFLOAT, FLOAT)[number]
        tensors = shaped(graph.shape, sizes, dtype)
        with cuda_on_cpu(MODES["late"]):
            plan = planned(FORMS[form](graph)[0], sizes, dtype)
            with poisoned_buffers(monkeypatch):
                output, lse = plan(*tensors, scale=SCALE, return_lse=True)
        expected, expected_lse = shaped_attention(graph, *tensors, EdgeData(), SCALE)
        rounded, _ = shaped_attention(graph, *tensors, EdgeData(), SCALE, rounded=dtype)
        assert_near(output, expected, rounded, tensors[2], f"{name}, {plan!r}")
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-2 if dtype == BFLOAT else 2e-3)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients(monkeypatch, sizes):
    graph = EDGE_LISTS["hub"]()
    tensors = shaped(graph.shape, sizes, HALF)
    exact = [each.double().requires_grad_() for each in tensors]
    expected, _ = shaped_attention(graph, *exact, EdgeData(), SCALE)
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).half()
    wanted = torch.autograd.grad(expected, exact, factors.double())
    with cuda_on_cpu(MODES["late"]):
        plan = planned(FORMS["torch_coo"](graph)[0], sizes, backward=True)
        leaves = [each.clone().requires_grad_() for each in tensors]
        with poisoned_buffers(monkeypatch):
            output, lse = plan(*leaves, scale=SCALE, return_lse=True)
            found = torch.autograd.grad(output, leaves, factors)
            given = [each.detach() for each in leaves]
            again = plan.backward(factors, *given, output.detach(), lse, scale=SCALE)[:3]
    for name, left, right, same in zip("qkv", found, wanted, again, strict=True):
        assert ((left.double() - right).norm() / right.norm()).item() < 2e-3, name
        assert torch.equal(left, same), name


@pytest.mark.parametrize("reorder", ["none", "communities", "given"])
@pytest.mark.parametrize(
    ("kind", "sizes"), [("bias_per_head", SIZES["16 heads of one"]), ("all", SIZES["groups of 3"])]
)
def test_edge_data_and_row_orders(monkeypatch, kind, sizes, reorder):
    graph = EDGE_LISTS["repeated"]()
    made, order = FORMS["scipy_csc"](graph)
    heads, kv_heads, dim, *_ = sizes
    data = edge_inputs(kind, graph.num_edges, heads, dim, HALF)
    weights = {
        name: each[:kv_heads] for name in ("key_weight", "value_weight") if (each := getattr(data, name)) is not None
    }
    if data.type_weight is not None:
        weights["type_weight"] = data.type_weight[:, :kv_heads]
    data = EdgeData(**(vars(data) | weights))
    tensors = shaped(graph.shape, sizes, HALF)
    perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3))
    with cuda_on_cpu():
        plan = planned(made, sizes, edge_data=True, reorder=perm if reorder == "given" else reorder)
        with poisoned_buffers(monkeypatch):
            output = plan(*tensors, scale=SCALE, edges=plan.bind_edges(in_order(data, order)))
    if reorder == "communities":
        assert sorted(plan.order.perm.tolist()) == list(range(graph.shape[0]))
    expected, _ = shaped_attention(graph, *tensors, data, SCALE)
    rounded, _ = shaped_attention(graph, *tensors, data, SCALE, rounded=HALF)
    assert_near(output, expected, rounded, tensors[2], f"{kind}, {plan!r}")


def test_a_group_shares_its_tiles():
    """16 query heads of one KV head fill a window: as many KV tiles a query as its keys need, not one plan a head."""
    graph = EDGE_LISTS["wide"]()
    made, _ = FORMS["torch_coo"](graph)
    with cuda_on_cpu():
        plan = planned(made, (16, 1, 64, 64, 0))
    keys = torch.bincount(graph.row, minlength=graph.shape[0])
    assert len(plan.data.arrays.kv_tiles) - 2 == (-(-keys // 16)).sum()
