"""Time to build the sparse formats of our kernels from CSR arrays that are on the device.

    backend        variant          builds
    fused3s_paper  none             BSB with 16 x 8 blocks: all that the kernel needs
    fused3s_paper  row_window_sort  the part of it that is the paper's reordering: the sort of the row windows by their
                                    number of TCBs, which are on the device
    fused3s        bsb              BSB with 16 x 16 blocks
    fused3s        none             the plan of `kernels.plan_attention`, by its own kernels; on a GPU

A build depends on neither head dimension nor type.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import data
import kernels
from bench.host_load import HostLoad, describe_wait
from bench.records import NONE, Provenance, Row, key
from bench.runner import classify, graph_columns, pattern_on
from bench.timers import Spread
from kernels.backends.fused3s_shapes import TILE
from kernels.formats.bsb import BSB, PAPER_TILE
from kernels.formats.bsb_build import sort_row_windows
from kernels.formats.csr import CSRPattern, array_module

FINISHED = ("unchecked",)  # statuses that are not measured again
REPEATS = 10
ROW_WINDOW_SORT = "row_window_sort"  # a variant
SECONDS = 2.0  # a build is not repeated after this time


@dataclass(frozen=True)
class Build:
    """A timed function, and the columns that name it.

    Attributes:
        prepare: gives the function, from a graph on the device. It is not timed.
    """

    backend: str
    variant: str
    prepare: Callable[[CSRPattern], Callable[[], Any]]


def builds(device: torch.device) -> list[Build]:
    """Builds that are timed on a device."""
    bsbs = [
        Build("fused3s_paper", NONE, lambda pattern: partial(BSB.from_graph, pattern, PAPER_TILE)),
        Build("fused3s_paper", ROW_WINDOW_SORT, _sort_of_row_windows),
        Build("fused3s", "bsb", lambda pattern: partial(BSB.from_graph, pattern, TILE)),
    ]
    if device.type != "cuda":
        return bsbs
    plan = partial(kernels.plan_attention, backend="fused3s", device=device)
    return [*bsbs, Build("fused3s", NONE, lambda pattern: partial(plan, pattern))]


def _sort_of_row_windows(pattern: CSRPattern) -> Callable[[], Any]:
    tcbs_per_window = BSB.from_graph(pattern, PAPER_TILE).tcb_row_offset.diff().long()
    xp, (counts,) = array_module(tcbs_per_window)
    return partial(sort_row_windows, xp, counts)


def measure_builds(
    loaded: data.LoadedGraph,
    environment: Provenance,
    device: torch.device,
    config: str,
    done: Collection[tuple] = (),
    max_edges: int | None = None,
) -> Iterator[tuple[str, list[Row]]]:
    """Description and row of each of `builds(device)`; no row if its key is `done`. Errors become a status.

    Args:
        config: file of the configuration that named the graph.
        max_edges: larger graphs are not measured; their rows say so.
    """
    num_edges = loaded.meta.num_edges
    for build in builds(device):
        columns = {
            **environment.model_dump(),
            **graph_columns(loaded.meta),
            **{"bench": "preprocessing", "scope": "build", "backend": build.backend, "variant": build.variant},
            **{"metric": "time", "unit": "ms", "config": config},
        }
        description = f"{build.backend} {build.variant} on {device.type}"
        if key(columns) in done:
            yield description, []
        elif max_edges is not None and num_edges > max_edges:
            reason = f"left out: {num_edges:,} edges; the limit on this device is {max_edges:,}"
            yield description, [Row(**columns, status="unavailable", reason=reason)]
        else:
            try:
                timed = build.prepare(pattern_on(device, loaded))
                host = HostLoad()
                spread = time_build(timed, device)
                busy = describe_wait(host.waited())
                note = "; ".join(["wall clock, synchronised", *([busy] if busy else [])])
                measured = {**spread.columns(), "status": "unchecked", "note": note}
            except Exception as error:  # the other builds go on, whatever the error is
                status, reason = classify(error)
                measured = {"status": status, "reason": reason}
            yield description, [Row(**columns, **measured)]


def time_build(
    build: Callable[[], Any], device: torch.device, repeats: int | None = None, seconds: float | None = None
) -> Spread:
    """Milliseconds of `build()` by the wall clock; on a GPU after a first call that compiles, with synchronisation.

    Args:
        repeats: most calls; default REPEATS.
        seconds: no call starts after this time; default SECONDS.
    """
    repeats, seconds = repeats or REPEATS, seconds or SECONDS
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
