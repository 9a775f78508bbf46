"""Inputs of the Graph Transformer for one part of a graph: the model itself needs no change."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from configs import Config, TrainConfig
from models import ConvNet, GraphTransformer
from models.graph_inputs import Attention, GraphInputs, aligned_columns
from models.graph_model import GraphModel
from parallel.attention import PartAttention, plan_part_attention
from parallel.cost_model import one_gpu_is_faster
from parallel.group import Group
from parallel.part import Part


def refuse_settings(config: Config) -> None:
    """Raise a ValueError that names the keys that a partitioned graph does not support."""
    problems = []
    if config.attention.reorder != "none":
        problems.append(
            f"attention.reorder = {config.attention.reorder!r}: a part has the order of the partition; use none"
        )
    if isinstance(config, TrainConfig) and config.training.sampler != "none":
        problems.append(f"training.sampler = {config.training.sampler!r}: use none, or train on one process")
    if problems:
        raise ValueError("one graph on several ranks cannot run with " + "; ".join(problems))


def runs_on_one_gpu(part: Part, group: Group, config: Config, dtype: torch.dtype, say: Callable[[str], None]) -> bool:
    """Whether `runtime.partition: auto` leaves the whole graph to rank 0, since a layer takes longer on all ranks."""
    if config.runtime.partition != "auto" or group.size == 1:
        return False
    model = config.model
    reason = one_gpu_is_faster(part.partition, model.heads, model.head_dim, dtype.itemsize, group.link)
    if reason:
        say(f"rank 0 computes alone ({reason}; runtime.partition: halo takes all ranks)")
    return reason is not None


def plan_model_attention(
    part: Part, group: Group, config: Config, dtype: torch.dtype, *, backward: bool = False
) -> PartAttention:
    """Attention of the model's head shape over a part, by the scheme of `runtime.partition`."""
    return plan_part_attention(
        part,
        group,
        scheme=config.runtime.partition,
        backend=config.attention.backend,
        dtype=dtype,
        head_dim=config.model.head_dim,
        num_heads=config.model.heads,
        backward=backward,
    )


def refuse_on_ranks(model: GraphModel, *, training: bool) -> None:
    """Raise a ValueError that names the parts of a model that a partitioned graph does not support."""
    problems = []
    if isinstance(model, ConvNet):
        problems.append("layers that take a plan of the whole graph: use model.kind = 'graph_transformer'")
    if model.task != "node":
        problems.append("a graph task: share out the graphs of each batch instead of rows")
    if model.edge_features != "none":
        problems.append(f"model.edge_features = {model.edge_features!r}: partitions hold no edge data; use 'none'")
    if model.pos_enc:
        problems.append(f"model.pos_enc = {model.pos_enc}: eigenvectors need the graph on one rank; use 0")
    if model.random_walk:
        problems.append(f"model.random_walk = {model.random_walk}: partitions do not hold the encoding; use 0")
    if isinstance(model, GraphTransformer) and model.virtual_nodes:
        problems.append("model.virtual_node = True: it is the mean of one part's rows; use false")
    if training and any(isinstance(layer, nn.BatchNorm1d) for layer in model.modules()):
        problems.append("model.norm = 'batch': its statistics would be of one part's rows; train with 'layer'")
    if problems:
        raise ValueError("a partitioned graph cannot run with " + "; ".join(problems))


def prepare_part(model: GraphModel, part: Part, attention: Attention) -> GraphInputs:
    """Inputs of this rank's rows, on the model's device and in its dtype: `GraphModel.prepare` for a part.

    Args:
        part: with node_data["feat"], float [n, F] or integers [n, C].
        attention: result of `plan_part_attention`.

    Raises:
        ValueError: the features are missing or do not match the model, or the model needs data of the whole graph.
    """
    refuse_on_ranks(model, training=False)
    if "feat" not in part.node_data:
        raise ValueError(f"{part.folder}: the partition holds no features; partition with node_data['feat']")
    features = np.array(part.node_data["feat"])  # a copy: mapped files are read-only
    aligned = None
    if features.dtype.kind == "f":
        aligned = aligned_columns(torch.from_numpy(features).to(model.dtype)).to(model.device)
        rows = aligned[:, : features.shape[1]]
    else:
        rows = torch.from_numpy(features.astype(np.int64)).to(model.device)
    model.embedding.check(rows)
    return GraphInputs(
        features=rows,
        aligned_features=aligned,
        attention=attention,
        encoding=None,
        nodes=torch.arange(part.num_rows, device=model.device),
        graph_starts=torch.zeros(1, dtype=torch.int64, device=model.device),
    )
