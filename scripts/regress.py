"""Measure some of the recorded times again on this GPU, and fail if one has become longer. `make regress`.

    python scripts/regress.py [--limit 5] [--reference DIR] [--root datasets] [--record]

configs/regress.yaml names the cells; their times are compared with those of a GPU of the same name in the CSVs below
DIR. A time counts if it is of `fused3s` and the host has little part in it: kernels back to back, CUDA graphs, and the
time in which an eager step kept the GPU busy. A time over the limit is measured once more, and the shorter one counts.
New rows go to results/local/regress. For a GPU without recorded rows `--record` measures all cells into
results/local/reference, once, and `--reference results/local/reference` compares with them.

Exit status: 0; 1 if a time is over the limit or a case failed; 3 if a graph could not be loaded, and the others are
within the limit; 2 if there is no GPU or nothing to compare with, or if anything else stopped the run.
"""

import math
import statistics
import sys
from collections.abc import Collection, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import torch
import typer
from rich.table import Table
from rich.text import Text

import fused3s
from bench.measures import MEASURES
from bench.runner import Case, DeviceLostError, devices, run_bench
from common import cli
from common.cli import console
from common.provenance import device_name
from common.records import Row, check_results_file, read_rows
from configs import load_config
from configs.bench import BenchConfig
from configs.load import parse_yaml
from report.rows import IDENTITY, measurement_files

ROOT = Path(__file__).resolve().parent.parent
NEW, OWN = Path("results/local/regress"), Path("results/local/reference")
PARTS: list[dict[str, Any]] = parse_yaml((ROOT / "configs" / "regress.yaml").read_text(encoding="utf-8"))
OURS = ("fused3s", "auto")  # auto: of layers
Times = dict[tuple, Row]  # by `report.rows.IDENTITY`
Cell = tuple[str, str]  # benchmark, and graph or workload

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    limit: Annotated[float, typer.Option(min=0, help="Percent by which a time may be longer.")] = 5.0,
    reference: Annotated[Path, typer.Option(help="Folder of the recorded CSVs.")] = Path("results"),
    root: Annotated[str, typer.Option(help="Folder of the data sets.")] = "datasets",
    record: Annotated[bool, typer.Option("--record", metavar="", help="Measure all cells; compare nothing.")] = False,
) -> None:
    """Measure some of the recorded times again, and fail if one has become longer."""
    with cli.user_errors(fused3s.BackendUnavailableError, DeviceLostError):
        cli.configure_logging("data")
        device = devices()[0]
        if device.type != "cuda":
            raise fused3s.BackendUnavailableError("times are compared on an NVIDIA GPU, and none was found here")
        if record:
            raise typer.Exit(measured(device, root, OWN)[1])
        old = recorded_times(reference, device_name(device))
        cells = {cell_of(row) for row in old.values()}
        new, status = measured(device, root, NEW, cells)
        most = 1 + limit / 100
        if slow := {key for key in new.keys() & old.keys() if most < ratio(new[key], old[key]) < math.inf}:
            console.print(Text(f"once more: {len(slow)} times are over the limit of {limit:g} %"))
            again, second = measured(device, root, NEW, {cell_of(new[key]) for key in slow})
            status = 1 if second == 1 else status
            for key in slow & again.keys():
                if ratio(again[key], new[key]) < 1:
                    new[key] = again[key]
        if not report(new, old, most):
            status = 1
    raise typer.Exit(status)


def recorded_times(folder: Path, device: str) -> Times:
    """The times of a GPU in the CSVs below a folder, each the latest.

    Raises:
        ValueError: there is none.
    """
    rows = [row for path in measurement_files(folder) if path.stem in MEASURES for row in read_rows(path)]
    found = times(sorted((row for row in rows if row.device == device), key=lambda row: row.date))
    if not found:
        others = ", ".join(sorted({row.device for row in rows if row.device_type == "cuda"})) or "no GPU"
        raise ValueError(
            f"{folder}: holds no times of a {device} (but of {others}); --record measures those of this GPU, and "
            f"--reference {OWN} compares with them later"
        )
    return {key: row for key, row in found.items() if not failed(row)}


def measured(device: torch.device, root: str, folder: Path, cells: Collection[Cell] | None = None) -> tuple[Times, int]:
    """New times of these cells, by default all of `PARTS`, whose rows go to `folder`; and NOT_LOADED if a graph could
    not be loaded, 1 if a case failed, else 0."""
    rows: list[Row] = []
    statuses = {0}
    for part in PARTS:
        given = [*part["set"], f"root={root}"]
        settings = load_config(ROOT / part["config"], given, schema=BenchConfig)
        names = [name for name in settings.names if cells is None or (settings.measure, name) in cells]
        if not names:
            continue
        settings = load_config(ROOT / part["config"], [*given, f"graphs=[{', '.join(names)}]"], schema=BenchConfig)
        file = folder / f"{settings.measure}.csv"
        check_results_file(file)
        before = len(read_rows(file))
        measure = MEASURES[settings.measure]
        statuses.add(run_bench(measure, settings, Path(part["config"]), file, device, again=True))
        rows += read_rows(file)[before:]
    return times(rows), 1 if 1 in statuses else max(statuses)


def times(rows: Iterable[Row]) -> Times:
    """Times of `fused3s` on the GPU, and failures, by what identifies a row; later ones replace earlier ones."""
    launches = ("back_to_back", "cuda_graph")
    return {
        tuple(getattr(row, name) for name in IDENTITY): row
        for row in rows
        if row.backend in OURS
        and (failed(row) or row.metric == "gpu_busy" or (row.metric == "time" and row.launch in launches))
    }


def cell_of(row: Row) -> Cell:
    return row.bench, row.variant if row.bench == "layers" else row.dataset


def failed(row: Row) -> bool:
    return row.status not in ("ok", "unchecked")


def ratio(new: Row, old: Row) -> float:
    return math.inf if failed(new) else new.value / old.value


def report(new: Times, old: Times, most: float) -> bool:
    """Print a table of recorded and new times; whether no ratio is above `most`.

    Raises:
        ValueError: no new time has a recorded one.
    """
    pairs = sorted(((row, old[key]) for key, row in new.items() if key in old), key=lambda pair: -ratio(*pair))
    if not pairs:
        raise ValueError("no time that was measured has a recorded one; were the graphs loaded?")
    table = Table("benchmark", "data set", "case", "type", "recorded, ms", "commit", "now, ms", "ratio")
    for row, before in pairs:
        case = Case(**{each.name: getattr(row, each.name) for each in fields(Case)})
        now = cli.outcome(row) if failed(row) else f"{row.value:.4g}"
        cells = (row.bench, row.dataset, case.description, row.dtype, f"{before.value:.4g}", before.commit[:7], now)
        table.add_row(*map(Text, (*cells, f"{ratio(row, before):.3f}")))
    console.print(table)
    ratios = [ratio(*pair) for pair in pairs]
    over = sum(one > most for one in ratios)
    mean = f"; geometric mean of the ratios {statistics.geometric_mean(ratios):.3f}" if max(ratios) < math.inf else ""
    console.print(Text(f"{len(pairs)} times, {over} over the limit{mean}"))
    return not over


if __name__ == "__main__":
    app()
