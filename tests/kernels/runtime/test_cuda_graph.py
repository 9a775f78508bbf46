"""Capture in CUDA graphs: the order of calls on fakes; on a GPU, replays, errors and the state after an error."""

import gc
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from fused3s import plan_attention
from fused3s.runtime import cuda_graph
from fused3s.runtime.cuda_graph import CaptureError, capture, kept_results, without_collector
from fused3s.runtime.tensor_state import TensorState

GPU = torch.device("cuda", 0)


CAPTURE = "capture thread_local"


class FakeStream:
    device_index, cuda_stream = 0, 7

    def wait_stream(self, other):
        pass


class FakeGraph:
    replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def calls(monkeypatch):
    """Names of torch's functions in the order of their calls; nothing is captured."""
    calls = []

    @contextmanager
    def graph(graph, pool=None, *, stream, capture_error_mode="global"):
        calls.append(f"capture {capture_error_mode}")
        try:
            yield
        except BaseException:
            raise RuntimeError("capture was invalidated")  # noqa: B904  as torch's does, in the handler

    @contextmanager
    def device(device):
        calls.append(f"device {device.index}")
        yield
        calls.append("device back")

    fakes = {
        "device": device,
        "Stream": FakeStream,
        "current_stream": FakeStream,
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: calls.append("set_stream"),
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": lambda: (0, 0),
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *arguments: calls.append("release memory"), raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *arguments, device: calls.append("zeros"))
    monkeypatch.setattr(cuda_graph, "_num_nodes", lambda stream: calls[calls.index(CAPTURE) :].count("run"))
    return calls


def test_capture_follows_two_calls_and_lets_other_threads_allocate(calls):
    def run():
        calls.append("run")
        return len(calls)

    captured = capture(run, torch.device("cuda", 1), launches=2)
    assert calls == ["device 1", "run", "run", CAPTURE, "run", "run", "device back"]
    assert captured.result == len(calls) - 1
    assert captured.replay() == captured.result
    assert captured.graph.replays == 1


def test_the_first_error_is_raised_and_torch_is_restored(calls):
    def run():
        if CAPTURE in calls:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        capture(run, GPU)
    assert calls[-5:] == ["set_stream", "release memory", "release memory", CAPTURE, "zeros"]


def test_an_error_of_another_kind_is_the_first_one(calls):
    def run():
        if CAPTURE in calls:
            raise ValueError("edges: their check waits\nmore")

    try:
        raise KeyError("an error that the caller handles meanwhile")
    except KeyError:
        with pytest.raises(CaptureError, match=r"^ValueError: edges: their check waits$"):
            capture(run, GPU)


def test_an_interrupt_stays_one(calls):
    def run():
        if CAPTURE in calls:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(run, GPU)
    assert not cuda_graph._kept


def test_a_replay_refuses_a_tensor_that_changed_since_the_capture(calls, monkeypatch):
    monkeypatch.setattr(cuda_graph, "stream_handle", lambda index: FakeStream.cuda_stream)
    tensors = [torch.ones(2, 3), torch.ones(4)]
    states = [TensorState(each) for each in tensors]

    def run():
        calls.append("run")
        kept = kept_results(GPU)
        assert (kept is not None) == (CAPTURE in calls)
        for state in states if kept else ():
            kept.add("edge_index", state, "a plan")

    captured = capture(run, GPU)
    assert kept_results(GPU) is None
    captured.replay()
    del tensors[1]  # a tensor that is gone does not change
    captured.replay()
    tensors[0].data = torch.ones(2, 3)
    with pytest.raises(
        CaptureError, match=r"edge_index: the tensor of shape \(2, 3\) on cpu .*Capture again; or .*cache=False"
    ):
        captured.replay()
    assert captured.graph.replays == 2


def test_an_empty_capture_is_an_error(calls):
    with pytest.raises(CaptureError, match="nothing was queued on cuda:0: the function works on another device"):
        capture(lambda: None, GPU)


@pytest.mark.gpu
def test_gpu_replays_launches_and_recovers_from_a_failure():
    x = torch.zeros(4, device=GPU)
    captured = capture(lambda: x.add_(1), GPU, launches=3)
    before = float(x[0])
    assert captured.replay() is captured.result
    assert captured.result.tolist() == [before + 3] * 4
    with pytest.raises(CaptureError):
        capture(lambda: x.sum().item(), GPU)
    with pytest.raises(CaptureError):
        capture(torch.cuda.synchronize, GPU)
    capture(lambda: x.add_(1), GPU).replay()
    assert x.isfinite().all()


@pytest.mark.gpu
def test_gpu_graphs_that_share_memory_take_it_once():
    x = torch.ones(1 << 24, device=GPU)  # 64 MiB
    first = capture(lambda: (x + 1).sum(), GPU)
    before = torch.cuda.memory_reserved(GPU)
    second = capture(lambda: (x + 2).sum(), GPU, shares=first)
    assert torch.cuda.memory_reserved(GPU) - before < x.nbytes
    for _ in range(2):
        assert (first.replay().item(), second.replay().item()) == (2 * len(x), 3 * len(x))


@pytest.mark.gpu
def test_gpu_random_numbers_after_a_capture_that_failed():
    x = torch.zeros(1000, device=GPU)

    def waits():
        torch.nn.functional.dropout(x, 0.5)
        return x.sum().item()

    with pytest.raises(CaptureError, match="capturing"):
        capture(waits, GPU)
    torch.cuda.manual_seed(0)
    first = torch.rand(5, device=GPU)
    torch.cuda.manual_seed(0)
    assert torch.equal(torch.rand(5, device=GPU), first)
    captured = capture(lambda: torch.rand(5, device=GPU), GPU)
    assert not torch.equal(captured.replay().clone(), captured.replay())


@pytest.mark.gpu
def test_gpu_other_threads_wait_and_allocate_during_a_capture():
    x, stop, failures = torch.zeros(4, device=GPU), threading.Event(), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            megabytes = 1
            while not stop.is_set():
                try:
                    torch.ones(megabytes << 18, device=GPU).sum().item()
                except RuntimeError as error:
                    failures.append(str(error))
                megabytes = megabytes % 512 + 7

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            capture(lambda: torch.empty(1 << 22, device=GPU).fill_(x.add_(1)[0]), GPU).replay()
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert x.isfinite().all()


@pytest.mark.gpu
def test_gpu_no_graph_of_a_reference_cycle_is_destroyed_during_a_capture():
    x = torch.zeros(4, device=GPU)

    class Cycle:
        def __init__(self):
            self.itself, self.graph = self, capture(lambda: x.add_(1), GPU)

    cycles = [None, None, Cycle()]  # let go in the two calls before the capture, and in the capture

    def run():
        cycles.pop(0)
        return x.add_(len([[each] for each in range(10_000)]))  # so many lists start a collection

    gc.collect()
    captured = capture(run, GPU)
    before = float(x[0])
    captured.replay()
    assert x.tolist() == [before + 10_000] * 4


def test_the_collector_is_off_until_the_last_of_captures_side_by_side_has_ended():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with without_collector():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with without_collector():
        thread.start()
        entered.wait()
    during = gc.isenabled()
    leave.set()
    thread.join()
    assert (during, gc.isenabled()) == (False, True)
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()  # as the caller left it
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_capture_on_a_device_that_is_not_current():
    device = torch.device("cuda", 1)
    x = torch.zeros(4, device=device)
    assert torch.cuda.current_device() == 0
    captured = capture(lambda: x.add_(1), device)
    assert torch.cuda.current_device() == 0
    before = float(x[0])
    captured.replay()
    torch.cuda.synchronize(device)
    assert captured.result.tolist() == [before + 1] * 4
    with pytest.raises(CaptureError, match="nothing was queued on cuda:0"):
        capture(lambda: x.add_(1), GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_gpu_a_capture_right_after_planning_has_exact_sizes(mode):
    """Under torch's own capture, which has no warm-up of ours: the plan asks for its numbers while it is captured."""
    edge_index = torch.randint(3_000, (2, 20_000), device="cuda")
    tensors = torch.randn(3, 3_000, 1, 64, device="cuda", dtype=torch.float16).unbind(0)
    options = {"dtype": torch.float16, "head_dim": 64, "backend": "fused3s", "device": "cuda"}
    plan = plan_attention(edge_index, shape=(3_000, 3_000), **options)
    bounded, expected = len(plan.data.arrays.work_items), plan(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out = plan(*tensors)
    assert len(plan.data.arrays.work_items) < bounded
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_gpu_a_capture_names_a_graph_whose_ids_are_out_of_range():
    edge_index = torch.randint(3_000, (2, 20_000), device="cuda")
    edge_index[0, 17] = 3_000
    tensors = torch.randn(3, 3_000, 1, 64, device="cuda", dtype=torch.float16).unbind(0)
    options = {"dtype": torch.float16, "head_dim": 64, "backend": "fused3s", "device": "cuda"}
    plan = plan_attention(edge_index, shape=(3_000, 3_000), **options)
    torch.cuda.synchronize()

    def step():
        tensors[0].clone()  # torch warns of an empty graph
        return plan(*tensors)

    with pytest.raises(ValueError, match="outside of the capture names it"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
    with pytest.raises(ValueError, match="3000"):
        plan(*tensors)
