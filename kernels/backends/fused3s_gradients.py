"""The backward pass of `fused3s`: which of its two kernels a call takes, and what they read.

cuda/fused3s_backward.cu        tensor cores, one head after the other; of the score's terms dropout alone
cuda/fused3s_edges_backward.cu  edge by edge: narrow heads on sparse graphs, and all edge data
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from ..edge_data import BoundEdges
from .base import Gradients, InputSpec, Memory
from .cuda import product_type
from .fused3s_backward import BackwardData, compile_backward, launch_backward
from .fused3s_edges import DROPOUT, EdgeKernelData, pad_weights, terms_of
from .fused3s_edges_backward import EdgeBackwardData, compile_edge_backward, launch_edge_backward, of_rows


@dataclass(frozen=True, eq=False)
class GradientData:
    """What the backward pass reads beside the forward pass's format.

    Attributes:
        tiles: for cuda/fused3s_backward.cu; None where no input of the plan takes it.
        edges: for cuda/fused3s_edges_backward.cu, with the forward pass's `EdgeKernelData`; likewise.
    """

    tiles: BackwardData | None
    edges: EdgeBackwardData | None


def compile_gradients(tiles: BackwardData | None, device: torch.device, inputs: InputSpec) -> None:
    """Compile the kernels of `inputs` without edge data, where their type is known; edge by edge without `tiles`."""
    dim = inputs.head_dim
    if inputs.dtype is None or dim is None:
        return
    dtype, even = product_type(inputs.dtype), dim + (-dim % 8 if dim % 2 else 0)
    if tiles is None:
        compile_edge_backward(dtype, inputs.out_dtype or inputs.dtype, even, inputs.num_heads, device)
    else:
        compile_backward(tiles, dtype, even, device)


def launch_gradients(
    data: GradientData,
    by_edge: EdgeKernelData | None,
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    edges: BoundEdges | None,
    wanted: frozenset[str],
    into: Memory | None = None,
) -> Gradients:
    """Run the backward pass on torch's current stream, without waiting for it; arguments as `Backend.attend_backward`.

    Args:
        by_edge: the forward pass's, with `data.edges`.
    """
    dim = query.shape[-1]
    terms = terms_of(edges)
    by_tile = data.tiles is not None and not terms & ~DROPOUT
    if by_tile:
        dropout = None if edges is None else edges.dropout
        tensors = (grad_output, query, key, value, output, lse)
        return of_rows(*launch_backward(data.tiles, *tensors, scale, dropout, wanted, into), wanted)
    if dim % 2:  # as in the forward pass
        tensors = (functional.pad(each, (0, -dim % 8)) for each in (grad_output, query, key, value, output))
        padded = None if edges is None else pad_weights(edges, -dim % 8)
        found = launch_gradients(data, by_edge, *tensors, lse, scale, padded, wanted)
        return _without_padding(found, dim)
    tensors = (grad_output, query, key, value, output, lse)
    return launch_edge_backward(by_edge, data.edges, *tensors, scale, edges, wanted, into)


def _without_padding(found: Gradients, dim: int) -> Gradients:
    """Gradients of heads of `dim` columns, from those of padded ones."""

    def cut(gradient: torch.Tensor | None, at: int) -> torch.Tensor | None:
        return None if gradient is None else gradient.narrow(at, 0, dim).contiguous()

    last = {name: cut(getattr(found, name), -1) for name in ("query", "key", "value", "type_weight")}
    middle = {name: cut(getattr(found, name), 1) for name in ("key_weight", "value_weight")}
    return found._replace(**last, **middle)
