"""Time attention of one graph on several GPUs and append the measurements to the results CSV. See bench/parallel.py.

    python scripts/bench_parallel.py --config configs/parallel_bench/single.yaml [--set section.key=value ...]
        [--results FILE]                                          # one GPU: the parts of each rank, one by one
    torchrun --nproc-per-node 2 scripts/bench_parallel.py ...     # 1 rank against 2, each on a GPU of its own

Exit status: 0; 1 if an output was wrong; 2 for any error.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import torch
import typer
from rich.table import Table
from rich.text import Text

import kernels
from bench import cli
from bench.cli import console
from bench.parallel import Subject, measure_on_ranks, measure_parts
from bench.records import Row, append_rows, check_results_file
from bench.runner import devices
from configs import load_config
from configs.bench_schema import Shape
from configs.parallel_bench_schema import ParallelBenchConfig
from data import LoadedGraph
from parallel import (
    Group,
    RankError,
    error_text,
    is_first_process,
    is_launched,
    load_part,
    on_first_rank,
    partition_graph,
    ranks,
    source_from_csr,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/parallel_bench/single.yaml.")],
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/parallel.csv"),  # ignored by git
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
) -> None:
    """Time attention of one graph on several GPUs."""
    console.quiet = not is_first_process()
    kinds = (*cli.USER_ERRORS, kernels.BackendUnavailableError, RankError)
    with cli.short_errors(*kinds, explain=error_text):
        cli.configure_logging(*([] if console.quiet else ["data"]))
        settings = load_config(config, overrides or [], ParallelBenchConfig)
        check_results_file(results)
        if is_launched():
            with ranks(device) as group:
                found = list(measure(settings, config, results, group.device, group))
        else:
            place = devices()[0] if device == "auto" else torch.device(device)
            found = list(measure(settings, config, results, place, None))
    console.print(cli.describe_config(config, settings), table(found))
    cli.print_end(f"{len(found)} rows", results)
    raise typer.Exit(1 if any(row.status == "wrong" for row in found) else 0)


def measure(
    settings: ParallelBenchConfig, config: Path, results: Path, device: torch.device, group: Group | None
) -> Iterator[Row]:
    """Rows of all graphs and shapes, each appended to `results` as soon as it is measured; on rank 0."""
    method = settings.partition.method
    for name in settings.data.names:
        loaded = settings.data.load(name)
        folders = {}
        for size in [group.size] if group else settings.partition.ranks:
            folders[size] = Path(settings.data.root, "parts", f"{name}-{method}-{size}-bench-{loaded.meta.sha256}")
            if group:
                on_first_rank(group, partial(partitioned, loaded, folders[size], size, method))
            else:
                partitioned(loaded, folders[size], size, method)
        for shape in settings.attention.head_shapes:
            console.print(Text(f"measuring {name} {shape}"))
            subject = Subject(settings, config, loaded, shape, device)
            if group:
                measured = measure_on_ranks(subject, load_part(folders[group.size], group), group)
            else:
                measured = measure_parts(subject, folders.values())
            for row in measured:
                append_rows(results, [row])
                yield row


def partitioned(loaded: LoadedGraph, folder: Path, size: int, method: str) -> None:
    indptr, col, _ = loaded.graph.adj_tensors("csc")
    source = source_from_csr(indptr.numpy(), col.numpy(), fingerprint=loaded.meta.sha256)
    partition_graph(source, folder, size, method, say=lambda text: console.print(Text(text)))


def table(rows: list[Row]) -> Table:
    """A line for each partition and scheme: times over the time on one rank."""
    found = Table("data set", "shape", "ranks", "scheme", "1 rank, ms", "ms", "over 1 rank", "of each region", "status")
    whole = {}
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        shape = str(Shape(row.heads, row.dim))
        if row.ranks == 1:
            whole[row.dataset, shape] = row.value
        else:
            groups.setdefault((row.dataset, shape, row.ranks, row.variant), []).append(row)
    for (dataset, shape, size, scheme), of_scheme in groups.items():
        regions: dict[str, float] = {}
        for row in of_scheme:
            region = row.region.partition(" of rank ")[0]
            regions[region] = regions.get(region, 0.0) + row.value
        total = regions.pop("none", None) or sum(regions.values())  # of the parts, one by one: of all ranks
        one = whole[dataset, shape]
        shown = ", ".join(f"{region} {value:.3f}" for region, value in regions.items())
        status = ", ".join(sorted({cli.outcome(row) for row in of_scheme}))
        found.add_row(
            *(dataset, shape, str(size), scheme, f"{one:.3f}", f"{total:.3f}", f"{total / one:.2f}", shown, status)
        )
    return found


if __name__ == "__main__":
    app()
