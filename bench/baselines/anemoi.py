"""`anemoi`: the Triton graph attention of ECMWF's weather models (anemoi.models.triton.gt), forward only.

One program per query row computes all heads and iterates over the row's edges, in float32 on CUDA cores. An edge tensor
E [nnz, H, d] is added to the keys and the values:

    s_ij = <q_i, k_j + E_ij> / sqrt(d)          O_i = sum_j softmax_j(s_ij) (v_j + E_ij)

The kernel always reads E. Without features E is zero, allocated with the plan if the plan knows its shape. With
features E_ij = W a_ij, so one weight serves keys and values. anemoi computes E by a linear layer before the attention;
here `attend` computes it at each call, or uses that of `keep_edge_tensor`, so that a timed call is the attention alone.

A scale other than 1/sqrt(d) is multiplied into q, in float32. A row whose scores are all -inf is NaN.

The package is installed by `pip install --no-deps anemoi-models`: its dependencies, which ask for an older torch, are
not needed for this module. Written for version 0.19.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fused3s.backends.base import Backend, Call, InputSpec
from fused3s.backends.cuda import refuse_gradients
from fused3s.graph.edges import canonical_csr
from fused3s.terms.edge_data import BoundEdges

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ELEMENTS = 2**31 - 1  # of q: the kernel computes its addresses in 32 bits


@dataclass(frozen=True, eq=False)
class AnemoiData:
    """Edges from keys (sources) to queries (targets), sorted by target.

    Attributes:
        row: [nnz] int64, source of each edge. anemoi calls the pair CSC: its adjacency has a row for each source.
        colptr: [num_rows + 1] int64, first edge of each target.
        zeros: [nnz, H, d], the edge tensor of calls without edge data; None where its shape was not planned.
    """

    row: torch.Tensor
    colptr: torch.Tensor
    zeros: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class KeptEdgeTensor:
    """W a of every edge, and what it was made from; `versions` count the changes in place of features and weight."""

    tensor: torch.Tensor
    weight: torch.Tensor
    versions: tuple[int, int]


class AnemoiBackend(Backend):
    name = "anemoi"
    summary = "ECMWF's Triton graph attention (anemoi-models), with an edge tensor [nnz, H, d]; NVIDIA GPU"
    data_type = AnemoiData
    takes_edges = True
    traceable = False
    autograd = False

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()  # padded features -> KeptEdgeTensor

    def unavailable(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return "no NVIDIA GPU found, or this PyTorch has no CUDA"
        if device.type != "cuda":
            return f"its Triton kernel runs on a GPU, and these tensors are on {device}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if importlib.util.find_spec("anemoi") is None or importlib.util.find_spec("anemoi.models") is None:
            return "the package anemoi-models is not installed (pip install --no-deps anemoi-models)"
        return None

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype not in DTYPES:
            return f"it takes torch.float16, torch.bfloat16 and torch.float32, got {dtype}"
        return None

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> AnemoiData:
        indptr, indices = canonical_csr(graph, device)
        zeros = None
        if not inputs.edge_data and inputs.dtype is not None and inputs.head_dim is not None:
            shape = (indices.numel(), inputs.num_heads, inputs.head_dim)
            zeros = torch.zeros(shape, dtype=inputs.dtype, device=device)
        return AnemoiData(indices.long(), indptr, zeros)

    def keep_edge_tensor(self, edges: BoundEdges) -> torch.Tensor:
        """Make the edge tensor of features and key weight and keep it for calls with the same two objects.

        It is complete on the device when this returns, and is dropped with the features. After a change of either in
        place, `attend` makes its own; a CUDA graph that was captured with the kept one goes on reading it.

        Args:
            edges: no tensor of it is an inference tensor.

        Returns:
            [nnz, H, d] of their type.
        """
        tensor = edge_tensor(edges.features, edges.key_weight)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        features, weight = edges.padded_features, edges.key_weight
        self._kept[features] = KeptEdgeTensor(tensor, weight, (features._version, weight._version))
        return tensor

    def attend(self, data: AnemoiData, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, _, edges = call
        if query.numel() > MAX_ELEMENTS:
            raise ValueError(
                f"q: got shape {tuple(query.shape)}, {query.numel()} elements; backend anemoi takes up to "
                f"{MAX_ELEMENTS} (use fewer heads at a time)"
            )
        weights = () if edges is None else (edges.features, edges.key_weight, edges.value_weight)
        refuse_gradients(self.name, query, key, value, *(tensor for tensor in weights if tensor is not None))
        added = self._zeros(data, key) if edges is None else self._edge_tensor(data, key, edges)
        factor = scale * math.sqrt(query.shape[-1])  # the kernel has 1/sqrt(d)
        if not math.isclose(factor, 1.0):
            query = query.float() * factor
        unread = data.row[:0]  # the lists of edges by source, which only the backward pass reads
        output, exact, _ = _attention()(query, key, value, added, data.row, data.colptr, unread, unread, unread)
        return output if output.dtype == out_dtype else exact.to(out_dtype)

    def _zeros(self, data: AnemoiData, key: torch.Tensor) -> torch.Tensor:
        shape = (data.row.numel(), *key.shape[1:])
        if data.zeros is not None and data.zeros.shape == shape and data.zeros.dtype == key.dtype:
            return data.zeros
        return key.new_zeros(shape)

    def _edge_tensor(self, data: AnemoiData, key: torch.Tensor, edges: BoundEdges) -> torch.Tensor:
        """The edge tensor of a call.

        Raises:
            ValueError: this attention cannot express the terms.
        """
        for term in ("types", "score"):
            if getattr(edges, term) is not None:
                raise ValueError(
                    f"{term}: backend anemoi has none; it takes features alone (backend='fused3s' takes all terms)"
                )
        if edges.features is None:
            return self._zeros(data, key)
        if not _same_values(edges.key_weight, edges.value_weight):
            raise ValueError(
                "key_weight, value_weight: backend anemoi adds one edge tensor to keys and values, so both "
                "weights must be given and equal (backend='fused3s' takes two)"
            )
        kept = self._kept.get(edges.padded_features)
        if (
            kept is not None
            and kept.weight is edges.key_weight
            and kept.versions == (edges.padded_features._version, edges.key_weight._version)
        ):
            return kept.tensor
        return edge_tensor(edges.features, edges.key_weight)


def edge_tensor(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """W a of every edge: features [nnz, r], weight [H, d, r] -> [nnz, H, d], one product of matrices."""
    return (features @ weight.flatten(0, 1).t()).unflatten(1, weight.shape[:2])


def _same_values(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Whether both are given and equal. Waits for the GPU unless they are one object."""
    if first is None or second is None:
        return False
    return first is second or torch.equal(first, second)


@cache
def _attention() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """anemoi's operator: (output in q's type, the same in float32, log-sum-exp). The package may be missing."""
    from anemoi.models.triton.gt import graph_transformer_attention

    return graph_transformer_attention


BACKENDS = (AnemoiBackend(),)
