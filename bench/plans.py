"""Time to plan attention on a graph, from CSR arrays that are on the device.

    variant        scope      one call
    plan           build      `kernels.plan_attention`
    plan_backward  build      the same with backward=True: the transpose and the schedules of the backward pass, too
    plan_and_run   attention  `kernels.plan_attention`, and attention with the plan: a mask that changes at every call

Each call is timed by the wall clock and ends with a synchronisation, so that the host's work and its waits count. The
output of plan_and_run is compared with float64 before its time is kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import kernels
from bench.checks import float64_attention, largest_row_error
from bench.format_build import time_build
from bench.kernels import checked_columns
from bench.records import Row
from bench.runner import Cell, GraphBench
from configs.plan_bench_schema import PlanBenchConfig

FINISHED = ("ok", "unchecked", "unsupported", "oom")  # statuses that are not measured again
VARIANTS = {"plan": "build", "plan_backward": "build", "plan_and_run": "attention"}  # with their scopes
DTYPE = torch.float16


class PlanBench(GraphBench):
    """Every variant for every shape of heads."""

    bench = "plans"

    @staticmethod
    def cells(config: PlanBenchConfig) -> list[Cell]:
        same = {"backend": config.plan.backend, "dtype": "float16", "out_dtype": "float16", "plan": "rebuilt"}
        return [
            Cell(dim=shape.dim, heads=shape.heads, variant=variant, scope=scope, **same)
            for shape in config.plan.head_shapes
            for variant, scope in VARIANTS.items()
        ]

    def measure_cell(self, cell: Cell) -> list[Row]:
        plan = partial(
            kernels.plan_attention,
            self.pattern,
            backend=cell.backend,
            device=self.device,
            dtype=DTYPE,
            head_dim=cell.dim,
            num_heads=cell.heads,
            backward=cell.variant == "plan_backward",
        )
        if cell.scope == "build":
            return [self._timed(cell, plan, {"status": "unchecked"})]
        query, key, value = self._inputs(cell)
        pattern, scale = self.pattern, cell.dim**-0.5
        expected = float64_attention(query, key, value, pattern.indptr, pattern.indices, scale)
        checked = checked_columns(largest_row_error(plan()(query, key, value), expected), DTYPE)
        del expected
        return [self._timed(cell, lambda: plan()(query, key, value), checked)]

    def _timed(self, cell: Cell, call: Callable[[], Any], checked: dict[str, Any]) -> Row:
        measure = self.config.measure
        spread = time_build(call, self.device, measure.repeats, measure.seconds)
        return self.row(cell, **spread.columns(), **checked, note="wall clock, synchronised")

    def _inputs(self, cell: Cell) -> tuple[torch.Tensor, ...]:
        """q, k and v: [N, H, d], normal random numbers."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (self.pattern.shape[0], cell.heads, cell.dim)
        return tuple(torch.randn(shape, generator=generator, device=self.device).to(DTYPE) for _ in ("q", "k", "v"))
