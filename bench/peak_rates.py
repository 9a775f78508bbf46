"""Peak rates of a GPU: copies by PyTorch, and mma.sync by cuda/peak_rates.cu.

Each micro-benchmark is a row of scope "machine". Its rate is work over time:

    backend  variant   dim      working_set     work
    copy     none      columns  read + written  bytes read and written
    mma      m16n8k16  0        blank           FLOP of products of 16 x 16 and 16 x 8

Every output is compared with the expected one.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench import fragments
from bench.runner import Case, Context
from common.records import Row
from common.timers import time_kernel
from configs.bench import BenchConfig
from fused3s.runtime.device import WARP_SIZE
from fused3s.runtime.jit import KernelInstance, get_kernel
from fused3s.runtime.launch import launch_kernel

COPIED_BYTES = 1 << 31  # read, and as many written
SOURCE = Path(__file__).parent / "cuda" / "peak_rates.cu"
THREADS = 256  # per block
MMA_TILES = 8  # accumulators of a warp
MMA_FLOP = 2 * 16 * 8 * 16  # of one m16n8k16
MMA_BLOCKS_PER_SM = 2
MMA_ITERATIONS = 4096
MMA_ALLOWED_ERROR = 1e-2  # float32 sums of 4096 terms, which a tensor core truncates

# Runs by launch configuration (such as "4 blocks per SM"), and a function that gives the error of an output.
Runs = tuple[dict[str, Callable[[], torch.Tensor]], Callable[[torch.Tensor], float]]


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    copied, flop = 2 * COPIED_BYTES, MMA_FLOP * warps(device) * MMA_TILES * MMA_ITERATIONS
    return [
        Case("copy", "machine", 128, "float16", heads=0, working_set=copied, work=copied),
        Case("mma", "machine", 0, "float16", heads=0, variant="m16n8k16", work=flop),
    ]


def measure(context: Context, case: Case) -> list[Row]:
    """Row of the fastest launch configuration."""
    runs, error_of = (copy_runs if case.backend == "copy" else mma_runs)(case, context.device)
    allowed = MMA_ALLOWED_ERROR if case.backend == "mma" else 0.0
    best = None
    for launch, run in runs.items():
        error = error_of(run())
        if not error <= allowed:
            raise ArithmeticError(f"{launch}: the output is off by {error:.1e}, allowed is {allowed:.1e}")
        spread, timer = time_kernel(run, device=context.device, repeats=context.config.repeats)
        if best is None or spread.median < best[0].median:
            best = spread, f"{launch}; {timer}", error
    spread, note, error = best
    return [context.row(case, **spread.columns(), status="ok", relative_error=error, note=note)]


def copy_runs(case: Case, device: torch.device) -> Runs:
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.work // (4 * case.dim), case.dim // 2)
    source = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    # In a CUDA graph copy_ uses the copy engine, which may be slower than a kernel.
    runs = {"copy_": lambda: target.copy_(source), "add": lambda: torch.add(source, 0, out=target)}
    return runs, lambda copy: float(not torch.equal(source, copy))


def warps(device: torch.device) -> int:
    """Warps of a run of mma; of any GPU where there is none."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * MMA_BLOCKS_PER_SM * THREADS // WARP_SIZE


def mma_runs(case: Case, device: torch.device, iterations: int = MMA_ITERATIONS) -> Runs:
    count = warps(device)
    kernel = get_kernel(KernelInstance(SOURCE, "mma_peak", (MMA_TILES,)), device.index)
    frag_a, frag_b, lane_sums = mma_problem()
    a, b = torch.from_numpy(frag_a).to(device), torch.from_numpy(frag_b).to(device)
    expected = iterations * torch.from_numpy(lane_sums).to(device)
    out = torch.zeros(count * WARP_SIZE, dtype=torch.float32, device=device)

    def run() -> torch.Tensor:
        blocks = count * WARP_SIZE // THREADS
        scalars = kernel.scalars(iterations=iterations)
        launch_kernel(kernel, (blocks,), THREADS, {"a": a, "b": b, "out": out}, scalars)
        return out

    def error(out: torch.Tensor) -> float:
        return ((out.view(count, WARP_SIZE) - expected).norm(dim=1).max() / expected.norm()).item()

    return {f"{MMA_BLOCKS_PER_SM} blocks of {THREADS} threads per SM": run}, error


def mma_problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random A and B_i as fragments, and the expected sum of each lane per iteration.

    Returns:
        [32, 8] and [MMA_TILES, 32, 4] float16, [32] float64.
    """
    generator = np.random.default_rng(0)
    a = generator.standard_normal((16, 16)).astype(np.float16)
    b = generator.standard_normal((MMA_TILES, 16, 8)).astype(np.float16)
    c = (a.astype(np.float64) @ b.astype(np.float64)).sum(0)
    lanes = range(WARP_SIZE)
    frag_a = [[a[fragments.a_element(lane, word, half)] for word in range(4) for half in range(2)] for lane in lanes]
    frag_b = [
        [[tile[fragments.b_element(lane, word, half)] for word in range(2) for half in range(2)] for lane in lanes]
        for tile in b
    ]
    sums = [sum(c[fragments.c_element(lane, register)] for register in range(4)) for lane in lanes]
    return np.array(frag_a), np.array(frag_b), np.array(sums)
