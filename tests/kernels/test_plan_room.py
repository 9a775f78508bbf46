"""Plans with room, of which one serves many graphs: on the CPU (tests/cuda_shim) and, in a CUDA graph, on a GPU."""

from dataclasses import replace

import pytest
import torch
from edge_cases import qkv
from gpu_calls import no_waits
from gpu_plan_on_cpu import gpu_on_cpu
from plan_cases import edge_list, hub_list
from poison import poisoned_buffers

from bench.baselines import REGISTRY
from fused3s import EdgeData, PlanRoom, plan_attention, plan_many
from fused3s.backends.base import InputSpec
from fused3s.backends.reference import edge_softmax_attention
from fused3s.fused.planning.gpu_csr import EdgeSource
from fused3s.fused.planning.gpu_plan import most_words
from fused3s.graph.edge_list import EdgeList
from fused3s.graph.edge_order import EdgeOrder
from fused3s.runtime.cuda_graph import capture
from fused3s.torch_side.tensor_record import tensors_of
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu

ROWS, COLS, EDGES = 90, 70, 2500
HALF = torch.float16
on_the_shim = NEEDS_COMPILER
# A few edges, as many as there is room for, none, hubs with copies.
GRAPHS = [
    edge_list(ROWS, COLS, 150, 1),
    edge_list(ROWS, COLS, EDGES, 2, torch.int32),
    edge_list(ROWS, COLS, 0),
    hub_list(ROWS, COLS, 900, 20, 3),
]
SHAPES = pytest.mark.parametrize(("heads", "dim"), [(2, 40), (1, 128), (8, 16)], ids=["2x40", "1x128", "8x16"])


def tensors_for(heads, dim, device="cpu"):
    return [each.to(device) for each in qkv((ROWS, COLS), heads, dim, HALF)]


def room_for(heads, dim, device="cpu", **options):
    return PlanRoom((ROWS, COLS), EDGES, device=device, dtype=HALF, head_dim=dim, num_heads=heads, **options)


def padded(graph: EdgeList, size: int = EDGES) -> torch.Tensor:
    found = torch.full((2, size), -1, dtype=graph.edge_index.dtype)
    found[:, : graph.num_edges] = graph.edge_index
    return found


def as_csr(graph: EdgeList, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.sort(graph.edge_index[1], stable=True).indices
    counts = torch.bincount(graph.edge_index[1], minlength=ROWS)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), padded(graph, size)[0, _padded_order(order, size)]


def _padded_order(order: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([order, torch.arange(len(order), size)])


def expected(graph: EdgeList, tensors):
    col, row = graph.edge_index.long()
    return edge_softmax_attention(*(each.double() for each in tensors), row, col, 0.3)


def check(output, lse, graph, tensors, label):
    wanted, wanted_lse = expected(graph, tensors)
    assert (output.double() - wanted).abs().max() < 4e-3, label
    finite = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite), label
    assert not finite.any() or (lse.double() - wanted_lse)[finite].abs().max() < 2e-3, label


@on_the_shim
@pytest.mark.parametrize("mode", ["late", "random"])
@SHAPES
def test_one_plan_serves_graphs_of_other_sizes(monkeypatch, heads, dim, mode):
    tensors = tensors_for(heads, dim)
    with cuda_on_cpu(MODES[mode]) as gpu, gpu_on_cpu(monkeypatch, mode):
        room = room_for(heads, dim)
        before = [each.data_ptr() for each in tensors_of(room.plan.data.arrays)]
        for number in (2, *range(len(GRAPHS)), 1, 0):
            graph = GRAPHS[number]
            forms = [graph.edge_index, padded(graph), as_csr(graph, graph.num_edges), as_csr(graph, EDGES)]
            for form in forms if mode == "late" else forms[1:2]:
                room.fill(form)
                with poisoned_buffers(monkeypatch):
                    output, lse = room.plan(*tensors, scale=0.3, return_lse=True)
                check(output, lse, graph, tensors, f"graph {number}")
            room.check()
            assert gpu.launched[-1].startswith("fused3s_edges" if dim == 16 else "fused3s<")
        assert [each.data_ptr() for each in tensors_of(room.plan.data.arrays)] == before


@on_the_shim
@pytest.mark.parametrize(("heads", "dim"), [(2, 40), (8, 16)])
def test_gradients_of_a_plan_with_room(monkeypatch, heads, dim):
    query, key, value = tensors_for(heads, dim)
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_for(heads, dim, backward=True)
        for number in (1, 3, 2, 0):
            graph = GRAPHS[number]
            room.fill(padded(graph))
            leaves = [each.clone().requires_grad_() for each in (query, key, value)]
            with poisoned_buffers(monkeypatch):
                output = room.plan(*leaves, scale=0.3)
                output.backward(torch.ones_like(output))
            exact = [each.double().requires_grad_() for each in (query, key, value)]
            wanted, _ = expected(graph, exact)
            gradients = torch.autograd.grad(wanted.sum(), exact, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                error = (leaf.grad.double() - gradient).abs().max()
                assert error <= 6e-3 * max(1, gradient.abs().max()), f"graph {number}: {error}"


@on_the_shim
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 16)])
def test_a_plan_is_found_in_memory_of_the_caller(monkeypatch, heads, dim):
    """By another object than the one that filled it, as in compiled layers; its calls have the bits of a room."""
    backend, inputs = REGISTRY["fused3s"], InputSpec(HALF, dim, heads, edge_data=True, backward=True)
    memory = torch.full((most_words(EDGES, ROWS, COLS),), -7, dtype=torch.int32)
    leaves = [each.requires_grad_() for each in (*tensors_for(heads, dim), torch.randn(EDGES, heads).half())]

    def both_passes(plan):
        with poisoned_buffers(monkeypatch):
            output = plan(*leaves[:3], scale=0.3, edges=EdgeData(bias=leaves[3]))
            return [output, *torch.autograd.grad(output.sum(), leaves)]

    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_for(heads, dim, edge_data=True, backward=True)

        def in_memory():
            return backend.make_room((ROWS, COLS), EDGES, memory.device, inputs, memory)

        for number in (1, 3, 2, 0):
            source = padded(GRAPHS[number])
            in_memory().refilled(EdgeSource(source, has_padding=True))
            room.fill(source)
            data = in_memory()
            plan = replace(room.plan, data=data, edge_order=EdgeOrder(backend.sorted_edges(data)))
            for found, expected in zip(both_passes(plan), both_passes(room.plan), strict=True):
                assert torch.equal(found, expected), f"graph {number}"


@on_the_shim
def test_the_edges_of_the_last_fill_are_numbered(monkeypatch):
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_for(4, 8, edge_data=True)
        for number in (3, 0):
            room.fill(padded(GRAPHS[number]))
            edge = room.plan.edge_order.edge_of_csr
            used = GRAPHS[number].num_edges
            assert sorted(edge[:used].tolist()) == list(range(used))
            column, row = GRAPHS[number].edge_index[:, edge[:used].long()]
            assert (row.diff() >= 0).all()
            assert torch.equal(column.int(), room.plan.data.arrays.indices[:used])
            assert (edge[used:] == 0).all()


@on_the_shim
@pytest.mark.parametrize(
    "form", ["bias", "bias over KV tiles", "features", "wide features", "added features", "types", "key_factor"]
)
def test_gradients_of_edge_data_in_a_plan_with_room(monkeypatch, form):
    """Rows of the data that have no edge in the last fill, among them all from its end on, get a gradient of 0."""
    heads, dim = (1, 64) if form == "bias over KV tiles" else (2, 8)
    generator = torch.Generator().manual_seed(1)
    query, key, value = tensors_for(heads, dim)
    given = {
        "bias": {"bias": (EDGES, heads)},
        "bias over KV tiles": {"bias": (EDGES, heads)},
        "features": {"features": (EDGES, 3), "key_weight": (heads, dim, 3), "value_weight": (heads, dim, 3)},
        "wide features": {"features": (EDGES, 20), "key_weight": (heads, dim, 20), "value_weight": (heads, dim, 20)},
        "added features": {"features": (EDGES, 3), "key_weight": (heads, dim, 3), "additive_weight": (heads, dim)},
        "types": {"type_weight": (4, heads, dim)},
        "key_factor": {"features": (EDGES, 3), "key_factor": (3, heads, dim)},
    }[form]
    given = {name: torch.randn(shape, generator=generator).to(HALF) for name, shape in given.items()}
    types = {"types": torch.randint(0, 4, (EDGES,), generator=generator)} if form == "types" else {}
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_for(heads, dim, edge_data=True, backward=True)
        for number in (3, 2, 0):
            graph = GRAPHS[number]
            room.fill(padded(graph))
            leaves = {name: each.clone().requires_grad_() for name, each in given.items()}
            with poisoned_buffers(monkeypatch):
                bound = room.plan.bind_edges(EdgeData(**leaves, **types))
                room.plan(query, key, value, scale=0.3, edges=bound).sum().backward()
            used = graph.num_edges
            exact = {name: each.double().requires_grad_() for name, each in given.items()}
            of_edges = {name: each[:used] if len(each) == EDGES else each for name, each in (exact | types).items()}
            options = {"shape": (ROWS, COLS), "backend": "reference", "device": "cpu", "edge_data": True}
            plan = plan_attention(graph.edge_index, **options)
            tensors = (each.double() for each in (query, key, value))
            plan(*tensors, scale=0.3, edges=plan.bind_edges(EdgeData(**of_edges))).sum().backward()
            for name, leaf in leaves.items():
                wanted = exact[name].grad
                error = (leaf.grad.double() - wanted).abs().max()
                assert error <= 1e-2 * max(1, wanted.abs().max()), f"graph {number}, {name}: {error}"


@on_the_shim
@pytest.mark.parametrize(
    ("graph", "error", "match"),
    [
        (torch.zeros((2, EDGES + 1), dtype=torch.int64), ValueError, f"got {EDGES + 1} edges.*room for {EDGES}"),
        (torch.zeros((3, 5), dtype=torch.int64), ValueError, r"edge_index: got shape \(3, 5\); \[2, e\]"),
        (torch.zeros((2, 5)), TypeError, "edge_index: got torch.float32"),
        ([[0], [0]], TypeError, "edge_index: got list"),
        ((torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)), ValueError, r"indptr: got .*\[91\]"),
        (torch.zeros((2, 5), dtype=torch.int64, device="meta"), ValueError, "edge_index: on meta, but the room is on"),
    ],
)
def test_graphs_that_do_not_fit(monkeypatch, graph, error, match):
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch), pytest.raises(error, match=match):
        room_for(1, 16).fill(graph)


@on_the_shim
@pytest.mark.parametrize(("shape", "num_edges"), [((0, 5), 9), ((5, 5), -1), ((5, 5), 2**31)])
def test_rooms_that_cannot_be(shape, num_edges):
    with cuda_on_cpu(), pytest.raises(ValueError, match=r"shape\[0\]: got 0|num_edges: got (-1|2147483648)"):
        PlanRoom(shape, num_edges, device="cpu", dtype=HALF, head_dim=16)


@on_the_shim
def test_the_last_fill_is_checked(monkeypatch):
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        room = room_for(1, 16)
        wrong = GRAPHS[0].edge_index.clone()
        wrong[0, 33] = COLS
        room.fill(wrong)
        with pytest.raises(ValueError, match=rf"edge 33 is \[{COLS}, \d+\] \(column, row\); columns 0 to {COLS - 1}"):
            room.check()
        indptr, indices = as_csr(GRAPHS[0], GRAPHS[0].num_edges)
        indptr[7] = 1000
        room.fill((indptr, indices))
        with pytest.raises(ValueError, match=r"indptr: entry [67] is"):
            room.check()
        room.fill(GRAPHS[0].edge_index)
        room.check()


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@SHAPES
def test_gpu_filling_and_attention_in_one_cuda_graph(heads, dim, backward):
    """The bits of a plan that is filled eagerly, graph after graph, and those of the exact plan's forward pass."""
    room, eager = (room_for(heads, dim, "cuda", backward=backward) for _ in range(2))
    edges = padded(GRAPHS[0]).long().cuda()
    tensors = [each.requires_grad_(backward) for each in tensors_for(heads, dim, "cuda")]

    def run(of_room, graph):
        of_room.fill(graph)
        output = of_room.plan(*tensors, scale=0.3)
        return [output, *torch.autograd.grad(output.float().sum(), tensors)] if backward else [output]

    captured = capture(lambda: run(room, edges), edges.device)
    for graph in (*reversed(GRAPHS), GRAPHS[1], GRAPHS[0]):
        edges.copy_(padded(graph))
        for each in captured.result:
            each.fill_(torch.nan)
        for got, wanted in zip(captured.replay(), run(eager, edges), strict=True):
            assert torch.equal(got, wanted)
        plain = [each.detach() for each in tensors]
        output, lse = room.plan(*plain, scale=0.3, return_lse=True)
        assert torch.equal(output, captured.result[0])
        check(output.cpu(), lse.cpu(), graph, [each.cpu() for each in plain], "replay")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (8, 16)])
def test_gpu_a_fill_does_not_wait(heads, dim):
    room, edges = room_for(heads, dim, "cuda", backward=True), padded(GRAPHS[1]).cuda()
    tensors = [each.requires_grad_() for each in tensors_for(heads, dim, "cuda")]
    room.plan(*tensors).float().sum().backward()  # compiles
    with no_waits():
        room.fill(edges)
        room.plan(*tensors).float().sum().backward()
        plans = plan_many([(edges[:, :2000], (ROWS, COLS))] * 3, dtype=HALF, head_dim=64, backward=True)
    for plan in plans:
        plan.data.settled()
