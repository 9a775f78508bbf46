"""Run steps of each layer, each with a new graph, and fail if memory grew. `make soak`.

    python scripts/soak.py [--steps 20000] [--only GATConv ...] [--edges 4000 ...] [--processes 16] [--output DIR]

Memory is read after 100, 1,000 and all steps; from the first reading on it may grow by one graph on the GPU (on a CPU:
in tensors that Python holds), and by the noise that bench/soak.py states in memory of the process, Python objects and
entries of the package's caches. Readings go to DIR/soak.csv.

Exit status: 0; 1 if memory grew or a case failed; 2 if anything else stopped the run.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import typer
from rich.table import Table
from rich.text import Text

import fused3s
from bench.runner import devices
from bench.soak import HOST_NOISE, ON_CPU, ON_GPU, Soaked, marks_of, rows_of, run_cases, soak_cases
from common import cli
from common.cli import console
from common.provenance import provenance
from common.records import append_rows, check_results_file

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[int | None, typer.Option(min=4, help=f"Of a case: {ON_GPU:,} on a GPU, else {ON_CPU:,}.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Part of a case LAYER/MODE/LAUNCH/EDGES; repeatable.")] = None,
    edges: Annotated[list[int] | None, typer.Option(min=2, help="Most edges of a graph; may be repeated.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Side by side; the cores, up to 16.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of a CSV soak.csv to append to.")] = None,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where to run.")] = "auto",
) -> None:
    """Run steps of each layer, each with a new graph, and fail if memory grew."""
    with cli.user_errors(fused3s.BackendUnavailableError):
        found = devices()
        on = found[-1] if device == "cpu" else found[0]
        if device == "cuda" and on.type != "cuda":
            raise fused3s.BackendUnavailableError("--device cuda: no NVIDIA GPU was found")
        file = None if output is None else output / "soak.csv"
        if file is not None:
            check_results_file(file)
        wanted = soak_cases(only or (), edges or ())
        cases = [case for case in wanted if on.type == "cuda" or not case.needs_gpu]
        if not cases:
            raise fused3s.BackendUnavailableError(f"these {len(wanted)} cases need an NVIDIA GPU, and none was found")
        steps = steps or (ON_GPU if on.type == "cuda" else ON_CPU)
        processes = min(processes or min(16, os.cpu_count() or 1), len(cases))
        environment = provenance(on)
        console.print(Text(f"{len(cases)} cases of {steps:,} steps on {environment['device']}, processes: {processes}"))
        if without := len(wanted) - len(cases):
            console.print(Text(f"left out: {without} that need a GPU"))
        results: list[Soaked] = []
        with cli.progress(len(cases)) as advance:
            for one in run_cases(cases, steps, on, processes):
                results.append(one)
                advance(f"{one.case}: {verdict(one)}", 1)
                if file is not None:
                    append_rows(file, rows_of(one, environment))
        console.print(table(sorted(results, key=lambda one: cases.index(one.case)), steps))
        bad = [one for one in results if one.error or one.grown]
        console.print(Text(f"memory grew or an error came in {len(bad)} of {len(results)} cases"))
        console.print(Text(f"to repeat    {cli.repeat_command()}"))
    raise typer.Exit(1 if bad else 0)


def verdict(found: Soaked) -> str:
    return found.error or ("grew: " + ", ".join(found.grown) if found.grown else "ok")


def table(results: list[Soaked], steps: int) -> Table:
    """A line for each case: memory at each reading, growth from the first on, and the verdict."""
    marks = [f"{mark:,}" for mark in marks_of(steps)]
    found = Table(
        *("layer", "mode", "launch", "edges", *(f"KiB after {mark}" for mark in marks), "may grow by, KiB"),
        *("process, MiB more", "pinned, KiB more", "objects more", "cache entries more", "seconds", "verdict"),
        title=f"memory of tensors; the process may grow by {HOST_NOISE >> 20} MiB",
    )
    for one in results:
        case = one.case
        read = [f"{each.allocated / 1024:.1f}" for each in one.readings]
        growth = [one.growth(name) for name in ("host", "pinned", "objects", "entries")] if one.readings else []
        cells = [f"{growth[0] / 2**20:.1f}", f"{growth[1] / 1024:.1f}", *map(str, growth[2:])] if growth else [""] * 4
        found.add_row(
            *(case.layer, case.mode, case.launch, str(case.edges), *read, *[""] * (len(marks) - len(read))),
            *(f"{case.graph_bytes / 1024:.1f}", *cells, f"{one.seconds:.1f}", Text(verdict(one))),
        )
    return found


if __name__ == "__main__":
    app()
