"""Subject of a run of `scripts/infer.py`: a configuration with its graphs, weights, device and precision."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.text import Text

import data
import kernels
from bench.cli import console
from configs import Config
from configs.resolve import check_machine, resolve_device, resolve_dtype
from data import LoadedGraph
from data.csr_batches import BatchSize
from inference.memory import data_remedies, memory_for, model_remedies
from models import GraphTransformer
from training.padded_batches import Room, make_room
from training.setup import build_model
from training.weights import Weights, find_weights, load_weights, named_weights


@dataclass(frozen=True, eq=False)
class Subject:
    """Attributes: loaded: all graphs of the run; weights: what `model` loads."""

    config: Config
    device: torch.device
    dtype: torch.dtype
    loaded: LoadedGraph
    weights: Weights

    @property
    def output_shape(self) -> tuple[int, int]:
        """Rows (nodes of a node task, graphs of a graph task) and classes of the logits."""
        meta = self.loaded.meta
        return meta.num_nodes if meta.task == "node" else meta.num_graphs, meta.num_classes

    @property
    def batch_size(self) -> int:
        return self.config.data.graphs_per_batch(self.loaded.meta.num_graphs, self.loaded.meta.num_nodes)

    def model(self, dtype: torch.dtype) -> GraphTransformer:
        """A model of its own on the device, for inference."""
        config, meta = self.config, self.loaded.meta
        with memory_for("building the model", lambda: model_remedies(config, meta)):
            model = build_model(config, meta, config.runtime.seed)
            if self.weights.path:
                load_weights(model, self.weights.path, config, meta)
            return model.to(self.device).cast(dtype).eval()

    def plan(self, graph: Any, backend: str, dtype: torch.dtype, reorder: str = "none") -> kernels.AttentionPlan:
        """Attention of the model's head shape over a graph (or batch), in rows of an order as `attention.reorder`."""
        model = self.config.model
        return kernels.plan_attention(
            graph,
            backend=backend,
            device=self.device,
            dtype=dtype,
            head_dim=model.head_dim,
            num_heads=model.heads,
            reorder=reorder,
            edge_data=model.edge_features != "none",
            check=False,  # the loader did
        )

    def room(self, size: BatchSize) -> Room:
        """Room for the plans of padded batches."""
        model = self.config.model
        options = {"head_dim": model.head_dim, "num_heads": model.heads, "backward": False}
        return make_room(size, device=self.device, dtype=self.dtype, **options)


def load_subject(config: Config) -> Subject:
    """Load the graphs, and find the weights, of a configuration.

    Raises:
        ValueError: before anything is loaded, if this machine cannot run the configuration.
    """
    device = resolve_device(config.runtime.device)
    dtype = resolve_dtype(config.attention.dtype, device)
    check_machine(config, device, dtype)
    named_weights(config)  # a missing file is found before a long load
    name, batches = config.data.name, config.data.batches
    console.print(Text(f"loading {name}"))
    with memory_for(f"loading {name}", lambda: data_remedies(config)):
        loaded = data.load(**config.load_arguments())
    if batches != 1 and loaded.meta.num_graphs == 1:
        raise ValueError(f"data.batches = {batches!r}: {loaded.meta.origin} holds one graph; only 1 is allowed")
    return Subject(config, device, dtype, loaded, find_weights(config, loaded.meta))
