"""Compilation by several threads, with a compiler that waits for the others instead of NVRTC."""

import threading
import time

import pytest
import torch

from fused3s import KernelCompileError, plan_attention, sparse_attention
from fused3s.fused.planning import gpu_plan
from fused3s.runtime import jit
from fused3s.runtime.jit import KernelInstance, compile_ahead, get_kernel

pytest.importorskip("cupy", reason="CuPy, which sets the device of a thread, is not installed")

ONE, TWO, THREE = (KernelInstance("plan/plan_edges.cu", name) for name in ("one", "two", "three"))
LIMIT = 30  # seconds until a thread that waits for another one gives up


@pytest.fixture
def compiled(monkeypatch):
    """Installs a function of an instance in place of the compiler; returns the list of its calls."""
    calls = []

    def install(compiler):
        def load(instance, device_index):
            calls.append((instance, device_index))
            return compiler(instance)

        monkeypatch.setattr(jit, "_load", load)
        return calls

    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "_compilations", {})
    monkeypatch.setattr("cupy.cuda.runtime.setDevice", lambda index: None)
    return install


def test_instances_compile_side_by_side(compiled, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    met = threading.Barrier(3, timeout=LIMIT)

    def compiler(instance):
        met.wait()  # each goes on when all have begun
        return instance.function

    calls = compiled(compiler)
    compile_ahead([ONE, TWO, THREE, ONE], 0)
    assert [get_kernel(each, 0) for each in (THREE, ONE, TWO)] == ["three", "one", "two"]
    assert sorted(each.function for each, _ in calls) == ["one", "three", "two"]


def test_callers_of_several_instances_do_not_wait_for_each_other(compiled):
    met, found = threading.Barrier(2, timeout=LIMIT), []
    compiled(lambda instance: (met.wait(), instance.function)[1])
    threads = [threading.Thread(target=lambda each=each: found.append(get_kernel(each, 0))) for each in (ONE, TWO)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(found) == ["one", "two"]


def test_callers_of_one_instance_compile_it_once(compiled):
    begun, go_on, found = threading.Event(), threading.Event(), []

    def compiler(instance):
        begun.set()
        assert go_on.wait(LIMIT)
        return object()

    calls = compiled(compiler)
    threads = [threading.Thread(target=lambda: found.append(get_kernel(ONE, 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(LIMIT)
    time.sleep(0.05)  # for the others to arrive
    go_on.set()
    for thread in threads:
        thread.join(LIMIT)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert calls == [(ONE, 0)]
    compile_ahead([ONE], 0)
    get_kernel(ONE, 1)  # another GPU
    assert calls == [(ONE, 0), (ONE, 1)]


def test_an_error_reaches_the_caller_and_the_next_call_tries_again(compiled):
    errors = [KernelCompileError("NVRTC could not compile one")]

    def compiler(instance):
        if instance is ONE and errors:
            raise errors.pop()
        return instance.function

    calls = compiled(compiler)
    compile_ahead([ONE, TWO], 0)
    assert get_kernel(TWO, 0) == "two"
    with pytest.raises(KernelCompileError, match="could not compile one"):
        get_kernel(ONE, 0)
    assert get_kernel(ONE, 0) == "one"
    assert sorted(each.function for each, _ in calls) == ["one", "one", "two"]


@pytest.mark.gpu
def test_gpu_first_plan_compiles_side_by_side(monkeypatch):
    threads, load = set(), jit._load

    def noted(instance, device_index):
        threads.add(threading.current_thread())
        return load(instance, device_index)

    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    monkeypatch.setattr(jit, "_load", noted)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(gpu_plan, "_begun", set())
    edge_index = torch.randint(200, (2, 2000), device="cuda")
    q, k, v = (torch.randn(200, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in "qkv")
    plan = plan_attention(edge_index, shape=(200, 200), dtype=torch.float16, head_dim=64, backward=True)
    compiled = set(jit._kernels)
    assert len(threads) > 1
    plan(q, k, v).sum().backward()
    assert set(jit._kernels) == compiled
    expected = sparse_attention(q, k, v, edge_index, shape=(200, 200), backend="reference")
    torch.testing.assert_close(plan(q, k, v), expected, rtol=2e-3, atol=2e-3)
