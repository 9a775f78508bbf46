"""Measure the errors of naive, stable and online softmax in fp16 and fp32, over ranges of scores.

    python scripts/stability.py --results results/h200/stability.csv

Without a GPU only the emulations run. Rows that the file already holds are not measured again. Exit status: 0, or 2 if
anything stopped the run.
"""

from pathlib import Path

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer
from rich.progress import track
from rich.table import Table

from bench import cli, runner
from bench.provenance import provenance
from bench.records import Row, append_rows, check_results_file
from bench.softmax_stability import all_scores, measure_scores

INPUTS = ("scores", "score_range", "nodes", "nnz")  # columns that tell one measurement's inputs from another's

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: cli.Results = Path("results/local/stability.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Measure the errors of the softmaxes."""
    with runner.user_errors(results):
        check_results_file(results)
        device = runner.devices()[0]
        environment = provenance(device)
        runner.print_warnings(environment)
        before = (row for row in runner.recorded(results, again) if row.device == environment.device)
        done = {tuple(getattr(row, name) for name in INPUTS) for row in before}
        rows = []
        every = {tuple(scores.row_columns()[name] for name in INPUTS): scores for scores in all_scores(device)}
        wanted = [scores for inputs, scores in every.items() if inputs not in done]
        for scores in track(wanted, "measuring", console=cli.console, auto_refresh=False):
            measured = list(measure_scores(scores, environment))
            append_rows(results, measured)
            rows += measured
    print_table(rows)
    cli.print_end(f"run {environment.run_id}, {len(rows)} rows,", results)


def print_table(rows: list[Row]) -> None:
    """A line per softmax or kernel and type: how many ranges lose no row, and the median errors there."""
    table = Table("backend", "variant", "type", "ranges without a lost row", "least error", "largest error")
    series: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.metric == "relative_error":
            series.setdefault((row.backend, row.variant, row.dtype), []).append(row)
    for name, measured in series.items():
        errors = [row.value for row in measured if row.status == "ok"]
        ends = (f"{min(errors):.1e}", f"{max(errors):.1e}") if errors else ("", "")
        table.add_row(*name, f"{len(errors)} of {len(measured)}", *ends)
    cli.console.print(table)


if __name__ == "__main__":
    app()
