"""Random edge data of a kind of `edges`: what the score and the value of each edge take beside q, k and v."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from configs.bench import Shape, edge_kind
from kernels.edge_data import EdgeData


@dataclass(frozen=True, eq=False)
class EdgeInputs:
    """Edge data in the order of the edges of a CSR pattern, and its weights; formulas are in `kernels.edge_data`.

    Attributes:
        bias: [nnz, 1] or [nnz, H].
        features: [nnz, r]; weight: [H, d, r], of keys and of values, as in PyG's TransformerConv and in anemoi.
        types: [nnz] uint8; type_weight: [T, H, d].
    """

    bias: Tensor | None = None
    features: Tensor | None = None
    weight: Tensor | None = None
    types: Tensor | None = None
    type_weight: Tensor | None = None

    @classmethod
    def random(cls, kind: str, shape: Shape, num_edges: int, device: torch.device) -> "EdgeInputs | None":
        """float16 normal random numbers, the same for equal arguments; None for kind "none"."""
        generator = torch.Generator(device).manual_seed(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).half()

        name, number = edge_kind(kind)
        heads, dim = shape
        if name in ("bias", "bias_per_head"):
            return cls(bias=normal(num_edges, heads if name == "bias_per_head" else 1))
        if name == "low_rank":
            weight = normal(heads, dim, number) / number**0.5  # W a is as large as k
            return cls(features=normal(num_edges, number), weight=weight)
        if name == "types":
            types = torch.randint(number, (num_edges,), generator=generator, device=device, dtype=torch.uint8)
            return cls(types=types, type_weight=normal(number, heads, dim))
        return None

    def to(self, dtype: torch.dtype) -> "EdgeInputs":
        """The same numbers with all but the types in another type."""
        return self._map(lambda name, tensor: tensor if name == "types" else tensor.to(dtype))

    def of_head(self, head: int) -> "EdgeInputs":
        """The data of one head; H is 1 then."""

        def one(name: str, tensor: Tensor) -> Tensor:
            if name in ("features", "types") or (name == "bias" and tensor.shape[1] == 1):
                return tensor
            return tensor[head : head + 1] if name == "weight" else tensor[:, head : head + 1]

        return self._map(one)

    def of_edges(self, part: slice) -> "EdgeInputs":
        """The data of some edges; the weights stay."""
        return self._map(lambda name, tensor: tensor if name.endswith("weight") else tensor[part])

    @property
    def bytes_of_edges(self) -> int:
        """Bytes of the tensors with an entry per edge."""
        return sum(one.nbytes for one in (self.bias, self.features, self.types) if one is not None)

    def bind(self, plan: Any) -> dict[str, Any]:
        """Keyword arguments of calls of a plan; the data is checked and sorted into the plan's order here, once."""
        bias = self.bias.squeeze(1) if self.bias is not None and self.bias.shape[1] == 1 else self.bias
        weights = {"key_weight": self.weight, "value_weight": self.weight, "type_weight": self.type_weight}
        return {"edges": plan.bind_edges(EdgeData(bias=bias, features=self.features, types=self.types, **weights))}

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> "EdgeInputs":
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return EdgeInputs(**{name: None if one is None else change(name, one) for name, one in given.items()})
