"""The model of a configuration, and its attention."""

from typing import Any

import torch

import fused3s
from configs import Config
from data import GraphMeta
from models.graph_model import GraphModel
from models.graph_transformer import GraphTransformer


def build_model(config: Config, meta: GraphMeta, seed: int, *, pyg: bool = False) -> GraphModel:
    """The model for a data set, float32 on the CPU. Weights depend on the seed only, not on device or precision; `pyg`:
    see `ConvNet`."""
    torch.manual_seed(seed)
    sizes = {"num_classes": meta.num_classes, "task": meta.task}
    sizes["in_features"] = meta.feature_cardinalities or meta.feature_dim
    if config.model.kind == "graph_transformer":
        sizes["edge_in_features"] = meta.edge_feature_cardinalities or meta.edge_feature_dim
        return GraphTransformer(**sizes, **config.model.model_dump(exclude={"checkpoint", "kind", "out_heads"}))
    from models.conv_net import ConvNet  # on use: most models are Graph Transformers

    of_blocks = {"checkpoint", "kind", "norm", "pos_enc", "random_walk", "edge_features"}  # `_keys_of_the_kind`
    return ConvNet(layer=config.model.kind, pyg=pyg, **sizes, **config.model.model_dump(exclude=of_blocks))


def heads_of(config: Config) -> dict[str, Any]:
    """Arguments of `fused3s.plan_attention` and `PlanRoom` that the model decides."""
    model = config.model
    return {
        "head_dim": model.head_dim,
        "num_heads": model.heads,
        "edge_data": model.edge_features != "none",
    }


def plan_model(graph: Any, config: Config, *, device: torch.device, **options: Any) -> fused3s.AttentionPlan:
    """Attention of the model over a graph (or batch) that the loader has checked; `options` go before the
    configuration."""
    attention = config.attention
    configured = {"backend": attention.backend, "reorder": attention.reorder, "check": False, **heads_of(config)}
    return fused3s.plan_attention(graph, device=device, **configured | options)
