"""SM active time of the paper's kernel, with and without row-window reordering (paper, "Performance Breakdown").

The clocked build of the kernel records the SM of each block and the SM's clock at its start and end. Clocks are
compared only within one SM, since SMs have no common zero.
"""

from dataclasses import replace

import numpy as np
import torch

from baselines.fused3s_paper import launch, paper_instance
from bench.checks import largest_row_error
from bench.kernels import KernelBench, checked_columns, refuse_impossible
from bench.records import Row
from bench.runner import Cell
from bench.timers import Spread
from configs.bench_schema import SWITCHES, BenchConfig
from kernels import BSB

ActiveCycles = dict[int, int]  # by SM


def active_cycles(clocks: np.ndarray, num_sms: int) -> ActiveCycles:
    """Cycles in which each SM had at least one block: length of the union of the intervals of its blocks.

    Args:
        clocks: [blocks, 3] int64: SM, clock at the start and at the end of the block.
        num_sms: SMs of the GPU. SMs without a block have 0 cycles and get the lowest free numbers.
    """
    cycles = {}
    for sm in np.unique(clocks[:, 0]):
        start, end = clocks[clocks[:, 0] == sm, 1:].T
        by_start = np.argsort(start)
        start, end = start[by_start], np.maximum.accumulate(end[by_start])
        gaps = np.maximum(start[1:] - end[:-1], 0)
        cycles[int(sm)] = int(end[-1] - start[0] - gaps.sum())
    unused = (sm for sm in range(num_sms) if sm not in cycles)
    return cycles | {sm: 0 for sm, _ in zip(unused, range(num_sms - len(cycles)), strict=False)}


class SmActivityBench(KernelBench):
    """Variants of the paper's kernel; a cell has a row per SM."""

    bench = "sm_active"

    @staticmethod
    def cells(config: BenchConfig) -> list[Cell]:
        options = {"metric": "sm_active_share", "unit": "1", "launch": "none", "plan": "none"}
        return [replace(cell, **options) for cell in KernelBench.cells(config)]

    def measure_cell(self, cell: Cell) -> list[Row]:
        """The mean active time over the longest, 1 if all SMs end together, and the active time of each SM.

        Launches differ: the share has percentiles over all launches, and the active times are those of the launch with
        the median longest time.
        """
        refuse_impossible(cell, self.device)
        problem = self.problem(cell)
        inputs, expected = problem.inputs(cell.torch_dtype), problem.expected
        bsb = BSB.from_graph(self.pattern, device=self.device)
        switches = SWITCHES[cell.variant]
        instance = paper_instance(cell.torch_dtype, getattr(torch, cell.out_dtype), cell.dim, **switches, clocked=True)
        clocks = torch.empty((1, instance.arguments.num_blocks(bsb), 3), dtype=torch.int64, device=self.device)
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        measure = self.config.measure

        def run() -> torch.Tensor:
            return launch(instance, bsb, *inputs, measure.scale_of(cell.dim), clocks)

        error = largest_row_error(run(), expected)  # the first call compiles
        launches = []
        for _ in range(measure.repeats):
            run()
            launches.append(active_cycles(clocks[0].cpu().numpy(), num_sms))
        return self.rows_of_launches(cell, launches, error)

    def rows_of_launches(self, cell: Cell, launches: list[ActiveCycles], error: float) -> list[Row]:
        """Rows of a cell from the active times of each launch and the error of the output."""
        checked = checked_columns(error, cell.torch_dtype)
        by_longest = sorted(launches, key=lambda cycles: max(cycles.values()))
        middle = by_longest[(len(launches) - 1) // 2]
        shares = [sum(cycles.values()) / len(cycles) / max(cycles.values()) for cycles in launches]
        note = f"mean over {len(middle)} SMs of the active time, over the longest"
        rows = [self.row(cell, **Spread.of(shares).columns(), **checked, note=note)]
        time = replace(cell, metric="sm_active_time", unit="cycles")
        note = f"of {len(launches)} launches, the one with the median longest time"
        for sm, cycles in sorted(middle.items()):
            rows.append(self.row(time, sm=sm, **Spread.of([cycles]).columns(), **checked, note=note))
        return rows


def check_config(config: BenchConfig) -> None:
    """Raise a ValueError for settings that the clocked build does not support."""
    if others := [backend for backend in config.kernel.backends if backend not in SWITCHES]:
        raise ValueError(
            f"kernel.backends: {', '.join(others)} has no clocked build; allowed are {', '.join(SWITCHES)}"
        )
    if config.kernel.bench != "kernels":
        raise ValueError("kernel.shapes and kernel.edges: the SM active time is of one head without edge data")
    if config.kernel.plans != ("fixed",):
        raise ValueError(
            f"kernel.plans = {list(config.kernel.plans)}: the SM active time is measured with [fixed] alone"
        )
