"""The transposed pattern of a graph, which backward passes read."""

import torch

from fused3s.graph.csr import CSRPattern, csr_from_edges
from fused3s.graph.edge_list import EdgeList
from fused3s.graph.edges import rows_of_edges


def transposed(indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> CSRPattern:
    """Of a CSR pattern of `shape`, with columns in order."""
    edges = torch.stack([rows_of_edges(indptr.long(), len(indices)), indices.long()])
    return csr_from_edges(EdgeList(edges, shape[::-1]))
