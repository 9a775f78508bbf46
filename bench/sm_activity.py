"""SM active time of the paper's kernel, with and without row-window reordering (paper, "Performance Breakdown").

The clocked build of the kernel records the SM of each block and the SM's clock at its start and end. Clocks are
compared only within one SM, since SMs have no common zero.
"""

from dataclasses import replace

import numpy as np
import torch

from bench import kernels as kernel_bench
from bench.baselines.bsb import BSB
from bench.baselines.fused3s_paper import launch, paper_instance
from bench.checks import checked_columns, largest_row_error
from bench.runner import Case, Context
from common.records import NONE, Row
from common.timers import Spread
from configs.bench import SWITCHES, BenchConfig

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


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    options = {"metric": "sm_active_share", "unit": "1", "launch": NONE, "plan": NONE}
    return [replace(case, **options) for case in kernel_bench.cases(config, device)]


def measure(context: Context, case: Case) -> list[Row]:
    """The mean active time over the longest, 1 if all SMs end together, and the active time of each SM.

    Launches differ: the share has percentiles over all launches, and the active times are those of the launch with the
    median longest time.
    """
    kernel_bench.refuse_impossible(case, context.device)
    config, device = context.config, context.device
    problem = context.keep("problem", case.shape, lambda: kernel_bench.Problem(context, case.shape, case.edges))
    inputs, expected = problem.inputs(case.torch_dtype), problem.expected
    bsb = BSB.from_graph(context.pattern, device=device)
    out_dtype = getattr(torch, case.out_dtype)
    instance = paper_instance(case.torch_dtype, out_dtype, case.dim, **SWITCHES[case.variant], clocked=True)
    clocks = torch.empty((1, instance.arguments.num_blocks(bsb), 3), dtype=torch.int64, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def run() -> torch.Tensor:
        return launch(instance, bsb, *inputs, config.scale_of(case.dim), clocks)

    error = largest_row_error(run(), expected)  # the first call compiles
    launches = []
    for _ in range(config.repeats):
        run()
        launches.append(active_cycles(clocks[0].cpu().numpy(), num_sms))
    return rows_of_launches(context, case, launches, error)


def rows_of_launches(context: Context, case: Case, launches: list[ActiveCycles], error: float) -> list[Row]:
    """Rows of a case from the active times of each launch and the error of the output."""
    checked = checked_columns(error, case.torch_dtype)
    by_longest = sorted(launches, key=lambda cycles: max(cycles.values()))
    middle = by_longest[(len(launches) - 1) // 2]
    shares = [sum(cycles.values()) / len(cycles) / max(cycles.values()) for cycles in launches]
    note = f"mean over {len(middle)} SMs of the active time, over the longest"
    rows = [context.row(case, **Spread.of(shares).columns(), **checked, note=note)]
    time = replace(case, metric="sm_active_time", unit="cycles")
    note = f"of {len(launches)} launches, the one with the median longest time"
    for sm, cycles in sorted(middle.items()):
        rows.append(context.row(time, sm=sm, **Spread.of([cycles]).columns(), **checked, note=note))
    return rows
