"""`models.inference.source` on several ranks: each has a part of the graph."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from common.cli import errors
from common.timers import Spread
from configs import Config
from data import LoadedGraph
from fused3s.runtime.cuda_graph import CapturedGraph, capture
from models import Execution, GraphModel
from models.inference.infer import infer
from models.inference.memory import memory_for
from models.inference.source import Source
from models.machine import check_machine, resolve_dtype
from parallel import Group, Part, PartAttention, all_values, check_agreement, gather_rows, on_first_rank, ranks
from parallel.capture import capture_together
from parallel.datasets import load_graph, open_part, plan_model_attention, prepare_part
from parallel.partition import describe
from parallel.training import hash_of_weights


class PartOfGraph(Source):
    """This rank's rows of one graph; arguments beside the configuration are those of `parallel.datasets.open_part`."""

    exchanges = True

    def __init__(
        self, config: Config, group: Group, part: Part, loaded: LoadedGraph, of_all: LoadedGraph | None
    ) -> None:
        super().__init__(config, group.device, loaded)
        self.group, self.part, self.rows = group, part, of_all
        self.dense = config.runtime.dense if part.num_rows else "plain"  # a kernel cannot be launched for no rows

    def plan(self) -> PartAttention:
        return plan_model_attention(self.part, self.group, self.config, self.dtype)

    def prepare(self, attention: PartAttention) -> Execution:
        # Before the first pass, in which ranks of different backends would wait for each other.
        check_agreement(self.group, {"attention backend": attention.backend})
        inputs = prepare_part(self.model, self.loaded.node_data["feat"], attention)
        return self._execution(inputs, attention, capture=self._capture)

    def _capture(self, run: Callable[[], Tensor], device: torch.device) -> CapturedGraph[Tensor]:
        return capture_together(partial(capture, run, device), self.group)

    def predict(self, execution: Execution) -> tuple[Tensor | None, dict[str, Spread]]:
        logits = gather_rows(self.part, execution.run(), self.group)
        return None if logits is None else logits.float(), {}

    def reference(self, model: GraphModel, dtype: torch.dtype) -> Tensor | None:
        """Logits of the whole graph, computed on rank 0's device."""

        def run() -> Tensor:
            return self._reference(model, dtype, load_graph(self.config).graph)

        return on_first_rank(self.group, run)

    def all_values(self, value: Any) -> list[Any]:
        return all_values(self.group, value)

    def ranks_table(self, memory: Sequence[float]) -> Table:
        """The partition and the memory of each rank in MiB."""
        table = Table("", f"Ranks: {len(memory)}; times and memory above are of the slowest and the fullest one")
        ranks = f"{self.group.size} over {self.group.backend}, rank 0 on {self.group.device}"
        of_each = ", ".join(f"{one:,.0f} MiB" for one in memory)
        for name, text in {"ranks": ranks, **describe(self.part.partition), "memory of each": of_each}.items():
            table.add_row(name, Text(text))
        return table

    def columns(self) -> dict[str, object]:
        columns = {"ranks": self.group.size, "link": self.group.link}
        return columns | {"variant": "halo", "order": self.part.partition.method}


def infer_on_ranks(config: Config, config_path: Path, **options: Any) -> bool:
    """`infer` as one of the ranks that a launcher started, with its options."""
    with ranks(config.runtime.device) as group:
        given = {"verify": options["verify"], "accuracy": options["accuracy"], "output": options["output"] is not None}
        check_agreement(group, {"configuration": config.sha(), "options": str(given)})
        source = load_on_ranks(config, group)
        check_agreement(group, {"weights": hash_of_weights(source.model), "graph": source.loaded.meta.sha256})
        return infer(source, config_path, **options)


def load_on_ranks(config: Config, group: Group) -> Source:
    """This rank's part of the graph."""
    if config.data.batches != 1:
        raise ValueError(f"data.batches = {config.data.batches!r}: several ranks divide one graph; only 1 is allowed")
    check_machine(config, group.device, resolve_dtype(config.attention.dtype, group.device))

    def say(text: str) -> None:
        if group.is_first:
            errors.print(Text(text))

    say(f"loading {config.data.name}")
    with memory_for(f"loading {config.data.name}", config):
        return PartOfGraph(config, group, *open_part(config, group, say))
