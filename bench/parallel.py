"""Times of attention of one graph on several GPUs, and of its parts.

On one GPU, without torchrun: the work of every rank, one rank after the other, part by part. The exchange is left out:
the keys and values of other ranks are already there.

    variant  region    one call
    none     none      attention of the whole graph on one GPU, without a partition (ranks = 1)
    halo     pack      gathers the rows that other ranks need
             own       the rank's rows over its own columns, and their log-sum-exp
             halo      boundary rows over halo columns
             combine   both outputs of the boundary rows by their log-sum-exp, in place

Under torchrun: the whole graph on rank 0, and for each scheme (variant) attention on all ranks and, in region
"exchange", the exchange of keys and values alone; each until the slowest rank is done.

Each output is compared with float64 before its time is kept.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernels
from bench.checks import float64_attention, largest_row_error
from bench.kernels import checked_columns
from bench.provenance import provenance
from bench.records import Row
from bench.runner import graph_columns, pattern_on
from bench.timers import Spread, time_kernel, time_passes
from configs.bench_schema import Shape
from configs.parallel_bench_schema import ParallelBenchConfig
from data import LoadedGraph
from parallel import Group, Part, all_values, gather_rows, load_part, load_partition, on_first_rank, plan_part_attention
from parallel.attention import PartAttention
from parallel.cost_model import LINKS, SCHEMES
from parallel.passes import SplitPasses
from parallel.rank_rows import combine_rows_


class Subject:
    """A graph with inputs of one shape: q, k and v of all rows, and what attention gives in float64.

    Args:
        config_path: file of the configuration, for the rows.
    """

    def __init__(
        self, settings: ParallelBenchConfig, config_path: Path, loaded: LoadedGraph, shape: Shape, device: torch.device
    ) -> None:
        self.settings, self.shape, self.device = settings, shape, device
        self.dtype = getattr(torch, settings.attention.dtype)
        self.pattern = pattern_on(device, loaded)
        generator = torch.Generator(device).manual_seed(0)
        size = (loaded.meta.num_nodes, shape.heads, shape.dim)
        self.qkv = [torch.randn(size, generator=generator, device=device).to(self.dtype) for _ in "qkv"]
        self.columns = {
            **provenance(device).model_dump(),
            **graph_columns(loaded.meta),
            "bench": "parallel",
            "config": str(config_path),
            "config_sha": settings.sha(),
            "dim": shape.dim,
            "heads": shape.heads,
            "dtype": settings.attention.dtype,
            "out_dtype": settings.attention.dtype,
            "backend": settings.attention.backend,
            "scope": "attention",
            "metric": "time",
            "unit": "ms",
        }

    def expected(self) -> Tensor:
        return float64_attention(*self.qkv, self.pattern.indptr, self.pattern.indices, self.shape.dim**-0.5)

    def whole(self, expected: Tensor) -> Row:
        """The whole graph on this GPU."""
        attention = self.settings.attention
        plan = kernels.plan_attention(
            self.pattern,
            backend=attention.backend,
            device=self.device,
            dtype=self.dtype,
            head_dim=self.shape.dim,
            num_heads=self.shape.heads,
        )
        run = partial(plan, *self.qkv)
        checked = checked_columns(largest_row_error(run(), expected), self.dtype)
        return self._row(self._time(run), checked, ranks=1)

    def plan(self, part: Part, group: Group, scheme: str) -> PartAttention:
        return plan_part_attention(
            part,
            group,
            scheme=scheme,
            backend=self.settings.attention.backend,
            dtype=self.dtype,
            head_dim=self.shape.dim,
            num_heads=self.shape.heads,
        )

    def parts_of(self, folder: Path, rank: int, old_id: Tensor, expected: Tensor) -> Iterator[Row]:
        """Each part of the work of one rank, with the rows of other ranks at hand.

        Args:
            old_id: [N] number in the graph of each row of the partition's order.
        """
        part = load_part(folder, rank=rank)
        group = Group(rank, part.partition.num_parts, self.device, "gloo")  # nothing is sent
        work = RankWork(self.plan(part, group, "halo").passes, part, self.qkv, old_id, self.shape.dim**-0.5)
        rows = torch.from_numpy(part.rows.copy()).to(self.device)
        checked = checked_columns(largest_row_error(work.all_parts(), expected[rows]), self.dtype)
        columns = {"ranks": group.size, "variant": "halo", "order": part.partition.method}
        for region, run in work.parts().items():
            yield self._row(self._time(run), checked, **columns, region=f"{region} of rank {rank}")

    def on_ranks(self, part: Part, group: Group, scheme: str, expected: Tensor | None) -> list[Row]:
        """Attention of all ranks by one scheme, and its exchange; rows on rank 0.

        Args:
            expected: on rank 0.
        """
        attention = self.plan(part, group, scheme)
        rows = torch.from_numpy(part.rows.copy()).to(self.device)
        q, k, v = (tensor[rows] for tensor in self.qkv)
        blocks: list[Tensor] = []
        gather_rows(part, attention(q, k, v), group, blocks.append)
        runs = {"none": lambda: attention(q, k, v)}
        if scheme != "heads":
            runs["exchange"] = lambda: attention.passes.exchange.start(k, v).wait()
        columns = {"ranks": group.size, "variant": scheme, "order": part.partition.method}
        columns["link"] = LINKS[group.link].name
        checked = checked_columns(largest_row_error(torch.cat(blocks), expected), self.dtype) if group.is_first else {}
        found = []
        for region, run in runs.items():
            run()
            all_values(group, None)  # the ranks start together
            spread = time_passes(run, device=self.device, repeats=self.settings.measure.repeats)
            slowest = max(all_values(group, spread), key=lambda one: one.median)
            if group.is_first:
                found.append(self._row((slowest, "passes"), checked, **columns, region=region))
        return found

    def _time(self, run: Callable[[], Any]) -> tuple[Spread, str]:
        run()
        return time_kernel(run, device=self.device, repeats=self.settings.measure.repeats)

    def _row(self, timed: tuple[Spread, str], checked: dict[str, Any], **columns: Any) -> Row:
        spread, timer = timed
        return Row(**(self.columns | spread.columns() | checked | columns), note=timer)


@dataclass(frozen=True, eq=False)
class RankWork:
    """The work of one rank, whose halo is at hand.

    Attributes:
        qkv: of all rows of the graph; old_id: see `Subject.parts_of`.
    """

    passes: SplitPasses
    part: Part
    qkv: list[Tensor]
    old_id: Tensor
    scale: float

    def parts(self) -> dict[str, Callable[[], Any]]:
        """Calls by region; those that this rank does not need are left out."""
        passes, boundary = self.passes, slice(self.passes.first, None)
        rows = torch.from_numpy(self.part.rows.copy()).to(self.old_id.device)
        q, k, v = (tensor[rows] for tensor in self.qkv)
        halo = self.old_id[torch.from_numpy(np.array(self.part.halo)).to(self.old_id.device)]
        arrived = torch.stack([tensor[halo] for tensor in self.qkv[1:]], 1)  # as received by the exchange
        options = {"scale": self.scale, "return_lse": True, "out_dtype": q.dtype}
        found: dict[str, Callable[[], Any]] = {}
        if len(self.part.send_rows):
            found["pack"] = lambda: passes.exchange.pack(k, v)
        if passes.own is not None:
            found["own"] = lambda: passes.own(q, k, v, **options)
        if passes.halo is not None:
            found["halo"] = lambda: passes.halo(q[boundary], *arrived.unbind(1), **options)
            output, lse = found["own"]()
            partial_output, partial_lse = found["halo"]()

            def combined() -> Tensor:
                # In place: later calls combine what the call before left. Their work does not depend on values.
                combine_rows_(output[boundary], lse[boundary], partial_output, partial_lse)
                return output

            found["combine"] = combined
        return found

    def all_parts(self) -> Tensor:
        """The output of this rank's rows, from one call of each part."""
        calls = self.parts()
        if "combine" in calls:
            return calls["combine"]()
        if "own" in calls:
            return calls["own"]()[0]
        return self.qkv[0][:0]


def measure_parts(subject: Subject, folders: Iterable[Path]) -> Iterator[Row]:
    """On one GPU: the whole graph, then the parts of all ranks of each partition."""
    expected = subject.expected()
    yield subject.whole(expected)
    for folder in folders:
        num_parts = load_partition(folder).num_parts
        ids = np.concatenate([load_part(folder, rank=rank).rows for rank in range(num_parts)])
        old_id = torch.from_numpy(ids).to(subject.device)
        for rank in range(num_parts):
            yield from subject.parts_of(folder, rank, old_id, expected)


def measure_on_ranks(subject: Subject, part: Part, group: Group) -> list[Row]:
    """Under torchrun: the whole graph on rank 0, then every scheme; rows on rank 0."""

    def whole() -> tuple[Tensor, Row]:
        expected = subject.expected()
        return expected, subject.whole(expected)

    expected, row = on_first_rank(group, whole) or (None, None)
    found = [row] if group.is_first else []
    for scheme in SCHEMES:
        if scheme != "heads" or subject.shape.heads >= group.size:
            found += subject.on_ranks(part, group, scheme, expected)
    return found
