"""Measure the errors of naive, stable and online softmax in fp16 and fp32, over ranges of scores.

    python scripts/stability.py --results results/h200/stability.csv

Without a GPU only the emulations run. Rows that the file already holds are not measured again. Exit status: 0, or 2 if
anything stopped the run.
"""

from pathlib import Path

import clone  # noqa: F401, stands first
import typer
from rich.progress import track
from rich.table import Table

from bench import cli, runner
from bench.provenance import provenance
from bench.records import Row, append_rows, check_results_file
from bench.softmax_stability import all_scores, measure_scores

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: cli.Results = Path("results/local/stability.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Measure the errors of the softmaxes."""
    with cli.user_errors(*runner.USER_ERRORS):
        check_results_file(results)
        device = runner.devices()[0]
        environment = provenance(device)
        before = (row for row in runner.recorded(results, again) if row.device == environment.device)
        done = {(row.scores, row.score_range) for row in before}
        rows = []
        wanted = [scores for scores in all_scores(device) if (scores.family, scores.size) not in done]
        for scores in track(wanted, "measuring", console=cli.console, auto_refresh=False):
            measured = list(measure_scores(scores, environment))
            append_rows(results, measured)
            rows += measured
    print_table(rows)
    cli.print_end(f"run {environment.run_id}, {len(rows)} rows,", results)


def print_table(rows: list[Row]) -> None:
    """The median error, one line per range; "-" where no row is finite."""
    rows = [row for row in rows if row.metric == "relative_error"]
    columns = list(dict.fromkeys((row.backend, row.variant, row.dtype) for row in rows))
    cells = {(row.scores, row.score_range, row.backend, row.variant, row.dtype): row for row in rows}
    table = Table("scores", *("\n".join(column).replace("\nnone", "") for column in columns))
    for scores in dict.fromkeys((row.scores, row.score_range) for row in rows):
        line = [cells.get((*scores, *column)) for column in columns]
        name = " ".join(map(str, scores))
        table.add_row(name, *("-" if row is None or row.value is None else describe(row) for row in line))
    cli.console.print(table)


def describe(row: Row) -> str:
    finite = f" ({row.repeats / row.nodes:.0%})" if row.repeats < row.nodes else ""
    return f"{row.value:.1e}{finite}"


if __name__ == "__main__":
    app()
