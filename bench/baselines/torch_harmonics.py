"""`torch_harmonics`: NVIDIA's neighbourhood attention on the sphere (torch_harmonics.attention), forward and backward.

Its CUDA kernels take a graph of two equiangular grids of nlat x 2 nlat points in which the neighbourhood of a query is
that of longitude 0, turned, as in `data.sources.sphere`; any other graph is refused. They compute

    O_i = sum_j w_j exp(<q_i, k_j>) v_j / sum_j w_j exp(<q_i, k_j>)

with a weight w for each latitude of the keys: 1, or exp of the value c of a score term "s + c". q is multiplied by the
scale. Each call copies q, k, v and the output between [N, H, d] and the kernels' layout [H, d, nlat, nlon]: times of
this backend include these copies.

Written for version 0.9, built with CUDA.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fused3s.backends.base import Backend, BackwardCall, Call, Gradients, InputSpec
from fused3s.backends.cuda import refuse_gradients
from fused3s.errors import UnsupportedGraphError
from fused3s.graph.edges import canonical_csr, rows_of_edges
from fused3s.runtime.device import NO_GPU

TERMS = ("s + column0", "column0 + s")  # normalised score terms that it can express
Grid = tuple[int, int]  # latitudes, longitudes


@dataclass(frozen=True, eq=False)
class SphereData:
    """The neighbourhoods of the queries at longitude 0.

    Attributes:
        queries, keys: the two grids.
        col_idx: [n] int64, keys of one query after the other.
        row_off: [nlat + 1] int64.
    """

    queries: Grid
    keys: Grid
    col_idx: torch.Tensor
    row_off: torch.Tensor


class TorchHarmonicsBackend(Backend):
    name = "torch_harmonics"
    summary = "NVIDIA's neighbourhood attention on grids of the sphere (torch-harmonics); NVIDIA GPU"
    data_type = SphereData
    takes_edges = True
    traceable = False
    autograd = False
    has_backward = True

    def __init__(self) -> None:
        self._weights = WeakTensorKeyDictionary()  # column values -> weight of each latitude

    def unavailable(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return NO_GPU
        if device.type != "cuda":
            return f"its CUDA kernels run on a GPU, and these tensors are on {device}"
        if importlib.util.find_spec("torch_harmonics") is None:
            return "the package torch-harmonics is not installed (version 0.9, built with CUDA)"
        try:
            _operators().forward  # noqa: B018 (an AttributeError where the package was built without CUDA)
        except (ImportError, AttributeError) as error:
            return f"the package torch-harmonics has no attention kernels: {error}"
        return None

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> SphereData:
        queries, keys = (_grid(num_points) for num_points in graph.shape)
        if keys[1] % queries[1]:
            raise UnsupportedGraphError(
                f"unsupported: {keys[1]} longitudes of keys are no multiple of {queries[1]} of queries"
            )
        indptr, indices = canonical_csr(graph, device)
        row, col = rows_of_edges(indptr), indices.long()
        turn = keys[1] // queries[1] * (row % queries[1])
        unturned = col - col % keys[1] + (col - turn) % keys[1]
        unturned = torch.sort(row * graph.shape[1] + unturned).values - row * graph.shape[1]  # row is ascending
        first = row - row % queries[1]  # the query at longitude 0 of the same latitude
        place = torch.arange(len(row), device=device) - indptr[row] + indptr[first]
        counts = indptr.diff()
        same_counts = counts.equal(counts[:: queries[1]].repeat_interleave(queries[1]))
        if not (same_counts and unturned.equal(unturned[place])):
            raise UnsupportedGraphError(
                "unsupported: the neighbours of a query must be those of longitude 0 at its latitude, turned"
            )
        at_zero = row % queries[1] == 0
        row_off = torch.nn.functional.pad(counts[:: queries[1]].cumsum(0), (1, 0))
        return SphereData(queries, keys, unturned[at_zero], row_off)

    def attend(self, data: SphereData, call: Call) -> torch.Tensor:
        refuse_gradients(self.name, *call[:3])
        output = _operators().forward(*_inputs(data, call), self._weight(data, call), *_pattern(data))
        return _points(output).to(call.out_dtype)

    def attend_backward(self, data: SphereData, given: BackwardCall) -> Gradients:
        call = given.call
        if others := sorted(given.wanted - {"query", "key", "value"}):
            raise ValueError(f"backend {self.name} has gradients of q, k and v alone; {', '.join(others)} is wanted")
        inputs = (*_inputs(data, call), _planes(given.grad_output.to(call.query.dtype), data.queries))
        found = _operators().backward(*inputs, self._weight(data, call), *_pattern(data))
        key, value, query = (_points(gradient) for gradient in found)
        return Gradients(query=query * call.scale, key=key, value=value)

    def _weight(self, data: SphereData, call: Call) -> torch.Tensor:
        """[nlat] float32: w of each latitude of the keys. Checked once for each tensor of values."""
        edges = call.edges
        if edges is None:
            return torch.ones(data.keys[0], device=call.query.device)
        values = edges.column_values
        others = [tensor for tensor in edges.tensors() if tensor is not None and tensor is not values]
        if values is None or edges.score not in TERMS or others:
            raise ValueError(f"edges: backend {self.name} takes a score term s + c with a value c of the column alone")
        if values not in self._weights:
            by_latitude = values.float().reshape(*data.keys, -1)
            if not bool((by_latitude == by_latitude[:, :1, :1]).all()):
                raise ValueError(f"edges: backend {self.name} takes one value c for all keys and heads of a latitude")
            self._weights[values] = by_latitude[:, 0, 0].exp()
        return self._weights[values]


def _operators() -> Any:
    """The package's operators: forward and backward."""
    import torch_harmonics.attention  # noqa: F401 (registers them)

    return torch.ops.attention_kernels


def _grid(num_points: int) -> Grid:
    nlat = math.isqrt(num_points // 2)
    if nlat < 1 or 2 * nlat**2 != num_points:
        raise UnsupportedGraphError(f"unsupported: {num_points} nodes are no grid of nlat x 2 nlat points")
    return nlat, 2 * nlat


def _inputs(data: SphereData, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v and the scaled q in the kernels' layout."""
    query = _planes(call.query * call.scale, data.queries)
    return _planes(call.key, data.keys), _planes(call.value, data.keys), query


def _planes(points: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[H, d, nlat, nlon] of [nlat * nlon, H, d]."""
    return points.permute(1, 2, 0).reshape(*points.shape[1:], *grid).contiguous()


def _points(planes: torch.Tensor) -> torch.Tensor:
    """[nlat * nlon, H, d] of [H, d, nlat, nlon]."""
    return planes.flatten(2).permute(2, 0, 1).contiguous()


def _pattern(data: SphereData) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    return data.col_idx, data.row_off, data.keys[1], *data.queries


BACKENDS = (TorchHarmonicsBackend(),)
