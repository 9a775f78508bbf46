"""Time one attention kernel, without a model around it, and append the measurements to the results CSV.

    python scripts/bench_kernels.py cora pubmed --backend fused3s_paper --dim 128 --results results/kernels.csv

The inputs are normal random numbers, the scores unscaled as in the paper. Each output is compared with float64, every
row, before its time is kept. The kernel is timed in CUDA graphs of several launches, L2 warm. Exit status: 0, or 1 if
an output was wrong, or 2 for anything that stopped the run.
"""

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

# Run as a file, Python looks for modules in scripts/; the packages are folders of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

import data
import kernels
from kernels.backends.reference import edge_softmax_attention
from results import append_rows, check_results_file
from results.measure import Spread, time_graph_replays
from results.provenance import Provenance, provenance
from results.records import Row

BUILDS = 11  # the first one warms up
ALLOWED_ERROR = {"float16": 2e-3, "bfloat16": 1.6e-2}  # of a row, relative in norm: about two roundings of E

console = Console(highlight=False, soft_wrap=True)


class DType(StrEnum):
    float16 = "float16"
    bfloat16 = "bfloat16"


class OutDType(StrEnum):
    float32 = "float32"
    input = "input"


def main(
    names: Annotated[list[str], typer.Argument(help="Data sets: registered names, or NAME for ROOT/NAME.npz.")],
    root: Annotated[Path, typer.Option(help="Folder of the data sets.")] = Path("datasets"),
    source: Annotated[str, typer.Option(help="auto, official, file or synthetic.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Graphs of a batch.")] = 1024,
    backend: Annotated[str, typer.Option(help="Attention back end.")] = "fused3s_paper",
    dim: Annotated[int, typer.Option(help="Dimensions of a head.")] = 128,
    dtype: Annotated[DType, typer.Option(help="Type of q, k and v.")] = DType.float16,
    out_dtype: Annotated[OutDType, typer.Option(help="Type of the output.")] = OutDType.float32,
    repeats: Annotated[int, typer.Option(min=30, help="Timed CUDA graph replays.")] = 50,
    results: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("results/local/kernels.csv"),
) -> None:
    """Time one attention kernel on some data sets."""
    try:
        check_results_file(results)
        if not torch.cuda.is_available():
            raise kernels.BackendUnavailableError("kernels are timed on an NVIDIA GPU, and none was found")
        setting = {"backend": backend, "dim": dim, "dtype": dtype.value, "repeats": repeats}
        setting["out_dtype"] = "float32" if out_dtype is OutDType.float32 else dtype.value
        environment = provenance(torch.device("cuda"))
        table = Table("data set", "nnz", "kernel ms", "p10", "p90", "error", "format build ms")
        wrong = False
        for name in track(names, "timing", console=console, disable=not console.is_terminal):
            loaded = data.load(name, root=root, source=source, batch_size=batch_size)
            kernel, build = measure(loaded, environment, **setting)
            append_rows(results, [kernel, build])
            wrong |= kernel.status == "wrong"
            label = name if kernel.data_source != "synthetic" else f"{name} (synthetic)"
            times = [f"{x:.4f}" for x in (kernel.value, kernel.p10, kernel.p90)]
            table.add_row(label, f"{kernel.nnz:,}", *times, f"{kernel.relative_error:.1e}", f"{build.value:.2f}")
    except (ValueError, OSError, kernels.BackendUnavailableError, data.DatasetMissingError) as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}"))
        raise typer.Exit(2) from error
    console.print(table)
    console.print(Text(f"appended to {results}"))
    raise typer.Exit(wrong)


def measure(
    loaded: data.LoadedGraph,
    environment: Provenance,
    *,
    backend: str,
    dim: int,
    dtype: str,
    out_dtype: str,
    repeats: int,
) -> tuple[Row, Row]:
    """Rows for the kernel's time and for the time to build the format on the GPU, on one graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch_dtype, torch_out = getattr(torch, dtype), getattr(torch, out_dtype)
    graph = loaded.graph
    plan = kernels.plan_attention(graph, backend=backend, device=device, dtype=torch_dtype, head_dim=dim)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(graph.num_nodes(), dim, generator=generator, device=device).to(torch_dtype) for _ in range(3)
    )

    def run() -> torch.Tensor:
        return plan(q, k, v, scale=1.0, out_dtype=torch_out)

    key, query = (ends.to(device) for ends in graph.edges())
    expected = edge_softmax_attention(q[:, None], k[:, None], v[:, None], query, key, 1.0)[:, 0]
    error = largest_row_error(run(), expected)
    del expected
    allowed = ALLOWED_ERROR[dtype]
    checked: dict[str, Any] = {"status": "ok", "relative_error": error}
    if not error <= allowed:  # NaN is wrong too
        checked |= {"status": "wrong", "reason": f"relative error {error:.1e} of a row, allowed {allowed:.1e}"}
    meta = loaded.meta
    shared = {
        **environment.model_dump(),
        "dataset": meta.name,
        "data_sha256": meta.sha256,
        "data_source": meta.source,
        "nodes": meta.num_nodes,
        "nnz": meta.num_edges,
        "graphs": meta.num_graphs,
        "dim": dim,
        "heads": 1,
        "blocks": 0,
        "dtype": dtype,
        "out_dtype": out_dtype,
        "backend": plan.backend,
        "metric": "time",
        "unit": "ms",
        "config": "scripts/bench_kernels.py",
        "config_sha": "none",
    }

    def row(scope: str, spread: Spread, note: str, **check: Any) -> Row:
        numbers = {"value": spread.median, "p10": spread.p10, "p90": spread.p90, "repeats": spread.repeats}
        return Row(scope=scope, note=note, **numbers, **check, **shared)

    kernel = row("kernel", time_graph_replays(run, repeats=repeats), "CUDA graph replays; L2 warm; scale 1", **checked)
    build_note = "CSR on the GPU to BSB, tile (16, 8); wall clock, synchronised"
    return kernel, row("build", time_builds(graph, device), build_note, status="unchecked")


def largest_row_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest norm of a row's difference over the norm of the row; a row that should be 0 must be 0."""
    difference, size = (output.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    return torch.where(size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf)).max().item()


def time_builds(graph: Any, device: torch.device) -> Spread:
    """Milliseconds to build BSB from CSR arrays that are on the GPU."""
    indptr, indices, _ = (array.to(device) for array in graph.adj_tensors("csc"))
    milliseconds = []
    for _ in range(BUILDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kernels.BSB.from_csr(indptr, indices)
        torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return Spread.of(milliseconds[1:])


if __name__ == "__main__":
    typer.run(main)
