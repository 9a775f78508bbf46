"""Graph Transformer: `GraphTransformer(...)`, `model.prepare(graph, attention)`, `model(inputs)`; and layers that
replace those of PyTorch Geometric and of DGL's examples: `FusedTransformerConv`, `FusedGATConv`, `FusedGATv2Conv`,
`FusedAGNNConv`, `SparseMHA`.
"""

from models.agnn import FusedAGNNConv
from models.checkpoint import CheckpointError, load_checkpoint
from models.execution import CudaGraphError, Execution, prepare_execution
from models.fast import DenseUnavailableError, StaleWeightsError
from models.gat_conv import FusedGATConv
from models.gatv2_conv import FusedGATv2Conv
from models.graph_inputs import Attention, GraphInputs, prepare_graph
from models.graph_transformer import GraphTransformer
from models.sparse_mha import SparseMHA
from models.transformer_conv import FusedTransformerConv

__all__ = [
    "Attention",
    "CheckpointError",
    "CudaGraphError",
    "DenseUnavailableError",
    "Execution",
    "FusedAGNNConv",
    "FusedGATConv",
    "FusedGATv2Conv",
    "FusedTransformerConv",
    "GraphInputs",
    "GraphTransformer",
    "SparseMHA",
    "StaleWeightsError",
    "load_checkpoint",
    "prepare_execution",
    "prepare_graph",
]
