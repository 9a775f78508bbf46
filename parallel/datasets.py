"""Data sets on several ranks: rank 0 loads and divides the graph, and sends each rank its part; inputs of the Graph
Transformer, which needs no change, for a part."""

import importlib.util
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

import data
from configs import Config, TrainConfig
from data import LoadedGraph
from data.atomic import replacing
from data.batches import GraphBatch
from models.graph_inputs import Attention, GraphInputs
from models.graph_model import GraphModel
from models.training.tasks import checked_labels
from parallel.attention import PartAttention, plan_part_attention
from parallel.collectives import scatter
from parallel.group import Group, check_agreement, on_first_rank
from parallel.partition import METHODS, Part, PartitionError, assign_rows, partition_graph

Say = Callable[[str], None]


def load_graph(config: Config) -> LoadedGraph:
    """The graph of a configuration.

    Raises:
        ValueError: it is a collection of graphs.
        DatasetMissingError, ValueError, MemoryError: as `data.load`.
    """
    name = config.data.name
    is_collection = not config.data.reads_file and data.info(name).num_graphs is not None
    loaded = None if is_collection else data.load(**config.load_arguments() | {"batch_size": None})
    if loaded is None or loaded.meta.num_graphs > 1 or loaded.meta.task != "node":
        raise ValueError(f"data.name = {name!r}: a collection of graphs; ranks divide one graph: start one process")
    return loaded


def divided(loaded: LoadedGraph, root: str, num_parts: int, method: str, say: Say) -> list[Part]:
    """The parts of a graph. The part of each row is kept in a file below `root`, so that METIS runs once.

    Raises:
        PartitionError: the file is damaged, or METIS is missing.
        ValueError, OSError, MemoryError: as `partition_graph`.
    """
    path, indptr, indices = partition_file(loaded, root, num_parts, method), loaded.row_pointers, loaded.columns
    arrays = np.ones(len(indices), bool), indices.numpy(), indptr.numpy()
    graph = sp.csr_array(arrays, shape=(len(indptr) - 1, len(indptr) - 1))
    if not path.is_file():
        say(f"partitioning {loaded.meta.name} into {num_parts} parts by {method}, once: {path}")
        content = io.BytesIO()  # into a file, np.save loses its end on a full disk without an error
        np.save(content, assign_rows(graph, num_parts, method))
        with replacing(path) as unfinished:
            unfinished.write_bytes(content.getbuffer())
    try:
        return partition_graph(graph, num_parts, method, np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise PartitionError(f"{path}: damaged ({error}); remove it, and it is made again") from error


def partition_file(loaded: LoadedGraph, root: str, num_parts: int, method: str) -> Path:
    """The part of each row of this graph, as `assign_rows` gives it. Equal edges have equal files."""
    return Path(root, "parts", f"{loaded.meta.name}-{method}-{num_parts}-{loaded.meta.sha256}.npy")


def open_part(config: Config, group: Group, say: Say) -> tuple[Part, LoadedGraph, LoadedGraph | None]:
    """This rank's part of a graph; data of its rows; on rank 0 ids, labels and splits of all rows. Takes a partition
    that is there, else METIS if it is installed, else contiguous parts.

    Raises:
        RankError: the ranks have different configurations.
        ValueError, OSError, MemoryError: as `refuse_settings`, on rank 0 as `load_graph` and `divided`.
    """
    check_agreement(group, {"configuration": config.sha()})
    refuse_settings(config)

    def divide() -> tuple[LoadedGraph, list[Part]]:
        loaded, root = load_graph(config), config.data.root
        if isinstance(config, TrainConfig):
            checked_labels(loaded)
        made = [method for method in METHODS if partition_file(loaded, root, group.size, method).is_file()]
        method = made[0] if made else "metis" if importlib.util.find_spec("pymetis") else "contiguous"
        return loaded, divided(loaded, root, group.size, method, say)

    if not (found := on_first_rank(group, divide)):
        return *scatter(group, None), None
    loaded, parts = found
    own = scatter(group, ((part, _rows_of(loaded, part.rows)) for part in parts))
    return *own, _without_edges(loaded, {"id"})


def _rows_of(loaded: LoadedGraph, rows: np.ndarray) -> LoadedGraph:
    """Some rows of a graph without their edges; splits are numbers of these rows."""
    index, pick = torch.from_numpy(rows), _without_edges(loaded, {"id", "feat"})
    splits = {name: torch.from_numpy(np.flatnonzero(np.isin(rows, ids))) for name, ids in (pick.splits or {}).items()}
    labels = None if pick.labels is None else pick.labels[index]
    node_data = {name: values[index] for name, values in pick.node_data.items()}
    return replace(pick, labels=labels, splits=splits or None, node_data=node_data)


def _without_edges(loaded: LoadedGraph, names: set[str]) -> LoadedGraph:
    node_data = {name: values for name, values in loaded.node_data.items() if name in names}
    return replace(loaded, row_pointers=None, columns=None, graph_sizes=None, node_data=node_data, edge_data={})


def refuse_settings(config: Config) -> None:
    """Raise a ValueError that names the keys that a divided graph does not support."""
    model, problems = config.model, []
    if config.attention.reorder != "none":
        problems.append(f"attention.reorder = {config.attention.reorder!r}: a part has an order of its own; use none")
    if model.kind != "graph_transformer":
        problems.append(f"model.kind = {model.kind!r}: its plan is of the whole graph; use graph_transformer")
    if model.edge_features != "none":
        problems.append(f"model.edge_features = {model.edge_features!r}: parts hold no edge data; use none")
    for key in ("pos_enc", "random_walk"):
        if value := getattr(model, key):
            problems.append(f"model.{key} = {value}: it needs the graph on one rank; use 0")
    if isinstance(config, TrainConfig):
        if model.norm == "batch":
            problems.append("model.norm = 'batch': its statistics would be of one part's rows; train with layer")
        if config.training.sampler != "none":
            problems.append(f"training.sampler = {config.training.sampler!r}: use none, or train on one process")
    if problems:
        raise ValueError("one graph on several ranks cannot run with " + "; ".join(problems))


def plan_model_attention(
    part: Part, group: Group, config: Config, dtype: torch.dtype, *, backward: bool = False
) -> PartAttention:
    """Attention of the model's head shape over a part."""
    shape = {"head_dim": config.model.head_dim, "num_heads": config.model.heads}
    return plan_part_attention(part, group, backend=config.attention.backend, dtype=dtype, **shape, backward=backward)


def prepare_part(model: GraphModel, features: Tensor, attention: Attention) -> GraphInputs:
    """Inputs of this rank's rows, on the model's device and in its dtype: `GraphModel.prepare` for a part.

    Args:
        features: of the part's rows, float [n, F] or integers [n, C].
        attention: result of `plan_part_attention`.

    Raises:
        ValueError: the features do not match the model.
    """
    features = features.to(model.device)
    model.embedding.check(features)
    starts = torch.zeros(1, dtype=torch.int64, device=model.device)
    arrays = {"indptr": None, "col": None, "edge_features": None}  # `refuse_settings`: the model reads no edges
    return model.prepare_batch(GraphBatch(features=features, graph_starts=starts, **arrays), attention)
