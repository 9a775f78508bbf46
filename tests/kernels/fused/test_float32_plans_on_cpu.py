"""float32 in plans of `fused3s` on the CPU (tests/cuda_shim): the choice of the kernel, and the precision "medium"."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from edge_cases import EDGE_LISTS, FORMS, edge_inputs, in_order, qkv
from float32_precision import matmul_precision
from poison import poisoned_buffers

from fused3s import AttentionPlan, Dropout, plan_attention
from fused3s.terms.edge_data import cast_floats
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Case:
    """Calls with edge data of a kind in edge_cases.KINDS on a graph with a hub, whose tensors require gradients."""

    def __init__(self, heads: int, dim: int, kind: str | None) -> None:
        self.graph = EDGE_LISTS["hub"]()
        self.heads, self.dim, self.kind = heads, dim, kind
        self.made, order = FORMS["scipy_coo"](self.graph)
        edges = None if kind is None else edge_inputs(kind, self.graph.num_edges, heads, dim)
        self.edges = None if edges is None else in_order(edges, order)
        self.grad_output = torch.randn(self.graph.shape[0], heads, dim, generator=torch.Generator().manual_seed(1))

    def plan(self, backend: str, dtype: torch.dtype) -> AttentionPlan:
        options = {"dtype": dtype, "head_dim": self.dim, "num_heads": self.heads, "backward": True}
        return plan_attention(self.made, backend=backend, device="cpu", edge_data=self.kind is not None, **options)

    def run(self, plan: AttentionPlan, dtype: torch.dtype, scale: float = 0.3, **options) -> list[torch.Tensor]:
        """The output, and the gradients of query, key and value and of the floats of the edge data."""
        leaves = [each.to(dtype).requires_grad_() for each in qkv(self.graph.shape, self.heads, self.dim)]
        bound = None
        if self.edges is not None:
            bound = plan.bind_edges(cast_floats(self.edges, dtype))
            named = {name: getattr(bound, name) for name in ("edge_values", "padded_features")}
            named = {name: each.requires_grad_() for name, each in named.items() if each is not None}
            bound, leaves = replace(bound, **named), [*leaves, *named.values()]
        output = plan(*leaves[:3], scale=scale, edges=bound, dropout=Dropout(0.2, 7), **options)
        grad = self.grad_output.to(dtype).to(output.dtype)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.fixture
def medium() -> Iterator[None]:
    with matmul_precision("medium"):
        yield


# Narrow and odd columns; and heads whose edge data of 16 bits the kernel over KV tiles takes.
@pytest.mark.parametrize(
    ("heads", "dim", "kind", "precision"),
    [
        (4, 13, "all", "highest"),
        (1, 136, "features", "high"),
        (2, 40, "bias", "highest"),
        (8, 8, None, "high"),
        (1, 1, "key_features", "highest"),
        (16, 3, "bias_minus_infinity_clamped", "highest"),
        (1, 255, "value_features", "high"),
    ],
)
def test_edge_data_goes_edge_by_edge(monkeypatch, heads, dim, kind, precision):
    case = Case(heads, dim, kind)
    exact = case.run(case.plan("reference", DOUBLE), DOUBLE)
    with matmul_precision(precision), cuda_on_cpu(MODES["late"]) as gpu:
        plan = case.plan("fused3s", FLOAT)
        with poisoned_buffers(monkeypatch):
            found = case.run(plan, FLOAT)
    for got, right in zip(found, exact, strict=True):
        assert got.dtype == FLOAT
        assert (got.double() - right).norm() <= 3e-6 * right.norm()
    assert {name.split("<")[0] for name in gpu.launched} >= {"fused3s_edges", "gradients_over_rows"}


# Over KV tiles; edge by edge, with edge data and padded columns.
@pytest.mark.parametrize(("heads", "dim", "kind"), [(1, 64, None), (4, 13, "all"), (1, 40, "bias")])
def test_medium_is_bfloat16_with_float32_around_it(monkeypatch, medium, heads, dim, kind):
    case = Case(heads, dim, kind)
    with cuda_on_cpu(MODES["late"]) as gpu:
        plan = case.plan("fused3s", FLOAT)
        with poisoned_buffers(monkeypatch):
            found = case.run(plan, FLOAT)
            launched = gpu.launched.copy()
            rounded = case.run(plan, BFLOAT, out_dtype=FLOAT)
    assert not any("kFloat" in name.split(",")[0] for name in launched)
    for index, (got, right) in enumerate(zip(found, rounded, strict=True)):
        assert got.dtype == FLOAT
        assert torch.equal(got, right.float()), index
