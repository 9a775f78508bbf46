"""The state of a plan while a GPU fills it: errors, sizes, threads, streams and copies, on a CPU (fake_gpu)."""

import copy
import gc
import pickle
import threading
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from edge_cases import qkv
from fake_gpu import fake_gpu
from plan_cases import edge_list
from racing import errors_in_threads

from fused3s import EdgeData, PlanRoom, plan_attention
from fused3s.backends.base import InputSpec
from fused3s.fused import backend as fused3s
from fused3s.fused import plan_state
from fused3s.fused.planning.gpu_plan import GPUPlan
from fused3s.fused.planning.plan import plan_graph
from fused3s.fused.tuning import CUT_PASSES
from fused3s.graph.csr import csr_from_edges
from fused3s.graph.edge_list import EdgeList
from fused3s.nn import TransformerConv
from fused3s.nn.cached.tensor_memo import TensorMemo
from fused3s.runtime import readback
from tests.cuda_shim.cuda_on_cpu import ON_SHIM

pytestmark = ON_SHIM

CPU, HALF = torch.device("cpu"), torch.float16
ROWS, COLS, HEADS, DIM = 90, 70, 2, 8


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


def inputs():
    return [each.requires_grad_() for each in qkv((ROWS, COLS), HEADS, DIM, HALF)]


def planned(is_damaged=False):
    """As a CSR: on a CPU torch would sort an edge list, and find damage at once."""
    pattern = csr_from_edges(edge_list(ROWS, COLS, 400, 1))
    if is_damaged:
        pattern.indices[17] = COLS
    arrays, options = (pattern.indptr, pattern.indices), {"dtype": HALF, "head_dim": DIM, "num_heads": HEADS}
    return plan_attention(arrays, shape=(ROWS, COLS), backend="fused3s", device="cpu", backward=True, **options)


def plan_of_list(edge_index):
    """As on a GPU, where edge lists are not sorted by torch before."""
    spec = InputSpec(HALF, DIM, HEADS)
    forward = partial(fused3s.forward_schedule, fused3s.gpu_limits(CPU), spec, None)
    return plan_graph(EdgeList(edge_index, (50, 50)), CPU, spec, forward)


@pytest.mark.parametrize("passes", [0, 1, 3, CUT_PASSES])
@pytest.mark.parametrize("finishes", [False, True])
def test_a_cached_plan_lets_go_of_its_graph(gpu, passes, finishes):
    """A loop over new graphs whose plans are cached by their tensor: nothing of a step is left after it."""
    memo, alive = TensorMemo("edge_index"), []
    gc.disable()  # what only the garbage collector frees would stay for long
    try:
        for _ in range(3):
            edge_index = torch.randint(50, (2, 300))
            plan = memo.get(edge_index, "key", partial(plan_of_list, edge_index), lambda plan: plan._tensors)
            if finishes:
                gpu.finish()
            for _ in range(passes):
                plan.ready()
                plan.ready(is_forward=False)
            alive += [weakref.ref(edge_index), weakref.ref(plan)]
            del edge_index, plan
        assert [each() for each in alive] == [None] * 6
        assert not memo._entries
    finally:
        gc.enable()


@pytest.mark.parametrize("compiled", [False, True])
def test_sizes_become_exact_after_some_forward_passes_once_the_gpu_is_done(gpu, compiled):
    plan = planned()
    call = torch.compile(lambda *given: plan(*given), backend="aot_eager", fullgraph=True) if compiled else plan
    tensors = inputs()
    bounded, first = plan.data.arrays, call(*tensors)
    first.sum().backward()
    for _ in range(CUT_PASSES):
        call(*tensors)
    assert plan.data.arrays is bounded, "cut before the GPU was done"
    gpu.finish()
    second = call(*tensors)
    assert plan.data.arrays is not bounded
    assert plan.data.arrays.work_items is None or len(plan.data.arrays.work_items) < len(bounded.work_items)
    assert torch.equal(second, first), "the exact plan has other bits"
    exact = plan.data.arrays
    call(*tensors)
    assert plan.data.arrays is exact
    torch.compiler.reset()


def test_a_capture_gets_exact_sizes_at_its_first_pass(gpu):
    """Its replays would run the blocks without work as often as the graph is replayed."""
    plan, damaged, tensors = planned(), planned(is_damaged=True), inputs()
    first, bounded = plan(*tensors), plan.data.arrays
    gpu.captures = True
    plan(*tensors)
    assert plan.data.arrays is bounded, "cut before the GPU was done"
    gpu.finish()
    second = plan(*tensors)
    assert plan.data.arrays is not bounded
    assert torch.equal(second, first)
    with pytest.raises(ValueError, match="outside of the capture names it"):
        damaged(*tensors)


def test_a_plan_that_is_used_in_one_step_is_not_cut(gpu):
    plan = planned()
    gpu.finish()
    bounded = plan.data.arrays
    for out in [plan(*inputs()) for _ in range(CUT_PASSES - 1)]:
        out.sum().backward()
    assert plan.data.arrays is bounded
    plan(*inputs())
    assert plan.data.arrays is not bounded


@pytest.mark.parametrize("compiled", [False, True])
def test_errors_of_ids_come_at_every_later_call(gpu, compiled):
    """Also from compiled code, which runs the plan itself."""
    plan, tensors = planned(is_damaged=True), inputs()
    call = torch.compile(lambda *given: plan(*given), backend="aot_eager", fullgraph=True) if compiled else plan
    call(*tensors)  # nobody knows yet
    gpu.finish()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"indices.*70"):
            call(*tensors)
    torch.compiler.reset()


@pytest.mark.parametrize("way", ["to", "deepcopy", "pickle", "settled", "print"])
def test_copies_keep_errors_and_sizes(gpu, way):
    ways = {
        "to": lambda plan: plan.to("meta").data,
        "deepcopy": lambda plan: copy.deepcopy(plan).data,
        "pickle": lambda plan: pickle.loads(pickle.dumps(plan)).data,
        "settled": lambda plan: plan.data.settled(),
        "print": lambda plan: str(plan) and plan.data,
    }
    with pytest.raises(ValueError, match=r"indices.*70"):
        ways[way](planned(is_damaged=True))
    plan = planned()
    found, exact = ways[way](plan), plan.data.exact()
    if way != "settled":  # memory of few edges is not worth a copy
        assert [tuple(each.shape) for each in shapes(found.arrays)] == [tuple(each.shape) for each in shapes(exact)]
    if way in ("deepcopy", "pickle"):
        copied, tensors = (
            {"deepcopy": copy.deepcopy, "pickle": lambda it: pickle.loads(pickle.dumps(it))}[way](plan),
            inputs(),
        )
        expected = plan(*tensors)
        exact.indices.zero_()
        assert torch.equal(copied(*tensors), expected), "a copy shares memory with its original"
        assert copied._number != plan._number


def shapes(arrays):
    return [each for each in vars(arrays).values() if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("second", ["ready", "settled", "exact"])
@pytest.mark.parametrize("first", ["ready", "settled", "exact"])
def test_a_thread_may_use_a_plan_while_another_one_reads_its_numbers(gpu, first, second):
    plan, errors, threads = planned().data, [], []
    plan.ready()
    gpu.finish()

    def use(way):
        try:
            getattr(plan, way)()
        except Exception as error:
            errors.append(error)

    def use_meanwhile():
        gpu.on_read = lambda: None
        threads.append(threading.Thread(target=use, args=(second,)))
        threads[0].start()
        threads[0].join(0.2)

    gpu.on_read = use_meanwhile
    use(first)
    threads[0].join()
    assert not errors


def test_threads_may_be_the_first_to_see_that_the_gpu_is_done(gpu):
    gpu.finish()
    for _ in range(20):
        plan = planned().data
        plan.ready()
        assert not errors_in_threads(plan.ready, 4)


def test_another_stream_waits_for_the_kernels_that_fill_a_plan(gpu):
    plan = planned().data
    plan.ready()
    assert (gpu.waits, gpu.recorded) == ([], set())
    for stream in (7, 7, 8):
        gpu.stream = stream
        plan.ready()
    assert (gpu.waits, gpu.recorded) == ([(7, 0), (8, 0)], {7, 8})
    gpu.stream = 9
    copied = copy.deepcopy(planned()).data  # planned and copied on stream 9
    gpu.stream = 0
    copied.ready()
    assert gpu.waits[-1] == (0, 9)


def test_edge_data_is_bound_on_another_stream_after_the_order_of_the_edges(gpu):
    """Also by a call, and where the order is no array of the plan."""
    edges = edge_list(ROWS, COLS, 400, 1).edge_index
    ids = torch.sparse_coo_tensor(edges.flip(0), torch.ones(400), (ROWS, COLS))
    options = {"backend": "fused3s", "device": "cpu", "dtype": HALF, "head_dim": DIM, "num_heads": HEADS}
    for graph, shape in ((edges, (ROWS, COLS)), (ids, None)):
        for use in (
            lambda plan, data: plan.bind_edges(data, check_values=False),
            lambda plan, data: plan(*inputs(), edges=data),
        ):
            gpu.stream = 0
            with torch.no_grad():
                plan = plan_attention(graph, shape=shape, edge_data=True, **options)
                gpu.waits.clear()
                gpu.stream = 5
                use(plan, EdgeData(bias=torch.zeros(400).half()))
            assert gpu.waits[0] == (5, 0)


@pytest.fixture
def room(gpu):
    return PlanRoom(
        (ROWS, COLS), 600, device="cpu", dtype=HALF, head_dim=DIM, num_heads=HEADS, edge_data=True, backward=True
    )


def test_a_stream_waits_for_each_fill_of_a_room(gpu, room):
    gpu.stream = 3
    room.fill(edge_list(ROWS, COLS, 150, 1).edge_index)
    gpu.stream = 4
    for _ in range(2):
        room.plan(*inputs())
    gpu.stream = 3
    room.fill(edge_list(ROWS, COLS, 150, 2).edge_index)
    gpu.stream = 4
    room.plan(*inputs())
    assert gpu.waits == [(4, 3), (4, 3)]
    gpu.stream = 5
    room.fill(edge_list(ROWS, COLS, 150, 1).edge_index)
    gpu.stream = 6
    room.check()
    assert gpu.waits[2:] == [(6, 5)]


def test_a_copy_on_another_stream_waits_for_the_plan_and_holds_its_memory(gpu, room, monkeypatch):
    """The original may be dropped before the copy has run."""
    monkeypatch.setattr(plan_state, "COMPACTED_EDGES", 400)  # those of `planned`
    plans = {"deepcopy": planned(), "to": planned(), "settled": planned()}
    ways = {
        "deepcopy": copy.deepcopy,
        "to": lambda plan: plan.to("meta"),
        "settled": lambda plan: plan.data.settled(),
    }
    for stream, (name, plan) in enumerate(plans.items(), 1):
        gpu.stream = stream
        found = ways[name](plan)
        assert (gpu.waits[-1], stream in gpu.recorded) == ((stream, 0), True), name
    assert found.arrays.indices.data_ptr() != plan.data.arrays.indices.data_ptr(), "settled in memory of upper bounds"
    gpu.stream = 8
    room.fill(edge_list(ROWS, COLS, 150, 1).edge_index)
    gpu.stream = 9
    copied = copy.deepcopy(room.plan)
    assert (gpu.waits[-1], 9 in gpu.recorded) == ((9, 8), True)
    assert torch.equal(copied(*inputs()), room.plan(*inputs()))


def test_a_room_is_not_copied_but_its_plan_is(room):
    """A copy would have no memory to fill."""
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"PlanRoom: .* copy its plan"):
            make(room)
    first, second = (edge_list(ROWS, COLS, number, seed).edge_index for number, seed in ((150, 1), (400, 7)))
    room.fill(first)
    expected, copied = room.plan(*inputs()), copy.deepcopy(room.plan)
    room.fill(second)
    assert torch.equal(copied(*inputs()), expected)


def test_calls_are_refused_after_a_fill_that_failed(room, monkeypatch):
    """Its kernels may have written some of the arrays."""
    first, second = (edge_list(ROWS, COLS, number, seed).edge_index for number, seed in ((150, 1), (400, 7)))
    tensors = inputs()
    room.fill(second)
    expected = room.plan(*tensors)
    room.fill(first)
    with monkeypatch.context() as patch:
        patch.setattr(GPUPlan, "fill", lambda *arguments: (_ for _ in ()).throw(RuntimeError("no launch")))
        with pytest.raises(RuntimeError, match="no launch"):
            room.fill(second)
    with pytest.raises(RuntimeError, match=r"or failed; .* fill it again"):
        room.plan(*tensors)
    room.fill(second)
    assert torch.equal(room.plan(*tensors), expected)


@pytest.mark.parametrize("form", ["eager", "with edges", "compiled", "layer"])
def test_a_fill_between_forward_and_backward_pass_is_refused(room, form):
    first, second = (edge_list(ROWS, COLS, number, seed).edge_index for number, seed in ((150, 1), (400, 7)))
    layer = TransformerConv(DIM, DIM, HEADS).to(HALF)
    call = {
        "eager": lambda q, k, v: room.plan(q, k, v),
        "with edges": lambda q, k, v: room.plan(q, k, v, edges=EdgeData(bias=q.new_ones(600))),
        "compiled": torch.compile(lambda q, k, v: room.plan(q, k, v), backend="aot_eager", fullgraph=True),
        "layer": lambda q, k, v: layer((k[:, 0], q[:, 0]), room.plan),
    }[form]
    tensors = inputs()
    for graph in (first, second):
        room.fill(graph)
        output = call(*tensors)
        if form != "layer":  # whose gradients have memory that the shim cannot tell from an input
            output.sum().backward()
    output = call(*tensors)
    room.fill(first)
    with pytest.raises(RuntimeError, match=r"PlanRoom\.fill planned another graph between"):
        output.sum().backward()
    torch.compiler.reset()


def test_a_compiled_call_gives_edge_data_without_an_edge_a_gradient_of_zero(room):
    """In a room the arrays of edges are longer than the graph."""
    room.fill(edge_list(ROWS, COLS, 150, 1).edge_index)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(600, generator=generator).half().requires_grad_()
    features = torch.randn(600, 3, generator=generator).half().requires_grad_()
    factor = torch.randn(3, HEADS, DIM, generator=generator).half().requires_grad_()
    tensors, gradients = inputs(), []

    def call(q, k, v, edges):
        return room.plan(q, k, v, edges=edges)

    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        data = EdgeData(bias=bias), EdgeData(features=features, key_factor=factor)
        bound = [room.plan.bind_edges(each, check_values=False) for each in data]
        output = sum(function(*tensors, each).float().sum() for each in bound)
        gradients.append(torch.autograd.grad(output, [bias, features, factor]))
    for eager, compiled in zip(*gradients, strict=True):
        assert torch.equal(eager, compiled)
        assert eager.isfinite().all()
    for of_edges in gradients[0][:2]:
        assert (of_edges[150:] == 0).all()
        assert (of_edges[:150] != 0).any()
    torch.compiler.reset()


@pytest.fixture
def slots(monkeypatch):
    """Memory of readbacks on a GPU whose copies are done, but those of `pending` events; `stream`: the current one."""
    state = SimpleNamespace(stream=0, made=[], pending=set(), is_safe=False)

    class Event:
        def query(self):
            assert state.is_safe, "the question ends a capture of another thread"
            return self not in state.pending

    class Slot:
        def __init__(self, count):
            self.memory, self.event, self.address = torch.zeros(count), Event(), 0
            state.made.append(self)

    @contextmanager
    def outside_of_captures():
        state.is_safe = True
        yield
        state.is_safe = False

    monkeypatch.setattr(readback, "_Slot", Slot)
    monkeypatch.setattr(readback, "copy_to_host", lambda *arguments: None)
    monkeypatch.setattr(readback, "outside_of_captures", outside_of_captures)
    monkeypatch.setattr(readback, "stream_handle", lambda device_index: state.stream)
    monkeypatch.setattr(readback, "_free", {})
    return state


def test_a_readback_has_memory_of_its_own_until_its_copy_is_done(slots):
    first, second = readback.Readback(0, 4, 0), readback.Readback(0, 4, 0)
    assert first._slot is not second._slot
    slots.pending.add(first._slot.event)
    del first, second  # the oldest is pending
    third = readback.Readback(0, 4, 0)
    assert slots.made.index(third._slot) == 2
    slots.pending.clear()
    assert [slots.made.index(readback.Readback(0, 4, 0)._slot) for _ in range(4)] == [0, 1, 0, 1]


def test_a_stream_that_is_late_does_not_multiply_the_memory_of_another(slots):
    late = readback.Readback(0, 4, 0)
    slots.pending.add(late._slot.event)
    del late
    slots.stream = 1
    for _ in range(20):
        readback.Readback(0, 4, 0)
    assert len(slots.made) == 2


def test_threads_share_the_free_memory_of_readbacks(slots, monkeypatch):
    readback.Readback(0, 4, 0)
    ((key, free),) = readback._free.items()
    (slot,) = free
    slots.is_safe = True
    monkeypatch.setattr(readback, "outside_of_captures", nullcontext)
    for _ in range(300):
        readback._free[key] = deque([slot])
        assert not errors_in_threads(lambda: readback.Readback(0, 4, 0), 2)
