"""The Graph Transformer over parts of a graph: logits in the graph's order and gradients, as of one process."""

import numpy as np
import parallel_jobs
import pytest
import scipy.sparse as sp
import torch

from data.dgl import import_dgl
from fused3s import plan_attention
from models import GraphTransformer
from parallel import partition_graph

NODES, FEATURES, CLASSES = 90, 9, 5
OPTIONS = {"in_features": FEATURES, "num_classes": CLASSES, "dim": 16, "heads": 4, "blocks": 3}


@pytest.fixture(scope="module")
def graph():
    generator = np.random.default_rng(4)
    matrix = sp.csr_array(generator.random((NODES, NODES)) < 0.06)
    return matrix, generator.standard_normal((NODES, FEATURES)).astype(np.float32)


def one_process(model, matrix, features, labels):
    row, col = matrix.nonzero()
    dgl_graph = import_dgl().graph((col, row), num_nodes=NODES)
    dgl_graph.ndata["feat"] = torch.from_numpy(features)
    plan = plan_attention(dgl_graph, backend="reference", device="cpu")
    logits = model(model.prepare(dgl_graph, plan))
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_logits_and_gradients_are_those_of_one_process(pool, graph):
    matrix, features = graph
    torch.manual_seed(0)
    model = GraphTransformer(**OPTIONS).double()
    labels = torch.arange(NODES) % CLASSES
    given = torch.from_numpy(features), labels
    parts = partition_graph(matrix, 3, "contiguous")
    found = pool.run(parallel_jobs.run_model, 3, parts, OPTIONS, model.state_dict(), *given)
    logits, gradients = one_process(model, matrix, features, labels)
    assert [joined is None for joined, _ in found] == [False, True, True]
    torch.testing.assert_close(found[0][0], logits, rtol=2e-6, atol=2e-6)
    for rank, (_, of_rank) in enumerate(found):
        for name, gradient in of_rank.items():
            torch.testing.assert_close(
                gradient, gradients[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert torch.equal(gradient, found[0][1][name]), f"{name}: rank {rank} has other bits than rank 0"
