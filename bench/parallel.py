"""Times of attention of one graph on several GPUs, and of its parts.

On one GPU, without torchrun: the work of every rank, one rank after the other, part by part. The exchange is left out:
the keys and values of other ranks are already there.

    variant  region    one call
    none     none      attention of the whole graph on one GPU, without a partition (ranks = 1)
    halo     pack      gathers the rows that other ranks need
             own       the rank's rows over its own columns, and their log-sum-exp
             halo      boundary rows over halo columns
             combine   both outputs of the boundary rows by their log-sum-exp, in place

Under torchrun: the whole graph on rank 0, and attention on all ranks and, in region "exchange", the exchange of keys
and values alone (variant halo); each until the slowest rank is done. Rank 0 alone reads and divides the graph.

Each output is compared with float64 before its time is kept, also that of a CUDA graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

import fused3s
from bench.checks import checked_columns, float64_attention, largest_row_error
from bench.kernels import normal_inputs
from bench.runner import Case, Context
from common import cli
from common.records import Row
from common.timers import Spread, time_kernel, time_passes
from configs.bench import BenchConfig
from fused3s.runtime.cuda_graph import CaptureError, capture
from parallel import Group, Part, PartAttention, all_values, gather_rows, on_first_rank, plan_part_attention, scatter
from parallel.capture import capture_together
from parallel.datasets import divided
from parallel.rank_rows import combine_rows_


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """One for each shape; it has the rows of all parts."""
    return [
        Case(backend, "attention", shape.dim, dtype, dtype, heads=shape.heads, ranks=1)
        for backend in config.backends
        for dtype in config.precisions
        for shape in config.head_shapes
    ]


def measure(context: Context, case: Case) -> list[Row]:
    """Under torchrun rows on rank 0 alone."""
    work, group = Work(context, case), context.group
    if group is None:
        expected = work.expected()
        rows = [work.whole(expected)]
        for size in context.config.ranks:
            rows += work.parts(parts_of(context, size), expected)
        return rows
    part = scatter(group, on_first_rank(group, partial(parts_of, context, group.size)))
    expected = on_first_rank(group, work.expected)
    rows = [on_first_rank(group, lambda: work.whole(expected)), *work.on_ranks(part, group, expected)]
    return rows if group.is_first else []


def parts_of(context: Context, size: int) -> list[Part]:
    config = context.config
    return divided(context.loaded, config.root, size, config.method, lambda text: cli.console.print(Text(text)))


class Work:
    """A graph with inputs of one shape: q, k and v of all rows."""

    def __init__(self, context: Context, case: Case) -> None:
        self.context, self.case, self.device, self.dtype = context, case, context.device, case.torch_dtype
        self.qkv, self.scale = normal_inputs(context, case.shape, 3, self.dtype), case.dim**-0.5
        self.options = {"backend": case.backend, "dtype": self.dtype, "head_dim": case.dim, "num_heads": case.heads}

    def expected(self) -> Tensor:
        pattern = self.context.pattern
        return float64_attention(*self.qkv, pattern.indptr, pattern.indices, self.scale)

    def whole(self, expected: Tensor) -> Row:
        """The whole graph on this GPU."""
        run = partial(fused3s.plan_attention(self.context.pattern, device=self.device, **self.options), *self.qkv)
        return self._timed(self.case, run, self._checked(run(), expected))

    def parts(self, parts: list[Part], expected: Tensor) -> Iterator[Row]:
        """Each part of the work of each rank, with the rows of other ranks at hand."""
        for rank, part in enumerate(parts):
            group = Group(rank, len(parts), self.device, "gloo")  # nothing is sent
            calls = self._calls(part, plan_part_attention(part, group, **self.options))
            checked = self._checked(self._output(calls), expected[self._rows(part.rows)])
            case = replace(self.case, ranks=len(parts), variant="halo", order=part.partition.method)
            for region, run in calls.items():
                yield self._timed(replace(case, region=f"{region} of rank {rank}"), run, checked)

    def on_ranks(self, part: Part, group: Group, expected: Tensor | None) -> list[Row]:
        """Attention of all ranks, and its exchange; rows on rank 0.

        Args:
            expected: on rank 0.
        """
        attention = plan_part_attention(part, group, **self.options)
        q, k, v = (tensor[self._rows(part.rows)] for tensor in self.qkv)
        runs = {
            "none": lambda: attention(q, k, v),
            "exchange": lambda: attention.passes.exchange.start(k, v).wait(),
        }
        case = replace(self.case, ranks=group.size, variant="halo", order=part.partition.method)
        launches = self.context.config.launches if self.device.type == "cuda" else ("eager",)
        found, checked = [], {}
        for region, launch in product(runs, launches):
            own, run = replace(case, region=region, launch=launch), runs[region]
            try:
                if launch == "cuda_graph":
                    run = capture_together(partial(capture, run, self.device), group).replay
            except CaptureError as error:  # on all ranks
                found.append(self.context.failed(own, error, link=group.link))
                continue
            output = run()
            if region == "none":
                joined = gather_rows(part, output, group)
                checked = {} if joined is None else self._checked(joined.to(self.device), expected)
            all_values(group, None)  # the ranks start together
            spread = time_passes(run, device=self.device, repeats=self.context.config.repeats)
            slowest = max(all_values(group, spread), key=lambda one: one.median)
            if group.is_first:
                found.append(self._row(own, slowest, "passes", checked, link=group.link))
        return found

    def _calls(self, part: Part, attention: PartAttention) -> dict[str, Callable[[], Any]]:
        """Calls by region of one rank; those that it does not need are left out."""
        passes, boundary = attention.passes, attention.passes.boundary
        q, k, v = (tensor[self._rows(part.rows)] for tensor in self.qkv)
        halo = self._rows(part.halo)
        arrived = torch.stack([tensor[halo] for tensor in self.qkv[1:]], 1)  # as received by the exchange
        options = {"scale": self.scale, "return_lse": True, "out_dtype": q.dtype}
        found: dict[str, Callable[[], Any]] = {}
        if len(part.send_rows):
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

    def _output(self, calls: dict[str, Callable[[], Any]]) -> Tensor:
        """The output of a rank's rows, from one call of each part."""
        if "combine" in calls:
            return calls["combine"]()
        return calls["own"]()[0] if "own" in calls else self.qkv[0][:0]

    def _checked(self, output: Tensor, expected: Tensor) -> dict[str, Any]:
        return checked_columns(largest_row_error(output, expected), self.dtype)

    def _timed(self, case: Case, run: Callable[[], Any], checked: dict[str, Any]) -> Row:
        run()
        spread, timer = time_kernel(run, device=self.device, repeats=self.context.config.repeats)
        return self._row(case, spread, timer, checked)

    def _row(self, case: Case, spread: Spread, note: str, checked: dict[str, Any], **columns: Any) -> Row:
        return self.context.row(case, **spread.columns(), **checked, **columns, note=note)

    def _rows(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).to(self.device)
