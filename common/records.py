"""Measured values as CSV files, one value per row, and the file runs.csv beside them: the provenance of each run.

Speed-ups, rates and other derived numbers are computed when drawing and never stored. A column that does not apply to
a row holds "none" (text), 0 (a size) or nothing (`score_range`, `sm`, `working_set`, `work`, clocks and powers); a
column that a file lacks has this default in each of its rows. `value` and its percentiles are blank only if `status`
and `reason` say why.
"""

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pandas as pd
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from common.csv_files import AS_TEXT, ResultsFileError, read_table
from common.places import check_place
from data.atomic import replacing

NONE = "none"
RUNS = "runs.csv"  # in the folder of the CSVs whose runs it describes
HOST_BOUND = 1.1  # a pass of so many times the time in which the GPU is busy with it, or more, is timed by the host
NOT_PUBLISHED, NOT_BUILT = "not published", "not built"  # in the tables of results/datasets

# ok: the output was compared with a reference and agrees. unchecked: measured, the output was not compared. wrong:
# measured, the output disagrees. The others have no value. unsupported: the backend does not take these inputs or this
# graph. unavailable: it cannot run on this machine.
Status = Literal["ok", "unchecked", "wrong", "oom", "unsupported", "unavailable", "error"]
Bench = Literal[
    *("kernels", "heads", "edges", "backward", "layers", "end_to_end", "preprocessing", "plans"),
    *("peak_rates", "sm_active", "stability", "infer", "train", "parallel", "codes", "soak", "doors"),
]  # also the stem of its CSV
Number = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]


class Row(BaseModel):
    """One measured value, with everything needed to measure it again.

    `kv_heads` is the number of heads of k and v where they are fewer than the query's, else 0. `region` is a pass of a
    kernel (forward, backward), a step or epoch of a training run, or the batches of a collection. `disturbed` says that
    repeated medians of a run disagreed (`bench.rounds`), that a pass took HOST_BOUND times as long as the GPU was busy
    with it, or that the host, which is part of the time, was busy with other work (`common.host_load`): such a time
    depends on the host and is no evidence. `relative_error` is the norm of the difference from the reference over the
    norm of the reference (of a whole model as in `models.inference.agreement.compare`), blank if status is unchecked.

    The fields before `bench` are the provenance of a run, one process on one device; unknown ones are "none". `sources`
    is a hash of the code that a time depends on, empty in runs from before it was recorded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str
    date: str  # UTC, ISO 8601, to the second
    commit: str
    dirty: Literal["yes", "no", "none"]  # whether the code differed from the commit
    sources: str = ""
    device: str  # GPU name or CPU model
    device_type: Literal["cuda", "cpu"]
    driver: str
    python: str
    torch: str
    cuda: str  # the CUDA that torch was built for
    cupy: str
    dgl: str
    pyg: str = NONE
    numpy: str
    max_sm_clock: int | None = Field(default=None, ge=0)  # MHz
    power_limit: float | None = Field(default=None, ge=0)  # W
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
    kv_heads: int = Field(default=0, ge=0)
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
    launch: Literal["eager", "compiled", "reduce_overhead", "cuda_graph", "back_to_back", "isolated", "none"] = NONE
    plan: Literal["fixed", "rebuilt", "none"] = NONE
    l2: Literal["warm", "cold", "none"] = NONE
    scope: Literal["model", "attention", "kernel", "build", "machine"]
    region: str = NONE
    sm: int | None = Field(default=None, ge=0)
    working_set: int | None = Field(default=None, ge=0)
    work: int | None = Field(default=None, ge=0)
    metric: str
    unit: str
    value: Number = None
    p10: Number = None
    p90: Number = None
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
        if (self.value, self.metric, self.region) == (0, "time", NONE):  # a part of a pass may be too short to be seen
            raise ValueError("value: got 0; a time is longer")
        if not measured and numbers != (None, None, None):
            raise ValueError(f"status {self.status!r} has no value; got {numbers}")
        if self.status not in ("ok", "unchecked") and self.reason == NONE:
            raise ValueError(f"status {self.status!r} needs a reason")
        if self.status in ("ok", "wrong") and self.relative_error is None:
            raise ValueError(f"status {self.status!r} needs relative_error; not compared is status 'unchecked'")
        return self


COLUMNS = tuple(Row.model_fields)
RUN_COLUMNS = COLUMNS[: COLUMNS.index("bench")]  # provenance
ROW_COLUMNS = ("run_id", *(name for name in COLUMNS if name not in RUN_COLUMNS))
DEFAULTS = {name: field.default for name, field in Row.model_fields.items() if not field.is_required()}
LOCK_SECONDS = 60.0  # that a row waits for another process
OUTCOME = (
    *("order_found", "value", "p10", "p90", "repeats", "disturbed", "sm_clock", "power"),
    *("status", "reason", "relative_error", "note"),
)
VERSIONS = ("torch", "cuda", "cupy", "dgl", "pyg")  # that a time depends on
SETTINGS = tuple(name for name in ROW_COLUMNS if name not in ("run_id", "config", *OUTCOME))
# Columns that identify a measurement: a case with the values of a recorded row is not measured again.
KEY = ("device", "sources", *VERSIONS, *SETTINGS)


def key(columns: Mapping[str, Any]) -> tuple:
    """Values of the columns of KEY; a column that is not given has its default."""
    return tuple(columns.get(name, DEFAULTS.get(name)) for name in KEY)


def finished(rows: Iterable[Row], statuses: Collection[Status]) -> dict[tuple, Row]:
    """Rows with one of these statuses by their key: they need not be measured again."""
    return {tuple(getattr(row, name) for name in KEY): row for row in rows if row.status in statuses}


def check_results_file(path: Path) -> None:
    """Raise a ResultsFileError, or a ValueError, if `append_rows` would refuse `path`. Call it before a long
    run."""
    if path.name == RUNS:
        raise ResultsFileError(f"{path}: is the list of the runs; name another file")
    check_place("--results", path)
    for file, columns in ((path, ROW_COLUMNS), (path.with_name(RUNS), RUN_COLUMNS)):
        _header(file, columns)


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a CSV, and their runs to the runs.csv beside it. Several processes may append at the same time.

    The file is new, or has the columns that rows needed so far; a column that it lacks is added.

    Raises:
        ResultsFileError: the file holds other columns, or ends inside a row; it is left unchanged.
        OSError: the rows could not be written, or another process kept runs.csv locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = path.with_name(RUNS)
    with _locked(runs):
        known = (
            {} if not _header(runs, RUN_COLUMNS) else {run["run_id"]: run for run in _cells(runs).to_dict("records")}
        )
        new = {row.run_id: row.model_dump(include={*RUN_COLUMNS}) for row in rows if row.run_id not in known}
        _header(path, ROW_COLUMNS)  # before the runs are written
        _append(runs, RUN_COLUMNS, list(new.values()))
        _append(path, ROW_COLUMNS, [row.model_dump(include={*ROW_COLUMNS}) for row in rows])


def _append(path: Path, allowed: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV as a whole; columns that they need and that it lacks are added to all of its rows."""
    header = _header(path, allowed)
    used = {name for row in rows for name, value in row.items() if name not in DEFAULTS or value != DEFAULTS[name]}
    columns = [name for name in allowed if name in header or name in used]
    if columns != header:
        with replacing(path) as unfinished:
            before = _cells(path) if header else pd.DataFrame(columns=columns)
            for name in set(columns) - {*before}:
                before[name] = DEFAULTS[name]
            before[columns].to_csv(unfinished, index=False, lineterminator="\n")
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n").writerows(rows)  # pandas drops NaN
    content = text.getvalue().encode()
    with path.open("ab", buffering=0) as file:
        length = file.tell()
        try:
            if (written := file.write(content)) != len(content):
                raise OSError(f"only {written} of {len(content)} bytes were written; is the disk full?")
        except OSError as error:
            file.truncate(length)
            raise OSError(f"{path}: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file that may be replaced. Others hold it for milliseconds, unless they hang."""
    try:
        held = FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS).acquire()
    except Timeout as error:
        text = f"{path}: another process has kept it locked for {LOCK_SECONDS:.0f} s; end it"
        raise TimeoutError(text) from error
    with held:
        yield


def read_rows(path: Path) -> list[Row]:
    """Rows of a results file with the provenance of their runs, in file order.

    Raises:
        ResultsFileError: the file, its runs.csv or a row does not have the schema; the text names the line.
    """
    if not _header(path, ROW_COLUMNS):
        return []
    runs = path.with_name(RUNS)
    if not _header(runs, RUN_COLUMNS):
        raise ResultsFileError(f"{runs}: is missing, but says where the rows of {path.name} come from; restore it")
    joined = _cells(path).merge(_cells(runs), on="run_id", how="left", validate="many_to_one")
    unknown = joined.loc[joined["device"].isna(), "run_id"]
    if len(unknown):
        raise ResultsFileError(f"{path}, line {unknown.index[0] + 2}: run_id: {unknown.iloc[0]!r} is not in {runs}")
    cells = ({name: cell for name, cell in row.items() if cell} for row in joined.to_dict("records"))
    try:
        return _ROWS.validate_python(list(cells), strict=False)  # all cells are text
    except ValidationError as error:
        details = error.errors()[0]
        line, *column = details["loc"]
        name = f"{column[0]}: " if column else ""
        raise ResultsFileError(f"{path}, line {line + 2}: {name}{details['msg']}") from error


def _cells(path: Path) -> pd.DataFrame:
    """The cells of a CSV as text."""
    cells = read_table(path, (), **AS_TEXT)
    short = cells.isna().any(axis=1)
    if short.any() or not isinstance(cells.index, pd.RangeIndex):
        line = int(short.to_numpy().argmax()) + 2
        raise ResultsFileError(f"{path}, line {line}: has other cells than the header; repair or move the file")
    return cells


def _header(path: Path, allowed: Sequence[str]) -> list[str]:
    """Columns of a file; none if it is missing or empty.

    Raises:
        ResultsFileError: it has columns that are not allowed, lacks one that has no default, or ends inside a line.
    """
    if not path.exists() or not path.stat().st_size:
        return []
    with path.open("rb") as file:
        first = file.readline().decode(errors="replace")
        file.seek(-1, io.SEEK_END)
        if file.read() != b"\n":
            raise ResultsFileError(f"{path}: the last line is incomplete; repair or move the file, then run again")
    header = first.rstrip("\n").split(",")
    missing = [name for name in allowed if name not in DEFAULTS and name not in header]
    unknown = [name for name in header if name not in allowed]
    if missing or unknown:
        raise ResultsFileError(
            f"{path}: holds other columns than this version writes (missing: {missing or NONE}, "
            f"unknown: {unknown or NONE}); move the file away, or write to another one with --results"
        )
    return header


_ROWS = TypeAdapter(list[Row])
