"""Batches at one size: they predict what the collection as a whole predicts, also with one plan for all of them."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from poison import poisoned_buffers

import data
from bench.batches import BatchRunner
from bench.padded_batches import PaddedBatches, ReplayedForward
from data.csr_batches import CsrBatches, padded
from kernels import plan_attention
from kernels.plan_room import with_room
from models import Execution, GraphTransformer, prepare_execution
from models.dense import choose_dense
from models.graph_inputs import pattern_of
from tests.cuda_shim.cuda_on_cpu import COMPILER, cuda_on_cpu

CPU, HEADS = torch.device("cpu"), 2


@pytest.fixture(params=["floats", "codes"])
def loaded(request, tmp_path):
    """50 graphs of 1 to 12 nodes, some without an edge; the last batch of 8 has 2 graphs."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 13, 50)
    edges = rng.integers(0, 30, 50) * (sizes > 1)
    u, v = rng.integers(0, np.repeat(sizes, edges), (2, edges.sum()))
    feat = rng.normal(size=(sizes.sum(), 5))
    np.savez(tmp_path / "c.npz", node_counts=sizes, edge_counts=edges, u=u, v=v, feat=feat)
    found = data.load("mine", path=tmp_path / "c.npz", batch_size=None)
    if request.param == "codes":
        found.graph.ndata["feat"] = torch.from_numpy(rng.integers(0, 4, (sizes.sum(), 2)))
    return with_meta(found, task="graph")


def with_meta(loaded, **changes):
    return data.LoadedGraph(loaded.graph, data.GraphMeta(**(vars(loaded.meta) | changes)))


def model_for(loaded, task="graph", dim=16):
    torch.manual_seed(0)
    features = 5 if loaded.graph.ndata["feat"].is_floating_point() else (4, 4)
    sizes = {"in_features": features, "num_classes": 3, "dim": dim, "heads": HEADS, "blocks": 2}
    return GraphTransformer(task=task, **sizes).eval()


def reference_plan(graph):
    return plan_attention(graph, backend="reference", device=CPU)


def predictions(runner):
    found = []
    with torch.inference_mode():
        runner.run(lambda batch, logits: found.append(logits))
    return torch.from_numpy(np.concatenate(found))


@pytest.mark.parametrize("task", ["graph", "node"])
def test_padded_batches_predict_what_the_whole_predicts(loaded, task):
    loaded, model = with_meta(loaded, task=task), model_for(loaded, task)
    with torch.no_grad():
        expected = model(model.prepare(loaded.graph, reference_plan(loaded.graph)))
    batches = PaddedBatches(CsrBatches(loaded, 8, CPU))
    assert len(batches) == 7
    num_graphs = 8 + -(-batches.num_rows // 64)
    assert {(len(batch.features), len(batch.graph_starts)) for batch in batches} == {(batches.num_rows, num_graphs)}
    for batch in batches:
        starts = [*batch.graph_starts.tolist(), batches.num_rows]
        assert max(np.diff(starts)[batch.last - batch.first :]) <= 64
    runner = BatchRunner(batches, model, reference_plan, model, by_thread=False)
    torch.testing.assert_close(predictions(runner), expected, atol=2e-5, rtol=0)


def test_a_batch_larger_than_the_padded_one(loaded):
    batch = CsrBatches(loaded, 8, CPU).batch(0, 8)
    rows = len(batch.features)
    for sizes in ((rows - 1, 8), (rows, 7)):
        with pytest.raises(ValueError, match=f"num_rows, num_graphs: got .*; the batch has {rows} rows of 8 graphs"):
            padded(batch, *sizes)


def fused_plan(graph, device):
    return plan_attention(graph, backend="fused3s", device=device, dtype=torch.float16, head_dim=32, num_heads=HEADS)


def by_one_plan(loaded, device, cuda_graph, around):
    """Predictions by one plan with room, and by a plan for each batch, inside of contexts of `around`; the number of
    batches that did not fit."""
    model = model_for(loaded, dim=64).to(device).cast(torch.float16)
    batches = PaddedBatches(CsrBatches(loaded, 8, device))
    first = next(iter(batches))

    def plan(graph):
        return fused_plan(graph, device)

    with torch.inference_mode():
        inputs = model.prepare_batch(first, with_room(plan(pattern_of(first)), batches.room))
        if cuda_graph:
            execution = prepare_execution(model, inputs, backend="fused3s", dense="plain", cuda_graph=True)
        else:
            execution = Execution(model, inputs, choose_dense(model, "plain"), None, "on a CPU")
    forward = ReplayedForward(execution, model)
    runners = [BatchRunner(batches, model, plan, each, by_thread=False) for each in (forward, model)]
    with around():
        return *map(predictions, runners), forward.num_eager


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")
@pytest.mark.usefixtures("one_thread")
def test_one_plan_and_its_inputs_serve_all_batches(loaded, monkeypatch):
    with cuda_on_cpu():
        found, expected, num_eager = by_one_plan(loaded, CPU, False, partial(poisoned_buffers, monkeypatch))
    assert torch.equal(found, expected)
    assert num_eager < 7


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")
@pytest.mark.usefixtures("one_thread")
def test_batches_that_do_not_fit_run_eagerly(loaded, monkeypatch):
    monkeypatch.setattr("bench.padded_batches.refill_", lambda room, plan: False)
    with cuda_on_cpu():
        found, expected, num_eager = by_one_plan(loaded, CPU, False, partial(poisoned_buffers, monkeypatch))
    assert torch.equal(found, expected)
    assert num_eager == 7


@pytest.mark.gpu
def test_gpu_one_cuda_graph_serves_all_batches(loaded):
    device = torch.device("cuda", torch.cuda.current_device())
    found, expected, num_eager = by_one_plan(loaded, device, True, nullcontext)
    assert torch.equal(found, expected)
    assert num_eager < 7
