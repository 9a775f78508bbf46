"""Caches of the layers: training after inference mode, several widths, what is dropped, other streams, captures."""

import copy
import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from layer_pairs import assert_same, pair, random_graph, trained

import fused3s.nn
from fused3s import AttentionPlan, capture_step, plan_attention
from fused3s.nn.cached import planned_edges, self_loops, tensor_memo
from fused3s.nn.cached.tensor_memo import MOST_RESULTS, TensorMemo
from fused3s.runtime.cuda_graph import CaptureError, KeptResults

pytestmark = pytest.mark.usefixtures("formula")
N, E, COLUMNS = 15, 60, 6
# Layer, columns of edge features
KINDS = [(kind, edge_dim) for kind in ("TransformerConv", "GATConv", "GATv2Conv") for edge_dim in (None, 5)]
KINDS.append(("AGNNConv", None))


def made(kind, edge_dim, backend, **options):
    """PyG's layer and ours with its weights."""
    sizes = {"edge_dim": edge_dim} if edge_dim else {}
    return pair(kind, COLUMNS, 3, 2, backend=backend, ours_only=options, **sizes)


def problem(edge_dim, seed=1):
    return random_graph(N, E, COLUMNS, edge_dim, seed)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["auto", "formula"])
@pytest.mark.parametrize("order", ["inference first", "no_grad first", "training first"])
@pytest.mark.parametrize(("kind", "edge_dim"), KINDS)
def test_one_cache_serves_inference_and_training(planned, kind, edge_dim, order, backend):
    theirs, ours = made(kind, edge_dim, backend)
    given = problem(edge_dim)
    mode = torch.no_grad if order == "no_grad first" else torch.inference_mode

    def infer():
        with mode():
            close(ours(*given), theirs(*given))

    if order != "training first":
        infer()
    expected = trained(theirs, *given)
    for _ in range(3):
        assert_same(trained(ours, *given), expected)
        infer()
    assert len(planned) == (1 if order == "training first" else 2), "one plan without a backward pass, one with"


@pytest.mark.parametrize(("kind", "edge_dim"), KINDS)
def test_a_graph_is_planned_once_for_all_layers_until_it_changes(planned, kind, edge_dim):
    theirs, ours = made(kind, edge_dim, "reference")
    given = problem(edge_dim)

    def check(number, layer=ours):
        close(layer(*given), theirs(*given))
        assert len(planned) == number

    for layer in (ours, copy.deepcopy(ours), ours):
        check(1, layer)
    for each in given[2:]:  # bound anew
        each.mul_(2)
        check(1)
    given[1].copy_(given[1].flip(0))
    check(2)
    given[1] = given[1].clone()
    check(3)
    if kind != "AGNNConv":  # another head dimension: another schedule
        pair(kind, COLUMNS, 5, 2, backend="reference", **({"edge_dim": edge_dim} if edge_dim else {}))[1](*given)
        assert len(planned) == 4


@pytest.mark.parametrize(("kind", "edge_dim"), KINDS)
def test_without_a_cache_every_call_reads_its_tensors(planned, kind, edge_dim):
    """Also what was changed behind torch's back."""
    theirs, ours = made(kind, edge_dim, "reference", cache=False)
    given = problem(edge_dim)
    for number in (1, 2):
        close(ours(*given), theirs(*given))
        assert len(planned) == number
        given[1].numpy()[:] = given[1].flip(0).numpy()
        for each in given[2:]:
            each.numpy()[:] *= 2


@pytest.mark.parametrize("backend", ["auto", "reference", "csr_unfused", "scatter", "formula"])
@pytest.mark.parametrize("graph_in_inference", [True, False])
def test_a_plan_made_in_inference_mode_serves_training(graph_in_inference, backend):
    edge_index = problem(None)[1]
    shape, heads = (N, N), {"dtype": torch.float64, "head_dim": 3, "num_heads": 2, "edge_data": True, "backward": True}
    with torch.inference_mode():
        graph = edge_index.clone() if graph_in_inference else edge_index
        plan = plan_attention(graph, shape=shape, backend=backend, device="cpu", **heads)
    other = plan_attention(edge_index, shape=shape, backend=backend, device="cpu", **heads)
    q, k, v = torch.randn(3, N, 2, 3, dtype=torch.float64, requires_grad=True).unbind()
    close(*[torch.autograd.grad(each(q, k, v).square().sum(), (q, k, v)) for each in (plan, other)])


@pytest.fixture
def bound(monkeypatch):
    """Plans to which edge features were bound."""
    bound, bind = [], AttentionPlan.bind_edges
    monkeypatch.setattr(
        AttentionPlan,
        "bind_edges",
        lambda plan, *given, **options: bound.append(id(plan)) or bind(plan, *given, **options),
    )
    return bound


def test_features_stay_bound_for_layers_of_several_widths(bound):
    x, edge_index, edge_attr = problem(5)
    layers = [
        fused3s.nn.TransformerConv(COLUMNS, width, heads=heads, edge_dim=5, backend="scatter").double()
        for heads, width in ((2, 3), (1, 4), (3, 2))
    ]
    for _ in range(4):
        for layer in layers:
            layer(x, edge_index, edge_attr)
    assert len(bound) == len(layers)
    assert len(set(bound)) == len(layers)


def test_bound_features_go_with_their_plan_and_the_oldest_of_many():
    edge_attr = problem(5)[2]
    layer = fused3s.nn.TransformerConv(COLUMNS, 3, edge_dim=5, backend="scatter").double()
    graphs = [torch.randint(N, (2, E)) for _ in range(MOST_RESULTS + 3)]
    plans = [layer.plan(graph, N) for graph in graphs]
    for count, plan in enumerate(plans, 1):
        planned_edges.bind_features(plan, edge_attr, torch.float64)
        assert len(planned_edges._bound._entries[id(edge_attr)].results) == min(count, MOST_RESULTS)
    del plan, plans, graphs
    gc.collect()
    assert not planned_edges._bound._entries[id(edge_attr)].results
    number = len(planned_edges._bound._entries)
    del edge_attr
    assert len(planned_edges._bound._entries) == number - 1


@pytest.mark.parametrize("change", ["freed", "written"])
def test_bound_features_of_earlier_batches_are_freed_at_once(change):
    """The graph and its plan stay; what only the garbage collector frees would fill a GPU."""
    layer = fused3s.nn.TransformerConv(COLUMNS, 3, edge_dim=5, backend="scatter").double()
    x, edge_index, edge_attr = problem(5)
    alive = []
    gc.disable()
    try:
        for _ in range(3):
            if change == "freed":
                edge_attr = edge_attr.clone()
            edge_attr.add_(1)
            layer(x, edge_index, edge_attr)
            (result,) = planned_edges._bound._entries[id(edge_attr)].results.values()
            alive.append(weakref.ref(result.value.padded_features))
            del result
        assert [each() is None for each in alive] == [True, True, False]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["GATConv", "TransformerConv"])
def test_nothing_is_kept_of_self_loops_whose_tensor_is_gone(kind):
    """Nor of plans and bound features."""
    memos = planned_edges._plans, self_loops._looped if kind == "GATConv" else planned_edges._bound
    _, ours = made(kind, 5, "scatter")
    x, edge_index, edge_attr = problem(5)
    before = [len(memo._entries) for memo in memos]
    ours(x, edge_index, edge_attr)
    assert [len(memo._entries) for memo in memos] == [number + 1 for number in before]
    del edge_index, edge_attr
    assert [len(memo._entries) for memo in memos] == before


class Made:
    """In place of `streams.Made`: which tensors were waited for."""

    waited: list

    @classmethod
    def on(cls, device):
        return cls()

    def used_by_current_stream(self, tensors):
        self.waited.append(tensors)


def test_every_cached_result_is_waited_for(monkeypatch):
    Made.waited = []
    monkeypatch.setattr(tensor_memo, "Made", Made)
    for kind in ("GATConv", "TransformerConv"):
        _, ours = made(kind, 5, "scatter")
        given = problem(5)
        Made.waited.clear()
        ours(*given)
        (first,) = [Made.waited[:]]
        ours(*given)
        again = Made.waited[len(first) :]
        plan = planned_edges._plans
        addresses = {each.data_ptr() for tensors in again for each in tensors}
        graph = given[1]
        if kind == "GATConv":
            looped = self_loops.edges_with_self_loops(graph, N)
            assert looped.data_ptr() in addresses
            graph = looped
        orders = [found.value.edge_order.edge_of_csr for found in plan._entries[id(graph)].results.values()]
        assert {each.data_ptr() for each in orders} <= addresses
        if kind == "TransformerConv":
            (result,) = planned_edges._bound._entries[id(given[2])].results.values()
            assert result.value.padded_features.data_ptr() in addresses


@pytest.fixture
def capture(monkeypatch):
    """`kept`: results of a capture by `runtime.cuda_graph.capture`; None in one of the caller's; `active`: whether the
    current stream is captured."""
    state = SimpleNamespace(active=False, kept=None)
    for module in (tensor_memo, planned_edges, self_loops):
        monkeypatch.setattr(module, "is_capturing", lambda device: state.active)
    monkeypatch.setattr(tensor_memo, "kept_results", lambda device: state.kept)

    def run(call, ours=True):
        """The result of `call` in a capture, which follows two calls of it, and the results that the capture keeps."""
        call()
        call()
        state.active, state.kept = True, KeptResults() if ours else None
        try:
            return call(), state.kept
        finally:
            state.active = False

    state.run = run
    return state


@pytest.mark.parametrize(("kind", "edge_dim"), KINDS)
def test_a_capture_keeps_the_plan_of_an_edge_index_that_stays(planned, capture, kind, edge_dim):
    theirs, ours = made(kind, edge_dim, "scatter")
    given = problem(edge_dim)
    out, kept = capture.run(lambda: ours(*given))
    close(out, theirs(*given))
    assert len(planned) == 1
    kept.check()
    for each in given[2:]:  # read anew by each replay
        each.mul_(2)
    kept.check()
    given[1][0, 0] += 1
    with pytest.raises(
        CaptureError, match=rf"edge_index: the tensor of shape \(2, {E}\) on cpu was changed .*cache=False"
    ):
        kept.check()


def test_a_capture_keeps_results_alive(capture):
    _, ours = made("GATConv", None, "scatter")
    given = list(problem(None))
    _, kept = capture.run(lambda: ours(*given))
    results = [result.value for *_, result in kept._results.values()]
    assert [type(each).__name__ for each in results] == ["_Looped", "AttentionPlan"]
    del given[1]
    gc.collect()
    assert [type(each).__name__ for each in results] == ["_Looped", "AttentionPlan"]
    kept.check()


@pytest.mark.parametrize(("kind", "edge_dim"), [each for each in KINDS if not each[1]])
@pytest.mark.parametrize("reason", ["run changes it", "no cache", "capture of the caller"])
def test_a_capture_plans_what_it_cannot_keep(planned, capture, monkeypatch, kind, edge_dim, reason):
    theirs, ours = made(kind, edge_dim, "reference", cache=reason != "no cache")
    x, edge_index = problem(None)
    source = problem(None, seed=2)[1]

    def call():
        if reason == "run changes it":
            edge_index.copy_(source)
        return ours(x, edge_index)

    entries = len(planned_edges._plans._entries)
    out, kept = capture.run(call, ours=reason != "capture of the caller")
    close(out, theirs(x, edge_index))
    assert not (kept and kept._results)
    assert len(planned) == {"run changes it": 3, "no cache": 3, "capture of the caller": 2}[reason]
    assert len(planned_edges._plans._entries) - entries <= 1, "a result of the capture is cached"


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("wants", ["edge_attr", "weights"])
def test_a_capture_that_would_wait_for_self_loops_is_refused(capture, kind, wants):
    _, ours = made(kind, 5 if wants == "edge_attr" else None, "reference", cache=False)
    given = problem(5 if wants == "edge_attr" else None)
    options = {} if wants == "edge_attr" else {"return_attention_weights": True}
    with pytest.raises(CaptureError, match=r"edge_index: got one without cached self-loops .* add_self_loops=False"):
        capture.run(lambda: ours(*given, **options))


def test_self_loops_in_a_capture_are_pairs_of_minus_one(capture):
    edge_index = torch.tensor([[0, 1, 2, -1, 3], [0, 2, 2, -1, 0]])
    capture.active = True
    looped = self_loops.edges_with_self_loops(edge_index, 3, allows_padding=True)
    assert looped.tolist() == [[-1, 1, -1, -1, 3, 0, 1, 2], [-1, 2, -1, -1, 0, 0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill_value", ["add", "mean", "min", "max", "mul"])
def test_features_of_a_star_and_of_a_node_without_edges(fill_value, dtype):
    """A sum in bfloat16 would stop at 256."""
    edge_index = torch.stack([torch.arange(1, 2001), torch.zeros(2000, dtype=torch.long)])
    features = torch.ones(2000, 2, dtype=dtype)
    looped = self_loops.features_with_self_loops(features, edge_index, 2, fill_value)
    assert looped.dtype == dtype
    assert looped[2000].tolist() == [2000.0 if fill_value == "add" else 1.0] * 2
    assert looped[2001].tolist() == [1.0 if fill_value == "mul" else 0.0] * 2


@pytest.mark.parametrize(("fill_value", "reduce"), [("min", torch.amin), ("max", torch.amax)])
def test_equal_extremes_share_the_gradient_of_a_self_loop(fill_value, reduce):
    """Also a negative one; a node without edges gives none."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(8, (2, 60), generator=generator)
    edge_index = edge_index[:, (edge_index[0] != edge_index[1]) & (edge_index[1] != 3)]
    kept = edge_index.shape[1]
    features = torch.randint(2, (kept, 3), generator=generator).double().requires_grad_()
    gradient = torch.randn(kept + 8, 3, dtype=torch.float64, generator=generator)
    looped = self_loops.features_with_self_loops(features, edge_index, 8, fill_value)
    looped.backward(gradient)
    expected = torch.zeros(8, 3, dtype=torch.float64), gradient[:kept].clone()
    for node in set(edge_index[1].tolist()):
        edges = (edge_index[1] == node).nonzero().squeeze(1)
        expected[0][node] = reduce(features.detach()[edges], 0)
        is_extreme = (features.detach()[edges] == expected[0][node]).double()
        expected[1][edges] += gradient[kept + node] * is_extreme / is_extreme.sum(0)
    assert torch.equal(looped[kept:], expected[0])
    torch.testing.assert_close(features.grad, expected[1])


def test_features_of_self_loops_are_kept_while_features_and_edges_stay():
    """Until one of the two changes or is freed; not where autograd records them."""

    def looped(features, edges, fill_value="mean"):
        return self_loops.features_with_self_loops(features, edges, 3, fill_value)

    edges, features = torch.tensor([[0, 1, 2], [1, 2, 2]]), torch.tensor([[1.0], [2.0], [5.0]])
    first = looped(features, edges)
    assert looped(features, edges) is first
    assert first.flatten().tolist() == [1, 2, 0, 1, 2]
    assert looped(features, edges, "add") is not first
    assert looped(features, edges, torch.tensor(7.0)).flatten().tolist() == [1, 2, 7, 7, 7]
    features[0] = 3.0
    assert looped(features, edges).flatten().tolist() == [3, 2, 0, 3, 2]
    edges[1, 0] = 2
    second = looped(features, edges)
    assert second.flatten().tolist() == [3, 2, 0, 0, 2.5]
    recorded = features.clone().requires_grad_()
    assert looped(recorded, edges) is not looped(recorded, edges)
    other = edges.clone()
    gone = weakref.ref(looped(features, other))
    assert looped(features, other) is gone()
    del other
    gc.collect()
    assert gone() is None
    number = id(features)
    assert [result.value for result in self_loops._features._entries[number].results.values()] == [second]
    del features
    gc.collect()
    assert number not in self_loops._features._entries


def test_the_memo_keeps_nothing_of_a_tensor_of_inference_mode():
    """Torch does not count its changes."""
    memo, made = TensorMemo("x"), iter((7, 8))
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert [memo.get(tensor, "a", lambda: next(made), lambda value: ()) for _ in range(2)] == [7, 8]


def test_the_memo_lets_go_of_a_tensor_whose_earlier_state_a_capture_keeps(monkeypatch):
    memo, tensor, errors = TensorMemo("x"), torch.zeros(3), []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    states = []
    for _ in range(2):
        memo.get(tensor, "a", lambda: 1, lambda value: ())
        states.append(memo._entries[id(tensor)].state)
        tensor.add_(1)
    del tensor
    assert not memo._entries
    assert not errors


def test_the_memo_keeps_the_results_of_two_threads_that_bring_one_new_tensor(monkeypatch):
    memo, tensor, threads, state = TensorMemo("x"), torch.zeros(3), [], tensor_memo.TensorState

    def get(key):
        return memo.get(tensor, key, lambda: key, lambda value: ())

    def state_meanwhile(*given):
        monkeypatch.setattr(tensor_memo, "TensorState", state)
        threads.append(threading.Thread(target=get, args=("b",)))
        threads[0].start()
        threads[0].join(0.2)
        return state(*given)

    monkeypatch.setattr(tensor_memo, "TensorState", state_meanwhile)
    get("a")
    threads[0].join()
    assert set(memo._entries[id(tensor)].results) == {"a", "b"}


def on_gpu(kind, edge_dim, num_edges=40_000, **options):
    """A layer on `fused3s`, and its arguments: enough edges that planning does not wait."""
    torch.manual_seed(0)
    given = () if kind == "AGNNConv" else (32, 16, 2)
    sizes = {"edge_dim": edge_dim} if edge_dim else {}
    layer = getattr(fused3s.nn, kind)(*given, **sizes, backend="fused3s", **options).cuda()
    x, edge_index = torch.randn(2000, 32, device="cuda"), torch.randint(2000, (2, num_edges), device="cuda")
    return layer, (x, edge_index, *([torch.randn(num_edges, edge_dim, device="cuda")] if edge_dim else []))


def step_of(layer, given):
    def run():
        layer.zero_grad(set_to_none=False)
        out = layer(*given)
        out.square().sum().backward()
        return out.detach()

    return run


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::fused3s.SlowerBackendWarning")
@pytest.mark.parametrize(("kind", "edge_dim"), KINDS)
@torch.no_grad()
def test_gpu_another_stream_waits_for_what_the_first_one_makes(kind, edge_dim):
    layer, given = on_gpu(kind, edge_dim)
    layer(*given)  # compiles
    for _ in range(10):
        given = [each.clone() for each in given]
        torch.cuda.synchronize()
        outputs = []
        for cycles in (50_000_000, 0):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(cycles)
                outputs.append(layer(*given))
        torch.cuda.synchronize()
        assert torch.equal(*outputs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::fused3s.SlowerBackendWarning")
@pytest.mark.parametrize(("kind", "edge_dim"), KINDS)
def test_gpu_a_captured_step_keeps_the_plan_and_refuses_a_changed_graph(planned, kind, edge_dim):
    layer, given = on_gpu(kind, edge_dim)
    run = step_of(layer, given)
    captured = capture_step(run, layer)
    assert len(planned) == 1
    for each in (given[0], *given[2:]):  # replays read features anew
        each.normal_()
        expected = run()
        torch.testing.assert_close(captured.replay(), expected)
    given[1].copy_(given[1].flip(0))
    with pytest.raises(CaptureError, match=r"edge_index: the tensor of shape \(2, 40000\) on cuda:0 was changed"):
        captured.replay()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["TransformerConv", "GATConv", "GATv2Conv", "AGNNConv"])
def test_gpu_a_captured_step_without_a_cache_plans_the_current_edges(kind):
    layer, given = on_gpu(kind, None, cache=False)
    run = step_of(layer, given)
    captured = capture_step(run, layer)
    for seed in range(3):
        torch.manual_seed(seed)
        given[1].copy_(torch.randint(2000, (2, 40_000), device="cuda"))
        given[1][:, ::7] = given[1][:1, ::7]  # self-loops
        out = captured.replay().clone()
        gradients = [each.grad.clone() for each in layer.parameters()]
        torch.testing.assert_close(out, run())
        for got, right in zip(gradients, layer.parameters(), strict=True):
            torch.testing.assert_close(got, right.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("fill_value", ["add", "mean", "mul"])
def test_gpu_features_of_self_loops_have_the_same_bits_twice(fill_value):
    edge_index = torch.randint(50, (2, 100_000), device="cuda")
    features = torch.rand(100_000, 3, device="cuda", requires_grad=True)
    found = []
    for _ in range(5):
        out = self_loops.features_with_self_loops(features, edge_index, 50, fill_value)
        found.append((out, torch.autograd.grad(out.square().sum(), features)[0]))
    for out, gradient in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(gradient, found[0][1])
