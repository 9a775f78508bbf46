"""Time whole forward passes of the Graph Transformer and append the measurements to the results CSV.

    python scripts/bench_end_to_end.py --config configs/end_to_end/single.yaml [--set section.key=value ...]
        [--results FILE]

Every output is compared with a reference in the same precision before its time is kept. What runs out of memory, cannot
be run in that way or fails gets a row that says so. Cells that the file already holds are not measured again. Exit
status: 0, or 1 if an output was wrong or a cell failed, or 2 for anything that stopped the run or kept a graph from
being loaded.
"""

import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated

# Run as a file, Python looks for modules in scripts/; the packages are folders of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import data
import kernels
from configs import load_config
from configs.end_to_end_schema import EndToEndConfig
from results import append_rows, check_results_file, provenance
from results.end_to_end import Cell, CellKey, GraphBench, finished_cells
from results.kernel_bench import DeviceLostError
from results.progress import progress
from results.records import Row, read_rows

DEFAULT_RESULTS = Path("results/local/end_to_end.csv")  # ignored by git
# What a user can mend: shown as a short message.
USER_ERRORS = (ValueError, OSError, kernels.BackendUnavailableError, DeviceLostError)

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/end_to_end/single.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; may be repeated.")
    ] = None,
    results: Annotated[Path, typer.Option(help="CSV to append to.")] = DEFAULT_RESULTS,
    again: Annotated[bool, typer.Option("--again", help="Measure also what the CSV already holds.")] = False,
) -> None:
    """Time whole forward passes on some graphs."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("data").setLevel(logging.INFO)
    try:
        settings = load_config(config, overrides or [], EndToEndConfig)
        check_results_file(results)  # a long run must not end in a file that cannot be written
        if not torch.cuda.is_available():
            raise kernels.BackendUnavailableError("models are timed on an NVIDIA GPU, and none was found")
        finished = finished_cells(read_rows(results)) if results.exists() and not again else set()
        status = bench(settings, config, results, finished, torch.device("cuda", torch.cuda.current_device()))
    except USER_ERRORS as error:
        errors.print(Text(f"error: {error}"))
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def bench(config: EndToEndConfig, path: Path, results: Path, finished: set[CellKey], device: torch.device) -> int:
    """Measure all cells that are not finished; the exit status."""
    console.print(Text(describe_config(path, config)))
    environment = provenance(device)
    table = Table("data set", "dim", "back end", "mode", "dtype", "model ms", "attention", "error", "MiB", "status")
    seen, skipped, not_loaded = set(), 0, []
    cells = config.run.cells_of_a_width * len(config.model.dims)
    with progress(console, cells * len(config.data.names)) as advance:
        for name in config.data.names:
            advance(name, 0)
            try:
                where = config.data
                loaded = data.load(name, root=where.root, source=where.source, batch_size=where.batch_size)
            except (data.DatasetMissingError, ValueError, OSError, MemoryError) as error:  # the other graphs go on
                not_loaded.append(f"{name}: {error}")
                advance(f"{name}: not loaded", cells)
                continue
            for cell, rows in GraphBench(loaded, config, str(path), environment, device).measure(finished):
                advance(describe_cell(name, cell, rows), 1)
                if not rows:
                    skipped += 1
                    continue
                append_rows(results, rows)
                seen.add(rows[0].status)
                table.add_row(*table_cells(cell, rows))
    console.print(table)
    if skipped:
        console.print(Text(f"skipped      {skipped}: {results} holds them already (--again measures them anew)"))
    console.print(Text(f"results      run {environment.run_id} in {results}"))
    console.print(Text(f"to repeat    {shlex.join(['python', *sys.argv])}"))
    for problem in not_loaded:
        errors.print(Text(f"error: {problem}"))
    if not_loaded:
        return 2
    return 1 if seen & {"wrong", "error"} else 0


def describe_config(path: Path, config: EndToEndConfig) -> str:
    """The resolved configuration, a line for each section."""
    sections = config.model_dump(mode="json").items()
    return "\n".join(
        [str(path), *(f"  {name:<8} " + " ".join(f"{k}={v}" for k, v in s.items()) for name, s in sections)]
    )


def describe_cell(name: str, cell: Cell, rows: list[Row]) -> str:
    outcome = "measured before"
    if rows:
        outcome = rows[0].status if rows[0].status == "ok" else f"{rows[0].status}: {rows[0].reason}"
    return f"{name} d={cell.dim} {cell.backend} {cell.mode}: {outcome}"


def table_cells(cell: Cell, rows: list[Row]) -> list[Text]:
    """A line of the final table."""
    by_metric = {(row.scope, row.metric): row for row in rows}
    first = rows[0]

    def shown(scope: str, metric: str, form: str) -> str:
        row = by_metric.get((scope, metric))
        return "" if row is None or row.value is None else format(row.value, form)

    error = "" if first.relative_error is None else f"{first.relative_error:.1e}"
    label = first.dataset if first.data_source != "synthetic" else f"{first.dataset} (synthetic)"
    times = [shown("model", "time", ".3f"), shown("attention", "time", ".3f")]
    memory = shown("model", "peak_memory", ",.0f")
    line = (label, str(first.dim), first.backend, cell.mode, first.dtype, *times, error, memory, first.status)
    return [Text(text) for text in line]


if __name__ == "__main__":
    app()
