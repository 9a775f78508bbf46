"""The 16-bit copy of a model against the model itself in float64."""

import copy

import pytest
import torch

import fused3s
from configs.schema import TrainingConfig
from data.dgl import import_dgl
from models import GraphTransformer
from models.training.losses import BY_METRIC
from models.training.optimiser import make_optimiser
from models.training.precision import WorkingCopy
from models.training.step import Step
from models.training.tasks import Batch

NODES = 40


def make(norm="layer", task="node"):
    """A model, and a graph of 40 nodes or four graphs of 10 nodes, with labels."""
    torch.manual_seed(0)
    dgl = import_dgl()
    model = GraphTransformer(in_features=6, num_classes=3, dim=16, heads=2, blocks=2, norm=norm, task=task)

    def random_graph(nodes, edges):  # dgl.rand_graph has a generator of its own, which manual_seed does not reach
        return dgl.graph(tuple(torch.randint(nodes, (2, edges))), num_nodes=nodes)

    graph = random_graph(NODES, 200)
    if task == "graph":
        graph = dgl.batch([random_graph(10, 50) for _ in range(4)])
    graph.ndata["feat"] = torch.randn(NODES, 6)
    return model, graph, torch.randint(3, (NODES,)) if task == "node" else torch.randint(2, (4, 3)).float()


def plan(graph, dtype):
    return fused3s.plan_attention(graph, backend="reference", device="cpu", dtype=dtype, head_dim=8, backward=True)


def loss_of(labels):
    return BY_METRIC["rocauc" if labels.is_floating_point() else "accuracy"]


def step_of(model, graph, labels, dtype, lr=1e-9):
    working = WorkingCopy(model, dtype)
    config = TrainingConfig(optimizer="sgd", lr=lr, weight_decay=0.0)
    optimiser = make_optimiser(working.vectors, config, torch.device("cpu"))
    batch = Batch(working.model.prepare(graph, plan(graph, dtype)), labels)
    return Step(model, working, working.model, optimiser, None, loss_of(labels)), batch


def gradients_of(model, graph, labels, dtype):
    """Loss and gradients by torch alone; 16 bits by autocast."""
    kept = next(model.parameters()).dtype
    with torch.autocast("cpu", dtype, enabled=dtype != kept):
        loss = loss_of(labels)(model.train()(model.prepare(graph, plan(graph, dtype))), labels)
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("norm", "task", "dtype"),
    [("layer", "node", torch.float16), ("batch", "node", torch.bfloat16), ("layer", "graph", torch.float32)],
)
def test_gradients_are_as_exact_as_those_of_autocast(norm, task, dtype):
    model, graph, labels = make(norm, task)
    right_loss, right = gradients_of(exact := copy.deepcopy(model).double(), graph, labels, torch.float64)
    _, by_torch = gradients_of(copy.deepcopy(model), graph, labels, dtype)
    step, batch = step_of(model, graph, labels, dtype)
    loss = step(batch).item()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    got = torch.cat([gradient.flatten().double() for gradient in gradients])
    allowed = 1.5 * (by_torch - right).norm()
    assert (got - right).norm() <= allowed
    assert allowed < 0.2 * right.norm()
    assert abs(loss - right_loss) < 0.01 * right_loss
    for name, buffer in exact.named_buffers():  # running statistics of the norms
        torch.testing.assert_close(model.get_buffer(name).double(), buffer.double(), rtol=0.02, atol=0.02)


def test_changes_below_the_resolution_of_16_bits_add_up():
    model, graph, labels = make()
    before = copy.deepcopy(model)
    step, batch = step_of(model, graph, labels, torch.bfloat16, lr=1e-3)
    losses = [step(batch).item() for _ in range(20)]
    weight, old = model.blocks[0].qkv.weight, before.blocks[0].qkv.weight
    assert (weight != old).float().mean() > 0.9
    assert losses[-1] < losses[0]
    assert torch.equal(step.working.model.blocks[0].qkv.weight, step.working.model.blocks[0].qkv.weight.bfloat16())
