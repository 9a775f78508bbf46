"""Times of attention inside a forward pass."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.models import time_eager
from common.timers import Spread, times_inside
from data.dgl import import_dgl
from fused3s import plan_attention
from models import GraphTransformer, prepare_execution
from models.inference.attention_time import time_attention

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def prepared(device=CPU, dtype=torch.float32, delay=0.0, **options):
    torch.manual_seed(0)
    source, destination = torch.randint(0, 50, (2, 300))
    graph = import_dgl().graph((source, destination), num_nodes=50)
    graph.ndata["feat"] = torch.randn(50, 6)
    model = GraphTransformer(in_features=6, num_classes=3, dim=64, blocks=3).to(device, dtype).eval()
    plan = plan_attention(graph, backend="fused3s" if device.type == "cuda" else "reference", device=device)

    def slow(q, k, v, **options):
        time.sleep(delay)
        return v.contiguous()

    attention = slow if delay else plan

    with torch.inference_mode():
        return prepare_execution(model, model.prepare(graph, attention), backend=plan.backend, **options)


@torch.inference_mode()
def test_time_in_attention_is_of_all_blocks_of_a_pass():
    run = prepared(delay=0.02)
    spread = Spread.of(times_inside(run.eager, run.inputs.attention, device=CPU, repeats=3)[0])
    assert 60 <= spread.median < 120
    assert spread.repeats == 3


@torch.inference_mode()
def test_a_graphs_attention_is_timed_alone_without_a_pass_around_it():
    calls = []

    def attention(q, k, v, **options):
        calls.append(q.shape)
        time.sleep(0.02)
        return v.contiguous()

    run = prepared()
    run = replace(run, inputs=replace(run.inputs, attention=attention), captured=SimpleNamespace(replay=run.eager))
    spread = time_attention(run, device=CPU, repeats=3)
    assert calls == [(50, 1, 64)] * 3
    assert 60 <= spread.median < 120  # of all three blocks


@torch.inference_mode()
def test_short_eager_passes_are_timed_apart_from_the_attention_in_them():
    forward, inside = time_eager(prepared(delay=0.04), device=CPU, repeats=4, first=None)
    assert (len(forward.medians) * 4, len(inside.medians) * 2) >= (8, 4)
    assert 120 <= inside.spread.median <= forward.spread.median * 1.1


@torch.inference_mode()
def test_one_long_eager_pass_gives_its_time_and_that_of_its_attention():
    calls = []

    def attention(q, k, v, **options):
        calls.append(1)
        time.sleep(0.02)
        return v.contiguous()

    run = prepared()
    run = replace(run, inputs=replace(run.inputs, attention=attention))
    forward, inside = time_eager(run, device=CPU, repeats=1, first=[1e6])
    assert forward.medians[0] == 1e6
    assert len(calls) == 3 * inside.spread.repeats == 3 * (len(forward.medians) - 1)
    assert 60 <= inside.spread.median < forward.spread.median < 120


@pytest.mark.gpu
@torch.inference_mode()
def test_gpu_attention_in_a_cuda_graph_does_not_wait_for_launches():
    device = torch.device("cuda", torch.cuda.current_device())
    run = prepared(device, torch.float16)
    run.run()
    _, inside_eager = time_eager(run, device=device, repeats=10, first=None)
    captured = prepared(device, torch.float16, cuda_graph=True)
    inside_graph = time_attention(captured, device=device, repeats=5)
    assert 0 < inside_graph.median < inside_eager.spread.median
