"""Measure what the GPU at hand does at most: copy, random gathers of K and V rows, mma.sync. See bench/peak_rates.py.

    python scripts/roofline.py --results results/h200/roofline.csv

Ceilings that the file already holds are not measured again. Exit status: 0, 1 if one failed, or 2 for anything that
stopped the run.
"""

from pathlib import Path

import clone  # noqa: F401, stands first
import typer
from rich.progress import track
from rich.table import Table
from rich.text import Text

from bench import append_rows, check_results_file, provenance
from bench import cli as script
from bench.peak_rates import ceilings, measure_ceiling
from bench.terminal import console
from report.roofline import Ceilings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: script.Results = Path("results/local/roofline.csv"),  # ignored by git
    again: script.Again = False,
) -> None:
    """Measure the ceilings of the GPU at hand."""
    with script.user_errors():
        check_results_file(results)
        device = script.gpu("ceilings are an NVIDIA GPU's")
        environment = provenance(device)
        before = script.recorded(results)
        finished = set() if again else {key(row.model_dump()) for row in before if row.status == "ok"}
        wanted = [one for one in ceilings(device) if key(one.columns | {"device": environment.device}) not in finished]
        rows = []
        for ceiling in track(wanted, "measuring", console=console, auto_refresh=False):
            rows.append(measure_ceiling(ceiling, environment, device))
            append_rows(results, rows[-1:])
    print_table(Ceilings.of([*before, *rows], environment.device))
    failed = [row for row in rows if row.status != "ok"]
    problems = [f"{row.dataset} {row.backend}, {row.nodes} rows, d = {row.dim}: {row.reason}" for row in failed]
    script.print_end(f"run {environment.run_id}, {len(rows)} rows,", results, problems)
    raise typer.Exit(1 if failed else 0)


def key(columns: dict) -> tuple:
    """What tells one ceiling from another."""
    return tuple(columns[name] for name in ("dataset", "backend", "nodes", "nnz", "dim", "device"))


def print_table(found: Ceilings) -> None:
    table = Table("K and V, MiB", *(f"{size}-byte rows, TB/s" for size in sorted(found.gather)), title=found.device)
    sizes = sorted({size for working_sets, _ in found.gather.values() for size in working_sets})
    for size in sizes:
        rates = [f"{found.gather_rate(row_bytes, size) / 1e9:.2f}" for row_bytes in sorted(found.gather)]
        table.add_row(f"{size / 2**20:.0f}", *rates)
    console.print(table)
    for what, rate, unit in (("copy", found.copy, "TB/s, read and written"), ("mma.sync", found.mma, "TFLOP/s")):
        console.print(Text(f"{what:<12} " + ("not measured" if rate is None else f"{rate / 1e9:.2f} {unit}")))


if __name__ == "__main__":
    app()
