"""A backend with a backward pass of its own that runs on the CPU: the formulas of `reference` behind the interface that
CUDA backends have."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from fused3s.backends.base import BackwardCall, Call, Gradients, InputSpec
from fused3s.backends.cuda import refuse_gradients
from fused3s.backends.reference import Edges, ReferenceBackend, edge_softmax_attention
from fused3s.terms.edge_data import FLOATS
from fused3s.torch_side.torch_private import autograd_active


@dataclass(frozen=True, eq=False)
class FormulaData:
    """The edges, and for the backward pass their number; shape and reads stand for the fields of a larger format."""

    edges: Edges
    shape: tuple[int, int]
    num_edges: int
    reads: str
    counted: torch.Tensor | None = None


class FormulaBackend(ReferenceBackend):
    name = "formula"
    data_type = FormulaData
    autograd = False
    has_backward = True
    traceable = False

    def __init__(self) -> None:
        self.wanted: list[frozenset[str]] = []  # of the backward passes so far

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> FormulaData:
        edges = super().build(graph, device, inputs, perm)
        data = FormulaData(edges, tuple(graph.shape), edges.row.numel(), "rows")
        return replace(data, counted=torch.tensor([data.num_edges])) if inputs.backward else data

    def attend(self, data: FormulaData, call: Call) -> torch.Tensor:
        refuse_gradients(self.name, *call[:3])
        assert call.query.data_ptr() or not call.query.numel(), "a launch needs memory"
        return super().attend(data.edges, call)

    def attend_backward(self, data: FormulaData, given: BackwardCall) -> Gradients:
        call, output, grad_output, wanted, _, grad_lse = given
        self.wanted.append(wanted)
        assert data.counted.tolist() == [data.edges.row.numel()], "a plan without what the backward pass reads"
        assert grad_output.shape == output.shape == call.query.shape
        with autograd_active():
            inputs = {"query": call.query, "key": call.key, "value": call.value}
            inputs |= {} if call.edges is None else {name: getattr(call.edges, name) for name in FLOATS}
            leaves = {name: each.detach().requires_grad_() for name, each in inputs.items() if each is not None}
            edges = call.edges
            if edges is not None:
                edges = replace(edges, **{name: leaf for name, leaf in leaves.items() if name in FLOATS})
            rows = [leaves[name] for name in ("query", "key", "value")]
            result, lse = edge_softmax_attention(*rows, data.edges.row, data.edges.col, call.scale, edges)
            torch.testing.assert_close(output, result.detach().to(output.dtype))
            torch.testing.assert_close(call.lse, lse.detach().float())
            names = [name for name in Gradients._fields if name in wanted]
            results, grads = [result], [grad_output.to(result.dtype)]
            if grad_lse is not None:
                results, grads = [result, lse], [*grads, grad_lse.to(lse.dtype)]
            found = torch.autograd.grad(results, [leaves[name] for name in names], grads)
        return Gradients(**dict(zip(names, found, strict=True)))
