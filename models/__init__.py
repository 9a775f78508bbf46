"""Graph Transformer: `GraphTransformer(...)`, `model.prepare(graph, attention)`, `model(inputs)`."""

from models.checkpoint import CheckpointError, load_checkpoint
from models.execution import CudaGraphError, Execution, prepare_execution
from models.fast import DenseUnavailableError, StaleWeightsError
from models.graph_inputs import Attention, GraphInputs, prepare_graph
from models.graph_transformer import GraphTransformer

__all__ = [
    "Attention",
    "CheckpointError",
    "CudaGraphError",
    "DenseUnavailableError",
    "Execution",
    "GraphInputs",
    "GraphTransformer",
    "StaleWeightsError",
    "load_checkpoint",
    "prepare_execution",
    "prepare_graph",
]
