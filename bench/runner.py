"""The harness of all benchmarks: a case is a record, a measure gives its rows, and a loop over graphs and cases writes
them as soon as they are there."""

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import torch
from rich.table import Table
from rich.text import Text

import fused3s
from common import cli
from common.columns import graph_columns
from common.gpu_state import clock_and_power
from common.host_load import HostLoad, describe_wait
from common.memory import is_out_of_memory
from common.provenance import provenance
from common.records import NONE, Row, Status, append_rows, finished, key, read_rows
from configs.bench import BenchConfig, Shape
from data import LoadedGraph
from fused3s.graph.csr import CSRPattern
from fused3s.runtime.cuda_graph import CaptureError
from models import CudaGraphError, DenseUnavailableError
from parallel.group import on_first_rank, share

# Beginnings of backends whose wrong outputs and errors are findings, not failures: the naive softmax, which may
# overflow, and code of others. PyG's sums in 16 bits are wrong on hubs.
FINDINGS = ("flashsparse_naive", "published_", "turbo_gnn", "pyg", "dgl")
REASON_CHARS = 160  # of a row of a table
Made = TypeVar("Made")


class DeviceLostError(RuntimeError):
    """A kernel left the GPU in a state in which this process cannot use it."""


class UnsupportedInputsError(ValueError):
    """A backend does not take the type, the head dimension or the edge data of a case."""


@dataclass(frozen=True)
class Case:
    """One combination to measure on a graph. The fields are columns of its first row."""

    backend: str
    scope: str
    dim: int = 0
    dtype: str = NONE
    out_dtype: str = NONE
    metric: str = "time"
    unit: str = "ms"
    heads: int = 1
    kv_heads: int = 0
    blocks: int = 0
    edges: str = NONE
    region: str = NONE
    variant: str = NONE
    order: str = NONE
    dense: str = NONE
    launch: str = NONE
    plan: str = NONE
    l2: str = NONE
    scores: str = NONE
    score_range: int | None = None
    working_set: int | None = None
    work: int | None = None
    ranks: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def shape(self) -> Shape:
        """Of a kernel."""
        return Shape(self.heads, self.dim, self.kv_heads)

    @property
    def description(self) -> str:
        options = (self.edges, self.region, self.variant, self.order, self.dense, self.launch, self.plan)
        shape = [str(self.shape)] * (self.dim > 0)
        precision = [self.out_dtype] * (self.scope != "kernel")
        told = [one for one in (*options, *precision) if one not in (NONE, "back_to_back", "fixed")]
        return " ".join([*shape, self.backend, *told])


class Context:
    """One graph on one device, and what the cases of a benchmark share.

    Attributes:
        loaded: the graph; None for a benchmark without graphs.
        name: of the graph or workload.
        known: the first row of each case that is finished, by its key.
        extra: columns of all rows.
        group: ranks under torchrun.
    """

    def __init__(
        self,
        config: BenchConfig,
        path: Path,
        environment: Mapping[str, Any],
        device: torch.device,
        name: str = NONE,
        loaded: LoadedGraph | None = None,
        known: Mapping[tuple, Row] | None = None,
        group: Any = None,
    ) -> None:
        self.config, self.path, self.environment, self.device = config, path, environment, device
        self.name, self.loaded, self.group = name, loaded, group
        self.known, self.extra = {**(known or {})}, {}
        self._kept: dict[str, tuple[Any, Any]] = {}

    @cached_property
    def pattern(self) -> CSRPattern:
        """The graph on the device; every backend builds its format from it."""
        return pattern_on(self.device, self.loaded)

    def keep(self, name: str, of: Any, make: Callable[[], Made]) -> Made:
        """The cached result of `make` if `of` is equal; otherwise the old result is freed and `make` called again."""
        if name not in self._kept or self._kept[name][0] != of:
            self._kept.pop(name, None)
            self._kept[name] = (of, make())
        return self._kept[name][1]

    def columns(self, case: Case) -> dict[str, Any]:
        """Columns of the first row of a case that are known before it is measured."""
        return {
            **self.environment,
            **(graph_columns(self.loaded.meta) if self.loaded else {}),
            **asdict(case),
            "bench": self.config.measure,
            "config": str(self.path),
            "config_sha": self.config.settings_sha,
            **self.extra,
        }

    def row(self, case: Case, **columns: Any) -> Row:
        return Row(**(self.columns(case) | columns))

    def failed(self, case: Case, error: Exception, **columns: Any) -> Row:
        status, reason = classify(error)
        return self.row(case, **(columns | {"status": status, "reason": reason}))


@dataclass(frozen=True)
class Measure:
    """A benchmark.

    Attributes:
        cases: those of a configuration on a device, the same for every graph.
        run: the rows of a case, the one that has the columns of the case first. An error becomes a status.
        begin: called once for each graph; may fill `Context.extra`.
        device: "gpu" is needed; "any": the CPU where there is none.
        features: whether graphs are loaded with their features.
        finished: statuses of cases that are not measured again.
        finds_disturbed: whether it finds out itself which times the host disturbed.
    """

    cases: Callable[[BenchConfig, torch.device], list[Case]]
    run: Callable[[Context, Case], list[Row]]
    begin: Callable[[Context], None] = lambda context: None
    device: str = "gpu"
    features: bool = False
    finished: Collection[Status] = ("ok", "unsupported", "oom")
    finds_disturbed: bool = False


def devices() -> list[torch.device]:
    """The current GPU, if there is one, and the CPU."""
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [*gpus, torch.device("cpu")]


def device_of(measure: Measure, wanted: str) -> torch.device:
    """The device to measure on.

    Args:
        wanted: auto, cuda or cpu.

    Raises:
        BackendUnavailableError: there is no GPU.
    """
    found = devices()
    if wanted == "cpu":
        return found[-1]
    if found[0].type != "cuda" and (measure.device == "gpu" or wanted == "cuda"):
        raise fused3s.BackendUnavailableError(
            "this is measured on an NVIDIA GPU, and none was found; without one, make reproduce-figures draws what was "
            "recorded, and --device cpu measures what runs there"
        )
    return found[0]


def load_once(load: Callable[[], LoadedGraph], group: Any) -> LoadedGraph:
    """The graph on rank 0; its description alone on the other ranks, which wait."""
    loaded = on_first_rank(group, load)
    meta = share(group, loaded and loaded.meta)
    return loaded or LoadedGraph(meta=meta)


def pattern_on(device: torch.device, loaded: LoadedGraph) -> CSRPattern:
    """A graph as CSR arrays on a device, with int64 offsets."""
    if device.type == "cuda" and "cupy" in sys.modules:  # synthetic graphs are made with CuPy, which keeps its memory
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    nodes = loaded.meta.num_nodes
    return CSRPattern(loaded.row_pointers.to(device).long(), loaded.columns.to(device), (nodes, nodes))


def classify(error: Exception) -> tuple[Status, str]:
    """Status of a measurement that raised `error`, and the reason: one line, short unless the error is unexpected."""
    whole = " ".join(str(error).split()) or type(error).__name__
    text = shorten(whole, REASON_CHARS, placeholder=" ...")
    if isinstance(error, fused3s.BackendUnavailableError):
        return "unavailable", text
    unsupported = (fused3s.UnsupportedGraphError, UnsupportedInputsError, DenseUnavailableError)
    if isinstance(error, (*unsupported, CudaGraphError, CaptureError)):
        return "unsupported", text
    # torch and CuPy have a class each; cuSPARSE and compiled code only say so.
    if is_out_of_memory(error) or "out of memory" in whole.lower():
        return "oom", whole.partition(". GPU ")[0][:REASON_CHARS]  # torch goes on with the state of its allocator
    return "error", f"{type(error).__name__}: {whole[:500]}"


def free_gpu(device_name: str, after: str, held: int = 0) -> None:
    """Release unused GPU memory between two cases: CuPy and cuSPARSE allocate outside of torch.

    Args:
        after: the case that was measured.
        held: bytes in tensors before the case.

    Raises:
        DeviceLostError: the GPU cannot be used any more.
    """
    try:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream that a case made
        if torch.cuda.memory_allocated() > held:  # perhaps held by a reference cycle
            gc.collect()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(
            f"{device_name} cannot be used any more after {after}: {str(error).partition(chr(10))[0]}\n"
            "to measure the rest, run again without that backend or graph"
        ) from error


def measured(measure: Measure, context: Context) -> Iterator[tuple[Case, list[Row]]]:
    """Each case with its rows as soon as they are measured; without rows if it is known."""
    on_gpu = context.device.type == "cuda"
    # A search for garbage after each case would take a quarter of a second over what the imports left.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if "torch._dynamo" in sys.modules:  # functions compiled for the sizes of the last graph count towards its limit
        torch.compiler.reset()
    measure.begin(context)
    for case in measure.cases(context.config, context.device):
        identity = key(context.columns(case))
        if identity in context.known:
            yield case, []
            continue
        held = torch.cuda.memory_allocated() if on_gpu else 0
        host = HostLoad()
        try:
            rows = measure.run(context, case)
        except Exception as error:  # the other cases go on, whatever the error is
            if context.group:  # the other ranks wait
                raise
            rows = [context.failed(case, error)]
        else:
            state = clock_and_power(context.device)
            busy, marks = describe_wait(host.waited()), not measure.finds_disturbed
            rows = [annotated(row, state, busy, marks) if row.metric == "time" and row.value else row for row in rows]
        if rows:
            context.known[identity] = rows[0]
        yield case, rows
        if on_gpu:
            free_gpu(context.environment["device"], f"{case.description} on {context.name}", held)


def annotated(row: Row, state: Mapping[str, Any], busy: str, marks: bool) -> Row:
    """A time with the state of the GPU; with one more note if the host is part of it and was busy, and then disturbed
    if `marks`."""
    changes = dict(state)
    if busy and waits_for_host(row):
        changes["note"] = busy if row.note == NONE else f"{row.note}; {busy}"
        if marks:
            changes["disturbed"] = "yes"
    return row.model_copy(update=changes)


def waits_for_host(row: Row) -> bool:
    """Whether the host is part of a time: it launches what a step consists of, or builds the plan."""
    return row.launch in ("eager", "compiled", "reduce_overhead") or row.plan == "rebuilt" or row.scope == "build"


def run_bench(
    measure: Measure,
    config: BenchConfig,
    path: Path,
    results: Path,
    device: torch.device,
    again: bool = False,
    group: Any = None,
) -> int:
    """Measure the cases that `results` does not hold, append their rows, and print a table.

    Args:
        path: file of the configuration.
        again: measure all cases.
        group: ranks under torchrun: all measure together, and the first one writes.

    Returns:
        The exit status: 1 if a case is wrong or failed, neither `finished` nor of FINDINGS; NOT_LOADED; else 0.
    """
    cli.console.print(Text("\n".join([str(path), *(f"  {name:<10} {value}" for name, value in config.used.items())])))
    environment = provenance(device)
    if environment["commit"] == NONE:
        hint = "no commit is known (not a git checkout): set FUSED3S_COMMIT to COMMIT-clean or COMMIT-dirty"
        cli.errors.print(Text(f"warning: rows will name no commit; {hint}"))
    before = read_rows(results) if results.exists() and not again and not group else []
    done = finished(before, measure.finished)
    cases = len(measure.cases(config, device))
    found: list[Row] = []
    skipped, not_loaded = 0, []
    load = lru_cache(maxsize=max(1, len(config.workloads)))(config.load)  # workloads have graphs in common
    with cli.progress(cases * max(1, len(config.names))) as advance:
        for name in config.names or [NONE]:
            try:
                get = partial(load, config.graph_of(name), measure.features)
                loaded = None if name == NONE else load_once(get, group) if group else get()
            except (ValueError, OSError, MemoryError, RuntimeError) as error:  # the other graphs go on
                if group or (isinstance(error, RuntimeError) and not is_out_of_memory(error)):
                    raise
                not_loaded.append(f"{name}: {error}")
                advance(f"{name}: not loaded", cases)
                continue
            context = Context(config, path, environment, device, name, loaded, done, group)
            for case, rows in measured(measure, context):
                outcome = cli.outcome(rows[0]) if rows else "measured before"
                advance(f"{name} {case.description}: {outcome}", 1)
                skipped += not rows
                if rows and not (group and not group.is_first):
                    append_rows(results, rows)
                    found += rows
    if found:
        cli.console.print(table(found))
    if skipped and not group:
        cli.console.print(Text(f"skipped      {skipped}: {results} holds them already (--again repeats them)"))
    cli.print_end(f"run {environment['run_id']}" if found else "no new row", results, not_loaded)
    judged = {row.status for row in found if not row.backend.startswith(FINDINGS)}
    wrong = judged & ({"wrong", "error"} - {*measure.finished})
    return 1 if wrong else cli.NOT_LOADED if not_loaded else 0


SHOWN = ("kv_heads", "edges", "region", "backend", "variant", "order", "dense", "launch", "l2", "plan", "dtype")
SHOWN += ("out_dtype", "device_type", "scores", "score_range", "working_set", "ranks", "scope", "metric")
ALWAYS = ("data set", "heads", "dim", "backend", "median", "p10", "p90", "error", "status")


def table(rows: list[Row]) -> Table:
    """A line for each time or other main value; settings that are the same in all lines are left out."""
    lines = [
        {
            "data set": cli.dataset(row),
            "heads": row.heads,
            "dim": row.dim,
            **{name: getattr(row, name) for name in SHOWN},
            "median": cli.number(row.value, ".4g"),
            "p10": cli.number(row.p10, ".4g"),
            "p90": cli.number(row.p90, ".4g"),
            "unit": row.unit,
            "T/s": f"{row.work / row.value / 1e9:.2f}" if row.work and row.value else "",
            "error": cli.number(row.relative_error, ".1e"),
            "status": f"{row.status}, disturbed" if row.disturbed == "yes" else cli.outcome(row),
        }
        for row in rows
        if row.metric in ("time", "kernel_time", "relative_error", "sm_active_share", "peak_memory")
    ]
    shown = [name for name in lines[0] if name in ALWAYS or len({line[name] for line in lines}) > 1] if lines else []
    found = Table(*shown)
    for line in lines:
        found.add_row(*(Text(str(line[name])) for name in shown))
    return found
