"""Base of models on graphs: inputs from graphs, and the type of the weights."""

from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from fused3s import AttentionPlan
from models.embedding import FeatureEmbedding
from models.graph_inputs import (
    Attention,
    EdgeInputs,
    GraphInputs,
    aligned_columns,
    checked_features,
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
        """Move the features and structure of a DGLGraph to the model's device and dtype.

        Args:
            graph: a homogeneous DGLGraph, single or `dgl.batch`ed, with ndata["feat"], float32 [N, F] or int64 [N, C];
                for a model with edge features edata["feat"], float32 [E, F] or int64 [E, C]; for one with random walks
                ndata["random_walk"], as `data.load(..., random_walk=k)` gives it.
            attention: attention over this graph on the model's device; a plan made with edge_data=True for a model
                with edge features.

        Raises:
            ValueError: features are missing, of another shape or dtype, or do not match this model; the plan keeps no
                edge order.
        """
        self.check_features(graph)
        sizes, with_edges = graph.batch_num_nodes().cpu(), self.edge_features != "none"
        batch = SimpleNamespace(
            features=graph.ndata["feat"],
            edge_features=graph.edata["feat"] if with_edges else None,
            random_walk=graph.ndata["random_walk"] if self.random_walk else None,
            graph_starts=(sizes.cumsum(0) - sizes).to(self.device),
            row_weights=None,
        )
        return self.prepare_batch(batch, attention, graph.edges() if self.pos_enc or with_edges else ())

    def prepare_batch(self, batch: Any, attention: Attention, ends: tuple[Tensor, ...] | None = None) -> GraphInputs:
        """As `prepare`, from tensors on the device instead of a DGLGraph. Does not check; waits for the GPU only
        with pos_enc.

        Args:
            batch: of a graph that passes `check_features`, with indptr [N + 1] int64 and col [nnz] of the distinct
                edges; features [N, F] float or [N, C] codes of any integer type; edge_features [nnz, F] float or
                [nnz, C] codes, or None; graph_starts [G] int64; random_walk [N, k] or None; row_weights [N] float32 or
                None. Entries of col after indptr[-1] are padding.
            attention: attention over the same edges.
            ends: source (key) and destination (query) of each row of edge_features; None for the order of indptr and
                col.
        """
        device, dtype, with_edges = self.device, self.dtype, self.edge_features != "none"
        if ends is None and (self.pos_enc or with_edges):
            edges = torch.arange(len(batch.col), device=device)
            ends = batch.col, torch.searchsorted(batch.indptr[1:], edges, right=True)
        features, aligned, encoding = batch.features, None, None
        if features.is_floating_point():
            aligned = aligned_columns(features.to(dtype)).to(device)
            features = aligned[:, : features.shape[1]]
        if self.pos_enc:
            from models.laplacian import laplacian_encoding  # on use: it needs SciPy

            source, destination = (nodes.cpu().numpy() for nodes in ends)
            vectors = laplacian_encoding(source, destination, len(features), self.pos_enc)
            encoding = torch.from_numpy(vectors).to(device, dtype)
        return GraphInputs(
            features=features if aligned is not None else features.to(device, torch.int64),
            aligned_features=aligned,
            attention=attention,
            encoding=encoding,
            nodes=torch.arange(len(features), device=device),
            graph_starts=batch.graph_starts,
            edges=self._edge_inputs(batch.edge_features, ends, attention) if with_edges else None,
            random_walk=batch.random_walk.to(device, dtype) if self.random_walk else None,
            row_weights=batch.row_weights,
        )

    def check_features(self, graph: Any) -> None:
        """Raise the ValueError of `prepare` if the features of a DGLGraph are missing or do not match this model."""
        self.embedding.check(checked_features(graph.ndata, "ndata", "nodes"))
        if self.edge_features != "none":
            self.edge_embedding.check(checked_features(graph.edata, "edata", "edges"), row="edge")
        found = graph.ndata.get("random_walk")
        if self.random_walk and (found is None or found.shape[1:] != (self.random_walk,)):
            got = "none" if found is None else f"shape {tuple(found.shape)}"
            raise ValueError(
                f'graph: ndata["random_walk"] of shape [nodes, {self.random_walk}] is needed; got {got}: '
                f"data.load(..., random_walk={self.random_walk}) gives it"
            )

    def _edge_inputs(self, features: Tensor, ends: tuple[Tensor, ...], plan: Attention) -> EdgeInputs:
        if not isinstance(plan, AttentionPlan) or plan.edge_order is None:
            raise ValueError(
                "attention: a model with edge features needs a plan that keeps the order of the edges: "
                "fused3s.plan_attention(graph, ..., edge_data=True)"
            )
        edge = plan.edge_order.edge_of_csr
        source, target = (nodes.to(self.device).long()[edge] for nodes in ends)
        features = features.to(self.device, self.dtype if features.is_floating_point() else torch.int64)
        return EdgeInputs(features[edge], source, target, plan.edge_order)
