"""`inference.source` on several ranks: a part of one graph, or a share of the batches of a collection."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

import data
from common.cli import errors
from configs import Config
from data import LoadedGraph
from fused3s import AttentionPlan
from fused3s.runtime.cuda_graph import CapturedGraph
from inference.all_batches import AllBatches
from inference.cost import Cost, SetRun
from inference.infer import infer, load_source
from inference.memory import memory_for
from inference.run import Request
from inference.source import Attention, Source
from models import Execution, GraphInputs, GraphModel
from models.machine import check_machine, resolve_dtype
from parallel import (
    Group,
    Part,
    PartAttention,
    all_values,
    check_agreement,
    gather_rows,
    on_first_rank,
    ranks,
    shared_from_first_rank,
)
from parallel.capture import capture_together
from parallel.collectives import gather_uneven
from parallel.cost_model import LINKS, Choice
from parallel.datasets import gather_labels, loaded_part, open_part
from parallel.inputs import plan_model_attention, prepare_part, refuse_on_ranks, refuse_settings, runs_on_one_gpu
from parallel.report import partition_lines
from parallel.sharing import share_of_batches
from parallel.training import hash_of_weights


class OfRanks(Source):
    """What the sources of several ranks report."""

    group: Group

    def costs(self, own: Cost) -> list[Cost]:
        return all_values(self.group, own)

    def lines(self) -> dict[str, str]:
        """How the ranks divide the work."""
        raise NotImplementedError

    def ranks_table(self, costs: Sequence[Cost]) -> Table:
        """The scheme, the partition and the memory of each rank in MiB."""
        title = f"Ranks: {len(costs)}; times and memory above are of the slowest and the fullest one"
        table = Table("", title)
        of_each = ", ".join(f"{cost.peak_memory:,.0f} MiB" for cost in costs)
        for name, text in {**self.lines(), "memory of each": of_each}.items():
            table.add_row(name, Text(text))
        return table


class PartOfGraph(OfRanks):
    """This rank's rows of one graph; `loaded` has their labels and splits."""

    exchanges = True

    def __init__(self, config: Config, group: Group, part: Part) -> None:
        if config.data.batches != 1:
            raise ValueError(f"data.batches = {config.data.batches!r}: this is one graph; only 1 is allowed")
        refuse_settings(config)
        super().__init__(config, group.device, loaded_part(part))
        self.group, self.part = group, part
        self.rows = gather_labels(part, group)
        self.dense = config.runtime.dense if part.num_rows else "plain"  # a kernel cannot be launched for no rows
        self._choice: Choice | None = None

    def plan(self) -> PartAttention:
        refuse_on_ranks(self.model, training=False)
        attention = plan_model_attention(self.part, self.group, self.config, self.dtype)
        self._choice = attention.choice
        return attention

    def inputs(self, attention: PartAttention) -> GraphInputs:
        _check_backend(self.group, attention)
        return prepare_part(self.model, self.part, attention)

    def capture(self, run: Callable[[], Tensor], device: torch.device) -> CapturedGraph[Tensor]:
        return capture_together(lambda: super(PartOfGraph, self).capture(run, device), self.group)

    def predict(self, execution: Execution, attention: PartAttention) -> tuple[Tensor | None, None]:
        blocks: list[Tensor] = []
        gather_rows(self.part, execution.run(), self.group, lambda rows: blocks.append(rows.float().cpu()))
        return torch.cat(blocks) if self.group.is_first else None, None

    def reference(self, model: GraphModel, dtype: torch.dtype) -> Tensor | None:
        """Logits of the whole graph, computed on rank 0's device."""

        def run() -> Tensor:
            chosen = self.config.data.model_dump(include={"name", "root", "source", "path"})
            loaded = data.load(**chosen, seed=self.config.runtime.seed)
            return self._reference(model, dtype, loaded.graph)

        return on_first_rank(self.group, run)

    def lines(self) -> dict[str, str]:
        return partition_lines(self.part, self.group, self._choice)

    def columns(self) -> dict[str, object]:
        columns = {"variant": self._choice.scheme, "order": self.part.partition.method}
        return {**_columns(self.group), **columns}


class ShareOfBatches(OfRanks, AllBatches):
    """This rank's batches of a collection, of which `loaded` holds all graphs.

    The batches are consecutive: the outputs of the ranks follow one another.
    """

    why_eager = "a collection on several ranks runs eagerly"

    def __init__(self, config: Config, group: Group, loaded: LoadedGraph) -> None:
        if config.runtime.cuda_graph is True:
            raise ValueError("runtime.cuda_graph = True: a collection on several ranks runs eagerly; use auto or false")
        size = config.data.graphs_per_batch(loaded.meta.num_graphs, loaded.meta.num_nodes)
        if config.data.batch_size == "auto":  # a batch for each rank
            size = min(size, -(-loaded.meta.num_graphs // group.size))
        super().__init__(config, group.device, loaded, share_of_batches(loaded, size, group))
        self.group = group
        self.rows = loaded if group.is_first else None

    def inputs(self, attention: AttentionPlan) -> GraphInputs:
        _check_backend(self.group, attention)
        return super().inputs(attention)

    def predict(self, execution: Execution, attention: AttentionPlan) -> tuple[Tensor | None, SetRun]:
        all_values(self.group, None)  # the ranks start together
        logits, run = super().predict(execution, attention)
        # The ranks run at the same time: the slowest one's pass is the pass of all.
        passes = zip(*all_values(self.group, run.passes), strict=False)
        slowest = tuple(max(of_ranks, key=lambda one: one.seconds) for of_ranks in passes)
        num_batches = sum(all_values(self.group, run.num_batches))
        num_graphs = self.loaded.meta.num_graphs
        return self._gathered(logits), replace(run, passes=slowest, num_graphs=num_graphs, num_batches=num_batches)

    def reference(self, model: GraphModel, dtype: torch.dtype) -> Tensor | None:
        return self._gathered(super().reference(model, dtype))

    def _gathered(self, logits: Tensor) -> Tensor | None:
        logits = gather_uneven(logits.to(self.group.device), self.group)
        return logits.cpu() if self.group.is_first else None

    def lines(self) -> dict[str, str]:
        return {"data parallel": "each rank runs consecutive batches of the collection; nothing is exchanged"}

    def columns(self) -> dict[str, object]:
        return {**_columns(self.group), "variant": "data parallel"}


def infer_on_ranks(request: Request, kept: list[str]) -> bool:
    """`infer` as one of the ranks that a launcher started, or on rank 0 alone where one GPU is faster."""
    config = request.config
    with ranks(config.runtime.device) as group:
        options = f"--verify {request.verify} --accuracy {request.accuracy} --output {request.output is not None}"
        check_agreement(group, {"configuration": config.sha(), "options": options})
        source = load_on_ranks(config, group)
        if source is None:
            return shared_from_first_rank(group, lambda: infer(request, load_source(config), kept))
        check_agreement(group, {"weights": hash_of_weights(source.model), "graph": source.loaded.meta.sha256})
        return infer(request, source, kept)


def load_on_ranks(config: Config, group: Group) -> Source | None:
    """This rank's part of the graph, or its share of the collection; None if rank 0 is to run the graph alone."""
    dtype = resolve_dtype(config.attention.dtype, group.device)
    check_machine(config, group.device, dtype)
    name, arguments = config.data.name, config.load_arguments()

    def say(text: str) -> None:
        if group.is_first:
            errors.print(Text(text))

    say(f"loading {name}")
    with memory_for(f"loading {name}", config):
        part = open_part(config.data, config.runtime.seed, group, say)
        if part is not None:
            return None if runs_on_one_gpu(part, group, config, dtype, say) else PartOfGraph(config, group, part)
        # Rank 0 alone downloads.
        loaded = on_first_rank(group, lambda: data.load(**arguments)) or data.load(**arguments)
    return ShareOfBatches(config, group, loaded)


def _check_backend(group: Group, attention: Attention) -> None:
    """Before the first pass, in which ranks of different backends would wait for each other."""
    check_agreement(group, {"attention backend": attention.backend})


def _columns(group: Group) -> dict[str, object]:
    return {"ranks": group.size, "link": LINKS[group.link].name}
