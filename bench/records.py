"""The one CSV schema of the repository: long form, one measured value per row.

Speed-ups, rates and other derived numbers are computed when drawing and never stored. A column that does not apply to
a row holds "none" (text), 0 (a size) or nothing (`score_range`, `sm`, `working_set`, `work`, clocks and powers).
`value` and its percentiles are blank only if `status` and `reason` say why. A file with other columns is refused.
"""

import csv
import fcntl
import io
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bench.places import check_place

logger = logging.getLogger(__name__)

NONE = "none"
NOT_PUBLISHED, NOT_BUILT = "not published", "not built"  # in the tables of results/datasets

# ok: the output was compared with a reference and agrees. unchecked: measured, the output was not compared. wrong:
# measured, the output disagrees. The others have no value. unsupported: the backend does not take these inputs or this
# graph. unavailable: it cannot run on this machine.
Status = Literal["ok", "unchecked", "wrong", "oom", "unsupported", "unavailable", "error"]
Bench = Literal[
    *("kernels", "heads", "edges", "backward", "float32", "layers", "training", "end_to_end", "preprocessing", "plans"),
    *("peak_rates", "sm_active", "stability", "infer", "train", "parallel"),
]  # also the stem of its CSV


class ResultsFileError(ValueError):
    """A results file that rows cannot be appended to or read from."""


class Provenance(BaseModel):
    """One process on one device, shared by all rows that it writes. Unknown values are "none", never guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str
    date: str  # UTC, ISO 8601, to the second
    commit: str
    dirty: Literal["yes", "no", "none"]  # whether the code differed from the commit
    device: str  # GPU name or CPU model
    device_type: Literal["cuda", "cpu"]
    driver: str
    python: str
    torch: str
    cuda: str  # the CUDA that torch was built for
    cupy: str
    dgl: str
    numpy: str
    max_sm_clock: int | None = Field(default=None, ge=0)  # MHz
    power_limit: float | None = Field(default=None, ge=0)  # W


class Row(Provenance):
    """One measured value, with everything needed to measure it again.

    Attributes:
        bench: the benchmark that wrote the row.
        config, config_sha: configuration file or script, and the hash of the resolved measurement settings.
        dataset, data_sha256, data_source: name of the graph, hash of its edges, and official, file or synthetic.
        nodes, nnz, graphs: size of the graph; nnz counts the attention scores (edges) of one head.
        scores, score_range: distribution of the scores and its parameter, see `bench.softmax_stability`.
        dim, heads, blocks: of a model its width, heads and blocks. Of a kernel the columns of one head, and the
            heads; blocks is 0.
        edges: kind of edge data in the score: of a kernel see `configs.bench_schema.PLAIN_EDGES`, of a model its
            `model.edge_features`.
        checkpoint: file of the weights of a model; "none" for random ones.
        ranks, link: of a graph on several GPUs (benchmark `parallel`) their number, and what connects
            them: NVLink, InfiniBand, gloo. The scheme is the `variant`, the partition the `order`.
        dtype, out_dtype: types of the inputs and of the output; in the benchmark `layers` of the weights, and of q, k
            and v.
        backend: attention backend that ran, or the micro-benchmark; in the benchmark `layers` auto, our layer's choice,
            or pyg.
        variant: version of it: a step of the ablation, an emulated softmax, a load path; the seed of a training run;
            the workload of the benchmark `layers`.
        order: row order that was asked for (`reorder`); order_found: the one that was used, in rows of order_time.
        dense: how the non-attention layers are computed ("auto": fused where it can run).
        launch: eager, or replayed as a CUDA graph, of whole models; of kernels: back_to_back (several launches in a
            row, which may overlap) or isolated (one launch, the GPU idle before it).
        plan: whether the sparse format was built once (fixed) or within each timed run (rebuilt); of kernels, and of
            training steps in the benchmark `layers`.
        l2: state of the L2 cache before each run; of kernels.
        scope: what was measured: the whole model, attention alone, one kernel, building the format, the machine.
        region: part of an eager forward pass, see `bench.model_regions`; of a kernel in the benchmark `backward` the
            pass, forward or backward; of a model in training: step, or the epoch of a point of a learning curve; of a
            model on a collection: "first batch", or "all batches" (its time: of each of them).
        sm: number of the streaming multiprocessor.
        working_set, work: bytes that a micro-benchmark touches; bytes that one run moves, or its FLOP.
        metric, unit: such as time and ms, peak_memory and MiB.
        value, p10, p90: median and percentiles over `repeats`.
        disturbed: whether repeated medians of an eager run disagreed, see `bench.timers`; such a time is no evidence.
        sm_clock, power: clock of the SMs in MHz and draw of the GPU in W, read right after the timed runs.
        relative_error: norm of the difference from the reference over the norm of the reference; for a whole model
            as defined by `bench.checks.compare`. Blank if status is unchecked.
    """

    bench: Bench
    config: str
    config_sha: str = NONE
    dataset: str = NONE
    data_sha256: str = NONE
    data_source: Literal["official", "file", "synthetic", "none"] = NONE
    nodes: int = Field(default=0, ge=0)
    nnz: int = Field(default=0, ge=0)
    graphs: int = Field(default=0, ge=0)
    scores: Literal["spread", "shift", "none"] = NONE
    score_range: int | None = None
    dim: int = Field(default=0, ge=0)
    heads: int = Field(default=0, ge=0)
    blocks: int = Field(default=0, ge=0)
    edges: str = NONE
    checkpoint: str = NONE
    ranks: int = Field(default=0, ge=0)
    link: str = NONE
    dtype: str = NONE
    out_dtype: str = NONE
    backend: str
    variant: str = NONE
    order: str = NONE
    order_found: str = NONE
    dense: Literal["plain", "compiled", "fused", "auto", "none"] = NONE
    launch: Literal["eager", "cuda_graph", "back_to_back", "isolated", "none"] = NONE
    plan: Literal["fixed", "rebuilt", "none"] = NONE
    l2: Literal["warm", "cold", "none"] = NONE
    scope: Literal["model", "attention", "kernel", "build", "machine"]
    region: str = NONE
    sm: int | None = Field(default=None, ge=0)
    working_set: int | None = Field(default=None, ge=0)
    work: int | None = Field(default=None, ge=0)
    metric: str
    unit: str
    value: float | None = None
    p10: float | None = None
    p90: float | None = None
    repeats: int = Field(default=0, ge=0)
    disturbed: Literal["yes", "no", "none"] = NONE
    sm_clock: int | None = Field(default=None, ge=0)
    power: float | None = Field(default=None, ge=0)
    status: Status
    reason: str = NONE
    relative_error: float | None = None
    note: str = NONE

    @model_validator(mode="after")
    def _blank_only_with_a_reason(self) -> Self:
        numbers = (self.value, self.p10, self.p90)
        measured = self.status in ("ok", "unchecked", "wrong")
        if measured and (None in numbers or self.repeats == 0):
            raise ValueError(f"status {self.status!r} needs value, p10, p90 and repeats; got {numbers}, {self.repeats}")
        if not measured and numbers != (None, None, None):
            raise ValueError(f"status {self.status!r} has no value; got {numbers}")
        if self.status not in ("ok", "unchecked") and self.reason == NONE:
            raise ValueError(f"status {self.status!r} needs a reason")
        if self.status in ("ok", "wrong") and self.relative_error is None:
            raise ValueError(f"status {self.status!r} needs relative_error; not compared is status 'unchecked'")
        return self


COLUMNS = tuple(Row.model_fields)
LOCK_SECONDS = 60.0  # that a row waits for another process
ADDED = ("edges", "checkpoint", "ranks", "link")  # columns that older files lack; their rows have the default
OUTCOME = (
    *("order_found", "value", "p10", "p90", "repeats", "disturbed", "sm_clock", "power"),
    *("status", "reason", "relative_error", "note"),
)
# Identity of a measurement: a later row with the same values supersedes an earlier one.
KEY = (
    "device",
    *(name for name in COLUMNS if name not in Provenance.model_fields and name not in ("config", *OUTCOME)),
)


def key(columns: Mapping[str, Any]) -> tuple:
    """Identity of a measurement; columns that are not given have their defaults."""
    return tuple(columns.get(name, Row.model_fields[name].default) for name in KEY)


def finished(rows: Iterable[Row], statuses: Collection[Status]) -> set[tuple]:
    """Keys of the rows with one of these statuses: they need not be measured again."""
    return {tuple(getattr(row, name) for name in KEY) for row in rows if row.status in statuses}


def check_results_file(path: Path) -> None:
    """Raise a ResultsFileError, or an OutputPathError, if `append_rows` would refuse `path`. Call it before a long
    run."""
    check_place("--results", path)
    if path.exists():
        _check_content(path, path.read_bytes())


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a CSV, with the header if the file is new. Several processes may append at the same time.

    A file without a column of ADDED takes rows that have its default.

    Raises:
        ResultsFileError: the file has another header, lacks a column that a row needs, or ends inside a row; it is left
            unchanged.
        OSError: the rows could not be written, or another process kept the file locked; it has its old length.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        _lock(path, file)
        file.seek(0)
        before = file.read()
        columns = _check_content(path, before)
        for name in set(COLUMNS) - set(columns):
            if any(getattr(row, name) != Row.model_fields[name].default for row in rows):
                raise ResultsFileError(f"{path}: has no column {name!r}, which these rows need; write to another file")
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        if not before:
            writer.writeheader()
        writer.writerows(row.model_dump() for row in rows)
        content = text.getvalue().encode()
        try:
            written = file.write(content)
            if written != len(content):
                raise OSError(f"{path}: only {written} of {len(content)} bytes were written; is the disk full?")
        except OSError as error:
            file.truncate(len(before))
            if error.errno and not error.filename:  # such as a full disk, which names no file
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise


def _lock(path: Path, file: IO[bytes]) -> None:
    """Lock a file until it is closed. Others hold the lock for milliseconds, unless they are stopped or hang."""
    start, said = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - start
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} (it cannot be locked)", str(path)) from error
        if waited > LOCK_SECONDS:
            raise TimeoutError(
                f"{path}: another process has kept it locked for {LOCK_SECONDS:.0f} s; end that process, or name "
                "another file with --results"
            )
        if not said and waited > 1:
            logger.warning("waiting for another process that writes to %s", path)
            said = True
        time.sleep(0.02)


def read_rows(path: Path) -> list[Row]:
    """Rows of a results file, in file order.

    Raises:
        ResultsFileError: the file or a row does not have the schema; the text names the line.
    """
    content = path.read_bytes()
    _check_content(path, content)
    try:
        reader = csv.DictReader(io.StringIO(content.decode(), newline=""))
        return [_row(path, reader.line_num, cells) for cells in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ResultsFileError(f"{path}: not a CSV in UTF-8: {error}; move the file away") from error


def _row(path: Path, line: int, cells: dict[str, str]) -> Row:
    if None in cells:  # csv's key of what follows the last column
        raise ResultsFileError(f"{path}, line {line}: has more cells than the header")
    try:
        row = Row.model_validate({name: cell or None for name, cell in cells.items()}, strict=False)  # all text
    except ValidationError as error:
        details = error.errors()[0]
        column = ".".join(map(str, details["loc"])) or "row"
        raise ResultsFileError(f"{path}, line {line}: {column}: {details['msg']}") from error
    for column in ("value", "p10", "p90"):
        number = getattr(row, column)
        if number is not None and not 0 <= number < math.inf:
            raise ResultsFileError(f"{path}, line {line}: {column}: got {number}; a finite number from 0 on is needed")
    if (row.value, row.metric, row.region) == (0, "time", NONE):  # a part of a pass may be too short to be seen
        raise ResultsFileError(f"{path}, line {line}: value: got 0; a time is longer")
    return row


def _check_content(path: Path, content: bytes) -> tuple[str, ...]:
    """Columns of a file; those of a new one if it is empty."""
    if not content:
        return COLUMNS
    if not content.endswith(b"\n"):
        raise ResultsFileError(f"{path}: the last line is incomplete; repair or move the file, then run again")
    header = next(csv.reader([content.split(b"\n", maxsplit=1)[0].decode(errors="replace")]))
    older = [name for name in ADDED if name not in header]
    if tuple(header) != tuple(name for name in COLUMNS if name not in older):
        missing = [name for name in COLUMNS if name not in header]
        extra = [name for name in header if name not in COLUMNS]
        raise ResultsFileError(
            f"{path}: holds other columns than this version writes (missing: {missing or NONE}, "
            f"unknown: {extra or NONE}); move the file away, or write to another one with --results"
        )
    return tuple(header)
