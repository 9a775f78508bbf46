"""Data sets of the paper: list and describe them, fetch their files, and make the paper's tables about them.

    python scripts/datasets.py list
    python scripts/datasets.py info NAME
    python scripts/datasets.py fetch NAME ... | --all
    python scripts/datasets.py stats NAME ... | --all [--source synthetic]

Exit status: 0; 1 if a set could not be fetched or a surrogate misses its targets; 2 for any other error.
"""

import os
import resource
import time
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import data
from bench import block_stats
from bench.block_stats import measure, paper_figures
from bench.cli import configure_logging, console, errors, user_errors
from bench.places import check_folder
from bench.provenance import provenance
from bench.records import NOT_PUBLISHED
from data.canonical import to_csr
from data.download import fetch as download
from data.loader import find_graph, to_dgl
from fused3s_dgl import import_dgl
from report.datasets import write_markdown

ROOT = Path(__file__).resolve().parent.parent
LOADED_BYTES_PER_EDGE = 4  # an int32 column
LOADED_BYTES_PER_NODE = 4  # offset of its row
ALL_STATS_EDGES = 10**9  # larger graphs are only measured when they are named

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Registered names; see `list`.")]
All = Annotated[
    bool, typer.Option("--all", metavar="", help="Every registered set; stats: of up to a thousand million edges.")
]
Root = Annotated[Path, typer.Option(help="Folder of the data sets.")]


@app.callback()
def main() -> None:
    """Data sets of the paper: list and describe them, fetch their files, and make the paper's tables about them."""
    configure_logging("data")


@app.command("list")
def list_sets() -> None:
    """Names, sizes, licences and citations."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "task", "nodes", "edges", "in memory", "licence", "citation"):
        table.add_column(column, justify="right" if column in ("nodes", "edges", "in memory") else "left")
    for name in data.names():
        entry = data.info(name)
        sizes = (f"{entry.num_nodes:,}", f"{entry.nnz:,}", _gibibytes(entry))
        table.add_row(name, entry.task, *sizes, entry.licence, entry.citation.split(":")[0])
    Console(highlight=False, width=max(console.width, 160)).print(table)


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="A registered name; see `list`.")], root: Root = Path("datasets")
) -> None:
    """Sizes, sources, licence, files and published statistics of one set."""
    with user_errors():
        entry = data.info(name)
        lines = {
            "name": entry.name,
            "task": f"{entry.task}, {entry.num_classes} classes",
            "nodes": f"{entry.num_nodes:,}" + (f" in {entry.num_graphs:,} graphs" if entry.num_graphs else ""),
            "edges": f"{entry.nnz:,}, {'symmetric' if entry.symmetric else 'one direction'}",
            "features": f"{entry.feature_dim} {'codes' if entry.feature_cardinalities else 'floats'} a node",
            "in memory": f"{_gibibytes(entry)} (ids and features)",
            "homepage": entry.homepage,
            "licence": entry.licence,
            "citation": entry.citation,
        }
        for remote in entry.official.files(root):
            state = "present" if remote.target.exists() else "missing"
            lines[f"file {remote.target}"] = f"{state}, from {remote.url or 'a script of the publisher'}"
        if entry.embedded is not None:
            lines["shipped"] = f"{entry.embedded.shipped.relative_to(ROOT)}, read instead of a download"
        for metric, value in paper_figures(entry).items():
            if metric not in ("nodes", "nnz"):
                lines[metric] = NOT_PUBLISHED if value is None else f"{value:.2f}, published"
        lines["surrogate"] = str(entry.synthetic)
        lines["note"] = entry.note or "none"
        for key, value in lines.items():
            console.print(Text(f"{key:<18} {value}"))


@app.command()
def fetch(names: Names = None, everything: All = False, root: Root = Path("datasets")) -> None:
    """Download the official files of data sets that do not ship with this repository. Existing files are kept."""
    with user_errors():
        missing = 0
        for name in _chosen(names, everything):
            entry = data.info(name)
            if entry.embedded is not None:
                shipped = entry.embedded.shipped.relative_to(ROOT)
                console.print(Text(f"{name}: ships with this repository, in {shipped}"))
                continue
            try:
                entry.official.fetch(root, download)
                place = f"in {root}" if entry.official.files(root) else "has no files"
                console.print(Text(f"{name}: {place}"))
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
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("results/datasets"),
) -> None:
    """Make the paper's data set, decile and format tables, with its figures beside those of our graphs."""
    off = 0
    with user_errors():
        chosen = _chosen(names, everything)
        if everything:
            chosen = [name for name in chosen if data.info(name).nnz <= ALL_STATS_EDGES]
        if path and len(chosen) != 1:
            raise ValueError(f"--path: needs exactly one NAME, got {len(chosen)}")
        check_folder("--out", out)  # before the work
        for name in chosen:
            try:
                off += _stats_of(name, source, root, path, seed, out)
            except (data.DatasetMissingError, MemoryError) as error:
                if len(chosen) == 1:
                    raise
                errors.print(Text(f"{name}: skipped: {error}"))
        console.print(Text(f"tables in {out}"))
    raise typer.Exit(1 if off else 0)


def _stats_of(name: str, source: str, root: Path, path: Path | None, seed: int, out: Path) -> int:
    """Measure one set and merge it into the tables; return how many figures of a surrogate miss their targets."""
    entry = data.info(name)
    import_dgl()  # outside the timed steps
    start = time.perf_counter()
    found_in, raw = find_graph(name, root=root, source=source, path=path, seed=seed)
    csr = to_csr(raw)
    del raw
    got = time.perf_counter()
    to_dgl(csr)
    built = time.perf_counter()
    measured = measure(csr)
    done = time.perf_counter()
    cost = {
        "edges": str(measured.bsb.nnz),
        "edges_s": f"{got - start:.1f}",
        "dgl_s": f"{built - got:.1f}",
        "blocks_s": f"{done - built:.1f}",
        "peak_memory_mib": str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024),
        "cores": str(os.cpu_count()),
    }
    del csr
    rows = {
        "datasets": block_stats.dataset_rows(entry, measured),
        "deciles": block_stats.decile_rows(entry, measured),
        "formats": block_stats.format_rows(measured),
        "costs": [cost],
    }
    block_stats.save_tables(out, name, found_in, rows, provenance(torch.device("cpu")))
    write_markdown(out)
    _show(name, found_in, rows["datasets"], cost)
    states = [row["status"] for row in (*rows["datasets"], *rows["deciles"])]
    return states.count("off") if found_in == "synthetic" else 0


def _show(name: str, source: str, rows: list[block_stats.TableRow], cost: block_stats.TableRow) -> None:
    table = Table(title=f"{name} ({source})", title_justify="left", box=None, pad_edge=False)
    for column in ("", "ours", "paper", "deviation", "target", "status"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(row[key] for key in ("metric", "ours", "paper", "deviation", "target", "status")))
    console.print(table)
    times = f"edges {cost['edges_s']} s, DGLGraph {cost['dgl_s']} s, BSB and its figures {cost['blocks_s']} s"
    console.print(Text(f"{times}, peak memory {cost['peak_memory_mib']} MiB of the whole process\n"))


def _chosen(names: list[str] | None, everything: bool) -> list[str]:
    if everything == bool(names):
        raise ValueError("NAME or --all: exactly one of the two is needed")
    chosen = list(data.names()) if everything else names
    for name in chosen:
        data.info(name)  # reject a misspelt name now, not after hours of work
    return chosen


def _gibibytes(entry: data.Dataset) -> str:
    width = 8 if entry.feature_cardinalities else 4
    size = entry.nnz * LOADED_BYTES_PER_EDGE + entry.num_nodes * (LOADED_BYTES_PER_NODE + entry.feature_dim * width)
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    app()
