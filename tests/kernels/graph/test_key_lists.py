"""Plans from lists of keys, [num_rows, k] and one list for each KV head, against dense float64 attention."""

from functools import partial

import pytest
import torch
from gpu_plan_on_cpu import gpu_on_cpu
from poison import poisoned_buffers
from shape_cases import as_edges, list_attention, shaped, shaped_attention

from fused3s import EdgeData, KeyLists, PlanRoom, ScoreTerm, plan_attention, plan_many, sparse_attention
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER, cuda_on_cpu

DOUBLE, HALF, SCALE = torch.float64, torch.float16, 0.3
BACKENDS = ["reference", "csr_unfused", "scatter", "dgl", "pyg", "formula"]
pytestmark = pytest.mark.usefixtures("one_thread", "formula")
close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)


def indices_of(*size: int, num_keys: int, dtype=torch.int64, seed: int = 0) -> torch.Tensor:
    """Keys at random, some repeated, a third of them -1; row 1 has none."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(num_keys, size, generator=generator)
    indices[torch.rand(size, generator=generator) < 0.3] = -1
    if size[0] > 1:
        indices[1] = -1
    return indices.to(dtype)


# num_rows, num_keys, k, lists (0: one for all), H, H_kv, d_v
CASES = {
    "one head": (33, 20, 4, 0, 1, 1, 5),
    "heads": (20, 33, 7, 0, 3, 3, 5),
    "groups": (17, 9, 5, 0, 6, 2, 3),
    "one query": (1, 5, 3, 0, 2, 1, 5),
    "no room for keys": (5, 5, 0, 0, 2, 2, 5),
    "lists of KV heads": (33, 20, 6, 2, 6, 2, 5),
    "lists of all heads": (19, 20, 6, 3, 3, 3, 7),
    "one list of one KV head": (19, 20, 6, 1, 4, 1, 5),
}


def planned(indices, case, **options):
    rows, cols, _, _, heads, kv_heads, _ = case
    given = {"num_heads": heads, "num_kv_heads": kv_heads, "device": "cpu", "backward": True} | options
    return plan_attention(KeyLists(indices), shape=(rows, cols), **given)


def case_of(name, dtype=torch.int64, seed=0):
    rows, cols, length, lists, heads, kv_heads, value_dim = CASES[name]
    indices = indices_of(rows, *((lists,) if lists else ()), length, num_keys=cols, dtype=dtype, seed=seed)
    return indices, shaped((rows, cols), (heads, kv_heads, 5, value_dim, 0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients_are_those_of_dense_attention(backend, name):
    for dtype in (torch.int32, torch.int64):
        indices, tensors = case_of(name, dtype)
        plan = planned(indices, CASES[name], backend=backend)
        leaves = [each.clone().requires_grad_() for each in tensors]
        exact = [each.clone().requires_grad_() for each in tensors]
        output, (wanted, wanted_lse) = plan(*leaves, scale=SCALE), list_attention(indices, *exact, SCALE)
        close(output, wanted)
        assert len(output) == 1 or not output[1].any(), "a query without keys"
        if backend == "reference":
            torch.testing.assert_close(plan(*leaves, scale=SCALE, return_lse=True)[1], wanted_lse.float())
        factors = torch.randn_like(wanted)
        found, right = torch.autograd.grad(output, leaves, factors), torch.autograd.grad(wanted, exact, factors)
        close(found, right)


@pytest.mark.parametrize("name", CASES)
def test_score_terms_of_queries_keys_and_heads(name):
    """Each KV head by a plan of its own, of an edge_index."""
    indices, (q, k, v) = case_of(name)
    (rows, heads, _), (cols, kv_heads, _) = q.shape, k.shape
    size, generator = heads // kv_heads, torch.Generator().manual_seed(2)
    row, col, head = (
        torch.randn(shape, generator=generator, dtype=DOUBLE).requires_grad_()
        for shape in ((rows, heads), (cols, kv_heads), (heads,))
    )

    def data(row, col, head):
        return EdgeData(score=ScoreTerm("m * s + r * c", row={"r": row}, col={"c": col}, head={"m": head}), clamp=0.7)

    plan = planned(indices, CASES[name], backend="formula")
    output, parts = plan(q, k, v, edges=data(row, col, head)), []
    for kv in range(kv_heads):
        own = slice(kv * size, (kv + 1) * size)
        edges = as_edges(indices if indices.dim() == 2 else indices[:, kv], cols)
        alone = plan_attention(
            torch.stack([edges.col, edges.row]), shape=edges.shape, device="cpu", backend="reference", backward=True
        )
        term = data(row[:, own], col[:, kv : kv + 1].expand(-1, size), head[own])
        every = (each[:, kv : kv + 1].expand(-1, size, -1) for each in (k, v))
        parts.append(alone(q[:, own], *every, edges=term))
    expected = torch.cat(parts, 1)
    close(output, expected)
    factors = torch.randn_like(expected)
    found, wanted = (
        torch.autograd.grad(each, (row, col, head), factors, allow_unused=True) for each in (output, expected)
    )
    for left, right in zip(found, wanted, strict=True):
        close(left, torch.zeros_like(left) if right is None else right)


def test_values_that_lists_do_not_take():
    plan = planned(indices_of(7, 2, 4, num_keys=9), (7, 9, 4, 2, 4, 2, 5), backend="scatter")
    tensors = shaped((7, 9), (4, 2, 5, 5, 0))
    for data, message in (
        (EdgeData(bias=torch.zeros(56, dtype=DOUBLE)), "this plan keeps no edge order"),
        (EdgeData(additive_weight=torch.zeros(2, 5, dtype=DOUBLE)), "additive_weight: got one, but a plan of lists"),
        (EdgeData(score=ScoreTerm("s + x", col={"x": torch.zeros(9, 3)})), "values of columns: got 3 heads; one"),
        (EdgeData(score=ScoreTerm("s + x", col={"x": torch.zeros(9, 4)})), "values of columns: got 4 .* call has 2"),
        (EdgeData(score=ScoreTerm("s + x", row={"x": torch.zeros(7, 8)})), "queries and edges: got 8 .* call has 4"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(*tensors, edges=data)
    with pytest.raises(ValueError, match="k: got 3 heads, but the plan has key lists of 2 KV heads"):
        plan(*shaped((7, 9), (6, 3, 5, 5, 0)))


@pytest.mark.parametrize("name", ["groups", "lists of KV heads"])
def test_without_a_plan(name):
    indices, tensors = case_of(name)
    output = sparse_attention(*tensors, KeyLists(indices), shape=CASES[name][:2])
    close(output, list_attention(indices, *tensors, 5**-0.5)[0])


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([[0]], TypeError, "KeyLists: got list"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"KeyLists: got torch.int64 of shape \(3,\); \[num_rows, k\]"),
        (torch.zeros(3, 2), ValueError, "KeyLists: got torch.float32"),
        (torch.zeros(3, 0, 2, dtype=torch.int32), ValueError, r"KeyLists: got torch.int32 of shape \(3, 0, 2\)"),
    ],
)
def test_lists_that_cannot_be(indices, error, message):
    with pytest.raises(error, match=message):
        KeyLists(indices)


@pytest.mark.parametrize("entry", [1431655766, 2**31 - 1, -(2**31), 20, -2])
def test_ids_out_of_range_stay_out_of_range(entry):
    """3 * 1,431,655,766 is 2 in 32 bits."""
    indices = torch.full((2, 3, 1), entry, dtype=torch.int32)
    indices[1] = -1
    edges = KeyLists(indices).edges(20)
    columns, rows = edges.edge_index.view(2, 2, 3)
    assert ((columns[0] < -1) | (columns[0] >= 60)).all()
    assert rows[0].tolist() == [0, 1, 2]
    assert (edges.edge_index.view(2, 2, 3)[:, 1] == -1).all()


@pytest.mark.parametrize(
    ("entry", "options", "error", "message"),
    [
        (9, {}, ValueError, r"KeyLists: entry \[2, 1, 3\] is 9; 0 to 8 are allowed, and -1 for no key"),
        (-2, {}, ValueError, r"KeyLists: entry \[2, 1, 3\] is -2"),
        (1 << 40, {}, ValueError, r"KeyLists: entry \[2, 1, 3\] is 1099511627776"),
        (0, {"shape": (8, 9)}, ValueError, r"KeyLists: got shape \(7, 2, 4\) for a graph of shape \(8, 9\); 8 rows"),
        (0, {"shape": None}, ValueError, "shape: KeyLists has no shape of its own"),
        (0, {"shape": (7, 1 << 30)}, ValueError, "KeyLists: got 2 lists .* 1073741822 queries and keys are allowed"),
        (0, {"num_kv_heads": 1}, ValueError, "num_kv_heads: got 1, but the key lists are for 2 KV heads"),
        (0, {"edge_data": True}, ValueError, "edge_data, edges: given, but KeyLists have no edge data"),
        (0, {"reorder": "communities"}, ValueError, "reorder: got 'communities', but lists for each KV head"),
    ],
)
def test_plans_that_cannot_be(entry, options, error, message):
    indices = indices_of(7, 2, 4, num_keys=9)
    indices[2, 1, 3] = entry
    options = {"shape": (7, 9), "num_heads": 4, "num_kv_heads": 2, "backend": "scatter"} | options
    with pytest.raises(error, match=message):
        plan_attention(KeyLists(indices), device="cpu", **options)


def test_plans_of_many_lists():
    cases = [case_of("groups", seed=seed) for seed in range(3)]
    graphs = [(KeyLists(indices), CASES["groups"][:2]) for indices, _ in cases]
    plans = plan_many(graphs, device="cpu", backend="scatter", num_heads=6, num_kv_heads=2)
    for plan, (indices, tensors) in zip(plans, cases, strict=True):
        close(plan(*tensors, scale=SCALE), list_attention(indices, *tensors, SCALE)[0])


def assert_halves(output, lse, indices, tensors):
    wanted, wanted_lse = list_attention(indices, *tensors, SCALE)
    assert (output.double() - wanted).abs().max() < 4e-3
    assert torch.equal(lse.isfinite(), wanted_lse.isfinite())
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=2e-3)


# H, H_kv, d, lists, dtype
ROOMS = [
    (4, 1, 32, 1, torch.int32),
    (4, 2, 16, 2, torch.int64),
    (16, 2, 16, 1, torch.int64),
    (2, 2, 40, 1, torch.int32),
]


def room_of(heads, kv_heads, dim, lists, device="cpu", **options):
    options = {"dtype": HALF, "head_dim": dim, "num_heads": heads, "num_kv_heads": kv_heads} | options
    return PlanRoom((ROWS, KEYS), ROWS * lists * LENGTH, num_lists=lists, device=device, **options)


ROWS, KEYS, LENGTH = 50, 40, 9


def lists_of(lists, dtype, seed, length=LENGTH):
    return indices_of(ROWS, *((lists,) if lists > 1 else ()), length, num_keys=KEYS, dtype=dtype, seed=seed)


@NEEDS_COMPILER
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "lists", "dtype"), ROOMS)
def test_a_room_is_filled_with_lists(monkeypatch, heads, kv_heads, dim, lists, dtype):
    tensors = shaped((ROWS, KEYS), (heads, kv_heads, dim, dim, 0), HALF)
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_of(heads, kv_heads, dim, lists, backward=True)
        for seed, length in ((1, LENGTH), (2, 3), (3, 0), (4, LENGTH)):
            indices = lists_of(lists, dtype, seed, length)
            room.fill(KeyLists(indices))
            room.check()
            with poisoned_buffers(monkeypatch):
                output, lse = room.plan(*tensors, scale=SCALE, return_lse=True)
            assert_halves(output, lse, indices, tensors)
        leaves = [each.clone().requires_grad_() for each in tensors]
        exact = [each.double().requires_grad_() for each in tensors]
        with poisoned_buffers(monkeypatch):
            room.plan(*leaves, scale=SCALE).sum().backward()
        gradients = torch.autograd.grad(list_attention(indices, *exact, SCALE)[0].sum(), exact)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert (leaf.grad.double() - gradient).abs().max() <= 6e-3 * max(1, gradient.abs().max())


@NEEDS_COMPILER
def test_a_room_for_grouped_queries_takes_an_edge_index(monkeypatch):
    tensors = shaped((ROWS, KEYS), (8, 2, 16, 16, 0), HALF)
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_of(8, 2, 16, 1, edge_data=True)
        indices = lists_of(1, torch.int64, 1)
        edges = as_edges(indices, KEYS)
        edge_index = torch.full((2, room.num_edges), -1)
        edge_index[:, : edges.num_edges] = torch.stack([edges.col, edges.row])
        room.fill(edge_index)
        room.check()
        bias = torch.randn(room.num_edges, 8, generator=torch.Generator().manual_seed(0)).half()
        with poisoned_buffers(monkeypatch):
            output = room.plan(*tensors, scale=SCALE, edges=EdgeData(bias=bias))
        data = EdgeData(bias=bias[: edges.num_edges])
        wanted, _ = shaped_attention(edges, *tensors, data, SCALE)
        assert (output.double() - wanted).abs().max() < 4e-3
        edge_index[1, 7] = ROWS
        room.fill(edge_index)
        with pytest.raises(ValueError, match=rf"graph: edge 7 is \[\d+, {ROWS}\] .* rows 0 to {ROWS - 1} are allowed"):
            room.check()
        with pytest.raises(ValueError, match=r"graph: got \(indptr, indices\); with grouped queries"):
            room.fill((torch.zeros(ROWS + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)))


@NEEDS_COMPILER
def test_lists_that_do_not_fit_a_room(monkeypatch):
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_of(4, 2, 16, 2)
        indices = lists_of(2, torch.int64, 1)
        indices[3, 1, 2] = KEYS
        room.fill(KeyLists(indices))
        with pytest.raises(ValueError, match=rf"KeyLists: entry \[3, 1, 2\] is {KEYS}"):
            room.check()
        with pytest.raises(ValueError, match=r"KeyLists: got shape .*; \[50, 2, e\] is needed"):
            room.fill(KeyLists(indices[:, 0]))
        with pytest.raises(TypeError, match=r"graph: got Tensor; this room takes KeyLists \[50, 2, k\]"):
            room.fill(torch.zeros((2, 3), dtype=torch.int64))
        with pytest.raises(ValueError, match="got 1000 edges, but there is room for 900"):
            room.fill(KeyLists(lists_of(2, torch.int64, 1, 10)))
        with pytest.raises(ValueError, match="edge_data: got True, but KeyLists have no edge data"):
            room_of(4, 2, 16, 2, edge_data=True)
