"""Gradients of `fused3s` plans on the CPU (tests/cuda_shim): forward and backward kernels together, chosen by the plan,
against autograd through `reference` in float64. The kernels one by one: test_backward_tiles_on_cpu.py,
test_edge_backward_on_cpu.py.
"""

import pytest
import torch
from poison import poisoned_buffers

from fused3s import Dropout, EdgeData, plan_attention, split_qkv
from fused3s.graph.csr import CSRPattern
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu

pytestmark = ON_SHIM

NODES = 70
ERROR = 2e-3  # relative, of a whole gradient: a few roundings to float16
HALF, DOUBLE = torch.float16, torch.float64


def graph_with_a_hub() -> CSRPattern:
    """An empty row, and a column that every other row has."""
    mask = torch.rand((NODES, NODES), generator=torch.Generator().manual_seed(0)) < 0.1
    mask[:, 5] = True
    mask[3] = False
    indptr = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    return CSRPattern(indptr, mask.nonzero()[:, 1].int(), (NODES, NODES))


# Heads, columns: tiles; edge by edge; odd columns, padded for features and for an odd number of heads, else not; of a
# plan for other heads.
@pytest.mark.parametrize(
    ("heads", "dim", "planned", "with_edges"),
    [
        (1, 64, 64, False),
        (1, 1, 1, False),
        (4, 8, 8, False),
        (2, 13, 13, True),
        (3, 13, 13, False),
        (4, 13, 13, False),
        (4, 8, None, True),
    ],
)
def test_gradients_of_a_plan(monkeypatch, heads, dim, planned, with_edges):
    pattern, generator = graph_with_a_hub(), torch.Generator().manual_seed(1)
    reorder = "auto" if with_edges else "none"

    def normal(*size):
        return torch.randn(size, generator=generator).half()

    inputs = [normal(NODES, heads, dim) for _ in "qkv"]
    grad_output, weight = normal(NODES, heads, dim), normal(heads, dim, 5) / 3
    edge_tensors = normal(len(pattern.indices), 5), normal(len(pattern.indices), heads), weight

    def gradients(plan, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        bound = None
        if with_edges:
            of_edges = [tensor.to(dtype).requires_grad_() for tensor in edge_tensors]
            leaves += of_edges
            features, bias, weight = of_edges
            bound = plan.bind_edges(EdgeData(bias, features=features, key_weight=weight, value_weight=weight))
        output = plan(*leaves[:3], edges=bound, dropout=Dropout(0.2, 7))
        return torch.autograd.grad(output, leaves, grad_output.to(dtype))

    exact = gradients(plan_attention(pattern, backend="reference", device="cpu", edge_data=with_edges), DOUBLE)
    with cuda_on_cpu(MODES["late"]):
        options = {"backend": "fused3s", "device": "cpu", "edge_data": with_edges, "reorder": reorder}
        plan = plan_attention(pattern, dtype=HALF, head_dim=planned, num_heads=heads, backward=True, **options)
        with poisoned_buffers(monkeypatch):
            found = gradients(plan, HALF)
    for got, right in zip(found, exact, strict=True):
        assert ((got.double() - right).norm() / right.norm()).item() < ERROR
    assert torch.equal(found[0][3], torch.zeros(heads, dim, dtype=HALF))  # the empty row


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (4, 8), (4, 13)])
def test_the_gradient_of_a_joint_projection_is_not_copied(monkeypatch, heads, dim):
    """Bits as of three tensors, in one tensor that the kernels wrote."""
    pattern, generator = graph_with_a_hub(), torch.Generator().manual_seed(2)
    qkv = torch.randn((NODES, 3 * heads * dim), generator=generator).half().requires_grad_()
    grad_output = torch.randn((NODES, heads, dim), generator=generator).half()
    copied = []
    with cuda_on_cpu(MODES["late"]):
        plan = plan_attention(
            pattern, backend="fused3s", device="cpu", dtype=HALF, head_dim=dim, num_heads=heads, backward=True
        )
        with poisoned_buffers(monkeypatch):
            leaves = [part.detach().requires_grad_() for part in split_qkv(qkv, heads)]
            apart = torch.autograd.grad(plan(*leaves, dropout=Dropout(0.2, 7)), leaves, grad_output)
            output = plan(*split_qkv(qkv, heads), dropout=Dropout(0.2, 7))
            stack = torch.stack
            monkeypatch.setattr(torch, "stack", lambda *args: copied.append(args) or stack(*args))
            (joint,) = torch.autograd.grad(output, qkv, grad_output)
    assert torch.equal(joint, torch.cat([part.flatten(1) for part in apart], 1))
    assert not copied
