"""The promises of docs/threads.md that hold on any machine: threads, fork, copies, transforms, checkpoints.

PyG's layer with the same change is the oracle, in float64. Hooks and adapters: test_hooks.py. Plans while a GPU fills
them: fused/test_plan_state.py. Several processes: tests/parallel/test_layers.py.
"""

import copy
import io
import multiprocessing
import pickle
import re
from pathlib import Path

import pytest
import torch
from layer_pairs import DTYPE, random_graph, trained
from layer_pairs import assert_same as assert_same_step
from layer_pairs import pair as layer_pair
from racing import in_threads
from torch.utils.checkpoint import checkpoint

from fused3s import EdgeData, plan_attention

NODES, EDGES = 30, 200
KINDS = {
    "TransformerConv": {},
    "TransformerConv-edges": {"edge_dim": 8},
    "GATConv": {},
    "GATConv-edges": {"edge_dim": 8},
    "GATv2Conv": {},
    "GATv2Conv-edges": {"edge_dim": 8},
}
BACKENDS = ["formula", "scatter"]  # one with a backward pass of its own, as fused3s; one that autograd differentiates
pytestmark = pytest.mark.usefixtures("formula")
every_kind = pytest.mark.parametrize("kind", KINDS)
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def pair(kind, backend):
    """PyG's layer, and ours with its weights."""
    return layer_pair(kind.partition("-")[0], 32, 16, 4, backend=backend, **KINDS[kind])


def given(kind):
    """x, a new edge_index and edge features of a layer."""
    x, *graph = random_graph(NODES, EDGES, 32, KINDS[kind].get("edge_dim"))
    return x.requires_grad_(), *graph


def results(layer, kind):
    return trained(layer, *given(kind))


def assert_same(mine, expected):
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


@every_kind
def test_hooks_of_the_layer_itself_run(kind):
    layers, calls = pair(kind, "formula"), []
    for layer in layers:
        layer.register_forward_hook(lambda *args: 2 * args[-1])
        layer.register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))
        layer.register_full_backward_hook(lambda *args: calls.append(args))
    theirs, ours = (results(layer, kind) for layer in layers)
    assert_same_step(ours, theirs)
    assert len(calls) == 2


@both_backends
@every_kind
def test_functional_call_takes_other_parameters(kind, backend):
    theirs, ours = pair(kind, backend)
    parameters = {name: (2 * each.detach()).requires_grad_() for name, each in theirs.named_parameters()}
    found = []
    for layer in (ours, theirs):
        out = torch.func.functional_call(layer, parameters, given(kind))
        found.append([out, *torch.autograd.grad(out.square().sum(), list(parameters.values()))])
    assert_same(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
@both_backends
@every_kind
def test_a_checkpoint_draws_the_dropout_mask_of_the_forward_pass(kind, backend, use_reentrant):
    _, layer = pair(kind, backend)
    layer.dropout = 0.5
    found = []
    for call in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=use_reentrant)):
        layer.zero_grad()
        x, *graph = given(kind)
        torch.manual_seed(1)
        call(x, *graph).sum().backward()
        found.append([x.grad, *(each.grad.clone() for each in layer.parameters())])
    assert_same(*found)


@both_backends
@every_kind
def test_copies_of_a_layer_that_was_called_are_layers_of_their_own(kind, backend):
    theirs, layer = pair(kind, backend)
    expected = results(theirs, kind)
    layer(*given(kind))
    file, state = io.BytesIO(), io.BytesIO()
    torch.save(layer, file)
    torch.save(layer.state_dict(), state)
    fresh = pair(kind, backend)[1]
    fresh.load_state_dict(torch.load(io.BytesIO(state.getvalue())))
    averaged = torch.optim.swa_utils.AveragedModel(layer).module
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded, fresh, averaged):
        assert_same_step(results(twin, kind), expected)
        assert not {each.data_ptr() for each in twin.parameters()} & {each.data_ptr() for each in layer.parameters()}


@pytest.mark.parametrize(
    ("kind", "names"), [("TransformerConv", ("lin_query", "lin_key")), ("GATv2Conv", ("lin_l", "lin_r"))]
)
@both_backends
def test_projections_that_share_a_weight_stay_tied(kind, names, backend):
    layers = pair(kind, backend)
    for layer in layers:
        first, second = (getattr(layer, name) for name in names)
        second.weight = first.weight
    theirs, ours = layers[0], copy.deepcopy(layers[1]).to("cpu")
    assert_same_step(results(ours, kind), results(theirs, kind))
    first, second = (getattr(ours, name) for name in names)
    assert first.weight is second.weight


@every_kind
def test_a_layer_that_is_used_twice_adds_its_gradients(kind):
    found = []
    for layer in pair(kind, "formula"):
        x, *graph = given(kind)
        layer(layer(x, *graph).tanh()[:, :32], *graph).square().sum().backward()
        found.append([x.grad, *(each.grad for each in layer.parameters())])
    assert_same(*found)


def plan_of(backend="auto", **options):
    shape = {"shape": (NODES, NODES), "device": "cpu", "dtype": DTYPE, "head_dim": 8, "num_heads": 4}
    return plan_attention(given("GATConv")[1], backend=backend, **shape, **options)


def qkv():
    return torch.randn(3, NODES, 4, 8, generator=torch.Generator().manual_seed(2), dtype=DTYPE).unbind(0)


@both_backends
@every_kind
def test_one_layer_serves_threads_that_bring_the_same_new_graph(kind, backend):
    theirs, layer = pair(kind, backend)
    x, *graph = given(kind)
    out = theirs(x, *graph)
    expected = [out.detach(), *torch.autograd.grad(out.square().sum(), x)]
    for _ in range(5):
        graph = [each.clone() for each in graph]  # nobody has planned it yet

        def call(graph=graph):
            mine = x.detach().requires_grad_()
            out = layer(mine, *graph)
            return [out.detach(), *torch.autograd.grad(out.square().sum(), mine)]

        for found in in_threads(call):
            assert_same(found, expected)


@pytest.mark.parametrize("backend", ["reference", "scatter", "csr_unfused", "formula"])
def test_one_plan_serves_many_threads(backend):
    plan, (q, k, v) = plan_of(backend, backward=True), qkv()

    def call():
        mine = q.clone().requires_grad_()
        out = plan(mine, k, v)
        return [out.detach(), *torch.autograd.grad(out.sum(), mine)]

    expected = call()
    for found in in_threads(call):
        assert_same(found, expected)


@pytest.mark.parametrize("backend", ["reference", "scatter", "csr_unfused", "formula"])
def test_copies_of_a_plan_are_plans(backend):
    has_edges = backend != "csr_unfused"
    plan, (q, k, v) = plan_of(backend, backward=True, edge_data=has_edges), qkv()
    data = {"edges": EdgeData(bias=torch.randn(EDGES, 4, dtype=DTYPE))} if has_edges else {}
    expected = plan(q, k, v, **data)
    file = io.BytesIO()
    torch.save(plan, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for twin in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), loaded):
        assert (twin.inputs, twin.shape, twin.nbytes) == (plan.inputs, plan.shape, plan.nbytes)
        mine, leaf = (q.clone().requires_grad_() for _ in range(2))
        assert_same([twin(mine, k, v, **data)], [expected])
        gradient = torch.autograd.grad(twin(mine, k, v, **data).sum(), mine)
        assert_same(gradient, torch.autograd.grad(plan(leaf, k, v, **data).sum(), leaf))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(io.BytesIO(file.getvalue()))


def test_bound_edges_belong_to_their_plan_and_not_to_a_copy():
    plan, (q, k, v) = plan_of(edge_data=True), qkv()
    bound = plan.bind_edges(EdgeData(bias=torch.randn(EDGES, 4, dtype=DTYPE)))
    for twin, edges in (copy.deepcopy((plan, bound)), (pickle.loads(pickle.dumps(plan)), bound)):
        if edges is bound:
            with pytest.raises(ValueError, match="edges: bound by another plan; bind the EdgeData with bind_edges"):
                twin(q, k, v, edges=edges)
        else:  # copied together
            assert_same([twin(q, k, v, edges=edges)], [plan(q, k, v, edges=bound)])


def planned_batch(numbers):
    """As a DataLoader's collate function."""
    edges = torch.tensor([[each, each + 1] for each in numbers]).T.contiguous()
    shape = {"shape": (10, 10), "device": "cpu", "dtype": torch.float32, "head_dim": 8, "num_heads": 1}
    return edges, plan_attention(edges, **shape)


def test_workers_of_a_data_loader_send_plans_of_the_cpu():
    options = {"batch_size": 4, "num_workers": 1, "collate_fn": planned_batch, "multiprocessing_context": "fork"}
    q, k, v = torch.randn(3, 10, 1, 8)
    for edges, plan in torch.utils.data.DataLoader(range(8), **options):
        expected = torch.zeros(10, 1, 8)
        expected[edges[1]] = v[edges[0]]  # one edge a row
        assert_same([plan(q, k, v)], [expected])


def test_a_layer_goes_on_in_a_forked_process():
    theirs, layer = pair("TransformerConv-edges", "scatter")
    arguments = given("TransformerConv-edges")
    with torch.no_grad():
        expected = theirs(*arguments)
        layer(*arguments)  # planned and bound before the fork
    context = multiprocessing.get_context("fork")
    ours, of_child = context.Pipe(duplex=False)

    def work():
        torch.set_num_threads(1)
        with torch.no_grad():
            of_child.send(pickle.dumps(layer(*arguments)))

    child = context.Process(target=work)
    child.start()
    of_child.close()
    assert ours.poll(30)
    assert_same([pickle.loads(ours.recv())], [expected])
    child.join()


@pytest.mark.parametrize("page", ["docs/threads.md", "kernels/NOTES.md"])
def test_the_page_names_tests_that_exist(page):
    root = Path(__file__).resolve().parents[3]
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (root / page).read_text(encoding="utf-8"))
    assert named
    for path, test in named:
        assert f"def {test}(" in (root / path).read_text(encoding="utf-8"), (path, test)
