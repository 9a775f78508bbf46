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
"exchange", the exchange of keys and values alone; each until the slowest rank is done. Rank 0 alone reads and
partitions the graph.

Each output is compared with float64 before its time is kept, also that of a CUDA graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
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
from parallel import (
    Group,
    Part,
    all_values,
    gather_rows,
    load_part,
    on_first_rank,
    partition_graph,
    plan_part_attention,
    source_from_csr,
)
from parallel.attention import PartAttention
from parallel.capture import capture_together
from parallel.cost_model import LINKS, choose_scheme, one_gpu_is_faster
from parallel.rank_rows import combine_rows_


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """One for each shape; it has the rows of all parts or schemes."""
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
            rows += work.parts(partitioned(context, size), size, expected)
        return rows
    folder = folder_of(context, group.size)
    on_first_rank(group, partial(partitioned, context, group.size))
    part = load_part(folder, group)
    expected = on_first_rank(group, work.expected)
    rows = [on_first_rank(group, lambda: work.whole(expected))]
    for scheme in context.config.schemes:
        if scheme != "heads" or case.heads >= group.size:
            rows += work.on_ranks(part, group, scheme, expected)
    return rows if group.is_first else []


def folder_of(context: Context, size: int) -> Path:
    config, sha = context.config, context.loaded.meta.sha256
    return Path(config.root, "parts", f"{context.name}-{config.method}-{size}-bench-{sha}")


def partitioned(context: Context, size: int) -> Path:
    """Folder of the graph's partition, made if it is missing."""
    folder, loaded = folder_of(context, size), context.loaded
    arrays = loaded.row_pointers.numpy(), loaded.columns.numpy()
    source = source_from_csr(*arrays, fingerprint=loaded.meta.sha256)
    partition_graph(source, folder, size, context.config.method, say=lambda text: cli.console.print(Text(text)))
    return folder


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

    def parts(self, folder: Path, size: int, expected: Tensor) -> Iterator[Row]:
        """Each part of the work of each rank, with the rows of other ranks at hand."""
        loaded = [load_part(folder, rank=rank) for rank in range(size)]
        old_id = torch.from_numpy(np.concatenate([part.rows for part in loaded])).to(self.device)
        for rank, part in enumerate(loaded):
            group = Group(rank, size, self.device, "gloo")  # nothing is sent
            calls = self._calls(part, plan_part_attention(part, group, scheme="halo", **self.options), old_id)
            checked = self._checked(self._output(calls), expected[_rows(part, self.device)])
            case = replace(self.case, ranks=size, variant="halo", order=part.partition.method)
            for region, run in calls.items():
                yield self._timed(replace(case, region=f"{region} of rank {rank}"), run, checked)

    def on_ranks(self, part: Part, group: Group, scheme: str, expected: Tensor | None) -> list[Row]:
        """Attention of all ranks by one scheme, and its exchange; rows on rank 0.

        Args:
            expected: on rank 0.
        """
        attention = plan_part_attention(part, group, scheme=scheme, **self.options)
        q, k, v = (tensor[_rows(part, self.device)] for tensor in self.qkv)
        runs = {"none": lambda: attention(q, k, v)}
        if scheme != "heads":
            runs["exchange"] = lambda: attention.passes.exchange.start(k, v).wait()
        shape = part.partition, self.case.heads, self.case.dim, self.dtype.itemsize, group.link
        auto = "one GPU" if one_gpu_is_faster(*shape) else choose_scheme("auto", *shape).scheme
        case = replace(self.case, ranks=group.size, variant=scheme, order=part.partition.method)
        launches = self.context.config.launches if self.device.type == "cuda" else ("eager",)
        found, checked = [], {}
        for region, launch in product(runs, launches):
            own, run = replace(case, region=region, launch=launch), runs[region]
            try:
                if launch == "cuda_graph":
                    run = capture_together(partial(capture, run, self.device), group).replay
            except CaptureError as error:  # on all ranks
                found.append(self.context.failed(own, error, link=LINKS[group.link].name))
                continue
            output = run()
            if region == "none":
                blocks: list[Tensor] = []
                gather_rows(part, output, group, blocks.append)
                checked = self._checked(torch.cat(blocks), expected) if group.is_first else {}
            all_values(group, None)  # the ranks start together
            spread = time_passes(run, device=self.device, repeats=self.context.config.repeats)
            slowest = max(all_values(group, spread), key=lambda one: one.median)
            if group.is_first:
                note = f"passes; auto: {auto}"
                found.append(self._row(own, slowest, note, checked, link=LINKS[group.link].name))
        return found

    def _calls(self, part: Part, attention: PartAttention, old_id: Tensor) -> dict[str, Callable[[], Any]]:
        """Calls by region of one rank; those that it does not need are left out.

        Args:
            old_id: [N] number in the graph of each row of the partition's order.
        """
        passes, boundary = attention.passes, slice(attention.passes.first, None)
        q, k, v = (tensor[_rows(part, self.device)] for tensor in self.qkv)
        halo = old_id[torch.from_numpy(np.array(part.halo)).to(self.device)]
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


def _rows(part: Part, device: torch.device) -> Tensor:
    return torch.from_numpy(part.rows.copy()).to(device)
