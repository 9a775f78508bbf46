"""The backward pass of `fused3s`: the choice between its two kernels.

cuda/tiles/backward.cu  tensor cores, heads sequentially; dropout, and in 16 bits most score terms
cuda/edges/backward.cu  edge by edge: narrow heads on sparse graphs, and all edge data
"""

import torch
from torch.nn import functional

from ..backends.base import BackwardCall, Gradients, InputSpec
from ..backends.cuda import product_type
from ..runtime.jit import KernelInstance, input_element
from .data import Fused3SData
from .edges.backward import edge_backward_instances, launch_edge_backward
from .edges.forward import edge_columns, padded_call, takes_columns
from .score_values import backward_fits_tiles, require_edge_arrays
from .shapes import tile_columns
from .tiles.backward import launch_backward, pass_instances


def gradient_instances(data: Fused3SData, inputs: InputSpec) -> list[KernelInstance]:
    """The kernels for `inputs` of a known type without edge data and dropout; edge by edge without KV tiles."""
    dtype, heads, dim = product_type(inputs.dtype), inputs.num_heads, inputs.head_dim
    if data.column_work_items is None:
        columns = edge_columns(heads, dim, dtype)
        return list(edge_backward_instances(dtype, inputs.out_dtype or inputs.dtype, columns, heads, 0))
    return pass_instances(data, input_element(dtype), tile_columns(dim), None)


def launch_gradients(data: Fused3SData, given: BackwardCall) -> Gradients:
    """Queue the backward pass on torch's current stream."""
    call, dim = given.call, given.call.query.shape[2]
    by_tile = data.column_work_items is not None and (
        call.edges is None or backward_fits_tiles(call.edges, call.query.dtype)
    )
    if call.edges is not None and call.edges.edge_values is not None and data.column_slot_edges is None:
        by_tile = False
    if dim % 2 and (by_tile or not takes_columns(call)):  # as in the forward pass
        output, grad_output = (functional.pad(each, (0, -dim % 8)) for each in (given.output, given.grad_output))
        padded = given._replace(call=padded_call(call), output=output, grad_output=grad_output, into=None)
        return _without_padding(launch_gradients(data, padded), dim)
    if not by_tile and data.column_items is None:
        require_edge_arrays(None)
    return launch_backward(data, given) if by_tile else launch_edge_backward(data, given)


def _without_padding(found: Gradients, dim: int) -> Gradients:
    """Gradients of padded heads, cut to `dim` columns."""

    def cut(gradient: torch.Tensor | None, at: int) -> torch.Tensor | None:
        return None if gradient is None else gradient.narrow(at, 0, dim).contiguous()

    names = "query", "key", "value", "type_weight", "key_factor", "additive_weight"
    last = {name: cut(getattr(found, name), -1) for name in names}
    middle = {name: cut(getattr(found, name), 1) for name in ("key_weight", "value_weight")}
    return found._replace(**last, **middle)
