"""The one CSV schema of the repository: long form, one measured value a row, appended whole or not at all.

Speed-ups, throughputs and other derived numbers are computed when drawing and never stored. No cell is left blank
unless `status` and `reason` say why. New columns go at the end of `Row`; a file with other columns is refused.
"""

import csv
import fcntl
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from bench.provenance import NONE, Provenance
from data.graph import GraphMeta

# ok: the output was compared with the reference and agrees; unchecked: measured, the output was not compared;
# wrong: measured, the output disagrees; the others have no value. unsupported: the back end cannot take such inputs or
# such a graph; unavailable: it cannot run on that machine.
Status = Literal["ok", "unchecked", "wrong", "oom", "unsupported", "unavailable", "error"]
Scope = Literal["model", "attention", "kernel", "build", "machine"]


class ResultsFileError(ValueError):
    """A results file that rows cannot be appended to."""


class Row(Provenance):
    """One measured value, with everything needed to measure it again.

    Attributes:
        dataset, data_sha256, data_source: the graph's name, its hash, and official, file or synthetic. Of scope machine
            the micro-benchmark's name and "none", and the next columns are its sizes, see `bench.peak_rates`.
        nodes, nnz, graphs: its size; nnz counts the attention scores (edges) of one head.
        dim, heads, blocks: the model's width, heads and blocks; blocks is 0 where no model was run.
        dtype, out_dtype: of the inputs and of the output.
        backend: the attention back end that really ran.
        scope: what was measured: the whole model, attention alone, one kernel, building the sparse format, or the
            machine itself.
        metric, unit: such as time and ms, share_of_time and 1, peak_memory and MiB.
        value, p10, p90: median and percentiles over `repeats`.
        relative_error: norm of the difference from the reference over the norm of the reference; for a whole model
            as `bench.verify` defines it. Blank if status is unchecked.
        config, config_sha: file of the configuration, and the hash of what it resolved to.
    """

    dataset: str
    data_sha256: str
    data_source: Literal["official", "file", "synthetic", "none"]
    nodes: int = Field(ge=0)
    nnz: int = Field(ge=0)
    graphs: int = Field(ge=1)
    dim: int = Field(ge=1)
    heads: int = Field(ge=1)
    blocks: int = Field(ge=0)
    dtype: str
    out_dtype: str
    backend: str
    scope: Scope
    metric: str
    unit: str
    value: float | None
    p10: float | None
    p90: float | None
    repeats: int = Field(ge=0)
    status: Status
    reason: str = NONE
    relative_error: float | None = None
    config: str
    config_sha: str
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


def graph_columns(meta: GraphMeta) -> dict[str, Any]:
    """The columns of a Row that all measurements on a graph share."""
    return {
        "dataset": meta.name,
        "data_sha256": meta.sha256,
        "data_source": meta.source,
        "nodes": meta.num_nodes,
        "nnz": meta.num_edges,
        "graphs": meta.num_graphs,
    }


def check_results_file(path: Path) -> None:
    """Raise a ResultsFileError if `append_rows` would refuse `path`: call it before a long run, not only after."""
    if path.exists():
        with path.open("rb") as file:
            _check_content(path, file.read())


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a CSV, with the header if the file is new. Several processes may append at a time.

    Raises:
        ResultsFileError: the file has another header or ends inside a row; it is left as it was.
        OSError: the rows could not be written; the file is cut back to what it held.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        file.seek(0)
        before = file.read()
        _check_content(path, before)
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not before:
            writer.writerow(COLUMNS)
        for row in rows:
            cells = row.model_dump()
            writer.writerow(["" if cells[name] is None else cells[name] for name in COLUMNS])
        content = text.getvalue().encode()
        try:
            written = file.write(content)
            if written != len(content):
                raise OSError(f"{path}: only {written} of {len(content)} bytes could be written; is the disk full?")
        except OSError:
            file.truncate(len(before))
            raise


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file, in the order in which they were written.

    Raises:
        ResultsFileError: the file does not have the schema, or a row does not; the text names the line.
    """
    content = path.read_bytes()
    _check_content(path, content)
    reader = csv.DictReader(io.StringIO(content.decode(), newline=""))
    rows = []
    for cells in reader:
        try:
            blank = {name: None for name, cell in cells.items() if cell == ""}
            rows.append(Row.model_validate(cells | blank, strict=False))  # a CSV holds text only
        except ValidationError as error:
            details = error.errors()[0]
            key = ".".join(map(str, details["loc"])) or "row"
            raise ResultsFileError(f"{path}, line {reader.line_num}: {key}: {details['msg']}") from error
    return rows


def _check_content(path: Path, content: bytes) -> None:
    if not content:
        return
    if not content.endswith(b"\n"):
        raise ResultsFileError(f"{path}: its last line is not complete; mend or move the file, then run again")
    header = next(csv.reader([content.split(b"\n", maxsplit=1)[0].decode(errors="replace")]))
    if tuple(header) != COLUMNS:
        missing = [name for name in COLUMNS if name not in header]
        extra = [name for name in header if name not in COLUMNS]
        raise ResultsFileError(
            f"{path}: holds other columns than this version writes (missing: {missing or NONE}, "
            f"unknown: {extra or NONE}); move the file away, or write to another one with --results"
        )
