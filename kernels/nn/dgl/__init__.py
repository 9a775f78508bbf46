"""Layers that replace those of `dgl.nn`, with the same arguments, state dict and numbers, and PyG's `TransformerConv`
for a DGLGraph.

    from fused3s.nn.dgl import GATConv   # in place of `from dgl.nn import GATConv`

The plan of a graph is built at the first call and kept beside the graph (`fused3s.nn.cached.dgl_edges`). A graph on the
CPU serves features on a GPU, too. `fused3s.nn.SparseMHA` and `fused3s.edge_attention` replace what uses `dgl.sparse`.
"""

from .agnn import AGNNConv
from .gat_conv import GATConv
from .gatv2_conv import GATv2Conv
from .transformer_conv import TransformerConv

__all__ = ["AGNNConv", "GATConv", "GATv2Conv", "TransformerConv"]
