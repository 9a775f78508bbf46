"""How long the sparse formats of our kernels take to build, from CSR arrays that are on the device: scope "build".

    backend        metric    what is built
    fused3s_paper  time      BSB with tile (16, 8), all that the kernel needs
    fused3s        bsb_time  BSB with tile (16, 16)
    fused3s        time      the same and the kernel's schedule, as `kernels.plan_attention` does it; on a GPU

A build depends on neither head dimension nor type: those columns are 1 and "none". Rows of the CPU have the run id of
the GPU beside it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import data
import kernels
from bench.kernels import classify, pattern_on
from bench.provenance import NONE, Provenance
from bench.records import Row, graph_columns
from bench.timers import NOT_MEASURED, Spread
from kernels.backends.fused3s import TILE
from kernels.formats.bsb import BSB, PAPER_TILE
from kernels.formats.csr import CSRPattern

REPEATS = 10
SECONDS = 2.0  # after so long a build is not repeated


@dataclass(frozen=True)
class Build:
    """What is timed on a device."""

    backend: str
    metric: str
    run: Callable[[CSRPattern], Any]


def builds(device: torch.device) -> list[Build]:
    """What can be built on a device."""
    bsbs = [
        Build("fused3s_paper", "time", lambda pattern: BSB.from_graph(pattern, PAPER_TILE)),
        Build("fused3s", "bsb_time", lambda pattern: BSB.from_graph(pattern, TILE)),
    ]
    if device.type != "cuda":
        return bsbs
    return [
        *bsbs,
        Build("fused3s", "time", lambda pattern: kernels.plan_attention(pattern, backend="fused3s", device=device)),
    ]


def measure_builds(
    loaded: data.LoadedGraph, environment: Provenance, device: torch.device, config: str, max_edges: int | None = None
) -> Iterator[Row]:
    """A row for each of `builds(device)`; what goes wrong is a status and a reason.

    Args:
        config: file of the configuration that named the graph.
        max_edges: of a graph with more no time is measured, and the rows say so.
    """
    shared = {
        **environment.model_dump(),
        **graph_columns(loaded.meta),
        "dim": 1,
        "heads": 1,
        "blocks": 0,
        "dtype": NONE,
        "out_dtype": NONE,
        "scope": "build",
        "unit": "ms",
        "config": config,
        "config_sha": NONE,
    }
    num_edges = loaded.meta.num_edges
    too_many = max_edges is not None and num_edges > max_edges
    for build in builds(device):
        columns = {**shared, "backend": build.backend, "metric": build.metric}
        if too_many:
            reason = f"left out: {num_edges:,} edges, and at most {max_edges:,} were asked for on this device"
            yield Row(**columns, **NOT_MEASURED, status="unavailable", reason=reason)
            continue
        try:
            spread = time_build(partial(build.run, pattern_on(device, loaded)), device)
        except Exception as error:  # whatever it is, the others go on
            status, reason = classify(error)
            yield Row(**columns, **NOT_MEASURED, status=status, reason=reason)
            continue
        note = "from CSR on the device; wall clock, synchronised"
        yield Row(**columns, **spread.columns(), status="unchecked", note=note)


def time_build(build: Callable[[], Any], device: torch.device) -> Spread:
    """Milliseconds of `build()` by the clock: on a GPU after one that compiles, and until the GPU has finished."""
    if device.type == "cuda":
        build()
        torch.cuda.synchronize()
    milliseconds: list[float] = []
    while len(milliseconds) < REPEATS and sum(milliseconds) < SECONDS * 1e3:
        start = time.perf_counter()
        build()
        if device.type == "cuda":
            torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return Spread.of(milliseconds)
