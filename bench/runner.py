"""Shared by the benchmarks: cells of a graph, devices, failures, and the loop over graphs."""

import fcntl
import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from textwrap import shorten
from typing import IO, Any, ClassVar

import torch
from rich.table import Table
from rich.text import Text

import kernels
from bench import cli
from bench.gpu_state import clock_and_power
from bench.host_load import HostLoad, describe_wait
from bench.memory import is_out_of_memory
from bench.provenance import provenance
from bench.records import NONE, Bench, Provenance, Row, Status, append_rows, key, read_rows
from data import GraphMeta, LoadedGraph
from kernels.formats.csr import CSRPattern
from kernels.runtime.cuda_graph import CaptureError
from models import CudaGraphError, DenseUnavailableError

# Backends that compute in float32 get float32 inputs, as in the paper: 16-bit inputs would only be converted, or (pyg)
# every intermediate result would be rounded. All others get float16.
FLOAT32 = ("csr_unfused", "dfgnn_hyper", "dfgnn_tiling", "dgl", "pyg", "reference")

REASON_CHARS = 160  # of a row of a table


class DeviceLostError(RuntimeError):
    """A kernel left the GPU in a state in which this process cannot use it."""


class UnsupportedInputsError(ValueError):
    """A backend does not take the type, the head dimension or the edge data of a cell."""


USER_ERRORS = (kernels.BackendUnavailableError, DeviceLostError)  # beside those of `bench.cli`


def user_errors(results: Path) -> AbstractContextManager[None]:
    """`bench.cli.user_errors` of a benchmark that appends rows to `results` as it goes."""

    def kept() -> str:
        if not results.exists():
            return "nothing was written"
        return f"rows of what was finished are in {results}; the same command measures the rest"

    return cli.user_errors(*USER_ERRORS, kept=kept)


def input_dtype(backend: str) -> torch.dtype:
    return torch.float32 if backend in FLOAT32 else torch.float16


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def devices() -> list[torch.device]:
    """The current GPU, if there is one, and the CPU."""
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [*gpus, torch.device("cpu")]


def gpu(purpose: str) -> torch.device:
    """The current GPU.

    Args:
        purpose: start of the message of the BackendUnavailableError without one.
    """
    device = devices()[0]
    if device.type != "cuda":
        raise kernels.BackendUnavailableError(
            f"{purpose}, and none was found; without one, make reproduce-figures draws what was recorded, and make "
            "infer runs the model on the CPU"
        )
    return device


def recorded(results: Path, again: bool = False) -> list[Row]:
    """Rows of the file; none if it does not exist or all is measured `again`."""
    return read_rows(results) if results.exists() and not again else []


def graph_columns(meta: GraphMeta) -> dict[str, Any]:
    """Columns of a row that describe the graph."""
    return {
        "dataset": meta.name,
        "data_sha256": meta.sha256,
        "data_source": meta.source,
        "nodes": meta.num_nodes,
        "nnz": meta.num_edges,
        "graphs": meta.num_graphs,
    }


def pattern_on(device: torch.device, loaded: LoadedGraph) -> CSRPattern:
    """A graph as CSR arrays on a device, with int64 offsets."""
    if device.type == "cuda" and "cupy" in sys.modules:  # synthetic graphs are made with CuPy, which keeps its memory
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    indptr, indices, _ = (array.to(device) for array in loaded.graph.adj_tensors("csc"))
    return CSRPattern(indptr.long(), indices, (loaded.meta.num_nodes, loaded.meta.num_nodes))


def classify(error: Exception) -> tuple[Status, str]:
    """Status of a measurement that raised `error`, and the reason: one line, short unless the error is unexpected."""
    whole = " ".join(str(error).split()) or type(error).__name__
    text = shorten(whole, REASON_CHARS, placeholder=" ...")
    if isinstance(error, kernels.BackendUnavailableError):
        return "unavailable", text
    unsupported = (kernels.UnsupportedGraphError, UnsupportedInputsError, DenseUnavailableError)
    if isinstance(error, (*unsupported, CudaGraphError, CaptureError)):
        return "unsupported", text
    # torch and CuPy have a class each; cuSPARSE and compiled code only say so.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "out of memory" in whole.lower():
        return "oom", whole.partition(". GPU ")[0][:REASON_CHARS]  # torch goes on with the state of its allocator
    return "error", f"{type(error).__name__}: {whole[:500]}"


def free_gpu(device_name: str, after: str, remedy: str, held: int = 0) -> None:
    """Release unused GPU memory between two cells: CuPy and cuSPARSE allocate outside of torch.

    Args:
        after: the cell that was measured.
        remedy: what to leave out if the cell broke the GPU.
        held: bytes in tensors before the cell.

    Raises:
        DeviceLostError: the GPU cannot be used any more.
    """
    try:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream that a cell made
        if torch.cuda.memory_allocated() > held:  # perhaps held by a reference cycle
            gc.collect()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(
            f"{device_name} cannot be used any more after {after}: {str(error).partition(chr(10))[0]}\n"
            f"to measure the rest, run again without {remedy}"
        ) from error


@dataclass(frozen=True)
class Cell:
    """One combination to measure on a graph. The fields are columns of its first row."""

    dim: int
    backend: str
    dtype: str
    out_dtype: str
    scope: str
    metric: str = "time"
    unit: str = "ms"
    heads: int = 1
    edges: str = "none"
    region: str = "none"
    variant: str = "none"
    order: str = "none"
    dense: str = "none"
    launch: str = "none"
    plan: str = "none"
    l2: str = "none"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host is part of its time: it launches each kernel by itself, or builds the plan."""
        return self.launch == "eager" or self.plan == "rebuilt"

    @property
    def description(self) -> str:
        options = (self.edges, self.region, self.variant, self.order, self.dense, self.launch, self.plan)
        usual = ("none", "back_to_back", "fixed")
        heads = "" if self.heads == 1 else f"H={self.heads} "
        return " ".join([f"{heads}d={self.dim} {self.backend}", *(one for one in options if one not in usual)])


class GraphBench(ABC):
    """The cells of a configuration on one graph. Subclasses list the cells and measure one.

    Args:
        config: a configuration with a section `measure`.
        config_path: its file.
    """

    bench: ClassVar[Bench]
    blocks = 0

    def __init__(
        self, loaded: LoadedGraph, config: Any, config_path: str, environment: Provenance, device: torch.device
    ) -> None:
        self.loaded, self.config, self.config_path = loaded, config, config_path
        self.environment, self.device = environment, device

    @staticmethod
    @abstractmethod
    def cells(config: Any) -> list[Cell]:
        """The cells of a configuration, the same for every graph."""

    @abstractmethod
    def measure_cell(self, cell: Cell) -> list[Row]:
        """Rows of a cell, the one with the cell's metric first. An error becomes a status."""

    @cached_property
    def pattern(self) -> CSRPattern:
        """The graph on the device; every backend builds its format from it."""
        return pattern_on(self.device, self.loaded)

    def row(self, cell: Cell, **columns: Any) -> Row:
        return Row(**(self.columns(cell) | columns))

    def columns(self, cell: Cell) -> dict[str, Any]:
        """Columns of the first row of a cell that are known before it is measured."""
        return {
            **self.environment.model_dump(),
            **graph_columns(self.loaded.meta),
            **asdict(cell),
            "bench": self.bench,
            "blocks": self.blocks,
            "config": self.config_path,
            "config_sha": self.config.measure.sha(),
        }

    def measure(self, done: dict[tuple, Row]) -> Iterator[tuple[Cell, list[Row]]]:
        """Each cell with its rows as soon as they are measured; without rows if its key is `done`."""
        self.known = {**done}
        on_gpu = self.device.type == "cuda"
        # A search for garbage after each cell would take a quarter of a second over what the imports left.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if "torch._dynamo" in sys.modules:  # functions compiled for the sizes of the last graph count towards its limit
            torch.compiler.reset()
        for cell in self.cells(self.config):
            if key(self.columns(cell)) in done:
                yield cell, []
                continue
            held = torch.cuda.memory_allocated() if on_gpu else 0
            host = HostLoad()
            try:
                rows = self.measure_cell(cell)
            except Exception as error:  # the other cells go on, whatever the error is
                status, reason = classify(error)
                rows = [self.row(cell, status=status, reason=reason)]
            else:
                state = clock_and_power(self.device)
                rows = [row.model_copy(update=state) if is_time(row) else row for row in rows]
                if cell.waits_for_host and (busy := describe_wait(host.waited())):
                    rows = [with_note(row, busy) if is_time(row) else row for row in rows]
            self.known[key(self.columns(cell))] = rows[0]
            yield cell, rows
            if on_gpu:
                after = f"{cell.description} on {self.loaded.meta.name}"
                free_gpu(self.environment.device, after, "that cell or graph (data.names)", held)


def print_warnings(environment: Provenance) -> None:
    """Print a line if rows of this environment will not say which code measured them, and if another benchmark of this
    clone is running."""
    if _lock() is None:
        hint = "each makes the times of the other longer"
        cli.errors.print(Text(f"warning: another benchmark of this clone is running: {hint}"))
    if environment.commit == NONE:
        hint = "no commit is known (not a git checkout): set FUSED3S_COMMIT to COMMIT-clean or COMMIT-dirty"
        cli.errors.print(Text(f"warning: rows will name no commit; {hint}"))


@cache  # which keeps the file open until the process ends
def _lock() -> IO[bytes] | None:
    """This source file, locked; None if another process has locked it."""
    source = Path(__file__).open("rb")  # noqa: SIM115
    try:
        fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        source.close()
        return None
    except OSError:  # some network file systems lock no file that is open for reading: then nothing is known
        pass
    return source


def with_note(row: Row, note: str) -> Row:
    """The row with one more note."""
    return row.model_copy(update={"note": note if row.note == NONE else f"{row.note}; {note}"})


def is_time(row: Row) -> bool:
    """Whether a row holds a measured time."""
    return row.metric == "time" and row.value is not None


def run_bench(
    bench: type[GraphBench],
    config: Any,
    path: Path,
    load: Callable[[str], LoadedGraph],
    results: Path,
    done: dict[tuple, Row],
    device: torch.device,
    head: Sequence[str],
    line: Callable[[list[Row]], Iterable[str]],
) -> int:
    """Measure the cells of a configuration that are not `done`, append their rows and print a table.

    Args:
        path: file of the configuration.
        load: gives the graph of a name.
        head, line: headings of the table, and one line of it from the rows of a cell.

    Returns:
        The exit status, see `measure_graphs`.
    """
    cli.console.print(cli.describe_config(path, config))
    environment = provenance(device)
    print_warnings(environment)

    def measure(loaded: LoadedGraph) -> Iterator[tuple[str, list[Row]]]:
        for cell, rows in bench(loaded, config, str(path), environment, device).measure(done):
            yield f"{cell.description}: {cli.outcome(rows[0]) if rows else 'measured before'}", rows

    cells = len(bench.cells(config))
    return measure_graphs(config.data.names, load, measure, cells, Table(*head), line, results, environment.run_id)


def measure_graphs(
    names: Sequence[str],
    load: Callable[[str], LoadedGraph],
    measure: Callable[[LoadedGraph], Iterable[tuple[str, list[Row]]]],
    cells: int,
    table: Table,
    line: Callable[[list[Row]], Iterable[str]],
    results: Path,
    run_id: str,
) -> int:
    """Measure each graph, append the rows as soon as a cell is finished, and print the table.

    Args:
        measure: gives the description and the rows of each cell on a graph; no rows if it was measured before.
        cells: their number per graph.
        load, line: see `run_bench`.

    Returns:
        The exit status: 2 if a graph could not be loaded, 1 if a cell is wrong or failed, else 0.
    """
    statuses, skipped, not_loaded = set(), 0, []
    with cli.progress(cells * len(names)) as advance:
        for name in names:
            advance(name, 0)
            try:
                loaded = load(name)
            except (ValueError, OSError, MemoryError, RuntimeError) as error:  # the other graphs go on
                if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    raise
                not_loaded.append(f"{name}: {error}")
                advance(f"{name}: not loaded", cells)
                continue
            for cell, rows in measure(loaded):
                advance(f"{name} {cell}", 1)
                if not rows:
                    skipped += 1
                    continue
                append_rows(results, rows)
                statuses.add(rows[0].status)
                table.add_row(*map(Text, line(rows)))
    if table.rows:
        cli.console.print(table)
    if skipped:
        cli.console.print(Text(f"skipped      {skipped}: {results} holds them already (--again repeats them)"))
    cli.print_end(f"run {run_id}", results, not_loaded)
    return 2 if not_loaded else 1 if statuses & {"wrong", "error"} else 0
