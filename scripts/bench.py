"""Run a benchmark and append its measurements to DIR/<measure>.csv, whose runs are in DIR/runs.csv.

    python scripts/bench.py --config configs/bench/single.yaml [--set key=value ...] [--results DIR] [--again]
    torchrun --nproc-per-node 2 scripts/bench.py --config configs/bench/parallel.yaml   # each rank on a GPU of its own

Every output is compared with a reference before its time is kept. A case that runs out of memory, is not supported or
fails gets a row with a status, and the others go on. Cases that the file already holds for the same device, versions
and sources are not measured again. Exit status: 0; 1 if an output was wrong or a case failed; 3 if a graph could not be
loaded, and the others were measured; 2 if anything else stopped the run.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import typer

import fused3s
from bench.measures import MEASURES
from bench.runner import DeviceLostError, device_of, run_bench
from common import cli
from common.launch import RankError, error_text, is_first_process, is_launched
from common.records import check_results_file
from configs import load_config
from configs.bench import BenchConfig
from parallel import ranks

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/bench/single.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value; may be repeated.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the CSVs to append to.")] = Path("results/local"),
    again: Annotated[bool, typer.Option("--again", help="Repeat measurements that the CSV already holds.")] = False,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where to measure.")] = "auto",
) -> None:
    """Run a benchmark."""
    cli.console.quiet = not is_first_process()
    kinds = (fused3s.BackendUnavailableError, DeviceLostError, RankError)
    kept = f"rows of what was finished are in {results}; the same command measures the rest"
    with cli.user_errors(*kinds, explain=error_text, kept=lambda: kept):
        cli.configure_logging(*([] if cli.console.quiet else ["data"]))
        settings = load_config(config, overrides or [], schema=BenchConfig)
        file, measure = results / f"{settings.measure}.csv", MEASURES[settings.measure]
        check_results_file(file)
        if not is_launched():
            raise typer.Exit(run_bench(measure, settings, config, file, device_of(measure, device), again))
        if settings.measure != "parallel":
            raise ValueError(f"measure = {settings.measure!r}: torchrun is for measure = 'parallel' alone")
        with ranks(device) as group:
            status = run_bench(measure, settings, config, file, group.device, again, group)
        raise typer.Exit(status)


if __name__ == "__main__":
    app()
