"""Times of attention of one graph on several GPUs, under torchrun, beside one GPU.

    variant  region    one call
    none     none      attention of the whole graph on rank 0, without a partition (ranks = 1)
    halo     none      attention on all ranks, until the slowest is done
             exchange  the exchange of keys and values alone

Rank 0 alone reads and divides the graph. Without torchrun the whole graph on one GPU is measured.

Each output is compared with float64 before its time is kept, also that of a CUDA graph.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

import fused3s
from bench.checks import checked_columns, float64_attention, largest_row_error
from bench.kernels import normal_inputs
from bench.runner import Case, Context
from common import cli
from common.records import Row
from common.timers import time_kernel, time_passes
from configs.bench import BenchConfig
from fused3s.runtime.cuda_graph import CaptureError, capture
from parallel import Group, Part, all_values, gather_rows, on_first_rank, plan_part_attention, scatter
from parallel.capture import capture_together
from parallel.datasets import divided


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """One for each shape; it has all rows."""
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
        return [work.whole(work.expected())]
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
        checked = self._checked(run(), expected)
        spread, timer = time_kernel(run, device=self.device, repeats=self.context.config.repeats)
        return self.context.row(self.case, **spread.columns(), **checked, note=timer)

    def on_ranks(self, part: Part, group: Group, expected: Tensor | None) -> list[Row]:
        """Attention of all ranks, and its exchange; rows on rank 0.

        Args:
            expected: on rank 0.
        """
        attention = plan_part_attention(part, group, **self.options)
        rows = torch.from_numpy(part.rows).to(self.device)
        q, k, v = (tensor[rows] for tensor in self.qkv)
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
                columns = slowest.columns() | checked | {"link": group.link, "note": "passes"}
                found.append(self.context.row(own, **columns))
        return found

    def _checked(self, output: Tensor, expected: Tensor) -> dict[str, Any]:
        return checked_columns(largest_row_error(output, expected), self.dtype)
