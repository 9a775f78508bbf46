"""Grouped queries, batches, values of another width and lists of keys with `fused3s` on a GPU, against float64."""

import pytest
import torch
from edge_cases import EDGE_LISTS, FORMS, assert_near, edge_inputs
from float32_precision import matmul_precision
from gpu_calls import no_waits
from shape_cases import head_options, list_attention, shaped, shaped_attention

from fused3s import Dropout, EdgeData, KeyLists, PlanRoom, plan_attention
from fused3s.runtime.cuda_graph import capture

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
HALF, BFLOAT, FLOAT, SCALE = torch.float16, torch.bfloat16, torch.float32, 0.3
TYPES = pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=str)
GRADIENT_ERROR = {HALF: 2e-3, BFLOAT: 1.6e-2, FLOAT: 1e-5}  # two roundings; float32: of a whole gradient
LSE_ERROR = {HALF: 1e-3, BFLOAT: 8e-3, FLOAT: 1e-5}
# H, H_kv, d, d_v, B (0: no batch).
SIZES = {
    "16 heads of one": (16, 1, 128, 128, 0),
    "groups of 8": (16, 2, 64, 64, 0),
    "groups of 3": (6, 2, 16, 16, 0),
    "groups of 4, narrow": (32, 8, 8, 8, 0),
    "wide values": (2, 2, 64, 128, 0),
    "narrow values of groups": (8, 2, 192, 128, 0),
    "a batch of groups": (4, 2, 16, 32, 3),
}


def planned(graph, sizes, dtype, **options):
    return plan_attention(graph, backend="fused3s", device=GPU, dtype=dtype, **(head_options(sizes) | options))


@pytest.fixture(autouse=True)
def highest():
    """Three TF32 terms a product, which the bounds of float32 are for."""
    with matmul_precision("highest"):
        yield


@TYPES
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_edge_case_matches_float64(sizes, dtype):
    for name, make_graph in EDGE_LISTS.items():
        graph = make_graph()
        edge_index = torch.stack([graph.col, graph.row]).to(GPU)
        plan = planned(edge_index, sizes, dtype, shape=graph.shape, backward=True)
        tensors = shaped(graph.shape, sizes, dtype)
        leaves = [each.to(GPU).requires_grad_() for each in tensors]
        exact = [each.double().requires_grad_() for each in tensors]
        output, lse = plan(*leaves, scale=SCALE, return_lse=True)
        expected, expected_lse = shaped_attention(graph, *exact, EdgeData(), SCALE)
        rounded, _ = shaped_attention(graph, *tensors, EdgeData(), SCALE, rounded=dtype)
        assert_near(output.detach().cpu(), expected.detach(), rounded, tensors[2], f"{name}, {plan!r}")
        torch.testing.assert_close(lse.cpu().double(), expected_lse.detach(), rtol=0, atol=LSE_ERROR[dtype])
        factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        wanted = torch.autograd.grad(expected, exact, factors.double())
        largest = max(each.norm() for each in wanted)  # those of q and k vanish where a row has one edge
        twice = [torch.autograd.grad(output, leaves, factors.to(GPU), retain_graph=True) for _ in range(2)]
        for which, first, second, right in zip("qkv", *twice, wanted, strict=True):
            assert torch.equal(first, second), f"{name}: other bits the second time"
            error = (first.cpu().double() - right).norm()
            assert error <= GRADIENT_ERROR[dtype] * largest, f"{name}: {which}"


@TYPES
@pytest.mark.parametrize("kind", ["bias_per_head", "all"])
def test_edge_data(kind, dtype):
    sizes = heads, kv_heads, dim, *_ = SIZES["groups of 3"]
    graph = EDGE_LISTS["repeated"]()
    data = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
    if kind == "all":
        weights = {name: getattr(data, name)[:kv_heads] for name in ("key_weight", "value_weight")}
        data = EdgeData(**(vars(data) | weights | {"type_weight": data.type_weight[:, :kv_heads]}))
    tensors = shaped(graph.shape, sizes, dtype)
    on_gpu = {name: each.to(GPU) if isinstance(each, torch.Tensor) else each for name, each in vars(data).items()}
    for form in ("torch_coo", "scipy_coo", "dgl"):
        plan = planned(FORMS[form](graph)[0], sizes, dtype, edge_data=True)
        output = plan(*(each.to(GPU) for each in tensors), scale=SCALE, edges=plan.bind_edges(EdgeData(**on_gpu)))
        expected, _ = shaped_attention(graph, *tensors, data, SCALE)
        rounded, _ = shaped_attention(graph, *tensors, data, SCALE, rounded=dtype)
        assert_near(output.cpu(), expected, rounded, tensors[2], f"{form}, {plan!r}")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_dropout_has_the_mask_of_the_reference(sizes):
    graph = EDGE_LISTS["hub"]()
    made, _ = FORMS["scipy_csr"](graph)
    heads, kv_heads, *_, batch = sizes
    batch = max(1, batch)
    tensors = shaped(graph.shape, sizes, HALF)
    counts = {"num_heads": batch * heads, "num_kv_heads": batch * kv_heads}
    expected = plan_attention(made, backend="reference", device="cpu", **counts)(*tensors, dropout=Dropout(0.4, 3))
    output = planned(made, sizes, HALF)(*(each.to(GPU) for each in tensors), dropout=Dropout(0.4, 3))
    assert (output.cpu() - expected).abs().max() < 4e-3 * expected.abs().max()


@pytest.mark.parametrize("form", ["edge_index", "csr", "lists", "lists of KV heads"])
def test_a_plan_does_not_wait(form):
    generator = torch.Generator().manual_seed(0)
    lists = torch.randint(-1, 3000, (2000, 4, 9), generator=generator).to(GPU)
    graph = {
        "edge_index": lambda: torch.stack([lists[:, 0].flatten().clamp(min=0), torch.arange(18_000).to(GPU) % 2000]),
        "csr": lambda: ((torch.arange(2001) * 9).to(GPU), lists[:, 0].flatten().clamp(min=0)),
        "lists": lambda: KeyLists(lists[:, 0]),
        "lists of KV heads": lambda: KeyLists(lists),
    }[form]()
    options, sizes = {"shape": (2000, 3000), "check": False, "backward": True}, (8, 4, 64, 64, 0)
    planned(graph, sizes, HALF, **options)  # compiles
    torch.cuda.synchronize()
    with no_waits():
        plan = planned(graph, sizes, HALF, **options)
    tensors = [each.to(GPU) for each in shaped((2000, 3000), sizes, HALF)]
    assert plan(*tensors).isfinite().all()


@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize("heads", [2, 16, 32])
def test_lists_fill_a_room_inside_a_cuda_graph(heads, lists):
    rows, cols, length, dim = 90, 70, 13, 64
    shape, sizes = (rows, *((lists,) if lists > 1 else ()), length), (heads, 2, dim, dim, 0)
    generator = torch.Generator().manual_seed(0)
    indices = torch.full(shape, -1, dtype=torch.int32, device=GPU)
    tensors = shaped((rows, cols), sizes, HALF)
    leaves = [each.to(GPU).requires_grad_() for each in tensors]
    room = PlanRoom(
        (rows, cols), indices.numel(), device=GPU, dtype=HALF, head_dim=dim, num_heads=heads, num_kv_heads=2,
        num_lists=lists, backward=True,
    )  # fmt: skip

    def run():
        room.fill(KeyLists(indices))
        output = room.plan(*leaves, scale=SCALE)
        return [output, *torch.autograd.grad(output.float().sum(), leaves)]

    captured = capture(run, GPU)
    for _ in range(3):
        filled = torch.randint(-1, cols, shape, generator=generator, dtype=torch.int32)
        filled[5] = -1
        indices.copy_(filled)
        output, *gradients = captured.replay()
        room.check()
        exact = [each.double().requires_grad_() for each in tensors]
        expected = list_attention(filled, *exact, SCALE)[0]
        assert (output.cpu().double() - expected).abs().max() < 4e-3
        assert not output[5].any()
        wanted = torch.autograd.grad(expected.sum(), exact)
        for got, right in zip(gradients, wanted, strict=True):
            assert (got.cpu().double() - right).norm() <= 2e-3 * max(right.norm(), 1e-1 * rows)
    indices[3, ..., 2] = cols
    captured.replay()
    with pytest.raises(ValueError, match=rf"KeyLists: entry \[3, .*2\] is {cols}"):
        room.check()


@pytest.mark.parametrize("size", [1, 4])
def test_an_error_in_lists_is_raised_at_a_later_call(size):
    indices = torch.zeros((50, 4), dtype=torch.int64, device=GPU)
    indices[7, 2] = 60
    plan = planned(KeyLists(indices), (size, 1, 64, 64, 0), HALF, shape=(50, 60), check=False)
    tensors = [each.to(GPU) for each in shaped((50, 60), (size, 1, 64, 64, 0), HALF)]
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"KeyLists: entry \[7, 2\] is 60; 0 to 59 are allowed"):
        plan(*tensors)


@pytest.mark.parametrize(("place", "value"), [(0, 1), (3, 40), (-1, 19)])
def test_a_damaged_csr_of_grouped_queries(place, value):
    offsets, indices = (torch.arange(11) * 2).to(GPU), torch.zeros(20, dtype=torch.int64, device=GPU)
    offsets[place] = value
    with pytest.raises(ValueError, match="indptr"):
        planned((offsets, indices), (4, 1, 64, 64, 0), HALF, shape=(10, 5), check=True)
    tensors = [each.to(GPU) for each in shaped((10, 5), (4, 1, 64, 64, 0), HALF)]
    plan = planned((offsets, indices), (4, 1, 64, 64, 0), HALF, shape=(10, 5), check=False)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="indptr"):
        plan(*tensors)


@pytest.mark.parametrize("name", ["groups of 3", "a batch of groups"])
def test_compiled_calls(name):
    graph, sizes = EDGE_LISTS["repeated"](), SIZES[name]
    plan = planned(FORMS["scipy_coo"](graph)[0], sizes, HALF, backward=True)
    leaves = [each.to(GPU).requires_grad_() for each in shaped(graph.shape, sizes, HALF)]

    def function(q, k, v):
        return plan(q, k, v, scale=SCALE) * 2

    expected, output = function(*leaves), torch.compile(function, fullgraph=True)(*leaves)
    torch.testing.assert_close(output, expected)
    factors = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(each, leaves, factors) for each in (output, expected))
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right)
    torch.compiler.reset()
