"""Time to build the sparse formats of our kernels from CSR arrays that are on the device.

    backend        variant          builds
    fused3s_paper  none             BSB with 16 x 8 blocks: all that the kernel needs
    fused3s_paper  row_window_sort  the part of it that is the paper's reordering: the sort of the row windows by their
                                    number of TCBs, which are on the device
    fused3s        none             the plan of `fused3s.plan_attention`, by its own kernels

A build depends on neither head dimension nor type.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fused3s
from bench.baselines.bsb import BSB, PAPER_TILE, array_module
from bench.baselines.bsb_build import sort_row_windows
from bench.runner import Case, Context
from common.records import NONE, Row
from common.timers import Spread
from configs.bench import BenchConfig
from fused3s.graph.csr import CSRPattern

# (backend, variant): the function that is timed, from a graph on the device.
BUILDS: dict[tuple[str, str], Callable[[CSRPattern], Callable[[], Any]]] = {
    ("fused3s_paper", NONE): lambda pattern: partial(BSB.from_graph, pattern, PAPER_TILE),
    ("fused3s_paper", "row_window_sort"): lambda pattern: _sort_of_row_windows(pattern),
    ("fused3s", NONE): lambda pattern: partial(
        fused3s.plan_attention, pattern, backend="fused3s", device=pattern.indices.device
    ),
}


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    return [Case(backend, "build", heads=0, variant=variant) for backend, variant in BUILDS]


def measure(context: Context, case: Case) -> list[Row]:
    build = BUILDS[case.backend, case.variant](context.pattern)
    return [timed(context, case, build, {"status": "unchecked"})]


def timed(context: Context, case: Case, call: Callable[[], Any], checked: dict[str, Any]) -> Row:
    config = context.config
    spread = time_build(call, context.device, config.repeats, config.seconds)
    return context.row(case, **spread.columns(), **checked, note="wall clock, synchronised")


def _sort_of_row_windows(pattern: CSRPattern) -> Callable[[], Any]:
    tcbs_per_window = BSB.from_graph(pattern, PAPER_TILE).tcb_row_offset.diff().long()
    xp, (counts,) = array_module(tcbs_per_window)
    return partial(sort_row_windows, xp, counts)


def time_build(build: Callable[[], Any], device: torch.device, repeats: int, seconds: float) -> Spread:
    """Milliseconds of `build()` by the wall clock; on a GPU after a first call that compiles, with synchronisation.

    Args:
        repeats: most calls.
        seconds: no call starts after this time.
    """
    if device.type == "cuda":
        build()
        torch.cuda.synchronize()
    milliseconds: list[float] = []
    while len(milliseconds) < repeats and sum(milliseconds) < seconds * 1e3:
        start = time.perf_counter()
        build()
        if device.type == "cuda":
            torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return Spread.of(milliseconds)
