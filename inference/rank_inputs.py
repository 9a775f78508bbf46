"""Inputs of a run of `scripts/infer.py` on several ranks: a part of one graph, or a share of a collection's batches.

Both are a `inference.inputs.Source`, and have `lines` and `columns` for the report besides.
"""

from dataclasses import replace

import torch
from torch import Tensor

import data
from configs import Config
from configs.resolve import check_machine, resolve_dtype
from data import LoadedGraph
from inference.batches import SetRun
from inference.inputs import AllBatches, OneGraph, Write
from inference.subject import Subject
from kernels import AttentionPlan
from models import Execution, GraphInputs, GraphTransformer
from parallel import Group, Part, PartAttention, all_values, check_agreement, gather_rows, on_first_rank
from parallel.collectives import gather_uneven
from parallel.cost_model import LINKS, Choice
from parallel.datasets import gather_labels, loaded_part
from parallel.inputs import plan_model_attention, prepare_part, refuse_on_ranks, refuse_settings
from parallel.report import partition_lines
from parallel.sharing import share_of_batches
from training.weights import find_weights


class PartOfGraph:
    """This rank's rows of one graph; `subject.loaded` has their labels and splits."""

    why_eager = "the ranks exchange rows within a pass"

    def __init__(self, config: Config, group: Group, part: Part) -> None:
        if config.data.batches != 1:
            raise ValueError(f"data.batches = {config.data.batches!r}: this is one graph; only 1 is allowed")
        refuse_settings(config)
        self.group, self.part = group, part
        self.subject = _subject(config, group, loaded_part(part))
        self.all_rows = gather_labels(part, group)
        self.model = self.subject.model(self.subject.dtype)
        self.dense = config.runtime.dense if part.num_rows else "plain"  # a kernel cannot be launched for no rows
        self._choice: Choice | None = None

    def plan(self) -> PartAttention:
        refuse_on_ranks(self.model, training=False)
        attention = plan_model_attention(self.part, self.group, self.subject.config, self.subject.dtype)
        self._choice = attention.choice
        return attention

    def inputs(self, attention: PartAttention) -> GraphInputs:
        _check_backend(self.group, attention.backend)
        return prepare_part(self.model, self.part, attention)

    def predict(self, execution: Execution, attention: PartAttention, write: Write) -> None:
        gather_rows(self.part, execution.run(), self.group, lambda rows: write(rows.float().cpu().numpy()))

    def reference(self, model: GraphTransformer, dtype: torch.dtype) -> Tensor | None:
        """Logits of the whole graph, computed on rank 0's device."""

        def run() -> Tensor:
            config = self.subject.config
            chosen = config.data.model_dump(include={"name", "root", "source", "path"})
            loaded = data.load(**chosen, seed=config.runtime.seed)
            return OneGraph(replace(self.subject, loaded=loaded), model).reference(model, dtype)

        return on_first_rank(self.group, run)

    def lines(self) -> dict[str, str]:
        """Lines of the report about the ranks."""
        return partition_lines(self.part, self.group, self._choice)

    def columns(self) -> dict[str, object]:
        """Columns of a row of results."""
        method = self.part.partition.method
        return {**_columns(self.group), "variant": self._choice.scheme, "order": method}


class ShareOfBatches:
    """This rank's batches of a collection, of which `subject.loaded` holds all graphs.

    The batches are consecutive: the outputs of the ranks follow one another.
    """

    why_eager = "a collection on several ranks runs eagerly"

    def __init__(self, config: Config, group: Group) -> None:
        if config.runtime.cuda_graph is True:
            raise ValueError("runtime.cuda_graph = True: a collection on several ranks runs eagerly; use auto or false")
        self.group = group
        arguments = config.load_arguments()
        # Rank 0 alone downloads.
        loaded = on_first_rank(group, lambda: data.load(**arguments)) or data.load(**arguments)
        self.subject = _subject(config, group, loaded)
        self.all_rows = loaded if group.is_first else None
        self.dense = config.runtime.dense
        batch_size = self.subject.batch_size
        if config.data.batch_size == "auto":  # a batch for each rank
            batch_size = min(batch_size, -(-loaded.meta.num_graphs // group.size))
        self._share = share_of_batches(loaded, batch_size, group)
        self.model = self.subject.model(self.subject.dtype)

    def plan(self) -> AttentionPlan:
        self._own = AllBatches(replace(self.subject, loaded=self._share), self.model, self.why_eager)
        return self._own.plan()

    def inputs(self, attention: AttentionPlan) -> GraphInputs:
        _check_backend(self.group, attention.backend)
        return self._own.inputs(attention)

    def predict(self, execution: Execution, attention: AttentionPlan, write: Write) -> SetRun:
        parts: list[Tensor] = []
        all_values(self.group, None)  # the ranks start together
        run = self._own.predict(execution, attention, lambda logits: parts.append(torch.tensor(logits)))
        logits = gather_uneven(torch.cat(parts).to(self.group.device), self.group)
        if self.group.is_first:
            write(logits.cpu().numpy())
        # The ranks run at the same time: the slowest one's pass is the pass of all.
        passes = zip(*all_values(self.group, run.passes), strict=False)
        slowest = tuple(max(of_ranks, key=lambda one: one.seconds) for of_ranks in passes)
        num_batches = sum(all_values(self.group, run.num_batches))
        num_graphs = self.subject.loaded.meta.num_graphs
        return replace(run, passes=slowest, num_graphs=num_graphs, num_batches=num_batches)

    def reference(self, model: GraphTransformer, dtype: torch.dtype) -> Tensor | None:
        logits = gather_uneven(self._own.reference(model, dtype).to(self.group.device), self.group)
        return logits.cpu() if self.group.is_first else None

    def lines(self) -> dict[str, str]:
        """As of `PartOfGraph`."""
        return {"data parallel": "each rank runs consecutive batches of the collection; nothing is exchanged"}

    def columns(self) -> dict[str, object]:
        """As of `PartOfGraph`."""
        return {**_columns(self.group), "variant": "data parallel"}


def _subject(config: Config, group: Group, loaded: LoadedGraph) -> Subject:
    dtype = resolve_dtype(config.attention.dtype, group.device)
    check_machine(config, group.device, dtype)
    return Subject(config, group.device, dtype, loaded, find_weights(config, loaded.meta))


def _check_backend(group: Group, backend: str) -> None:
    """Before the first pass, in which ranks of different backends would wait for each other."""
    check_agreement(group, {"attention backend": backend})


def _columns(group: Group) -> dict[str, object]:
    return {"ranks": group.size, "link": LINKS[group.link].name}
