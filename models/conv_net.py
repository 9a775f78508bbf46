"""A stack of attention layers from the features straight to the classes, as in GAT (Veličković et al. 2018): no
embedding, no feed-forward network, and no residual through which a node could be classified by its own features.

    model = ConvNet(layer="transformer_conv", in_features=1433, num_classes=7, dim=64, heads=8, blocks=2)
    plan = fused3s.plan_attention(graph, device=..., dtype=..., head_dim=8, num_heads=8)
    logits = model(model.prepare(graph, plan))

All layers share the plan. The layers add no self-loops: the graph has those that it is to have.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models.embedding import check_float_features
from models.graph_inputs import GraphInputs, checked_features
from models.graph_model import GraphModel
from models.settings import Task, check_settings

# Classes of fused3s.nn, with options: softmax(q k / sqrt(d)) without the term of the node itself; additive attention of
# GAT and of GATv2.
LAYERS = {
    "transformer_conv": ("TransformerConv", {"root_weight": False}),
    "gat_conv": ("GATConv", {"add_self_loops": False}),
    "gatv2_conv": ("GATv2Conv", {"add_self_loops": False}),
}


class ConvNet(GraphModel):
    """Attention layers with an ELU in between; the output is the mean of the last one's heads.

    Weights are drawn as in GAT (Glorot), biases are 0.

    Args:
        layer: a name of LAYERS.
        out_heads: heads of the last layer.
        pyg: whether the layers are PyG's own, to time training beside them. They take the edges of the plan in the
            inputs, which is then one of the backend `pyg`.
        in_features, num_classes, heads, blocks, attention_dropout, input_dropout: as of `GraphTransformer`.
        task: "node".
        dim: width of all heads of a hidden layer.
        dropout: rate on the output of each hidden layer.

    Raises:
        TypeError, ValueError: an argument is wrong; or features are categorical, or the task is not "node".
    """

    pos_enc, random_walk, edge_features = 0, 0, "none"

    def __init__(
        self,
        *,
        layer: str,
        in_features: int,
        num_classes: int,
        task: Task = "node",
        dim: int = 128,
        heads: int = 1,
        out_heads: int = 1,
        blocks: int = 10,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        input_dropout: float = 0.0,
        pyg: bool = False,
    ) -> None:
        sizes = {"in_features": in_features, "num_classes": num_classes, "dim": dim, "heads": heads, "blocks": blocks}
        rates = {"dropout": dropout, "attention_dropout": attention_dropout, "input_dropout": input_dropout}
        check_settings(task=task, **sizes, **rates)
        if not isinstance(in_features, int) or task != "node":
            raise ValueError(f"layer: got {layer!r}, which classifies nodes by float features")
        super().__init__()
        if pyg:
            from torch_geometric import nn as nn_layers
        else:
            from fused3s import nn as nn_layers  # on use: it imports PyG, which takes seconds

        name, options = LAYERS[layer]
        self.pyg, self.task, self.in_features = pyg, task, in_features
        self.input_dropout, self.dropout = input_dropout, dropout
        make = partial(getattr(nn_layers, name), **options, dropout=attention_dropout)
        width = in_features
        self.blocks = nn.ModuleList()
        for _ in range(blocks - 1):
            self.blocks.append(make(width, dim // heads, heads=heads))
            width = dim
        self.blocks.append(make(width, num_classes, heads=out_heads, concat=False))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_uniform_(parameter)

    def forward(self, inputs: GraphInputs) -> Tensor:
        """Logits [N, num_classes]; inputs from `prepare`."""
        h = F.dropout(inputs.features, self.input_dropout, self.training)
        *hidden, last = self.blocks
        edges = inputs.attention.data.edge_index if self.pyg else inputs.attention
        for layer in hidden:
            h = F.dropout(F.elu(layer(h, edges)), self.dropout, self.training)
        return last(h, edges)

    def check_features(self, graph: Any) -> None:
        check_float_features(checked_features(graph.ndata, "ndata", "nodes"), self.in_features)
