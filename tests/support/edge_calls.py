"""Calls of the kernels that go edge by edge, both passes, and the bounds for their errors.

float32: plain torch in float32 is the yardstick. 16 bits: two roundings of the largest row of a gradient.
"""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pytest
import torch
from devices import kernels_of
from edge_cases import RANK, EdgeList, bound_edges, qkv
from plan_oracle import data_by_edge
from poison import poisoned_buffers
from tolerance import FLOOR

from fused3s.backends.base import BackwardCall, Call, Gradients
from fused3s.fused.data import Fused3SData
from fused3s.fused.edges.backward import launch_edge_backward
from fused3s.fused.edges.forward import launch_edge_kernel
from fused3s.terms.dropout import Dropout, kept_edges
from fused3s.terms.edge_data import BoundEdges, transform_scores
from fused3s.torch_side.tensor_record import map_tensors

FACTOR = 4  # of the error of the worst row of plain torch in float32
EPS = torch.finfo(torch.float32).eps
ROWS = ("query", "key", "value")
SEED = 2**40 + 12345


def plain_scores(
    query: torch.Tensor, key: torch.Tensor, row: torch.Tensor, col: torch.Tensor, scale: float, edges: BoundEdges
) -> torch.Tensor:
    """[nnz, H] in the type of all tensors, with [nnz, H, d] ones."""
    keys = key[col]
    if edges.type_weight is not None:
        keys = edges.type_weight[edges.types.long()] * keys
    if edges.key_factor is not None:
        keys = (edges.features[:, :, None, None] * edges.key_factor).sum(1) * keys
    if edges.key_weight is not None:
        keys = keys + torch.einsum("hdr,er->ehd", edges.key_weight, edges.features)
    if edges.additive_weight is None:
        score = (query[row] * keys).sum(-1) * scale
    else:
        score = (torch.nn.functional.leaky_relu(query[row] + keys, 0.2) * edges.additive_weight).sum(-1) * scale
    return transform_scores(score, edges, lambda x: x[row], lambda x: x[col])


def plain_values(value: torch.Tensor, col: torch.Tensor, edges: BoundEdges) -> torch.Tensor:
    """[nnz, H, d]"""
    values = value[col]
    if edges.value_weight is None:
        return values
    return values + torch.einsum("hdr,er->ehd", edges.value_weight, edges.features)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: torch.Tensor,
    col: torch.Tensor,
    scale: float,
    edges: BoundEdges,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [N, H, d], log-sum-exp [N, H]) in the type of all tensors; differentiable."""
    score = plain_scores(query, key, row, col, scale, edges)
    target = row[:, None].expand_as(score)
    maximum = score.new_full(query.shape[:2], -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    weight = torch.exp(score - maximum.clamp(min=torch.finfo(score.dtype).min)[row])
    total = torch.zeros_like(maximum).index_add(0, row, weight)
    lse = maximum + torch.log(total)
    weight = weight * dropout_factors(edges.dropout, row, col, query.shape[1])
    output = torch.zeros_like(query).index_add(0, row, weight[..., None] * plain_values(value, col, edges))
    is_empty = total[..., None] == 0
    return torch.where(is_empty, 0.0, output / torch.where(is_empty, 1.0, total[..., None])), lse


def dropout_factors(
    dropout: Dropout | None, row: torch.Tensor, col: torch.Tensor, num_heads: int
) -> torch.Tensor | float:
    return 1.0 if dropout is None else kept_edges(dropout, row, col, num_heads) / (1 - dropout.rate)


def assert_float32(
    got: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor, floor: torch.Tensor | float, label: str
) -> None:
    """NaN and infinities where float64 has them; no row [..., :] is off by more than FACTOR times plain torch's worst.

    Args:
        got, plain: float32, of the kernel and of plain torch.
        expected: float64.
        floor: of the allowed error, for where plain torch is exact, as with one edge a row.
    """
    assert got.dtype == plain.dtype == torch.float32, label
    assert got.shape == expected.shape, label
    if not expected.numel():
        return
    for name, has in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        wrong = torch.nonzero(has(got) != has(expected))
        assert len(wrong) == 0, f"{label}: {name} at {len(wrong)} wrong places, the first {wrong[0].tolist()}"
    got, expected, plain = (each.nan_to_num(posinf=0.0, neginf=0.0).double() for each in (got, expected, plain))
    error, yardstick = ((each - expected).norm(dim=-1).max() for each in (got, plain))
    allowed = FACTOR * yardstick + floor
    assert error <= allowed, f"{label}: off by {error:.2e}, allowed {allowed:.2e}, plain torch {yardstick:.2e}"


@dataclass(frozen=True, eq=False)
class EdgeCall:
    """Inputs over a graph, whose repeated edges are edges of their own.

    Attributes:
        row, col: [nnz] int64, rows in the order of the kernel's, then columns.
        tensors: query, key, value and grad_output.
    """

    row: torch.Tensor
    col: torch.Tensor
    data: Fused3SData
    tensors: dict[str, torch.Tensor]
    edges: BoundEdges
    scale: float
    out_dtype: torch.dtype

    @classmethod
    def make(
        cls,
        graph: EdgeList,
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        kind: str | None = None,
        rate: float | None = None,
        part_edges: int = 1000,
        reordered: bool = False,
        scale: float = 0.4,
        out_dtype: torch.dtype | None = None,
        rank: int = RANK,
    ) -> "EdgeCall":
        """Edge data of a kind in edge_cases.KINDS; items of at most `part_edges` edges; `rank`: number of features."""
        num_rows, num_cols = graph.shape
        generator = torch.Generator().manual_seed(3)
        perm = torch.randperm(num_rows, generator=generator) if reordered else torch.arange(num_rows)
        place = torch.argsort(perm)[graph.row]
        order = torch.argsort(place * num_cols + graph.col, stable=True)
        indptr = torch.nn.functional.pad(torch.bincount(place, minlength=num_rows).cumsum(0), (1, 0))
        row, col, indices = graph.row[order], graph.col[order], graph.col[order].int()
        row_ids = perm.int() if reordered else None
        tensors = dict(zip(ROWS, qkv(graph.shape, heads, dim, dtype), strict=True))
        out_dtype = out_dtype or dtype
        tensors["grad_output"] = torch.randn(tensors["query"].shape, generator=generator).to(dtype).to(out_dtype)
        dropout = None if rate is None else Dropout(rate, torch.tensor([SEED]))
        return cls(
            row,
            col,
            data_by_edge(indptr, indices, graph.shape, row_ids, part_edges),
            tensors,
            replace(bound_edges(graph, kind, order, heads, dim, dtype, rank), dropout=dropout),
            scale,
            out_dtype,
        )

    def run(
        self,
        monkeypatch: pytest.MonkeyPatch,
        mode: str = "late",
        wanted: set[str] | None = None,
        device: str = "cpu",
        shim: AbstractContextManager | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
        """Output and log-sum-exp of the forward kernel, and the gradients that the backward kernels make of them.
        `shim`: in place of `kernels_of`."""
        query, key, value, grad_output = (self.tensors[name].to(device) for name in (*ROWS, "grad_output"))
        edges = self.edges.with_tensors([None if each is None else each.to(device) for each in self.edges.tensors()])
        data, wanted = map_tensors(self.data, lambda each: each.to(device)), frozenset(wanted or self.leaves())
        with shim or kernels_of(device, mode), poisoned_buffers(monkeypatch):
            lse = torch.empty(tuple(query.shape[:2]), dtype=torch.float32, device=query.device)
            call = Call(query, key, value, self.scale, self.out_dtype, lse, edges)
            output = launch_edge_kernel(data, call)
            gradients = launch_edge_backward(data, BackwardCall(call, output, grad_output, wanted))
        return output.cpu(), lse.cpu(), Gradients(*(None if each is None else each.cpu() for each in gradients))

    def leaves(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """The inputs that have a gradient, by the names of `Gradients`."""
        names = [name for name in Gradients._fields if name not in ROWS]
        given = {name: getattr(self.edges, name) for name in names}
        given = {name: self.tensors[name] for name in ROWS} | {name: x for name, x in given.items() if x is not None}
        return {name: each.detach().to(dtype).requires_grad_() for name, each in given.items()}

    def plain(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Output, log-sum-exp and gradients of `plain_attention` in a type."""
        leaves = self.leaves(dtype)
        terms = replace(self.edges, **{name: leaf for name, leaf in leaves.items() if name not in ROWS})
        output, lse = plain_attention(*(leaves[name] for name in ROWS), self.row, self.col, self.scale, terms)
        found = torch.autograd.grad(output, leaves.values(), self.tensors["grad_output"].to(dtype))
        return output.detach(), lse.detach(), dict(zip(leaves, found, strict=True))

    def sizes(self) -> tuple[float, dict[str, float]]:
        """What rounding errors are relative to, as plain torch may be exact by luck: the largest score, and the largest
        row of each gradient and of "output", if all terms of all their sums had one sign."""
        query, key, value = (self.tensors[name].double() for name in ROWS)
        grad, edges = self.tensors["grad_output"].double().abs(), self.edges.to(torch.float64)
        with torch.no_grad():
            _, lse = plain_attention(query, key, value, self.row, self.col, self.scale, edges)
            score = plain_scores(query, key, self.row, self.col, self.scale, edges)
            weight = torch.where(lse[self.row] == -torch.inf, 0.0, torch.exp(score - lse[self.row]))
            kept = weight * dropout_factors(edges.dropout, self.row, self.col, query.shape[1])
            products = (grad[self.row] * plain_values(value, self.col, edges).abs()).sum(-1)
            delta = torch.zeros_like(lse).index_add(0, self.row, kept * products)
            score_gradient = kept * products + weight * delta[self.row]
        leaves = {name: each.detach().abs().requires_grad_() for name, each in self.leaves(torch.float64).items()}
        terms = replace(edges, **{name: leaf for name, leaf in leaves.items() if name not in ROWS})
        if clamped := re.fullmatch(r"clamp\((.*), -number0, number0\)", edges.score or ""):
            terms = replace(terms, score=clamped[1])
        score = plain_scores(leaves["query"], leaves["key"], self.row, self.col, abs(self.scale), terms)
        values = plain_values(leaves["value"], self.col, terms)
        found = torch.autograd.grad(
            (score, (grad[self.row] * values).sum(-1)), leaves.values(), (score_gradient, kept), retain_graph=True
        )
        output = torch.zeros_like(query).index_add(0, self.row, kept[..., None] * values.detach())
        rows = dict(zip(leaves, found, strict=True)) | {"output": output}
        sizes = {name: float(each.norm(dim=-1).max()) if each.numel() else 0.0 for name, each in rows.items()}
        finite = score.detach()[score.isfinite()]
        return float(finite.max()) if finite.numel() else 0.0, sizes

    def check(self, results: tuple[torch.Tensor, torch.Tensor, Gradients], label: str) -> None:
        """Compare what `run` returned with float64."""
        output, lse, gradients = results
        ends = {"query": self.row, "key": self.col, "value": self.col}
        for name, used in ends.items():
            alone = torch.ones(len(self.tensors[name]), dtype=torch.bool).index_fill_(0, used, False)
            assert (getattr(gradients, name)[alone] == 0).all(), f"{label}: the gradient of {name} without an edge"
        empty = torch.ones(len(output), dtype=torch.bool).index_fill_(0, self.row, False)
        assert (output[empty] == 0).all(), f"{label}: a row without an edge"
        if self.tensors["query"].dtype != torch.float32:
            return self._check_16_bits(output, lse, gradients, label)
        expected, plain = self.plain(torch.float64), self.plain(torch.float32)
        largest_score, sizes = self.sizes()
        of_weight = (2 + largest_score / 8) * EPS  # relative error of exp(score)
        assert_float32(output, expected[0], plain[0], of_weight * sizes["output"], f"{label}: output")
        assert_float32(lse[..., None], expected[1][..., None], plain[1][..., None], of_weight, f"{label}: lse")
        for name, gradient in expected[2].items():
            got, yardstick = getattr(gradients, name), plain[2][name]
            assert_float32(got, gradient, yardstick, 2 * of_weight * sizes[name], f"{label}: gradient of {name}")
        return None

    def _check_16_bits(self, output: torch.Tensor, lse: torch.Tensor, gradients: Gradients, label: str) -> None:
        """No row is off by more than two units in the last place of the largest; of gradients also by what the rounding
        of O changes: delta, and ds by p times that, as the gradient of lse does."""
        leaves, grad, dtype = self.leaves(), self.tensors["grad_output"].double(), self.tensors["query"].dtype
        terms = replace(self.edges, **{name: leaf for name, leaf in leaves.items() if name not in ROWS})
        exact, exact_lse = plain_attention(*(leaves[name] for name in ROWS), self.row, self.col, self.scale, terms)
        torch.testing.assert_close(lse.double(), exact_lse.detach(), rtol=1e-5, atol=1e-4, msg=f"{label}: lse")
        if exact.numel():
            error, size = (each.detach().norm(dim=-1).max() for each in (output - exact, exact))
            assert error <= 2 * torch.finfo(dtype).eps * size + FLOOR, f"{label}: output is off by {error:.2e}"
        expected = torch.autograd.grad(exact, leaves.values(), grad, retain_graph=True)
        delta_error = (grad * (output - exact.detach())).sum(-1)
        changes = torch.autograd.grad(exact_lse, leaves.values(), delta_error, allow_unused=True)
        for name, right, change in zip(leaves, expected, changes, strict=True):
            got = getattr(gradients, name)
            assert (got.dtype, got.shape) == (dtype, right.shape), f"{label}: {name}"
            assert torch.isfinite(got).all(), f"{label}: {name} is not finite"
            if right.numel():
                size, error = (each.norm(dim=-1).max() for each in (right, got.double() - right))
                changed = 0.0 if change is None else change.nan_to_num().norm(dim=-1).max()
                allowed = 2 * torch.finfo(dtype).eps * size + 2 * changed + FLOOR
                assert error <= allowed, f"{label}: {name} is off by {error:.2e}, allowed {allowed:.2e}"


def assert_same_bits(found, expected, label: str = "") -> None:
    """Output, log-sum-exp and gradients of two runs."""
    for left, right in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert left is right is None or torch.equal(left, right), label
