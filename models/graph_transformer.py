"""Graph Transformer of Dwivedi and Bresson (2020, "A Generalization of Transformer Networks to Graphs"), as the
end-to-end section of the Fused3S paper runs it: 10 blocks, each with one attention layer, three feed-forward layers
(output projection, d -> 2d with ReLU, 2d -> d) and two norms.

    model = GraphTransformer(in_features=1433, num_classes=7)
    plan = fused3s.plan_attention(graph, device=..., dtype=..., head_dim=model.head_dim)  # the sparse format, once
    inputs = model.prepare(graph, plan)                                                   # tensors on its device
    logits = model(inputs)                                                                # any number of times

Attention is a callable inside `inputs`, so weights and state dict do not depend on the backend. `models.fast` computes
the same with fewer kernels.

Edge features, edata["feat"], enter in one of two forms; the plan then needs edge_data=True:

stream  As in section 2.3 of the paper: the edges have a stream of their own (`EdgeBlock`). The authors' code
        (graphdeeplearning/graphtransformer) also adds 1e-6 to the sum of the weights, which is at least exp(-5): a
        relative difference of at most 1.5e-4, in a row with one edge. It also computes the edges of the last block,
        which nothing reads.
bias    As in Graphormer (Ying et al. 2021): a learned number for each head and bond type (or a linear map of float
        features) is added to the score, the same in all blocks.

`forward` only queues work on the device, without host synchronisation or data-dependent shapes, so that a CUDA graph
can capture it. Dropout is placed as in the authors' code; dropout of the features as in GCN and GAT.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused3s import BoundEdges, Dropout, split_qkv
from models.batch_norm import BatchNorm
from models.embedding import FeatureEmbedding
from models.graph_inputs import EdgeInputs, GraphInputs
from models.graph_model import GraphModel
from models.readout import Readout, mean_nodes
from models.settings import EdgeFeatures, Features, Norm, Task, check_settings

NORMS = {"layer": nn.LayerNorm, "batch": BatchNorm}
SCORE_CLAMP = 5.0  # of the edge stream, as in the authors' code
SEED_STEP = 0x9E3779B97F4A7C15 - 2**64  # added at each training pass: odd, so that no seed returns before 2^64 passes
Edges = Tensor | BoundEdges | None  # see `Block.attend`
# (attended [N, d], h [N, d]) -> (h of the next block [N, d], its q, k, v [N, 3 d], or None after the last block). Those
# with batch norm also take `GraphInputs.row_weights`, if there are any.
DenseBlock = Callable[..., tuple[Tensor, Tensor | None]]


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual and then a norm (post-norm)."""

    def __init__(self, dim: int, heads: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)  # one GEMM; no bias, as in the original
        self.out = nn.Linear(dim, dim)
        self.ffn_up = nn.Linear(dim, 2 * dim)
        self.ffn_down = nn.Linear(2 * dim, dim)
        self.norm1 = NORMS[norm](dim)
        self.norm2 = NORMS[norm](dim)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, h: Tensor, e: Edges, inputs: GraphInputs, edge_block: "EdgeBlock | None", dropout: dict[str, Any]
    ) -> tuple[Tensor, Edges]:
        """Nodes h [N, d] -> [N, d], and e for the next block; other arguments as in `attend`."""
        attended, e = self.attend(self.qkv(h), e, inputs, edge_block, dropout)
        return mlp(self, attended, h, *norm_options(self, inputs)), e

    def attend(
        self, qkv: Tensor, e: Edges, inputs: GraphInputs, edge_block: "EdgeBlock | None", dropout: dict[str, Any]
    ) -> tuple[Tensor, Edges]:
        """q, k and v of the nodes, [N, 3 d] -> output of attention [N, d], and e for the next block.

        Args:
            e: the edge stream [nnz, d] with an `edge_block`; otherwise a bias of the scores, or None.
            dropout: arguments of the plan for dropout.
        """
        q, k, v = split_qkv(qkv, self.heads)  # views [N, H, d / H], no copies
        options = {"scale": self.scale, "out_dtype": v.dtype} | dropout
        if edge_block is not None:
            scores, e = edge_block(q, k, e, inputs.edges)
            # Attention adds the scores to products of scale 0. V as Q and K needs no further gather.
            q, k = v, v
            options |= {"scale": 0.0, "edges": inputs.edges.bind_bias(scores, SCORE_CLAMP)}
        elif e is not None:
            options["edges"] = e
        return inputs.attention(q, k, v, **options).flatten(1), e


class EdgeBlock(nn.Module):
    """The edge stream of a block: w_ij = (q_i * k_j / sqrt(d)) * E e_ij, elementwise, and the layers of `mlp` on w.

    The sum of w over a head is the score of the edge. w is a tensor [nnz, H, d / H].
    """

    def __init__(self, dim: int, heads: int, norm: str, dropout: float, *, last: bool) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.last = last
        self.project = nn.Linear(dim, dim, bias=False)
        if last:  # nothing reads the edges after it
            return
        self.out = nn.Linear(dim, dim)
        self.ffn_up = nn.Linear(dim, 2 * dim)
        self.ffn_down = nn.Linear(2 * dim, dim)
        self.norm1 = NORMS[norm](dim)
        self.norm2 = NORMS[norm](dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, e: Tensor, edges: EdgeInputs) -> tuple[Tensor, Tensor | None]:
        """q, k [N, H, d / H] and edges e [nnz, d] -> scores [nnz, H], and e for the next block, None after the last."""
        w = (q * self.scale)[edges.target] * k[edges.source] * self.project(e).unflatten(1, (self.heads, -1))
        return w.sum(-1), None if self.last else mlp(self, w.flatten(1), e)


def mlp(block: Block | EdgeBlock, attended: Tensor, h: Tensor, *row_weights: Tensor) -> Tensor:
    """The layers of a block after attention: output of attention and input of the block, both [rows, d] -> [rows, d].

    Norms may have float32 parameters with 16-bit rows. row_weights: see `BatchNorm`.
    """
    h = block.norm1(h + block.out(block.drop(attended)), *row_weights)
    return block.norm2(h + block.ffn_down(block.drop(F.relu(block.ffn_up(h)))), *row_weights)


def norm_options(block: Block, inputs: GraphInputs) -> tuple[Tensor, ...]:
    """`row_weights` of `mlp`: those of a padded batch for batch norm, which would count the padding."""
    is_padded = isinstance(block.norm1, BatchNorm) and inputs.row_weights is not None
    return (inputs.row_weights,) if is_padded else ()


class GraphTransformer(GraphModel):
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
        random_walk: steps of the random-walk encoding added to the input through a batch norm and a linear layer.
        edge_features: "none", or the form in which edata["feat"] enters, "bias" or "stream"
            (see `models.graph_transformer`).
        edge_in_features: as `in_features`, for edges; only with edge features.
        dropout: rate on the embedding, on the output of attention and inside the FFN.
        attention_dropout: rate on the softmax weights.
        input_dropout: rate on float features.

    Attributes:
        dropout_seeds: [blocks] int64, seeds of attention dropout, on the model's device, not in its state dict. Each
            training pass changes them in place, so each replay of a CUDA graph draws other masks.

    Raises:
        TypeError, ValueError: an argument is wrong; the text names it and what is allowed.
    """

    def __init__(
        self,
        *,
        in_features: Features,
        num_classes: int,
        task: Task = "node",
        dim: int = 128,
        heads: int = 1,
        blocks: int = 10,
        norm: Norm = "layer",
        pos_enc: int = 0,
        random_walk: int = 0,
        edge_features: EdgeFeatures = "none",
        edge_in_features: Features | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        input_dropout: float = 0.0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_settings(**given)
        super().__init__()
        self.head_dim = dim // heads
        self.task, self.edge_features = task, edge_features
        self.pos_enc, self.random_walk = pos_enc, random_walk
        self.attention_dropout, self.input_dropout = attention_dropout, input_dropout
        self.embedding = FeatureEmbedding(in_features, dim)
        if pos_enc:
            self.encoding = nn.Linear(pos_enc, dim)
        if random_walk:
            self.walk_norm = BatchNorm(random_walk)
            self.walk_encoding = nn.Linear(random_walk, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, norm, dropout) for _ in range(blocks))
        self.readout = Readout(dim, num_classes)
        if edge_features != "none":
            self.edge_embedding = FeatureEmbedding(edge_in_features, heads if edge_features == "bias" else dim)
        self.edge_blocks: Any = [None] * blocks
        if edge_features == "stream":
            self.edge_blocks = nn.ModuleList(
                EdgeBlock(dim, heads, norm, dropout, last=i == blocks - 1) for i in range(blocks)
            )
        if attention_dropout:  # drawn last and only if used: the weights of a seed do not depend on it
            self.register_buffer("dropout_seeds", torch.randint(2**63 - 1, (blocks,)), persistent=False)

    def forward(self, inputs: GraphInputs) -> Tensor:
        """Logits [N, num_classes] or [G, num_classes], in the type of the readout's weights; inputs from `prepare`."""
        h = self.encode(self.embed(inputs), inputs)
        e = self.embed_edges(inputs)
        for i, dropout in enumerate(self.attention_dropouts()):
            h, e = self.blocks[i](h, e, inputs, self.edge_blocks[i], dropout)
        return self.readout(self.rows(h, inputs))

    def embed(self, inputs: GraphInputs) -> Tensor:
        """Node features -> [N, d]."""
        return self.embedding(self.features(inputs))

    def features(self, inputs: GraphInputs) -> Tensor:
        """Node features; in training with dropout, and padded to whole 16 bytes for fast GEMMs."""
        if not self.training or inputs.aligned_features is None:
            return inputs.features
        return F.dropout(inputs.aligned_features, self.input_dropout)

    def encode(self, h: Tensor, inputs: GraphInputs) -> Tensor:
        """Embedded features [N, d] with the positional encodings: input of the first block."""
        if inputs.encoding is not None:
            h = h + self.encoding(inputs.encoding)
        if inputs.random_walk is not None:
            h = h + self.walk_encoding(self.walk_norm(inputs.random_walk, inputs.row_weights))
        return self.drop(h)

    def embed_edges(self, inputs: GraphInputs) -> Edges:
        """`e` of the first block (see `Block.attend`)."""
        if inputs.edges is None:
            return None
        e = self.edge_embedding(inputs.edges.features)
        return inputs.edges.bind_bias(e) if self.edge_features == "bias" else e

    def attention_dropouts(self) -> list[dict[str, Any]]:
        """Arguments of the plan for dropout, one per block; draws the seeds of a training pass."""
        if not (self.training and self.attention_dropout):
            return [{}] * len(self.blocks)
        self.dropout_seeds.add_(SEED_STEP)
        return [{"dropout": Dropout(self.attention_dropout, seed)} for seed in self.dropout_seeds.split(1)]

    def rows(self, h: Tensor, inputs: GraphInputs) -> Tensor:
        """Input of the readout: the nodes [N, d], or the mean of each graph [G, d]."""
        return h if self.task == "node" else mean_nodes(h.to(self.readout.classes.weight.dtype), inputs)


def successive_blocks(model: GraphTransformer) -> list[tuple[Block, Block | None]]:
    """Pairs of each block and its successor."""
    return list(zip(model.blocks, [*model.blocks[1:], None], strict=True))


def weights_of(block: Block, following: Block | None) -> list[Tensor]:
    """Weights of a dense block in the order of `models.dense.block.pack_block`; the last is Wqkv of the next block."""
    layers = (block.out, block.norm1, block.ffn_up, block.ffn_down, block.norm2)
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
    return weights if following is None else [*weights, following.qkv.weight]
