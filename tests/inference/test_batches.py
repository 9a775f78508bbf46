"""A model over all batches of a collection against the same model on DGL's batch of all graphs."""

import numpy as np
import pytest
import torch

import data
from data.csr_batches import CsrBatches
from inference.batches import BatchRunner, Pass, SetRun, run_set
from kernels import plan_attention
from models import GraphTransformer

CPU = torch.device("cpu")


@pytest.fixture
def loaded(tmp_path):
    """37 graphs of 1 to 12 nodes, some without an edge."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 13, 37)
    edges = rng.integers(0, 9, 37) * (sizes > 1)
    u, v = rng.integers(0, np.repeat(sizes, edges), (2, edges.sum()))
    feat = rng.normal(size=(sizes.sum(), 5))
    np.savez(tmp_path / "c.npz", node_counts=sizes, edge_counts=edges, u=u, v=v, feat=feat)
    return data.load("mine", path=tmp_path / "c.npz", batch_size=None)


def model_for(task, **options):
    torch.manual_seed(0)
    settings = {"dim": 16, "heads": 2, "blocks": 2, "norm": "layer", "in_features": 5, "num_classes": 3} | options
    return GraphTransformer(task=task, **settings).eval()


def reference_plan(graph, **options):
    return plan_attention(graph, backend="reference", device=CPU, **options)


def predictions(runner):
    found = []
    with torch.inference_mode():
        one = runner.run(lambda batch, logits: found.append((batch.first_row, batch.last_row, logits)))
    ends = [0, *(last for _, last, _ in found)]
    assert [first for first, _, _ in found] == ends[:-1]
    return torch.from_numpy(np.concatenate([logits for *_, logits in found])), one


@pytest.mark.parametrize("by_thread", [False, True])
@pytest.mark.parametrize(("task", "pos_enc"), [("graph", 0), ("node", 0), ("graph", 3)])
def test_batches_predict_what_the_whole_predicts(loaded, task, pos_enc, by_thread):
    meta = data.GraphMeta(**(vars(loaded.meta) | {"task": task}))
    loaded = data.LoadedGraph(loaded.graph, meta)
    model = model_for(task, pos_enc=pos_enc)
    with torch.no_grad():
        expected = model(model.prepare(loaded.graph, reference_plan(loaded.graph)))
    runner = BatchRunner(CsrBatches(loaded, 8, CPU), model, reference_plan, model, by_thread=by_thread)
    found, one = predictions(runner)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert len(one.forward) == 5
    assert 0 < one.share <= 1
    assert torch.equal(predictions(runner)[0], found)


@pytest.mark.parametrize("form", ["bias", "stream"])
def test_edge_features_in_batches(loaded, form):
    torch.manual_seed(1)
    loaded.graph.edata["feat"] = torch.randint(0, 4, (loaded.graph.num_edges(), 1))
    model = model_for("graph", edge_features=form, edge_in_features=(4,))
    with torch.no_grad():
        plan = reference_plan(loaded.graph, edge_data=True)
        expected = model(model.prepare(loaded.graph, plan))
    runner = BatchRunner(
        CsrBatches(loaded, 8, CPU), model, lambda graph: reference_plan(graph, edge_data=True), model, by_thread=False
    )
    torch.testing.assert_close(predictions(runner)[0], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("by_thread", [False, True])
def test_an_error_in_a_batch_ends_the_pass(loaded, by_thread):
    calls = []

    def plan(graph):
        calls.append(graph)
        if len(calls) == 3:
            raise ValueError("the third batch")
        return reference_plan(graph)

    model = model_for("graph")
    runner = BatchRunner(CsrBatches(loaded, 8, CPU), model, plan, model, by_thread=by_thread)
    with pytest.raises(ValueError, match="the third batch"), torch.inference_mode():
        runner.run(lambda batch, logits: None)


def test_short_passes_are_repeated_and_only_the_first_is_taken():
    takes = []

    class Runner:
        def __init__(self, seconds):
            self.seconds = seconds

        def run(self, take):
            takes.append(take)
            return Pass(self.seconds, (1.0, 3.0))

    def take(batch, logits):
        pass

    assert len(run_set(Runner(0.1), take, 7)) == 7
    assert [each is take for each in takes] == [True, *[False] * 7]
    assert len(run_set(Runner(2.0), take, 7)) == 2
    (only,) = run_set(Runner(60.0), take, 7)
    whole = SetRun((only, Pass(40.0, (2.0,))), 600, 2, 512, CPU)
    assert whole.graphs_per_second.median == pytest.approx((10 + 15) / 2)
    assert whole.forward.median == 2
    assert only.share == pytest.approx(0.004 / 60)


@pytest.mark.gpu
@pytest.mark.parametrize("kept_share", [0.5, 0.0])
@pytest.mark.parametrize("by_thread", [False, True])
def test_gpu_batches_predict_what_the_whole_predicts(loaded, monkeypatch, kept_share, by_thread):
    monkeypatch.setattr("data.csr_batches.KEPT_SHARE", kept_share)
    device = torch.device("cuda", torch.cuda.current_device())
    model = model_for("graph", dim=64).to(device, torch.float16)
    batches = CsrBatches(loaded, 3, device)
    assert batches.kept_on.type == ("cuda" if kept_share else "cpu")
    with torch.inference_mode():
        plan = plan_attention(loaded.graph, backend="reference", device=device)
        expected = model(model.prepare(loaded.graph, plan)).float().cpu()

    def fused(graph):
        return plan_attention(graph, backend="fused3s", device=device, dtype=torch.float16, head_dim=32, num_heads=2)

    runner = BatchRunner(batches, model, fused, model, by_thread=by_thread)
    for _ in range(5):
        torch.testing.assert_close(predictions(runner)[0], expected, atol=1e-2, rtol=0)
