"""Padded batches: they predict what the collection as a whole predicts, also by one CUDA graph for all of them."""

import numpy as np
import pytest
import torch
from reference_room import CalledAgain, ReferenceRoom

import data
from data.csr_batches import CsrBatches
from inference.batches import BatchRunner, ReplayRunner
from kernels import plan_attention
from models import Execution, GraphTransformer, prepare_execution
from models.fast import choose_dense
from training.padded_batches import PaddedBatches, make_room, padding_refused

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


def model_for(loaded, task="graph", dim=16, **options):
    torch.manual_seed(0)
    features = 5 if loaded.graph.ndata["feat"].is_floating_point() else (4, 4)
    sizes = {"in_features": features, "num_classes": 3, "dim": dim, "heads": HEADS, "blocks": 2} | options
    return GraphTransformer(task=task, **sizes).eval()


def reference_plan(graph):
    return plan_attention(graph, backend="reference", device=CPU)


def predictions(runner):
    """Logits of all graphs, in their order."""
    found = []
    with torch.inference_mode():
        runner.run(lambda batch, logits: found.append(torch.from_numpy(logits.copy())))
    return torch.cat(found)


def padded_batches(loaded, model, room=ReferenceRoom, device=CPU):
    graphs = CsrBatches(loaded, 8, device)
    size = graphs.largest_size([np.arange(each.first, each.last) for each in graphs.ranges()])
    shape = {"device": device, "dtype": model.dtype, "head_dim": model.head_dim, "num_heads": HEADS}
    return graphs, PaddedBatches(graphs, size, model, room((size.rows, size.rows), size.edges, **shape))


@pytest.mark.parametrize("task", ["graph", "node"])
def test_padded_batches_predict_what_the_whole_predicts(loaded, task):
    loaded = with_meta(loaded, task=task)
    model = model_for(loaded, task)
    with torch.no_grad():
        expected = model(model.prepare(loaded.graph, reference_plan(loaded.graph)))
    graphs, padded = padded_batches(loaded, model)
    padded.load(np.arange(8))
    again = CalledAgain(lambda: model(padded.inputs()), CPU)
    execution = Execution(model, padded.inputs(), choose_dense(model, "plain"), again, "")
    runner = ReplayRunner(graphs, padded, execution)
    for _ in range(2):
        torch.testing.assert_close(predictions(runner), expected, atol=2e-5, rtol=0)
    assert padded.room.fills == 2 + 2 * 7


def test_graphs_that_do_not_fit_are_not_loaded(loaded):
    graphs, padded = padded_batches(loaded, model_for(loaded))
    padded.load(np.arange(3))
    before = padded.ids.clone()
    assert before.tolist() == [0, 1, 2, *[50] * 5]
    most = graphs.sizes.argmax()
    for ids in (np.arange(9), np.full(8, most)):
        assert not padded.load(ids)
    assert torch.equal(padded.ids, before)


@pytest.mark.parametrize(
    ("backend", "reorder", "options", "reason"),
    [
        ("csr_unfused", "none", {}, "backend is csr_unfused"),
        ("fused3s", "communities", {}, "reorder = 'communities'"),
        ("fused3s", "none", {"pos_enc": 3}, "Laplacian eigenvectors"),
        ("fused3s", "none", {"edge_features": "bias", "edge_in_features": 3}, "edge features"),
        ("fused3s", "none", {}, None),
    ],
)
def test_what_cannot_be_padded_is_named(loaded, backend, reorder, options, reason):
    model = model_for(loaded, **options)
    found = padding_refused(model, backend, reorder, CsrBatches(loaded, 8, CPU))
    assert found is None if reason is None else reason in found


@pytest.mark.gpu
def test_gpu_a_collection_on_the_host_is_named(loaded, monkeypatch):
    monkeypatch.setattr("data.csr_batches.KEPT_SHARE", 0.0)
    model = model_for(loaded).to(gpu())
    assert "too large for the memory" in padding_refused(model, "fused3s", "none", CsrBatches(loaded, 8, gpu()))


def gpu():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["graph", "node"])
def test_gpu_one_cuda_graph_serves_all_batches(loaded, task):
    loaded = with_meta(loaded, task=task)
    model = model_for(loaded, task, dim=64).to(gpu()).cast(torch.float16)
    graphs = CsrBatches(loaded, 8, gpu())
    size = graphs.largest_size([np.arange(each.first, each.last) for each in graphs.ranges()])
    shape = {"device": gpu(), "dtype": torch.float16, "head_dim": model.head_dim, "num_heads": HEADS}
    with torch.inference_mode():
        padded = PaddedBatches(graphs, size, model, make_room(size, backward=False, **shape))
        padded.load(np.arange(8))
        execution = prepare_execution(model, padded.inputs, backend="fused3s", dense="plain", cuda_graph=True)

    def plan(graph):
        return plan_attention(graph, backend="fused3s", **shape)

    expected = predictions(BatchRunner(graphs, model, plan, model, by_thread=False))
    for _ in range(2):
        torch.testing.assert_close(predictions(ReplayRunner(graphs, padded, execution)), expected, atol=2e-3, rtol=0)
