"""Graph Transformer of Dwivedi and Bresson (2020, "A Generalization of Transformer Networks to Graphs"), as the
end-to-end section of the Fused3S paper runs it: 10 blocks, each with one attention layer, three feed-forward layers
(output projection, d -> 2d with ReLU, 2d -> d) and two norms.

    model = GraphTransformer(in_features=1433, num_classes=7)
    plan = kernels.plan_attention(graph, device=..., dtype=..., head_dim=model.head_dim)  # the sparse format, once
    inputs = model.prepare(graph, plan)                                                   # the DGLGraph ends here
    logits = model(inputs)                                                                # any number of times

Attention is a callable inside `inputs`, so that weights and state dict do not depend on the backend. The dense block
between two attentions and the embedding are callables, too: `forward` accepts other implementations (see
`models.dense`).

Edge features, edata["feat"], enter in one of two forms; the plan then needs edge_data=True:

stream  As in section 2.3 of the paper: the edges have a stream of their own. In a block e_ij becomes norm(e + O w),
        then norm(e + FFN(e)), where w_ij = (q_i * k_j / sqrt(d)) * E e_ij, elementwise for each head: a tensor
        [nnz, H, d] by its nature. Its sum over a head is the score, clamped to -5 to 5. The authors' code
        (graphdeeplearning/graphtransformer) also adds 1e-6 to the sum of the weights, which is at least exp(-5): a
        relative difference of at most 1.5e-4, in a row with one edge. It also computes the edges of the last block,
        which nothing reads.
bias    As in Graphormer (Ying et al. 2021): a learned number for each head and bond type (or a linear map of float
        features) is added to the score, the same in all blocks.

`forward` only queues work on the device, without host synchronisation or data-dependent shapes, so that a CUDA graph
can capture it.

Dropout acts in training mode only. `dropout` acts where the authors' code has it: on the embedding, on the output of
attention and inside the feed-forward network; `attention_dropout` on the softmax weights, inside the attention backend;
`input_dropout` on float features, as GCN and GAT have it on bags of words. The published configurations set all to 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels import BoundEdges, Dropout, split_qkv
from kernels.arguments import check_integer, check_rate, check_word
from models.embedding import FeatureEmbedding
from models.graph_inputs import (
    Attention,
    EdgeInputs,
    GraphInputs,
    edge_features_of,
    node_features_of,
    prepare_batch,
    prepare_graph,
)

Norm = Literal["layer", "batch"]
Task = Literal["node", "graph"]
EdgeFeatures = Literal["none", "bias", "stream"]
# Larger values are mistakes: they would fail where memory is allocated, without a name.
MOST = {
    **{"num_classes": 1_000_000, "dim": 65_536, "heads": 65_536, "blocks": 10_000},
    **{"pos_enc": 1_024, "in_features": 10_000_000},
}
SCORE_CLAMP = 5.0  # of the edge stream, as in the authors' code
SEED_STEP = 0x9E3779B97F4A7C15 - 2**64  # added at each training pass: odd, so that no seed returns before 2^64 passes
# From one attention to the next: (attn_out [N, d], h [N, d]) -> (h of the next block [N, d], its q, k, v [N, 3 d], or
# None after the last block).
DenseBlock = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
NO_DROPOUT: Mapping[str, Any] = {}


class ResidualLayers(nn.Module):
    """The layers after attention, of nodes and of edges: projection and FFN, each with a residual, then a norm."""

    def add_layers(self, dim: int, norm: Norm, dropout: float) -> None:
        self.dropout = dropout
        self.out = nn.Linear(dim, dim)
        self.ffn_up = nn.Linear(dim, 2 * dim)
        self.ffn_down = nn.Linear(2 * dim, dim)
        make_norm = nn.LayerNorm if norm == "layer" else nn.BatchNorm1d
        self.norm1 = make_norm(dim)
        self.norm2 = make_norm(dim)

    def finish(self, attn_out: Tensor, h: Tensor) -> Tensor:
        """Output of attention and input of the block, both [rows, d] -> output of the block [rows, d].

        Norms may have float32 parameters over 16-bit rows.
        """
        h = self.norm1(h + self.out(self.drop(attn_out)))
        return self.norm2(h + self.ffn_down(self.drop(F.relu(self.ffn_up(h)))))

    def drop(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.dropout) if self.training and self.dropout else h


class Block(ResidualLayers):
    """Attention and feed-forward network, each with a residual and then a norm (post-norm)."""

    def __init__(self, dim: int, heads: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)  # one GEMM; no bias, as in the original
        self.add_layers(dim, norm, dropout)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, 3 d] -> q, k, v: views [N, H, d / H], no copies."""
        return split_qkv(qkv, self.heads)

    def attend(
        self, qkv: Tensor, attention: Attention, bias: BoundEdges | None = None, dropout: Mapping[str, Any] = NO_DROPOUT
    ) -> Tensor:
        """[N, 3 d] -> [N, d]. dropout: arguments of the plan (see `GraphTransformer.attention_options`)."""
        q, k, v = self.split(qkv)
        edge_terms = {} if bias is None else {"edges": bias}
        return attention(q, k, v, scale=self.scale, out_dtype=qkv.dtype, **edge_terms, **dropout).flatten(1)


class EdgeBlock(ResidualLayers):
    """The edge stream of a block. The last one has no output: nothing reads the edges after it."""

    def __init__(self, dim: int, heads: int, norm: Norm, dropout: float, *, last: bool) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.last = last
        self.project = nn.Linear(dim, dim, bias=False)
        if not last:
            self.add_layers(dim, norm, dropout)

    def forward(self, q: Tensor, k: Tensor, e: Tensor, edges: EdgeInputs) -> Tensor:
        """q, k [N, H, d / H] and the edge stream e [nnz, d] -> w [nnz, H, d / H]."""
        return (q * self.scale)[edges.target] * k[edges.source] * self.project(e).unflatten(1, (self.heads, -1))

    def attend(
        self,
        parts: tuple[Tensor, Tensor, Tensor],
        e: Tensor,
        edges: EdgeInputs,
        attention: Attention,
        dropout: Mapping[str, Any] = NO_DROPOUT,
    ) -> tuple[Tensor, Tensor | None]:
        """q, k, v and the edge stream -> output of attention [N, d] and the next edge stream."""
        q, k, v = parts
        w = self(q, k, e, edges)
        # The scores are there: attention adds them to products of scale 0. V as Q and K has no further row to gather.
        bias = replace(edges.bind_bias(w.sum(-1)), clamp=SCORE_CLAMP)
        out = attention(v, v, v, scale=0.0, out_dtype=v.dtype, edges=bias, **dropout).flatten(1)
        return out, None if self.last else self.finish(w.flatten(1), e)


def finish_and_project(block: Block, following: Block, attn_out: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """DenseBlock: the rest of a block and the QKV projection of the next one."""
    h = block.finish(attn_out, h)
    return h, following.qkv(h)


def finish_last(block: Block, attn_out: Tensor, h: Tensor) -> tuple[Tensor, None]:
    """DenseBlock of the last block."""
    return block.finish(attn_out, h), None


class Readout(nn.Module):
    """[rows, d] -> [rows, classes]: an MLP with two hidden layers of width d / 2 and d / 4."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(dim, dim // 2)
        self.hidden2 = nn.Linear(dim // 2, dim // 4)
        self.classes = nn.Linear(dim // 4, num_classes)

    def forward(self, h: Tensor) -> Tensor:
        return self.classes(F.relu(self.hidden2(F.relu(self.hidden1(h)))))


class GraphTransformer(nn.Module):
    """Graph Transformer on one graph or a batch of graphs.

    Args:
        in_features: columns of float features, or the number of values of each categorical column.
        num_classes: outputs per node or graph.
        task: "node": output [N, num_classes]; "graph": mean over the nodes of each graph, output [G, num_classes].
        dim: width d, a multiple of `heads`. The paper times 64, 128 and 256.
        heads: attention heads. The paper times 1.
        blocks: transformer blocks.
        norm: "layer", or "batch" with running statistics in eval mode.
        pos_enc: number of Laplacian eigenvectors added to the input through a linear layer.
        edge_features: "none", or the form in which edata["feat"] enters: "bias" or "stream" (see the module).
        edge_in_features: as `in_features`, for the edges; with edge features only.
        dropout, attention_dropout, input_dropout: rates in training mode (see the module).

    Attributes:
        dropout_seeds: [blocks] int64, seeds of attention dropout, on the model's device and no part of its state dict.
            Each training pass changes them in place, so that each replay of a CUDA graph draws other masks.

    Raises:
        TypeError, ValueError: an argument is not what is allowed; the text names it.
    """

    def __init__(
        self,
        *,
        in_features: int | Sequence[int],
        num_classes: int,
        task: Task = "node",
        dim: int = 128,
        heads: int = 1,
        blocks: int = 10,
        norm: Norm = "layer",
        pos_enc: int = 0,
        edge_features: EdgeFeatures = "none",
        edge_in_features: int | Sequence[int] | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"num_classes": (num_classes, 1), "dim": (dim, 4), "heads": (heads, 1), "blocks": (blocks, 1)}
        for name, (value, least) in (sizes | {"pos_enc": (pos_enc, 0)}).items():
            check_integer(name, value, least, MOST[name])
        check_word("task", task, get_args(Task))
        check_word("norm", norm, get_args(Norm))
        check_word("edge_features", edge_features, get_args(EdgeFeatures))
        _check_inputs("in_features", in_features)
        if dim % heads:
            raise ValueError(f"dim: got {dim} with heads = {heads}; a multiple of heads is needed")
        if edge_features != "none" and not edge_in_features:
            raise ValueError(
                f"edge_in_features: got {edge_in_features} with edge_features = {edge_features!r}; the columns of "
                "float features, or the number of values of each categorical column, are needed"
            )
        if edge_features != "none":
            _check_inputs("edge_in_features", edge_in_features)
        rates = {"dropout": dropout, "attention_dropout": attention_dropout, "input_dropout": input_dropout}
        for name, rate in rates.items():
            check_rate(name, rate)
        self.head_dim = dim // heads
        self.task = task
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.input_dropout = input_dropout
        self.pos_enc = pos_enc
        self.embedding = FeatureEmbedding(in_features, dim)
        if pos_enc:
            self.encoding = nn.Linear(pos_enc, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, norm, dropout) for _ in range(blocks))
        self.readout = Readout(dim, num_classes)
        self.edge_features = edge_features
        if edge_features != "none":
            self.edge_embedding = FeatureEmbedding(edge_in_features, heads if edge_features == "bias" else dim)
        if edge_features == "stream":
            self.edge_blocks = nn.ModuleList(
                EdgeBlock(dim, heads, norm, dropout, last=i == blocks - 1) for i in range(blocks)
            )
        if attention_dropout:  # drawn last and only where used: weights of a seed do not depend on it
            self.register_buffer("dropout_seeds", torch.randint(2**63 - 1, (blocks,)), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the blocks' weights."""
        return self.blocks[0].qkv.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks[0].qkv.weight.device

    def cast(self, dtype: torch.dtype) -> Self:
        """Give the weights a type, in place. The readout of graphs stays in float32 at least, and so does their mean.

        The logits of a rare label lie close together. In 16 bits most of them are the same number, which ROC-AUC and
        average precision cannot rank. The readout has one row a graph, so that float32 costs little.
        """
        for name, module in self.named_children():
            is_of_graphs = name == "readout" and self.task == "graph"
            module.to(torch.promote_types(dtype, torch.float32) if is_of_graphs else dtype)
        return self

    def prepare(self, graph: Any, attention: Attention) -> GraphInputs:
        """Move the features and structure of a DGLGraph to the model's device and dtype (see `prepare_graph`).

        Args:
            graph: a DGLGraph, single or batched, with ndata["feat"], and edata["feat"] for a model with edge features.
            attention: attention over this graph on the model's device; a plan made with edge_data=True for a model
                with edge features.

        Raises:
            ValueError: the features are missing or do not fit this model.
        """
        inputs = prepare_graph(
            graph,
            attention,
            pos_enc=self.pos_enc,
            device=self.device,
            dtype=self.dtype,
            edge_features=self.edge_features != "none",
        )
        self.embedding.check(inputs.features)
        if inputs.edges:
            self.edge_embedding.check(graph.edata["feat"], row="edge")  # in the caller's order: the text names the edge
        return inputs

    def check_features(self, graph: Any) -> None:
        """Raise the ValueError of `prepare` if the features of a DGLGraph are missing or do not fit this model."""
        self.embedding.check(node_features_of(graph))
        if self.edge_features != "none":
            self.edge_embedding.check(edge_features_of(graph), row="edge")

    def prepare_batch(self, batch: Any, attention: Attention) -> GraphInputs:
        """As `prepare`, from the tensors of a batch of graphs on the model's device (see `graph_inputs.prepare_batch`).

        Args:
            batch: of a graph that `check_features` has nothing against.
        """
        return prepare_batch(
            batch,
            attention,
            pos_enc=self.pos_enc,
            device=self.device,
            dtype=self.dtype,
            edge_features=self.edge_features != "none",
        )

    def dense_blocks(self, project: Callable = finish_and_project, last: Callable = finish_last) -> list[DenseBlock]:
        """One DenseBlock per block, from the plain functions or from compiled versions of them."""
        parts = [partial(project, block, following) for block, following in pairwise(self.blocks)]
        return [*parts, partial(last, self.blocks[-1])]

    def embed(self, inputs: GraphInputs) -> Tensor:
        """Node features -> [N, d], by the plain module."""
        return self.embedding(self.embedding_input(inputs))

    def embedding_input(self, inputs: GraphInputs) -> Tensor:
        """Features with dropout and, in training, padded to whole 16 bytes, which makes the products fast."""
        is_padded = self.training and inputs.aligned_features is not None
        features = inputs.aligned_features if is_padded else inputs.features
        if self.training and self.input_dropout and features.is_floating_point():
            features = F.dropout(features, self.input_dropout)
        return features

    def attention_options(self) -> list[Mapping[str, Any]]:
        """Arguments of the plan for dropout, one per block; draws the seeds of a training pass."""
        if not (self.training and self.attention_dropout):
            return [NO_DROPOUT] * len(self.blocks)
        self.dropout_seeds.add_(SEED_STEP)
        return [{"dropout": Dropout(self.attention_dropout, seed)} for seed in self.dropout_seeds.split(1)]

    def forward(
        self,
        inputs: GraphInputs,
        dense: Sequence[DenseBlock] | None = None,
        embed: Callable[[GraphInputs], Tensor] | None = None,
        readout: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits [N, num_classes] or [G, num_classes] in the type of the readout's weights.

        Args:
            inputs: from `prepare`.
            dense, embed, readout: other implementations of the dense block, one per block, of the embedding and of the
                readout (see `models.dense` and `models.dense_training`); None for the plain modules.
        """
        h = (embed or self.embed)(inputs)
        if inputs.encoding is not None:
            h = h + self.encoding(inputs.encoding)
        if self.training and self.dropout:
            h = F.dropout(h, self.dropout)
        e = None if inputs.edges is None else self.edge_embedding(inputs.edges.features)
        bias = inputs.edges.bind_bias(e) if self.edge_features == "bias" else None
        qkv = self.blocks[0].qkv(h)
        parts = self.dense_blocks() if dense is None else dense
        options = self.attention_options()
        for i, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            if self.edge_features == "stream":
                edge_block = self.edge_blocks[i]
                attn_out, e = edge_block.attend(block.split(qkv), e, inputs.edges, inputs.attention, options[i])
            else:
                attn_out = block.attend(qkv, inputs.attention, bias, options[i])
            h, qkv = part(attn_out, h)
        if self.task == "graph":
            h = mean_nodes(h.to(self.readout.classes.weight.dtype), inputs)
        return (readout or self.readout)(h)


def _check_inputs(name: str, features: int | Sequence[int]) -> None:
    """Columns of float features, or the numbers of values of categorical ones."""
    if isinstance(features, (str, bytes)) or not isinstance(features, (int, Sequence)):
        raise TypeError(
            f"{name}: got {features!r}; the columns of float features, or the number of values of each categorical "
            "column, are needed"
        )
    values = [features] if isinstance(features, int) else list(features)
    if not values:
        raise ValueError(f"{name}: got no column; at least one is needed")
    for value in values:
        check_integer(name, value, 1, MOST["in_features"])


def mean_nodes(h: Tensor, inputs: GraphInputs) -> Tensor:
    """Mean over the nodes of each graph, [N, d] -> [G, d], zero for a graph without nodes."""
    return _MeanNodes.apply(h, inputs.nodes, inputs.graph_starts)


class _MeanNodes(torch.autograd.Function):
    """(h [N, d], nodes [N], graph starts [G]) -> [G, d].

    embedding_bag over the rows of h: one kernel that sums in float32 (a float16 sum would stagnate) and without
    atomics, so that results are reproducible. Its own gradient would sort the nodes, which are in order.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, nodes: Tensor, graph_starts: Tensor) -> Tensor:
        ctx.save_for_backward(nodes, graph_starts)
        return F.embedding_bag(nodes, h, graph_starts, mode="mean")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        nodes, starts = ctx.saved_tensors
        sizes = F.pad(starts, (0, 1), value=len(nodes)).diff()
        graph = torch.searchsorted(starts, nodes, right=True) - 1  # of equal starts the last: the others have no nodes
        return (grad / sizes.clamp(min=1)[:, None])[graph], None, None
