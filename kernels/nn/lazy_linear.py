"""Linear layers that take their number of input columns from the first call, as PyG's do for in_channels=-1."""

import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def glorot_(parameter: Tensor) -> None:
    """Draw a parameter as PyG does."""
    bound = math.sqrt(6 / (parameter.shape[-2] + parameter.shape[-1]))
    nn.init.uniform_(parameter, -bound, bound)


def reset_glorot(layer: nn.Linear) -> None:
    """Draw weight and bias of a layer as PyG's GAT layers do, unless it is lazy and was not called yet."""
    if is_lazy(layer.weight) or not layer.in_features:
        return
    glorot_(layer.weight)
    if layer.bias is not None:
        bound = layer.in_features**-0.5
        nn.init.uniform_(layer.bias, -bound, bound)


class LazyLinear(nn.LazyLinear):
    """`nn.LazyLinear` whose bias exists from the start, as in PyG: either can load the other's state dict."""

    def __init__(self, out_columns: int, bias: bool) -> None:
        super().__init__(out_columns, bias=False)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_columns))

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            self.weight.materialize((self.out_features, x.shape[-1]))
            self.in_features = x.shape[-1]
            self.reset_parameters()
        self.in_features = self.weight.shape[1]


class LazyGlorotLinear(LazyLinear):
    """With the initial weights of PyG's GAT layers."""

    def reset_parameters(self) -> None:
        reset_glorot(self)


def linear(columns: int, out_columns: int, bias: bool, *, lazy: type[LazyLinear] = LazyLinear) -> nn.Linear:
    """A linear layer; of the type `lazy` for -1 columns."""
    return lazy(out_columns, bias) if columns == -1 else nn.Linear(columns, out_columns, bias)


def check_columns(in_channels: int | tuple[int, int]) -> tuple[int, int]:
    """Columns of sources and of targets.

    Raises:
        TypeError, ValueError: they are no two sizes, or a size is neither positive nor -1.
    """
    both = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
    if not isinstance(both, (tuple, list)) or [type(columns) for columns in both] != [int, int]:
        raise TypeError(f"in_channels: got {in_channels!r}; an integer, or those of sources and of targets, is needed")
    if any(columns < 1 and columns != -1 for columns in both):
        raise ValueError(f"in_channels: got {in_channels}; sizes of at least 1 are needed, or -1: the first call tells")
    return tuple(both)
