"""A backend with a backward pass of its own that runs on the CPU: the formulas of `reference` behind the interface that
CUDA backends have."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.autograd import FLOAT_TERMS
from kernels.backends.base import Gradients, InputSpec
from kernels.backends.cuda import refuse_gradients
from kernels.backends.reference import Edges, ReferenceBackend, edge_softmax_attention
from kernels.edge_data import EdgeTerms


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

    def attend(self, data, query, key, value, scale, out_dtype, lse=None, edges=None):
        refuse_gradients(self.name, query, key, value)
        assert query.data_ptr() or not query.numel(), "a launch needs memory"
        return super().attend(data.edges, query, key, value, scale, out_dtype, lse, edges)

    def attend_backward(
        self, data, grad_output, query, key, value, output, lse, scale, edges, wanted, into=None
    ) -> Gradients:
        self.wanted.append(wanted)
        assert data.counted.tolist() == [data.edges.row.numel()], "a plan without what the backward pass reads"
        assert grad_output.shape == output.shape == query.shape
        with _autograd_active():
            given = {"query": query, "key": key, "value": value}
            if edges is not None:
                given |= {name: getattr(edges, name) for name in FLOAT_TERMS if getattr(edges, name) is not None}
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
            terms = EdgeTerms() if edges is None else edges
            terms = replace(terms, **{name: leaf for name, leaf in leaves.items() if name in FLOAT_TERMS})
            q, k, v = (leaves[name] for name in ("query", "key", "value"))
            result, log_sum_exp = edge_softmax_attention(q, k, v, data.edges.row, data.edges.col, scale, terms)
            torch.testing.assert_close(output, result.detach().to(output.dtype))
            torch.testing.assert_close(lse, log_sum_exp.detach().float())
            names = [name for name in Gradients._fields if name in wanted]
            found = torch.autograd.grad(result, [leaves[name] for name in names], grad_output.to(result.dtype))
        return Gradients(**dict(zip(names, found, strict=True)))


class _autograd_active:  # noqa: N801 (used as a function)
    """Autograd also inside of an operator's kernel, where the dispatcher has switched it off."""

    def __enter__(self) -> None:
        keys = torch._C._dispatch_tls_local_exclude_set()
        for key in torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradFunctionality:
            keys = keys.remove(key)
        self.guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys)
        self.guard.__enter__()
        self.grad = torch.enable_grad()
        self.grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.grad.__exit__(*error)
        self.guard.__exit__(*error)
