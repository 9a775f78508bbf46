"""Measure what naive, stable and online softmax lose in fp16 and fp32, over ranges of scores.

    python scripts/stability.py --results results/h200/stability.csv

Without a GPU only the emulations run. A range that the file already holds from this device is not measured again. Exit
status: 0, or 2 for anything that stopped the run.
"""

from pathlib import Path

import clone  # noqa: F401, stands first
import typer
from rich.progress import track
from rich.table import Table

from bench import append_rows, check_results_file, provenance
from bench import cli as script
from bench.records import Row
from bench.softmax_stability import all_scores, measure_scores
from bench.terminal import console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: script.Results = Path("results/local/stability.csv"),  # ignored by git
    again: script.Again = False,
) -> None:
    """Measure the errors of the softmaxes."""
    with script.user_errors():
        check_results_file(results)
        device = script.devices()[0]
        environment = provenance(device)
        finished = {row.dataset for row in script.recorded(results, again) if row.device == environment.device}
        rows = []
        wanted = [scores for scores in all_scores(device) if scores.name not in finished]
        for scores in track(wanted, "measuring", console=console, auto_refresh=False):
            measured = list(measure_scores(scores, environment))
            append_rows(results, measured)
            rows += measured
    print_table(rows)
    script.print_end(f"run {environment.run_id}, {len(rows)} rows,", results)


def print_table(rows: list[Row]) -> None:
    """The median error, a line for each range; "-" where no row is finite."""
    rows = [row for row in rows if row.metric == "relative_error"]
    columns = list(dict.fromkeys((row.backend, row.dtype) for row in rows))
    cells = {(row.dataset, row.backend, row.dtype): row for row in rows}
    table = Table("scores", *(f"{backend}\n{dtype}" for backend, dtype in columns))
    for dataset in dict.fromkeys(row.dataset for row in rows):
        line = [cells.get((dataset, *column)) for column in columns]
        table.add_row(dataset, *("-" if row is None or row.value is None else describe(row) for row in line))
    console.print(table)


def describe(row: Row) -> str:
    finite = f" ({row.repeats / row.nodes:.0%})" if row.repeats < row.nodes else ""
    return f"{row.value:.1e}{finite}"


if __name__ == "__main__":
    app()
