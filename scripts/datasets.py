"""Data sets of the paper: list and describe them, fetch their files, and make the paper's tables about them.

    python scripts/datasets.py list
    python scripts/datasets.py info NAME
    python scripts/datasets.py fetch NAME ... | --all
    python scripts/datasets.py stats NAME ... | --all [--source synthetic]

Exit status: 0, also if stats took surrogates (--source official takes none); 1 if a named set could not be had or a
surrogate misses its targets; 2 for any other error.
"""

import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import data
from bench import block_stats
from common.cli import configure_logging, console, errors, user_errors
from common.places import check_folder
from common.provenance import provenance
from common.records import NOT_PUBLISHED
from data.atomic import replacing
from data.graph import dgl_graph, to_tensor
from data.loader import find_graph
from report.datasets import markdown_of

ALL_STATS_EDGES = 10**9  # larger graphs are only measured when they are named

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Registered names; see `list`.")]
All = Annotated[bool, typer.Option("--all", metavar="", help="Every set; stats: of up to a thousand million edges.")]
Root = Annotated[Path, typer.Option(help="Folder of the data sets.")]


@app.callback()
def main() -> None:
    """Data sets of the paper: list and describe them, fetch their files, and make the paper's tables about them."""
    configure_logging("data")


@app.command("list")
def list_sets(root: Root = Path("datasets")) -> None:
    """Names, sizes, licences and citations, and whether the official files are there."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "task", "nodes", "edges", "here", "licence", "citation"):
        table.add_column(column, justify="right" if column in ("nodes", "edges") else "left")
    for name in data.names():
        entry = data.info(name)
        here = "yes" if entry.embedded or entry.official.is_present(root) else ""
        size = f"{entry.num_nodes:,}", f"{entry.nnz:,}"
        table.add_row(name, entry.task, *size, here, entry.licence, entry.citation.split(":")[0])
    Console(highlight=False, width=max(console.width, 160)).print(table)


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="A registered name; see `list`.")], root: Root = Path("datasets")
) -> None:
    """Sizes, sources, licence, files and published statistics of one set."""
    with user_errors():
        entry = data.info(name)
        lines = {key: getattr(entry, key) for key in ("name", "task", "num_classes", "num_nodes", "num_graphs", "nnz")}
        lines |= {key: getattr(entry, key) for key in ("feature_dim", "homepage", "licence", "citation")}
        for remote in entry.official.files(root):
            state = "present" if remote.target.exists() else "missing"
            lines[f"file {remote.target}"] = f"{state}, from {remote.url or 'a script of the publisher'}"
        if entry.embedded is not None:
            lines["shipped"] = f"{entry.embedded}, read instead of a download"
        for metric, value in block_stats.paper_figures(entry).items():
            if metric not in ("nodes", "nnz"):
                lines[metric] = NOT_PUBLISHED if value is None else f"{value:.2f}, published"
        lines |= {"surrogate": entry.surrogate or f"none, since {entry.no_surrogate}", "note": entry.note or "none"}
        for key, value in lines.items():
            console.print(Text(f"{key:<18} {value:,}" if isinstance(value, int) else f"{key:<18} {value}"))


@app.command()
def fetch(names: Names = None, everything: All = False, root: Root = Path("datasets")) -> None:
    """Download the official files of data sets that do not ship with this repository. Existing files are kept."""
    with user_errors():
        missing = 0
        for name in _chosen(names, everything):
            entry = data.info(name)
            if entry.embedded is not None:
                console.print(Text(f"{name}: ships with this repository, in {entry.embedded}"))
                continue
            try:
                if not entry.official.is_present(root):
                    check_folder("--root", root)
                    entry.official.fetch(root)
                console.print(Text(f"{name}: {f'in {root}' if entry.official.files(root) else 'has no files'}"))
            except data.DatasetMissingError as error:
                missing += 1
                errors.print(Text(f"{name}: {error}"))
    raise typer.Exit(1 if missing else 0)


@app.command()
def stats(
    names: Names = None,
    everything: All = False,
    source: Annotated[str, typer.Option(help="auto, official, file or synthetic; see data.load.")] = "auto",
    root: Root = Path("datasets"),
    path: Annotated[Path | None, typer.Option(help="A graph file, for one NAME.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of surrogates.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("results/local/datasets"),
) -> None:
    """Make the paper's data set, decile, format and tile tables, with its figures next to those of our graphs."""
    failed, surrogates = 0, []
    with user_errors():
        chosen = _chosen(names, everything)
        if everything:
            chosen = [name for name in chosen if data.info(name).nnz <= ALL_STATS_EDGES]
        if path and len(chosen) != 1:
            raise ValueError(f"--path: needs exactly one NAME, got {len(chosen)}")
        check_folder("--out", out)  # before the work
        for name in chosen:
            try:
                found_in, off = _stats_of(name, source, root, path, seed, out)
                failed += off
                surrogates += [name] * (found_in == "synthetic")
            except (data.DatasetMissingError, MemoryError) as error:
                if len(chosen) == 1:
                    raise
                errors.print(Text(f"{name}: skipped: {error}"))
                failed += not everything and isinstance(error, data.DatasetMissingError)
        if surrogates and source == "auto":
            errors.print(Text(f"synthetic surrogates, as the files are missing: {', '.join(surrogates)}"))
        console.print(Text(f"tables in {out}"))
    raise typer.Exit(1 if failed else 0)


def _stats_of(name: str, source: str, root: Path, path: Path | None, seed: int, out: Path) -> tuple[str, int]:
    """Measure one set and merge it into the tables; return its source, and how many figures of a surrogate are off."""
    entry, times = data.info(name), [time.perf_counter()]
    found_in, csr = find_graph(name, root=root, source=source, path=path, seed=seed)
    times.append(time.perf_counter())
    sizes = torch.tensor([csr.num_nodes])
    dgl_graph(to_tensor(csr.indptr), to_tensor(csr.col), sizes)
    times.append(time.perf_counter())
    measured = block_stats.measure(csr)
    times.append(time.perf_counter())
    steps = (f"{end - start:.1f}" for start, end in pairwise(times))
    cost = {"edges": str(csr.col.size), **dict(zip(("edges_s", "dgl_s", "blocks_s"), steps, strict=True))}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # of the whole process
    cost |= {"peak_memory_mib": str(peak), "cores": str(os.cpu_count())}
    rows = {
        "datasets": block_stats.dataset_rows(entry, measured),
        "deciles": block_stats.decile_rows(entry, measured),
        "formats": block_stats.format_rows(measured),
        "tiles": block_stats.tile_rows(measured),
        "costs": [cost],
    }
    block_stats.save_tables(out, name, found_in, rows, provenance(torch.device("cpu")))
    for path in (out / f"{table}.csv" for table in rows):
        with replacing(path.with_suffix(".md")) as unfinished:
            unfinished.write_text(markdown_of(path), encoding="utf-8")
    table = Table(title=f"{name} ({found_in})", title_justify="left", box=None, pad_edge=False)
    columns = ("metric", "ours", "paper", "deviation", "target", "status")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows["datasets"]:
        table.add_row(*(row[key] for key in columns))
    console.print(table)
    states = [row["status"] for row in (*rows["datasets"], *rows["deciles"])]
    return found_in, states.count("off") if found_in == "synthetic" else 0


def _chosen(names: list[str] | None, everything: bool) -> list[str]:
    if everything == bool(names):
        raise ValueError("NAME or --all: exactly one of the two is needed")
    chosen = list(data.names()) if everything else names
    for name in chosen:
        data.info(name)  # reject a misspelt name now, not after hours of work
    return chosen


if __name__ == "__main__":
    app()
