"""First layer of the model: node features to width d."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.graph_inputs import GraphInputs, aligned_columns

MAX_ONE_HOT = 1024  # largest total number of categorical values that is expanded to one-hot rows
MAX_ONE_HOT_ELEMENTS = 2**28  # of such rows in training


class FeatureColumns(nn.Module):
    """Columns of features: [N, F] floats, or [N, C] int64 with the number of values of each.

    Attributes:
        columns: F, or the number of values of all C columns.
        cardinalities: number of values of each column; None for floats.
        first: [C] int64, first value of each column among those of all; of categorical ones.
    """

    def __init__(self, in_features: int | Sequence[int]) -> None:
        super().__init__()
        self.cardinalities = None if isinstance(in_features, int) else tuple(in_features)
        self.columns = in_features if self.cardinalities is None else sum(in_features)
        if self.cardinalities is not None:
            first = torch.tensor([0, *in_features[:-1]]).cumsum(0)
            self.register_buffer("first", first, persistent=False)

    def one_hot(self, features: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Categorical features as [N, width], width >= columns: a 1 for the value of each column."""
        rows = torch.zeros((len(features), width), dtype=dtype, device=features.device)
        return rows.scatter_(1, features + self.first, 1)

    def check(self, features: Tensor, row: str = "node") -> None:
        """Raise a ValueError for features of the wrong shape or range; on a GPU a bad index is a device assertion.

        Args:
            row: "node" or "edge", for the message.
        """
        if self.cardinalities is None:
            check_float_features(features, self.columns, row)
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


class FeatureEmbedding(FeatureColumns):
    """[N, F] floats or [N, C] int64 -> [N, d]: a linear map, or the sum of one embedding per column."""

    def __init__(self, in_features: int | Sequence[int], dim: int) -> None:
        super().__init__(in_features)
        if self.cardinalities is None:
            self.linear = nn.Linear(self.columns, dim)
        else:
            # One table with the values of all columns: one kernel sums the rows of a node, in float32.
            self.table = nn.EmbeddingBag(self.columns, dim, mode="sum")

    def forward(self, features: Tensor) -> Tensor:
        """Float features may have further columns of zeros (`GraphInputs.aligned_features`)."""
        if self.cardinalities is None:
            padding = features.shape[1] - self.columns
            weight = F.pad(self.linear.weight, (0, padding)) if padding else self.linear.weight
            return F.linear(features, weight, self.linear.bias)
        table = self.table.weight
        if self.training and table.is_cuda and _fits_one_hot(len(table), len(features)):
            return embed_one_hot(self, features)
        return self.table(features + self.first)


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
    return lambda inputs: F.linear(embedding.one_hot(inputs.features, weight.shape[1], weight.dtype), weight)


def embed_one_hot(embedding: FeatureEmbedding, features: Tensor) -> Tensor:
    """Categorical features [N, C] -> [N, d] as the product of one-hot rows and the table, which is fast in both
    directions: the gradient of an EmbeddingBag sorts all values."""
    weight = aligned_columns(embedding.table.weight.T)
    return F.linear(embedding.one_hot(features, weight.shape[1], weight.dtype), weight)


def _fits_one_hot(values: int, rows: int = 0) -> bool:
    return values <= MAX_ONE_HOT and values * rows <= MAX_ONE_HOT_ELEMENTS
