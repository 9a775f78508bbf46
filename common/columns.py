"""Columns that many rows of results share."""

from pathlib import Path

import torch

from common.provenance import provenance
from configs import Config
from data import GraphMeta


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def graph_columns(meta: GraphMeta) -> dict[str, object]:
    """Columns of a row that describe the graph."""
    return {
        "dataset": meta.name,
        "data_sha256": meta.sha256,
        "data_source": meta.source,
        "nodes": meta.num_nodes,
        "nnz": meta.num_edges,
        "graphs": meta.num_graphs,
    }


def run_columns(
    bench: str, config_path: Path, config: Config, meta: GraphMeta, device: torch.device, **own: object
) -> dict[str, object]:
    """Columns that all rows of a run share: the machine, the graph, the model, and its `own`."""
    return {
        **provenance(device),
        **graph_columns(meta),
        "bench": bench,
        "config": str(config_path),
        "config_sha": config.sha(),
        **config.model.model_dump(include={"dim", "heads", "blocks"}),
        "edges": config.model.edge_features,
        "order": config.attention.reorder,
        **own,
    }
