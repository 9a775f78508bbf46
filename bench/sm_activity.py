"""SM active time of the paper's kernel, with and without row-window reordering (paper, section "Performance Breakdown",
figure "SM active time"): for how many cycles each SM had a thread block to run.

The clocked build of the kernel notes the SM of each block, and the SM's clock at the block's start and end. Only clocks
of one SM are compared, so that it does not matter that those of two SMs have no common zero.
"""

import numpy as np
import torch

from bench.checks import largest_row_error
from bench.kernels import Cell, GraphBench, Problem, checked_columns, refuse_impossible
from bench.records import Row
from bench.timers import Spread
from configs.bench_schema import VARIANTS, BenchConfig
from kernels import BSB
from kernels.backends.fused3s_paper import PaperKernelSpec, launch

WITHOUT, WITH = "F3S_splitC", "F3S_reorderRW"  # apart from the order of the row windows they are the same kernel
TIME, SHARE = "sm_active_time", "sm_active_share"

ActiveCycles = dict[int, int]  # by SM


def active_cycles(clocks: np.ndarray, num_sms: int) -> ActiveCycles:
    """Cycles in which each SM had at least one block: the length of the union of its blocks' intervals.

    Args:
        clocks: [blocks, 3] int64: SM, and its clock at the block's start and end.
        num_sms: of the GPU. An SM without a block has 0 cycles, under the lowest number that no other has.
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


def check_config(config: BenchConfig) -> None:
    """Raise a ValueError for what the clocked build cannot do."""
    if others := [backend for backend in config.kernel.backends if backend not in VARIANTS]:
        raise ValueError(f"kernel.backends: {', '.join(others)} notes no clocks; allowed are {', '.join(VARIANTS)}")
    if config.measure.l2 != "warm":
        raise ValueError(f"measure.l2 = {config.measure.l2}: the SM active time is measured with L2 warm alone")


def measure_sm_active(bench: GraphBench, backend: str, problem: Problem) -> list[Row]:
    """The rows of one variant on one graph.

    Launches differ, so the active times are those of one launch, in the middle of `measure.repeats` by its longest
    time: a row for each SM, with its number in the note. One more row has the mean active time over the longest, 1 if
    all SMs end together, with its percentiles over all launches.

    Args:
        bench: the graph, and the device, an NVIDIA GPU.
        backend: one of configs.bench_schema.VARIANTS.
        problem: the inputs, of `bench`.
    """
    cell = Cell(backend, problem.dim, getattr(torch, bench.config.kernel.out_dtype))
    refuse_impossible(cell, bench.device)
    inputs, expected = problem.inputs(cell.dtype), problem.expected
    bsb = BSB.from_graph(bench.pattern, device=bench.device)
    spec = PaperKernelSpec(cell.dtype, cell.out_dtype, cell.dim, **VARIANTS[backend], clocked=True)
    clocks = torch.empty((1, bsb.num_row_windows, 3), dtype=torch.int64, device=bench.device)
    num_sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
    scale, repeats = bench.config.measure.scale, bench.config.measure.repeats

    def run() -> torch.Tensor:
        return launch(spec, bsb, *(tensor[:, None] for tensor in inputs), scale, clocks)[:, 0]

    error = largest_row_error(run(), expected)  # the first call compiles
    launches = []
    for _ in range(repeats):
        run()
        launches.append(active_cycles(clocks[0].cpu().numpy(), num_sms))
    return sm_active_rows(bench, cell, launches, error)


def sm_active_rows(bench: GraphBench, cell: Cell, launches: list[ActiveCycles], error: float) -> list[Row]:
    """The rows of `measure_sm_active`, from the active times of each launch and the output's error."""
    shared = bench.columns_of(cell) | checked_columns(error, cell.dtype)

    def row(metric: str, unit: str, values: list[float], note: str) -> Row:
        return Row(**shared, **Spread.of(values).columns(), metric=metric, unit=unit, note=note)

    by_longest = sorted(launches, key=lambda cycles: max(cycles.values()))
    middle = by_longest[(len(launches) - 1) // 2]
    shares = [sum(cycles.values()) / len(cycles) / max(cycles.values()) for cycles in launches]
    rows = [row(SHARE, "1", shares, f"mean over {len(middle)} SMs of the active time, over the longest; L2 warm")]
    for sm, cycles in sorted(middle.items()):
        note = f"SM {sm}; the launch of {len(launches)} whose longest time is the median; L2 warm"
        rows.append(row(TIME, "cycles", [cycles], note))
    return rows
