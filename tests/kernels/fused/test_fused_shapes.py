"""Grouped queries, batches, values of another width and lists of keys with `fused3s`, on the CPU (tests/cuda_shim) and
on a GPU, against float64."""

import pytest
import torch
from devices import kernels_of, on_cpu, on_gpu
from edge_cases import EDGE_LISTS, FORMS, assert_near, edge_inputs, in_order, map_tensors
from gpu_calls import no_waits
from poison import poisoned_buffers
from shape_cases import head_options, list_attention, shaped, shaped_attention

from bench.precision import matmul_precision
from fused3s import Dropout, EdgeData, KeyLists, PlanRoom, plan_attention
from fused3s.runtime.cuda_graph import capture

pytestmark = pytest.mark.usefixtures("one_thread", "highest")

GPU = torch.device("cuda", 0)
HALF, BFLOAT, FLOAT, SCALE = torch.float16, torch.bfloat16, torch.float32, 0.3
TYPES = (HALF, BFLOAT, FLOAT)
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
# Of each kernel: tiles of one head, folded heads, edge by edge.
CPU_SIZES = {
    "16 heads of one": (16, 1, 64, 64, 0),
    "groups of 3": (6, 2, 16, 16, 0),
    "groups of 4, narrow": (8, 2, 8, 8, 0),
    "wide values": (2, 2, 20, 33, 0),
    "narrow values of groups": (4, 1, 40, 24, 0),
    "a batch of groups": (4, 2, 16, 16, 3),
}
CPU_GRAPHS = (("hub", "torch_coo"), ("empty_rows_and_windows", "dgl"), ("repeated", "torch_csr"))  # one of each type


def planned(graph, sizes, dtype=HALF, device="cuda", **options):
    return plan_attention(graph, backend="fused3s", device=device, dtype=dtype, **(head_options(sizes) | options))


@pytest.fixture
def highest():
    """Three TF32 terms a product, which the bounds of float32 are for."""
    with matmul_precision("highest"):
        yield


def check(monkeypatch, graph, made, sizes, dtype, device, label, backward=True):
    """Output and log-sum-exp; the gradients twice, by autograd and by the plan, with the same bits."""
    tensors = shaped(graph.shape, sizes, dtype)
    leaves = [each.to(device).requires_grad_(backward) for each in tensors]
    exact = [each.double().requires_grad_() for each in tensors]
    expected, expected_lse = shaped_attention(graph, *exact, EdgeData(), SCALE)
    rounded, _ = shaped_attention(graph, *tensors, EdgeData(), SCALE, rounded=dtype)
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with kernels_of(device):
        plan = planned(made, sizes, dtype, device, shape=graph.shape, backward=backward)
        with poisoned_buffers(monkeypatch):
            output, lse = plan(*leaves, scale=SCALE, return_lse=True)
            if backward:
                found = torch.autograd.grad(output, leaves, factors.to(device))
                given = [each.detach() for each in (*leaves, output, lse)]
                again = plan.backward(factors.to(device), *given, scale=SCALE)[:3]
    assert_near(output.detach().cpu(), expected.detach(), rounded, tensors[2], f"{label}, {plan!r}")
    torch.testing.assert_close(lse.detach().cpu().double(), expected_lse.detach(), rtol=0, atol=LSE_ERROR[dtype])
    if backward:
        wanted = torch.autograd.grad(expected, exact, factors.double())
        largest = max(each.norm() for each in wanted)  # those of q and k vanish where a row has one edge
        for which, first, second, right in zip("qkv", found, again, wanted, strict=True):
            assert torch.equal(first, second), f"{label}: other bits the second time"
            size = right.norm() if device == "cpu" else largest
            assert (first.cpu().double() - right).norm() <= GRADIENT_ERROR[dtype] * size, f"{label}: {which}"


CASES = [on_cpu(sizes, dtype, id=f"cpu-{name}-{dtype}") for name, sizes in CPU_SIZES.items() for dtype in TYPES]
CASES += [on_gpu(sizes, dtype, id=f"cuda-{name}-{dtype}") for name, sizes in SIZES.items() for dtype in TYPES]


@pytest.mark.parametrize(("device", "sizes", "dtype"), CASES)
def test_every_edge_case_matches_float64(monkeypatch, device, sizes, dtype):
    """On the CPU one graph of a type, and gradients of the first."""
    if device == "cpu":
        name, form = CPU_GRAPHS[TYPES.index(dtype)]
        graph = EDGE_LISTS[name]()
        check(monkeypatch, graph, FORMS[form](graph)[0], sizes, dtype, device, name, backward=dtype == HALF)
        return
    for name, make_graph in EDGE_LISTS.items():
        graph = make_graph()
        check(monkeypatch, graph, torch.stack([graph.col, graph.row]).cuda(), sizes, dtype, device, name)


CASES = [
    on_cpu(kind, sizes, HALF, "scipy_csc", reorder, id=f"cpu-{kind}-{reorder}")
    for kind, sizes in (("bias_per_head", CPU_SIZES["16 heads of one"]), ("all", SIZES["groups of 3"]))
    for reorder in ("none", "communities", "given")
]
CASES += [
    on_gpu(kind, SIZES["groups of 3"], dtype, form, "none", id=f"cuda-{kind}-{dtype}-{form}")
    for kind in ("bias_per_head", "all")
    for dtype in TYPES
    for form in ("torch_coo", "scipy_coo", "dgl")
]


@pytest.mark.parametrize(("device", "kind", "sizes", "dtype", "form", "reorder"), CASES)
def test_edge_data_and_row_orders(monkeypatch, device, kind, sizes, dtype, form, reorder):
    graph, (heads, kv_heads, dim, *_) = EDGE_LISTS["repeated"](), sizes
    made, order = FORMS[form](graph)
    data = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
    if kind == "all":
        weights = {name: getattr(data, name)[:kv_heads] for name in ("key_weight", "value_weight")}
        data = EdgeData(**(vars(data) | weights | {"type_weight": data.type_weight[:, :kv_heads]}))
    tensors = shaped(graph.shape, sizes, dtype)
    if reorder == "given":
        reorder = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3))
    with kernels_of(device):
        plan = planned(made, sizes, dtype, device, edge_data=True, reorder=reorder)
        bound = plan.bind_edges(map_tensors(in_order(data, order), lambda each: each.to(device)))
        with poisoned_buffers(monkeypatch):
            output = plan(*(each.to(device) for each in tensors), scale=SCALE, edges=bound)
    expected, _ = shaped_attention(graph, *tensors, data, SCALE)
    rounded, _ = shaped_attention(graph, *tensors, data, SCALE, rounded=dtype)
    assert_near(output.cpu(), expected, rounded, tensors[2], f"{kind}, {plan!r}")


def test_a_group_shares_its_tiles():
    """16 query heads of one KV head fill a window: as many KV tiles a query as its keys need, not one plan a head."""
    graph = EDGE_LISTS["wide"]()
    with kernels_of("cpu"):
        plan = planned(FORMS["torch_coo"](graph)[0], (16, 1, 64, 64, 0), device="cpu")
    keys = torch.bincount(graph.row, minlength=graph.shape[0])
    assert len(plan.data.arrays.kv_tiles) - 2 == (-(-keys // 16)).sum()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_dropout_has_the_mask_of_the_reference(sizes):
    graph = EDGE_LISTS["hub"]()
    made, _ = FORMS["scipy_csr"](graph)
    heads, kv_heads, *_, batch = sizes
    batch = max(1, batch)
    tensors = shaped(graph.shape, sizes, HALF)
    counts = {"num_heads": batch * heads, "num_kv_heads": batch * kv_heads}
    expected = plan_attention(made, backend="reference", device="cpu", **counts)(*tensors, dropout=Dropout(0.4, 3))
    output = planned(made, sizes)(*(each.to(GPU) for each in tensors), dropout=Dropout(0.4, 3))
    assert (output.cpu() - expected).abs().max() < 4e-3 * expected.abs().max()


@pytest.mark.gpu
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
    planned(graph, sizes, **options)  # compiles
    torch.cuda.synchronize()
    with no_waits():
        plan = planned(graph, sizes, **options)
    tensors = [each.to(GPU) for each in shaped((2000, 3000), sizes, HALF)]
    assert plan(*tensors).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize("heads", [2, 16, 32])
def test_lists_fill_a_room_inside_a_cuda_graph(heads, lists):
    rows, cols, length, dim = 90, 70, 13, 64
    shape, sizes = (rows, *((lists,) if lists > 1 else ()), length), (heads, 2, dim, dim, 0)
    generator = torch.Generator().manual_seed(0)
    indices = torch.full(shape, -1, dtype=torch.int32, device=GPU)
    tensors = shaped((rows, cols), sizes, HALF)
    leaves = [each.to(GPU).requires_grad_() for each in tensors]
    options = {"dtype": HALF, "head_dim": dim, "num_heads": heads, "num_kv_heads": 2, "num_lists": lists}
    room = PlanRoom((rows, cols), indices.numel(), device=GPU, backward=True, **options)

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


def damaged(tensor: torch.Tensor, place: int | tuple[int, int], value: int) -> torch.Tensor:
    tensor[place] = value
    return tensor.to(GPU)


DAMAGED = {
    "edge_index": (lambda: damaged(torch.zeros((2, 90), dtype=torch.int64), (0, 17), 60), "edge_index: row 0.*60"),
    "lists": (
        lambda: KeyLists(damaged(torch.zeros((50, 4), dtype=torch.int64), (7, 2), 60)),
        r"KeyLists: entry \[7, 2\] is 60; 0 to 59 are allowed",
    ),
} | {
    f"indptr, {place}": (
        lambda place=place, value=value: (
            damaged(torch.arange(51) * 2, place, value),
            torch.zeros(100, dtype=torch.int64, device=GPU),
        ),
        "indptr",
    )
    for place, value in ((0, 1), (3, 140), (-1, 99))
}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("form", DAMAGED)
def test_an_error_in_a_graph_is_raised_at_a_later_call(form, size):
    """Or by the plan, where it waits."""
    make, message = DAMAGED[form]
    plan = planned(make(), (size, 1, 64, 64, 0), shape=(50, 60), check=False)
    tensors = [each.to(GPU) for each in shaped((50, 60), (size, 1, 64, 64, 0), HALF)]
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=message):
        plan(*tensors)
    with pytest.raises(ValueError, match=message):
        planned(make(), (size, 1, 64, 64, 0), shape=(50, 60), check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["groups of 3", "a batch of groups"])
def test_compiled_calls(name):
    graph, sizes = EDGE_LISTS["repeated"](), SIZES[name]
    plan = planned(FORMS["scipy_coo"](graph)[0], sizes, backward=True)
    leaves = [each.to(GPU).requires_grad_() for each in shaped(graph.shape, sizes, HALF)]

    def function(q, k, v):
        return plan(q, k, v, scale=SCALE) * 2

    expected, output = function(*leaves), torch.compile(function, fullgraph=True)(*leaves)
    torch.testing.assert_close(output, expected)
    factors = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(each, leaves, factors) for each in (output, expected))
    torch.testing.assert_close(found, wanted)
    torch.compiler.reset()
