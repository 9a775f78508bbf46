"""Models: `GraphTransformer(...)` or `ConvNet(...)`, `model.prepare(graph, attention)`, `model(inputs)`."""

from typing import TYPE_CHECKING, Any

from models.checkpoint import CheckpointError, load_checkpoint
from models.execution import CudaGraphError, Execution, StaleWeightsError, prepare_execution
from models.fast import DenseUnavailableError
from models.graph_inputs import Attention, GraphInputs
from models.graph_model import GraphModel
from models.graph_transformer import GraphTransformer

if TYPE_CHECKING:
    from models.conv_net import ConvNet

__all__ = [
    "Attention",
    "CheckpointError",
    "ConvNet",
    "CudaGraphError",
    "DenseUnavailableError",
    "Execution",
    "GraphInputs",
    "GraphModel",
    "GraphTransformer",
    "StaleWeightsError",
    "load_checkpoint",
    "prepare_execution",
]


def __getattr__(name: str) -> Any:
    if name != "ConvNet":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from models.conv_net import ConvNet  # on use: most models are Graph Transformers

    return ConvNet
