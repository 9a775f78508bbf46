"""Peak rates of a GPU, measured with cuda/peak_rates.cu: copy, random gathers of rows, mma.sync.

Each micro-benchmark is a row of scope "machine". Its rate is work over time:

    backend  variant              dim               working_set     work
    copy     none                 columns           read + written  bytes read and written
    gather   ld_global, cp_async  columns of a row  K + V           bytes of random pairs of a K row and a V row
    mma      m16n8k16             0                 blank           FLOP of products of 16 x 16 and 16 x 8

Every output is compared with the expected one.
"""

from collections.abc import Callable
from dataclasses import replace
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

MIB = 1 << 20
WORKING_SETS_MIB = (4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)  # K and V together
DIMS = (64, 128, 256)
GATHERED_BYTES = 1 << 30  # per run
COPIED_BYTES = 1 << 31  # read, and as many written
SOURCE = Path(__file__).parent / "cuda" / "peak_rates.cu"
PIECES, STAGES = 4, 2  # 16-byte loads in flight per lane; stages of the shared-memory ring of a warp
THREADS = 256  # per block, in every kernel
# Blocks per SM to try, the fastest is kept: more blocks have more bytes in flight and leave less L1.
PATHS = {"ld_global": (4, 8), "cp_async": (3, 4, 6)}
MMA_TILES = 8  # accumulators of a warp
MMA_FLOP = 2 * 16 * 8 * 16  # of one m16n8k16
MMA_BLOCKS_PER_SM = 2
MMA_ITERATIONS = 4096
MMA_ALLOWED_ERROR = 1e-2  # float32 sums of 4096 terms, which a tensor core truncates

# Runs by launch configuration (such as "4 blocks per SM"), and a function that gives the error of an output.
Runs = tuple[dict[str, Callable[[], torch.Tensor]], Callable[[torch.Tensor], float]]


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """All micro-benchmarks, quick ones first."""
    rate = Case("copy", "machine", 128, "float16", heads=0)
    found = [
        replace(rate, working_set=2 * COPIED_BYTES, work=2 * COPIED_BYTES),
        replace(
            rate, backend="mma", variant="m16n8k16", dim=0, work=MMA_FLOP * warps(device) * MMA_TILES * MMA_ITERATIONS
        ),
    ]
    for mib in WORKING_SETS_MIB:
        for dim in DIMS:
            size, work = 4 * dim * (mib * MIB // (4 * dim)), 4 * dim * (GATHERED_BYTES // (4 * dim))
            gather = replace(rate, backend="gather", dim=dim, working_set=size, work=work)
            found += [replace(gather, variant=path) for path in PATHS]
    return found


def measure(context: Context, case: Case) -> list[Row]:
    """Row of the fastest launch configuration."""
    prepare = {"copy": copy_runs, "mma": mma_runs, "gather": gather_runs}[case.backend]
    runs, error_of = prepare(case, context.device)
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
    source = _random_words((case.work // (4 * case.dim), case.dim // 2), device)
    target = torch.empty_like(source)
    # In a CUDA graph copy_ uses the copy engine, which may be slower than a kernel.
    runs = {"copy_": lambda: target.copy_(source), "add": lambda: torch.add(source, 0, out=target)}
    return runs, lambda copy: float(not torch.equal(source, copy))


def gather_runs(case: Case, device: torch.device) -> Runs:
    """K and V are [num_rows, dim] of 16 bits each."""
    dim, path, num_rows = case.dim, case.variant, case.working_set // (4 * case.dim)
    pairs, chunks = case.work // (4 * dim), GATHERED_BYTES // (16 * WARP_SIZE * PIECES)
    function, shape = ("gather_ld", (dim, PIECES)) if path == "ld_global" else ("gather_async", (dim, PIECES, STAGES))
    kernel = get_kernel(KernelInstance(SOURCE, function, shape), device.index)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    key, value = (_random_words((num_rows, dim // 2), device, seed) for seed in (0, 1))
    word_sums = key.sum(1, dtype=torch.int64) + value.sum(1, dtype=torch.int64)
    expected = int(word_sums[random_rows(pairs, num_rows, device)].sum())

    def run_with(blocks: int) -> Callable[[], torch.Tensor]:
        out = torch.empty(blocks * num_sms * THREADS, dtype=torch.int32, device=device)

        def run() -> torch.Tensor:
            scalars = kernel.scalars(num_rows=num_rows, num_batches=chunks)
            launch_kernel(kernel, (blocks * num_sms,), THREADS, {"k": key, "v": value, "out": out}, scalars)
            return out

        return run

    def error(out: torch.Tensor) -> float:
        return float((int(out.sum(dtype=torch.int64)) - expected) % 2**32 != 0)

    return {f"{blocks} blocks of {THREADS} threads per SM": run_with(blocks) for blocks in PATHS[path]}, error


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


def random_rows(count: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """[count] int64: rows gathered by cuda/peak_rates.cu (`random_row`)."""
    low = 2**32 - 1
    i = torch.arange(count, device=device)
    i = i ^ (i >> 16)
    i = i * 0x85EBCA6B & low
    i = i ^ (i >> 13)
    i = i * 0xC2B2AE35 & low
    i = i ^ (i >> 16)
    return i * num_rows >> 32


def _random_words(shape: tuple[int, int], device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32, device=device)
