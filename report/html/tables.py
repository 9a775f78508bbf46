"""Tables of the page, one line per measurement: kernel and model times, memory, errors, provenance, graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from bench.records import KEY, NONE
from report.frames import PRECISIONS, latest

BASELINE = "fused3s_paper"
KERNELS = ("kernels", "heads", "edges", "backward")  # benchmarks of kernels


@dataclass(frozen=True, eq=False)
class Column:
    """A column: heading, values, and how numbers are written (None: text)."""

    head: str
    values: Sequence
    form: str | None = None

    @cached_property
    def cells(self) -> list[tuple[str, float | None]]:
        """Text of each cell, and its number; a number that is missing is "-"."""
        return [_cell(value, self.form) for value in self.values]

    @property
    def texts(self) -> list[str]:
        return [text for text, _ in self.cells]


@dataclass(frozen=True)
class Table:
    """A table to sort and filter.

    Attributes:
        note: what its columns mean, and the values that all lines share.
        columns: those with more than one value, in order.
    """

    anchor: str
    title: str
    note: str
    columns: list[Column]

    @classmethod
    def of(cls, anchor: str, title: str, note: str, columns: list[Column]) -> "Table":
        """A table without the columns that have one value only: the note says them."""
        several = [column for column in columns if len({*column.texts}) > 1]
        if not several:  # a table of one line
            return cls(anchor, title, note, columns)
        same = [f"{one.head} {one.texts[0]}" for one in columns if one not in several and one.texts[0] not in ("", "-")]
        return cls(anchor, title, note + (f" All lines: {'; '.join(same)}." if same else ""), several)

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """Heading of each column, and whether it holds numbers."""
        return [(column.head, column.form is not None) for column in self.columns]

    @property
    def lines(self) -> list[tuple[tuple[str, float | None], ...]]:
        """Cells by line."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


def _cell(value: object, form: str | None) -> tuple[str, float | None]:
    if form is None:
        return str(value), None
    return ("-", None) if pd.isna(value) else (format(value, form), float(value))


def tables(rows: pd.DataFrame) -> list[Table]:
    """All tables that have a line."""
    rows = latest(rows, *KEY)
    found = [_kernels(rows), _models(rows), _memory(rows), _errors(rows), _provenance(rows), _graphs(rows)]
    return [one for one in found if one.lines]


def _graph_columns(rows: pd.DataFrame) -> list[Column]:
    return [
        Column("device", rows["device"]),
        Column("graph", rows["dataset"]),
        Column("kind", rows["graph"].map(kind)),
        Column("edges", rows["nnz"], ","),
        Column("d", rows["dim"], "d"),
        Column("heads", rows["heads"], "d"),
    ]


def kind(graph: object) -> str:
    return "synthetic" if graph.synthetic else "surrogate" if graph.surrogate else "real"


def _outcome(rows: pd.DataFrame) -> list[Column]:
    """Status of a line, with its reason where there is one."""
    words = [
        status if reason == NONE else f"{status}: {reason}"
        for status, reason in zip(rows["status"], rows["reason"], strict=True)
    ]
    return [Column("error", rows["relative_error"], ".1e"), Column("status", words)]


def _words(values: pd.Series) -> pd.Series:
    """Values as words; "none" is empty."""
    return values.replace({NONE: ""}).str.replace("_", " ")


def _precision(values: pd.Series) -> pd.Series:
    return values.map(lambda value: PRECISIONS.get(value, value))


def _kernels(rows: pd.DataFrame) -> Table:
    rows = rows[rows["bench"].isin(KERNELS) & (rows["metric"] == "time")]
    cell = ["bench", "device", "graph", "dim", "heads", "edges", "region", "out_dtype", "launch", "plan", "l2"]
    base = rows[(rows["series"] == BASELINE) & (rows["status"] == "ok") & (rows["dtype"] == "float16")]
    base = base.drop_duplicates(cell, keep="last").set_index(cell)["value"].rename("base")
    rows = rows.join(base, on=cell).sort_values(["nnz", "dim", "series"], kind="stable")
    columns = [
        Column("benchmark", rows["bench"]),
        *_graph_columns(rows),
        Column("edge data", _words(rows["edges"])),
        Column("pass", _words(rows["region"])),
        Column("backend", rows["series"]),
        Column("input", _precision(rows["dtype"])),
        Column("output", _precision(rows["out_dtype"])),
        Column("launches", _words(rows["launch"])),
        Column("L2", rows["l2"]),
        Column("format", rows["plan"]),
        Column("ms", rows["value"], ".4f"),
        Column("p10", rows["p10"], ".4f"),
        Column("p90", rows["p90"], ".4f"),
        Column(f"× {BASELINE}", rows["base"] / rows["value"], ".2f"),
        *_outcome(rows),
    ]
    note = (
        "Medians of one attention kernel. Launches: back to back in a CUDA graph, or isolated, the GPU idle before. "
        f"Format: built once (fixed) or at each call (rebuilt). “× {BASELINE}”: how many times faster than that kernel "
        "with the same output type, launches and L2 state. Error: relative, of the worst row, against float64. Scores "
        "are unscaled in the benchmark kernels, and scaled by 1/√d in heads, edges and backward."
    )
    return Table.of("kernel-times", "Attention kernels: times", note, columns)


def _models(rows: pd.DataFrame) -> Table:
    rows = rows[(rows["bench"] == "end_to_end") & (rows["metric"] == "time") & (rows["region"] == NONE)]
    rows = rows.sort_values(["nnz", "dim", "series", "scope"], kind="stable")
    columns = [
        *_graph_columns(rows),
        Column("blocks", rows["blocks"], "d"),
        Column("backend", rows["backend"]),
        Column("other layers", rows["dense"]),
        Column("launch", _words(rows["launch"])),
        Column("precision", _precision(rows["dtype"])),
        Column("part", rows["scope"]),
        Column("ms", rows["value"], ".3f"),
        Column("p10", rows["p10"], ".3f"),
        Column("p90", rows["p90"], ".3f"),
        Column("disturbed", _words(rows["disturbed"])),
        *_outcome(rows),
    ]
    note = (
        "Medians of a forward pass (part: model) and of the attentions in it (part: attention, timed in passes of its "
        "own). Precision is that of the model outside attention. Disturbed: repeats of an eager run disagreed; "
        "such a time is no evidence. The weights are random, not trained."
    )
    return Table.of("model-times", "Whole model: times", note, columns)


def _memory(rows: pd.DataFrame) -> Table:
    rows = rows[rows["metric"] == "peak_memory"].sort_values(["bench", "nnz", "dim", "series"], kind="stable")
    columns = [
        Column("benchmark", _words(rows["bench"])),
        *_graph_columns(rows),
        Column("edge data", _words(rows["edges"])),
        Column("backend and mode", rows["series"]),
        Column("precision", _precision(rows["dtype"])),
        Column("output", _precision(rows["out_dtype"])),
        Column("MiB", rows["value"], ",.0f"),
        *_outcome(rows)[1:],
    ]
    note = "Peak memory on the GPU by PyTorch's allocator: inputs, sparse format and one run, or one forward pass."
    return Table.of("memory", "Peak memory", note, columns)


def _errors(rows: pd.DataFrame) -> Table:
    metrics = ["time", "output_error", "argmax_agreement"]
    rows = rows[rows["bench"].isin([*KERNELS, "end_to_end"]) & rows["metric"].isin(metrics)]
    rows = rows[rows["relative_error"].notna() | rows["metric"].isin(metrics[1:]) & rows["value"].notna()]
    value = rows["value"].where(rows["metric"] != "time", rows["relative_error"])
    quantity = rows["metric"].replace({"time": "relative error"}).pipe(_words)
    rows = rows.assign(error=value, quantity=quantity)
    cell = ["bench", "device", "graph", "dim", "heads", "edges", "series", "dtype", "out_dtype", "quantity"]
    rows = rows.sort_values("error", ascending=False, kind="stable").drop_duplicates(cell)
    columns = [
        Column("benchmark", _words(rows["bench"])),
        *_graph_columns(rows),
        Column("edge data", _words(rows["edges"])),
        Column("backend and mode", rows["series"]),
        Column("precision", _precision(rows["dtype"])),
        Column("output", _precision(rows["out_dtype"])),
        Column("quantity", rows["quantity"]),
        Column("value", rows["error"], ".2e"),
        Column("status", rows["status"]),
    ]
    note = (
        "Relative error: of the worst row of a kernel against float64, or of a whole model against its reference; the "
        "largest over launches. Output error and argmax agreement: a 16-bit model against the same model in fp32, with "
        "untrained weights; agreement is the share of rows with the same largest output."
    )
    return Table.of("errors", "Errors", note, columns)


def _minutes(dates: pd.Series) -> pd.Series:
    return dates.str[:16].str.replace("T", " ")


PROVENANCE = (
    *("device", "driver", "cuda", "torch", "python", "cupy", "dgl", "numpy"),
    *("max_sm_clock", "power_limit", "commit", "dirty"),
)


def _provenance(rows: pd.DataFrame) -> Table:
    found = rows.groupby(list(PROVENANCE), dropna=False).agg(
        benches=("bench", lambda names: ", ".join(sorted({*names}))),
        runs=("run_id", "nunique"),
        count=("run_id", "size"),
        first=("date", "min"),
        last=("date", "max"),
    )
    found = found.reset_index().sort_values("last", ascending=False)
    columns = [
        Column("last", _minutes(found["last"])),
        Column("first", _minutes(found["first"])),
        *(Column(name, found[name]) for name in PROVENANCE[:8]),
        Column("SM clock, MHz", found["max_sm_clock"].astype(float), ".0f"),
        Column("power limit, W", found["power_limit"].astype(float), ".0f"),
        Column("commit", found["commit"].str[:12]),
        Column("changed code", found["dirty"]),
        Column("benchmarks", _words(found["benches"])),
        Column("runs", found["runs"], "d"),
        Column("rows", found["count"], ",d"),
    ]
    note = (
        "Machines, versions and commits of the rows above; times are UTC. “Changed code”: if the code differed from "
        "the commit; none means that it was not recorded."
    )
    return Table.of("provenance", "Machines, versions, commits", note, columns)


def _graphs(rows: pd.DataFrame) -> Table:
    rows = rows[rows["data_sha256"] != NONE].drop_duplicates(["dataset", "data_sha256", "data_source"], keep="last")
    rows = rows.sort_values("nnz", kind="stable")
    columns = [
        Column("graph", rows["dataset"]),
        Column("kind", rows["graph"].map(kind)),
        Column("source", rows["data_source"]),
        Column("graphs", rows["graphs"], ","),
        Column("nodes", rows["nodes"], ","),
        Column("edges", rows["nnz"], ","),
        Column("SHA-256 of the edges", rows["data_sha256"]),
    ]
    note = (
        "Source: official (downloaded from the publisher), file (read from a local file), synthetic (made with the "
        "size and degrees of the data set of that name). A surrogate stands in for another data set."
    )
    return Table.of("graphs", "Graphs", note, columns)
