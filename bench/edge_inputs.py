"""Random data of a kind of `edges`: what the score and the value of an edge take beside q, k and v."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from configs.bench import Shape, edge_kind
from fused3s.graph.csr import CSRPattern
from fused3s.terms.edge_data import EdgeData
from fused3s.terms.score_term import ScoreTerm

SLOPE = 0.2  # of the leaky ReLU of gat and gatv2


class Term(NamedTuple):
    """A score term of the score s and of values r of the row and c of the column.

    Attributes:
        expression: as `ScoreTerm` takes it.
        score: the same in torch, from s, r and c, against which outputs are checked.
    """

    expression: str
    score: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


TERMS = {
    "column": Term("s + c", lambda s, r, c: s + c),
    "soft_cap": Term("2 * tanh(s / 2)", lambda s, r, c: 2 * (s / 2).tanh()),
    "gat": Term(f"leaky_relu(r + c, {SLOPE})", lambda s, r, c: leaky_relu(r + c, SLOPE)),
}


@dataclass(frozen=True, eq=False)
class EdgeInputs:
    """Data of the edges of a CSR pattern, of its rows and columns, and weights; formulas: `fused3s.terms.edge_data`.

    Attributes:
        bias: [nnz, 1] or [nnz, H].
        features: [nnz, r]; weight: [H, d, r], of keys and of values, as in PyG's TransformerConv and in anemoi.
        types: [nnz] uint8; type_weight: [T, H, d].
        additive_weight: [H, d], of GATv2's score.
        term: of TERMS, with its values row [num_rows, 1 or H] and column [num_cols, 1 or H] in float32.
    """

    bias: Tensor | None = None
    features: Tensor | None = None
    weight: Tensor | None = None
    types: Tensor | None = None
    type_weight: Tensor | None = None
    additive_weight: Tensor | None = None
    term: Term | None = None
    row: Tensor | None = None
    column: Tensor | None = None

    @classmethod
    def random(cls, kind: str, shape: Shape, pattern: CSRPattern) -> "EdgeInputs | None":
        """float16 normal random numbers, the same for equal arguments; None for kind "none"."""
        device = pattern.indices.device
        generator = torch.Generator(device).manual_seed(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).half()

        name, number = edge_kind(kind)
        (heads, dim, _), (num_rows, num_cols), num_edges = shape, pattern.shape, pattern.indices.numel()
        if name in ("bias", "bias_per_head"):
            return cls(bias=normal(num_edges, heads if name == "bias_per_head" else 1))
        if name == "low_rank":
            weight = normal(heads, dim, number) / number**0.5  # W a is as large as k
            return cls(features=normal(num_edges, number), weight=weight)
        if name == "types":
            types = torch.randint(number, (num_edges,), generator=generator, device=device, dtype=torch.uint8)
            return cls(types=types, type_weight=normal(number, heads, dim))
        if name == "gatv2":
            return cls(additive_weight=normal(heads, dim))
        if name == "column":
            return cls(term=TERMS[name], column=normal(num_cols, 1).float())
        if name == "gat":
            return cls(term=TERMS[name], row=normal(num_rows, heads).float(), column=normal(num_cols, heads).float())
        return cls(term=TERMS[name]) if name in TERMS else None

    def to(self, dtype: torch.dtype) -> "EdgeInputs":
        """The same numbers in another type, but for types and for values of rows and columns."""
        kept = ("types", "row", "column")
        return self._map(lambda name, tensor: tensor if name in kept else tensor.to(dtype))

    def of_head(self, head: int) -> "EdgeInputs":
        """The data of one head; H is 1 then."""

        def one(name: str, tensor: Tensor) -> Tensor:
            if name in ("weight", "additive_weight"):
                return tensor[head : head + 1]
            is_shared = name in ("features", "types") or (name != "type_weight" and tensor.shape[1] == 1)
            return tensor if is_shared else tensor[:, head : head + 1]

        return self._map(one)

    def of_rows(self, rows: slice, edges: slice) -> "EdgeInputs":
        """The data of some rows, which have these edges; columns and weights stay."""
        parts = dict.fromkeys(("bias", "features", "types"), edges) | {"row": rows}
        return self._map(lambda name, tensor: tensor[parts[name]] if name in parts else tensor)

    @property
    def is_of_edges(self) -> bool:
        """Whether a plan must be made for data of edges: they have entries of their own, or the call goes edge by edge
        since its score is not a function of <q, k>."""
        given = self.bias, self.features, self.types, self.additive_weight
        return self.term is TERMS["gat"] or any(one is not None for one in given)

    @property
    def bytes_of_values(self) -> int:
        """Bytes of the tensors with an entry per edge, row or column."""
        given = (self.bias, self.features, self.types, self.row, self.column)
        return sum(one.nbytes for one in given if one is not None)

    def scores(self, query: Tensor, key: Tensor, scale: float, row: Tensor, col: Tensor) -> Tensor:
        """[n] float64: the scores of the edges of one head, before a maximum is subtracted.

        Args:
            query, key: [n, d] float64, of each edge.
            row, col: [n], of each edge.
        """
        if self.type_weight is not None:
            key = key * self.type_weight[self.types.long(), 0].double()
        if self.weight is not None:
            key = key + self.features.double() @ self.weight[0].double().T
        if self.additive_weight is None:
            score = (query * key).sum(1) * scale
        else:
            score = (leaky_relu(query + key, SLOPE) @ self.additive_weight[0].double()) * scale
        if self.bias is not None:
            score = score + self.bias[:, 0].double()
        if self.term is None:
            return score
        places = ((self.row, row), (self.column, col))
        return self.term.score(score, *(None if each is None else each[at, 0].double() for each, at in places))

    def bind(self, plan: Any) -> dict[str, Any]:
        """Keyword arguments of calls of a plan; the data is checked and sorted into the plan's order here, once."""
        weights = {"key_weight": self.weight, "value_weight": self.weight, "type_weight": self.type_weight}
        weights |= {"additive_weight": self.additive_weight, "additive_slope": SLOPE}
        of_edges = {"bias": _shared(self.bias), "features": self.features, "types": self.types}
        return {"edges": plan.bind_edges(EdgeData(**of_edges, **weights, score=self._score_term()))}

    def _score_term(self) -> ScoreTerm | None:
        if self.term is None:
            return None
        values = {"row": ("r", self.row), "col": ("c", self.column)}
        given = {kind: {name: _shared(value)} for kind, (name, value) in values.items() if value is not None}
        return ScoreTerm(self.term.expression, **given)

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> "EdgeInputs":
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return EdgeInputs(
            **{name: change(name, one) if isinstance(one, Tensor) else one for name, one in given.items()}
        )


def _shared(values: Tensor | None) -> Tensor | None:
    """Values that all heads have in common without a dimension of heads."""
    return values.squeeze(1) if values is not None and values.shape[1] == 1 else values
