"""A model over all batches of a collection against the same model on DGL's batch of all graphs."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from reference_room import CalledAgain, ReferenceRoom

import data
import fused3s
from data.batches import GraphSet
from fused3s import plan_attention
from models import GraphTransformer, prepare_execution
from models.inference.batches import eager_passes, replays, run_pass
from models.padded_batches import PaddedBatches, padding_refused

CPU, HEADS = torch.device("cpu"), 2


@pytest.fixture
def collection(tmp_path):
    """A function that gives 37 graphs of 1 to 12 nodes, some without an edge, with changes of their description."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 13, 37)
    edges = rng.integers(0, 30, 37) * (sizes > 1)
    u, v = rng.integers(0, np.repeat(sizes, edges), (2, edges.sum()))
    feat = rng.normal(size=(sizes.sum(), 5))
    np.savez(tmp_path / "c.npz", node_counts=sizes, edge_counts=edges, u=u, v=v, feat=feat)

    def collection(codes=False, **changes):
        loaded = data.load("mine", path=tmp_path / "c.npz", batch_size=None)
        if codes:
            loaded.node_data["feat"] = torch.from_numpy(rng.integers(0, 4, (int(sizes.sum()), 2)))
        return dataclasses.replace(loaded, meta=dataclasses.replace(loaded.meta, **changes))

    return collection


def model_for(task="graph", **options):
    torch.manual_seed(0)
    sizes = {"in_features": 5, "num_classes": 3, "dim": 16, "heads": 2, "blocks": 2} | options
    return GraphTransformer(task=task, **sizes).eval()


def reference_plan(graph, device=CPU, **options):
    return plan_attention(graph, backend="reference", device=device, **options)


def logits_of_all(passes, device=CPU):
    """Logits of all graphs in their order, and the pass."""
    ends, parts = [0], []

    def take(batch, logits):
        assert batch.start == ends[-1]
        ends.append(batch.stop)
        parts.append(logits.clone())

    with torch.inference_mode():
        one = run_pass(passes, take, device)
    return torch.cat(parts), one


def gpu():
    return torch.device("cuda", torch.cuda.current_device())


def expected_of(model, loaded, **options):
    with torch.inference_mode():
        plan = reference_plan(loaded.graph, model.device, **options)
        return model(model.prepare(loaded.graph, plan)).float().cpu()


def padded_batches(loaded, model, room=ReferenceRoom, device=CPU):
    """The graphs of each batch, and all of them padded."""
    graphs = GraphSet(loaded, device)
    ranges = ranges_of(graphs, 8)
    size = graphs.largest_size([*map(np.array, ranges)])
    shape = {"device": device, "dtype": model.dtype, "head_dim": model.head_dim, "num_heads": HEADS}
    return ranges, PaddedBatches(graphs, size, model, room((size.rows, size.rows), size.edges, **shape))


def ranges_of(graphs, size):
    return [range(first, min(first + size, len(graphs))) for first in range(0, len(graphs), size)]


def passes_over(graphs, size, *arguments, **options):
    return eager_passes(graphs, ranges_of(graphs, size), *arguments, **options)


@pytest.mark.parametrize(("task", "pos_enc", "by_thread"), [("graph", 0, True), ("node", 0, False), ("graph", 3, True)])
def test_batches_predict_what_the_whole_predicts(collection, task, pos_enc, by_thread):
    loaded, model = collection(task=task), model_for(task, pos_enc=pos_enc)
    graphs = GraphSet(loaded)
    for _ in range(2):
        found, one = logits_of_all(passes_over(graphs, 8, model, reference_plan, model, by_thread=by_thread))
        torch.testing.assert_close(found, expected_of(model, loaded), atol=2e-5, rtol=0)
    seconds, forward = one
    assert len(forward) == 5
    assert 0 < sum(forward) / 1e3 < seconds


@pytest.mark.parametrize("form", ["bias", "stream"])
def test_edge_features_in_batches(collection, form):
    torch.manual_seed(1)
    loaded = collection()
    loaded.edge_data["feat"] = torch.randint(0, 4, (len(loaded.columns), 1))
    model = model_for(edge_features=form, edge_in_features=(4,))

    def plan(graph):
        return reference_plan(graph, edge_data=True)

    found, _ = logits_of_all(passes_over(GraphSet(loaded), 8, model, plan, model, by_thread=False))
    torch.testing.assert_close(found, expected_of(model, loaded, edge_data=True), atol=2e-5, rtol=0)


@pytest.mark.parametrize("by_thread", [False, True])
def test_an_error_in_a_batch_ends_the_pass(collection, by_thread):
    calls = []

    def plan(graph):
        calls.append(graph)
        if len(calls) == 3:
            raise ValueError("the third batch")
        return reference_plan(graph)

    model = model_for()
    with pytest.raises(ValueError, match="the third batch"):
        logits_of_all(passes_over(GraphSet(collection()), 8, model, plan, model, by_thread=by_thread))


@pytest.mark.parametrize(("task", "codes"), [("graph", True), ("node", False)])
def test_padded_batches_predict_what_the_whole_predicts(collection, task, codes):
    loaded = collection(codes, task=task)
    model = model_for(task, in_features=(4, 4) if codes else 5)
    ranges, padded = padded_batches(loaded, model)
    padded.load(np.arange(8))
    again = CalledAgain(lambda: model(padded.inputs()), CPU)
    execution = dataclasses.replace(prepare_execution(model, padded.inputs, backend="reference"), captured=again)
    for _ in range(2):
        found, _ = logits_of_all(replays(ranges, padded, execution))
        torch.testing.assert_close(found, expected_of(model, loaded), atol=2e-5, rtol=0)
    assert padded.room.fills == 2 + 2 * 5


def test_graphs_that_do_not_fit_are_not_loaded(collection):
    _, padded = padded_batches(collection(), model_for())
    padded.load(np.arange(3))
    before = padded.ids.clone()
    assert before.tolist() == [0, 1, 2, *[37] * 5]
    assert not padded.load(np.arange(9))
    assert torch.equal(padded.ids, before)


@pytest.mark.parametrize(
    ("backend", "reorder", "options", "reason"),
    [
        ("csr_unfused", "none", {}, "backend is csr_unfused"),
        ("fused3s", "communities", {}, "reorder = 'communities'"),
        ("fused3s", "none", {"edge_features": "stream", "edge_in_features": 3}, "a stream of edges"),
        ("fused3s", "none", {"edge_features": "bias", "edge_in_features": 3}, None),
        ("fused3s", "none", {}, None),
    ],
)
def test_the_reason_against_padded_batches_is_given(collection, backend, reorder, options, reason):
    found = padding_refused(model_for(**options), backend, reorder, GraphSet(collection()))
    assert found is None if reason is None else reason in found


@pytest.mark.gpu
@pytest.mark.parametrize(("kept_share", "by_thread"), [(0.5, False), (0.0, True)])
def test_gpu_batches_predict_what_the_whole_predicts(collection, monkeypatch, kept_share, by_thread):
    monkeypatch.setattr("data.batches.KEPT_SHARE", kept_share)
    loaded, model = collection(), model_for(dim=64).to(gpu(), torch.float16)
    graphs = GraphSet(loaded, gpu())
    assert graphs.kept_on.type == ("cuda" if kept_share else "cpu")

    def plan(graph):
        return plan_attention(graph, backend="fused3s", device=gpu(), dtype=torch.float16, head_dim=32, num_heads=2)

    stream = torch.cuda.Stream(gpu(), priority=-1)
    arrays = [each for each in graphs._arrays.values() if each.is_cuda]
    complete = [each.clone() for each in arrays]
    for each in arrays:
        each.fill_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # the arrays are complete long after the first pass is queued
    for each, values in zip(arrays, complete, strict=True):
        each.copy_(values)
    for _ in range(5):
        passes = passes_over(graphs, 3, model, plan, model, stream, by_thread=by_thread)
        found, _ = logits_of_all(passes, gpu())
        torch.testing.assert_close(found, expected_of(model, loaded), atol=1e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["graph", "node"])
def test_gpu_one_cuda_graph_serves_all_batches(collection, task):
    loaded = collection(task=task)
    model = model_for(task, dim=64).to(gpu()).cast(torch.float16)
    with torch.inference_mode():
        ranges, padded = padded_batches(loaded, model, partial(fused3s.PlanRoom, backward=False), gpu())
        padded.load(np.arange(8))
        execution = prepare_execution(model, padded.inputs, backend="fused3s", dense="plain", cuda_graph=True)
    for _ in range(2):
        found, _ = logits_of_all(replays(ranges, padded, execution), gpu())
        torch.testing.assert_close(found, expected_of(model, loaded), atol=1e-2, rtol=0)
