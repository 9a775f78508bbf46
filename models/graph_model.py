"""Base of models on graphs: inputs from graphs, and the type of the weights."""

from typing import Any, Self

import torch
from torch import nn

from models.embedding import FeatureEmbedding
from models.graph_inputs import (
    Attention,
    GraphInputs,
    edge_features_of,
    node_features_of,
    prepare_batch,
    prepare_graph,
    random_walk_of,
)


class GraphModel(nn.Module):
    """Base of `GraphTransformer` and `ConvNet`.

    Attributes:
        task: "node" or "graph".
        pos_enc: number of Laplacian eigenvectors of the input.
        random_walk: steps of the random-walk encoding of the input.
        edge_features: "none", "bias" or "stream".
        embedding, edge_embedding: embeddings of node features and, with edge features, of edge features.
    """

    task: str
    pos_enc: int
    random_walk: int
    edge_features: str
    embedding: FeatureEmbedding
    edge_embedding: FeatureEmbedding
    blocks: nn.ModuleList

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights of the blocks."""
        return next(self.blocks.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.blocks.parameters()).device

    def cast(self, dtype: torch.dtype) -> Self:
        """Cast the weights in place. The readout and mean of graph tasks stay in float32 or wider.

        The logits of a rare label lie close together: in 16 bits most of them are equal, and ROC-AUC and average
        precision cannot rank them. The readout has one row per graph, so float32 costs little.
        """
        for name, module in self.named_children():
            is_of_graphs = name == "readout" and self.task == "graph"
            module.to(torch.promote_types(dtype, torch.float32) if is_of_graphs else dtype)
        return self

    def prepare(self, graph: Any, attention: Attention) -> GraphInputs:
        """Move the features and structure of a DGLGraph to the model's device and dtype (see `prepare_graph`).

        Args:
            graph: a DGLGraph, single or batched, with ndata["feat"], edata["feat"] for a model with edge features, and
                ndata["random_walk"] for one with that encoding, as `data.load(..., random_walk=k)` gives them.
            attention: attention over this graph on the model's device; a plan made with edge_data=True for a model
                with edge features.

        Raises:
            ValueError: the features are missing or do not match this model.
        """
        self.check_features(graph)
        return prepare_graph(graph, attention, **self._read())

    def prepare_batch(self, batch: Any, attention: Attention) -> GraphInputs:
        """As `prepare`, from the tensors of a batch of graphs on the model's device (see `graph_inputs.prepare_batch`).

        Args:
            batch: tensors of a graph that passes `check_features`.
        """
        return prepare_batch(batch, attention, **self._read())

    def check_features(self, graph: Any) -> None:
        """Raise the ValueError of `prepare` if the features of a DGLGraph are missing or do not match this model."""
        self.embedding.check(node_features_of(graph))
        if self.edge_features != "none":
            self.edge_embedding.check(edge_features_of(graph), row="edge")
        if self.random_walk:
            random_walk_of(graph, self.random_walk)

    def _read(self) -> dict[str, Any]:
        """Keyword arguments of `prepare_graph` and `prepare_batch` for this model."""
        read = {"pos_enc": self.pos_enc, "random_walk": self.random_walk, "edge_features": self.edge_features != "none"}
        return read | {"device": self.device, "dtype": self.dtype}
