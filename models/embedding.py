"""The model's first layer: node features to width d."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.graph_inputs import GraphInputs, aligned_columns

MOST_HOT = 1024  # values of all categorical columns that are still written as one row of zeros and ones


class FeatureEmbedding(nn.Module):
    """[N, F] floats or [N, C] int64 -> [N, d]: a linear map, or the sum of one embedding for each column."""

    def __init__(self, in_features: int | Sequence[int], dim: int) -> None:
        super().__init__()
        if isinstance(in_features, int):
            self.linear = nn.Linear(in_features, dim)
        else:
            # One table, the columns' values one after the other: one kernel sums a node's rows, in float32.
            self.table = nn.EmbeddingBag(sum(in_features), dim, mode="sum")
            first = torch.tensor([0, *in_features[:-1]]).cumsum(0)
            self.register_buffer("first", first, persistent=False)
        self.cardinalities = None if isinstance(in_features, int) else tuple(in_features)

    def forward(self, features: Tensor) -> Tensor:
        if self.cardinalities is None:
            return self.linear(features)
        return self.table(features + self.first)

    def check(self, features: Tensor) -> None:
        """Raise a ValueError if these features do not fit; on a GPU a bad index would end in a device assertion."""
        if self.cardinalities is None:
            if not features.is_floating_point() or features.shape[1] != self.linear.in_features:
                raise ValueError(
                    f"graph: features are {features.dtype} with {features.shape[1]} columns; "
                    f"the model was built for {self.linear.in_features} columns of floats"
                )
            return
        if features.is_floating_point() or features.shape[1] != len(self.cardinalities):
            raise ValueError(
                f"graph: features are {features.dtype} with {features.shape[1]} columns; "
                f"the model was built for {len(self.cardinalities)} columns of int64"
            )
        for column, values in enumerate(self.cardinalities):
            bad = (features[:, column] < 0) | (features[:, column] >= values)
            if bad.any():
                node = int(bad.nonzero()[0])
                raise ValueError(
                    f"graph: feature column {column} of node {node} is {int(features[node, column])}; "
                    f"the model was built for 0 to {values - 1}"
                )


def pack_embedding(embedding: FeatureEmbedding) -> Callable[[GraphInputs], Tensor]:
    """The embedding as one product of matrices whose rows are aligned, as the fast tensor-core kernels of a BLAS need.

    Categorical columns become rows of zeros and ones, if they have at most MOST_HOT values in all: that is the sum of
    their embeddings, and takes a fraction of an EmbeddingBag's time. The result has a copy of the weights: pack again
    after loading others.
    """
    if embedding.cardinalities is None:
        weight, bias = (tensor.detach().clone() for tensor in (embedding.linear.weight, embedding.linear.bias))
        weight = aligned_columns(weight)
        return lambda inputs: F.linear(inputs.aligned_features, weight, bias)
    table = embedding.table.weight.detach()
    if len(table) > MOST_HOT:
        return lambda inputs: embedding(inputs.features)
    weight = aligned_columns(table.T.clone())

    def embed(inputs: GraphInputs) -> Tensor:
        values = inputs.features + embedding.first
        hot = torch.zeros((len(values), weight.shape[1]), dtype=weight.dtype, device=weight.device)
        return F.linear(hot.scatter_(1, values, 1), weight)

    return embed
