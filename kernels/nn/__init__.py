"""Layers that replace those of PyTorch Geometric, with the same arguments, state dict and numbers, and `SparseMHA` of
DGL's sparse graph transformer.

    from fused3s.nn import TransformerConv   # in place of `from torch_geometric.nn import TransformerConv`

Where PyG is installed, its layers are `torch_geometric.nn.MessagePassing`; only `HGTConv` needs it. The layers of
`dgl.nn` are in `fused3s.nn.dgl`.
"""

from .agnn import AGNNConv
from .gat_conv import GATConv
from .gatv2_conv import GATv2Conv
from .hgt_conv import HGTConv
from .sparse_mha import SparseMHA
from .transformer_conv import TransformerConv

__all__ = ["AGNNConv", "GATConv", "GATv2Conv", "HGTConv", "SparseMHA", "TransformerConv"]
