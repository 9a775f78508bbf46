"""Measure peak rates of the GPU: copy, random gathers of K and V rows, mma.sync. See bench/peak_rates.py.

    python scripts/peak_rates.py --results results/h200/peak_rates.csv

Micro-benchmarks that the file already holds are not measured again. Exit status: 0; 1 if one failed; 2 if anything
else stopped the run.
"""

from pathlib import Path

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text

from bench import cli, runner
from bench.peak_rates import measure, micro_benchmarks
from bench.provenance import provenance
from bench.records import append_rows, check_results_file, finished, key
from report.derived import PeakRates
from report.rows import frame

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: cli.Results = Path("results/local/peak_rates.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Measure the peak rates of the GPU."""
    with runner.user_errors(results):
        check_results_file(results)
        device = runner.gpu("peak rates are measured on an NVIDIA GPU")
        environment = provenance(device)
        runner.print_warnings(environment)
        before = runner.recorded(results, again)
        done = finished(before, ("ok",))
        wanted = [one for one in micro_benchmarks(device) if key(one.row_columns(environment)) not in done]
        rows = []
        for benchmark in track(wanted, "measuring", console=cli.console, auto_refresh=False):
            rows.append(measure(benchmark, environment, device))
            append_rows(results, rows[-1:])
    print_table(PeakRates.of(frame([*before, *rows]), environment.device))
    failed = [row for row in rows if row.status != "ok"]
    problems = [f"{row.backend} {row.variant}, {row.working_set} bytes, d = {row.dim}: {row.reason}" for row in failed]
    cli.print_end(f"run {environment.run_id}, {len(rows)} rows,", results, problems)
    raise typer.Exit(1 if failed else 0)


def print_table(found: PeakRates) -> None:
    gather = found.gather / 1e9
    table = Table("K and V, MiB", *(f"{size}-byte rows, TB/s" for size in gather.columns), title=found.device)
    for working_set, rates in gather.iterrows():
        table.add_row(f"{working_set / 2**20:.0f}", *(f"{rate:.2f}" for rate in rates))
    cli.console.print(table)
    for name, rate, unit in (("copy", found.copy, "TB/s, read and written"), ("mma.sync", found.mma, "TFLOP/s")):
        cli.console.print(Text(f"{name:<12} " + ("not measured" if rate is None else f"{rate / 1e9:.2f} {unit}")))


if __name__ == "__main__":
    app()
