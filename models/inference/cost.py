"""Time and memory of a run."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.timers import Spread


@dataclass(frozen=True)
class Cost:
    """Time and memory on one process."""

    forward: Spread  # ms of a forward pass; of the first batch, where there are several
    attention_share: Spread | None  # of it spent in attention, 0 to 1; None for layers that call a plan themselves
    waited: float | None  # share of the time in which threads waited for a core meanwhile, see `common.host_load`
    format_build: float  # ms to build the sparse format, once per graph or batch
    peak_memory: float  # MiB


class Pass(NamedTuple):
    """One pass over a collection."""

    seconds: float  # from the first batch's assembly to the last output in host memory
    # Milliseconds of each batch's forward pass, on a GPU between two CUDA events: launch gaps count, and assembly and
    # plan where the CUDA graph has them.
    forward: tuple[float, ...]


@dataclass(frozen=True)
class SetRun:
    """A collection, predicted as a whole: its timed passes, their size, and where the graphs were meanwhile."""

    passes: tuple[Pass, ...]
    num_graphs: int
    num_batches: int
    batch_size: int
    kept_on: torch.device

    @property
    def graphs_per_second(self) -> Spread:
        return Spread.of([self.num_graphs / one.seconds for one in self.passes])

    @property
    def share(self) -> Spread:
        """Share of a pass's time in which the device ran forward passes, 0 to 1."""
        return Spread.of([sum(one.forward) / 1e3 / one.seconds for one in self.passes])

    @property
    def forward(self) -> Spread:
        """Milliseconds of the forward pass of a batch."""
        return Spread.of([milliseconds for one in self.passes for milliseconds in one.forward])
