"""First layer of the model: node features to width d."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.graph_inputs import GraphInputs, aligned_columns

MAX_ONE_HOT = 1024  # largest total number of categorical values that is expanded to one-hot rows
MAX_ONE_HOT_ELEMENTS = 2**28  # most elements of one-hot rows in training


class FeatureEmbedding(nn.Module):
    """[N, F] floats or [N, C] int64 -> [N, d]: a linear map, or the sum of one embedding per column."""

    def __init__(self, in_features: int | Sequence[int], dim: int) -> None:
        super().__init__()
        if isinstance(in_features, int):
            self.linear = nn.Linear(in_features, dim)
        else:
            # One table with the values of all columns: one kernel sums the rows of a node, in float32.
            self.table = nn.EmbeddingBag(sum(in_features), dim, mode="sum")
            first = torch.tensor([0, *in_features[:-1]]).cumsum(0)
            self.register_buffer("first", first, persistent=False)
        self.cardinalities = None if isinstance(in_features, int) else tuple(in_features)

    def forward(self, features: Tensor) -> Tensor:
        """Float features may have further columns of zeros (`GraphInputs.aligned_features`)."""
        if self.cardinalities is None:
            padding = features.shape[1] - self.linear.in_features
            weight = F.pad(self.linear.weight, (0, padding)) if padding else self.linear.weight
            return F.linear(features, weight, self.linear.bias)
        table = self.table.weight
        if self.training and table.is_cuda and _fits_one_hot(len(table), len(features)):
            return embed_one_hot(self, features)
        return self.table(features + self.first)

    def check(self, features: Tensor, row: str = "node") -> None:
        """Raise a ValueError for features of the wrong shape or range; on a GPU a bad index is a device assertion.

        Args:
            row: "node" or "edge", for the message.
        """
        if self.cardinalities is None:
            check_float_features(features, self.linear.in_features, row)
            return
        if features.is_floating_point() or features.shape[1] != len(self.cardinalities):
            raise ValueError(
                f"graph: {row} features are {features.dtype} with {features.shape[1]} columns; "
                f"the model was built for {len(self.cardinalities)} columns of int64"
            )
        for column, values in enumerate(self.cardinalities):
            bad = (features[:, column] < 0) | (features[:, column] >= values)
            if bad.any():
                first = int(bad.nonzero()[0])
                raise ValueError(
                    f"graph: feature column {column} of {row} {first} is {int(features[first, column])}; "
                    f"the model was built for 0 to {values - 1}"
                )


def check_float_features(features: Tensor, columns: int, row: str = "node") -> None:
    """Raise a ValueError unless these are floats [rows, columns]."""
    if not features.is_floating_point() or features.shape[1] != columns:
        raise ValueError(
            f"graph: {row} features are {features.dtype} with {features.shape[1]} columns; "
            f"the model was built for {columns} columns of floats"
        )


def pack_embedding(embedding: FeatureEmbedding) -> Callable[[GraphInputs], Tensor]:
    """The embedding as one GEMM with aligned rows, which the fast tensor-core kernels of a BLAS require.

    Categorical columns with at most MAX_ONE_HOT values in total become one-hot rows: the GEMM sums their embeddings in
    a fraction of the time of an EmbeddingBag. The result holds a copy of the weights: pack again after loading others.
    """
    if embedding.cardinalities is None:
        weight, bias = (tensor.detach().clone() for tensor in (embedding.linear.weight, embedding.linear.bias))
        weight = aligned_columns(weight)
        return lambda inputs: F.linear(inputs.aligned_features, weight, bias)
    table = embedding.table.weight.detach()
    if not _fits_one_hot(len(table)):
        return lambda inputs: embedding(inputs.features)
    weight = aligned_columns(table.T.clone())
    return lambda inputs: F.linear(one_hot_rows(embedding, inputs.features, weight), weight)


def embed_one_hot(embedding: FeatureEmbedding, features: Tensor) -> Tensor:
    """Categorical features [N, C] -> [N, d] as the product of one-hot rows and the table, which is fast in both
    directions: the gradient of an EmbeddingBag sorts all values."""
    weight = aligned_columns(embedding.table.weight.T)
    return F.linear(one_hot_rows(embedding, features, weight), weight)


def _fits_one_hot(values: int, rows: int = 0) -> bool:
    return values <= MAX_ONE_HOT and values * rows <= MAX_ONE_HOT_ELEMENTS


def one_hot_rows(embedding: FeatureEmbedding, features: Tensor, weight: Tensor) -> Tensor:
    """[N, V] in the type of the weight [d, V], V >= the number of values: a 1 for the value of each column."""
    rows = torch.zeros((len(features), weight.shape[1]), dtype=weight.dtype, device=weight.device)
    return rows.scatter_(1, features + embedding.first, 1)
