"""The one operation behind tables, claims and figures: select rows, take ratios, take means, render.

A specification is a mapping. Its keys are columns of a row (see `report.rows.select`), and

    use           names of selections of `defs` in tables.yaml, laid under the others
    ours, theirs  selections on top, of the two sides of a ratio: value of `theirs` over value of `ours`
    across        true if the two sides are of different devices
    newest        true for the device that was measured last, where several have rows; else the one with most rows
    by            columns that identify a pair of a ratio; the default is the graph and d
    cell          how a cell is computed and written, one of CELLS; the default is "value"

A row counts in a ratio or mean only if its status is `ok`, or `unchecked` where nothing can be compared (bytes, rates,
published times). Rows whose output is `wrong` never count, nor do times that the host disturbed.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import pandas as pd

from report.derived import derived_rows
from report.published import with_published
from report.rows import merged, provenance, read_yaml, select

PAIR = ("data_sha256", "dim")
DISTURBED = "~"
KEYS = {
    "use",
    "ours",
    "theirs",
    "across",
    "newest",
    "by",
    "cell",
    "mean",
    "worst",
    "form",
    "show",
    "times",
    "named",
    "of",
}
KEYS |= {"steps", "above", "below", "fails"}  # that are no columns
Spec = Mapping[str, Any]


class Data:
    """Rows of all benchmarks, and which of them were used.

    Args:
        rows: `report.rows.recorded`, or a part of it.
        device: whose rows are taken where several have some; the default is the one with most rows of a benchmark. A
            name, or words of it ("h200"); "cpu" for the rows of a CPU.

    Raises:
        ValueError: no device, or several, of `rows` are meant.
    """

    def __init__(self, rows: pd.DataFrame, device: str | None = None) -> None:
        every = with_published(pd.concat([rows, derived_rows(rows)], ignore_index=True))
        self.benches = dict(iter(every.groupby("bench")))
        self.empty = every.iloc[:0]
        kinds = dict(zip(rows["device"], rows["device_type"], strict=True))
        self.device = device and _named(device, kinds)
        self.device_type = kinds.get(self.device, "cuda")
        self.defs: dict[str, Spec] = read_yaml("tables.yaml")["defs"]
        self.used: list[pd.DataFrame] = []

    def resolve(self, spec: Spec) -> dict[str, Any]:
        """The specification with the selections that it uses."""
        return merged(*(self.defs[name] for name in spec.get("use", ())), {k: v for k, v in spec.items() if k != "use"})

    def pick(self, spec: Spec) -> pd.DataFrame:
        """Rows of one device that a specification selects, by number of edges.

        Raises:
            ValueError: a key is neither a column nor one of KEYS.
        """
        spec = self.resolve(spec)
        found = self._of_device(self._rows_of(spec), spec)
        self._use(found)
        return found

    def _rows_of(self, spec: Spec) -> pd.DataFrame:
        """Rows of all devices that a resolved specification selects."""
        where = {name: value for name, value in spec.items() if name not in KEYS}
        bench = where.pop("bench")
        return select(self.benches.get(bench, self.empty), {"device_type": self.device_type} | where)

    def _of_device(self, found: pd.DataFrame, spec: Spec, device: str | None = None) -> pd.DataFrame:
        """Rows of one device by number of edges: of the specification's, else of `device`, else of the usual one."""
        devices = found["device"]
        if device is None and devices.nunique() > 1:
            usual = found.loc[found["date"].idxmax(), "device"] if spec.get("newest") else devices.mode().iloc[0]
            device = self.device if self.device in {*devices} else usual
        if device is not None and "device" not in spec:
            found = found[devices == device]
        return found.sort_values(["nnz", "label", "dim"], kind="stable")

    def _use(self, found: pd.DataFrame) -> None:
        self.used.append(found[["device", "commit", "date", "dirty"]])

    def measured(self, spec: Spec, by: Sequence[str] = PAIR) -> pd.DataFrame:
        """Rows that count in means, with `by` as index.

        Raises:
            ValueError: two of them have the same `by`; the specification does not tell them apart.
        """
        return counted(self.pick(spec), spec, by)

    def pairs(self, spec: Spec) -> pd.DataFrame:
        """Rows of `ours` with the columns ratio (theirs over ours), low and high (between the percentiles) and noisy.

        Without a row unless each d of a list of several has a pair: a mean over fewer is another quantity.
        """
        spec = self.resolve(spec)
        by = spec.get("by", PAIR)
        ours, theirs = (merged(spec, self.resolve(spec.get(side, {}))) for side in ("ours", "theirs"))
        mine, other = self._rows_of(ours), self._rows_of(theirs)
        device = None if spec.get("across") else self._device_of_both(mine["device"], other["device"])
        mine = counted(self._of_device(mine, ours, device), ours, by)
        other = counted(self._of_device(other, theirs, device), theirs, by)
        both = mine.index.intersection(other.index, sort=False)
        mine, other = mine.loc[both], other.loc[both]
        self._use(mine)
        self._use(other)
        found = mine.assign(
            ratio=other["value"] / mine["value"] * spec.get("times", 1),
            low=other["p10"] / mine["p90"],
            high=other["p90"] / mine["p10"],
            noisy=(mine["disturbed"] == "yes") | (other["disturbed"] == "yes"),
            theirs=other["value"],
        )
        dims = spec.get("dim")
        complete = not isinstance(dims, list) or {*dims} <= {*found.loc[~found["noisy"], "dim"]}
        return found if complete else found.iloc[:0]

    def _device_of_both(self, ours: pd.Series, theirs: pd.Series) -> str | None:
        """The device of a ratio: of the devices that have rows of both sides, if there are any."""
        able = ours[ours.isin(theirs)] if ours.isin(theirs).any() else ours
        if able.empty:
            return None
        return self.device if self.device in {*able} else able.mode().iloc[0]

    def provenance(self) -> str:
        """Device, commits and dates of the rows used since the last call."""
        used, self.used = pd.concat([self.empty[["device", "commit", "date", "dirty"]], *self.used]), []
        return provenance(used[used["date"] != ""])


def _named(device: str, kinds: Mapping[str, str]) -> str:
    """The name that is `device`, or the only one that has, with its kind, the words of `device`."""
    words = {*device.lower().split()}
    found = [name for name, kind in kinds.items() if words <= {*name.lower().split(), kind}]
    if device not in found and len(found) != 1:
        recorded, some = ", ".join(sorted(kinds)), " and ".join(found)
        raise ValueError(f"--device {device}: names {some or 'no device'}; recorded are {recorded}")
    return device if device in found else found[0]


def counted(found: pd.DataFrame, spec: Spec, by: Sequence[str]) -> pd.DataFrame:
    """See `Data.measured`; `spec` is for the message."""
    found = found[found["status"].isin(["ok", "unchecked"])]
    if (twice := found.duplicated(list(by), keep=False)).any():
        several = found[twice].nunique()
        raise ValueError(f"{dict(spec)}: selects several rows of one {' and '.join(by)}: {several[several > 1]}")
    return found.set_index(list(by), drop=False).rename_axis(list(range(len(by))))


def mean(ratios: pd.Series) -> float:
    """Geometric mean, as in the paper."""
    return geometric_mean(ratios)


def real(found: pd.DataFrame) -> pd.DataFrame:
    return found[found["kind"] == "real"]


def quiet(found: pd.DataFrame) -> pd.DataFrame:
    """Pairs of which the host disturbed neither time."""
    return found[~found["noisy"]]


def _value(data: Data, spec: Spec) -> str:
    """One value, or the status of one that failed; `~` marks one that the host disturbed."""
    found = data.pick(spec)
    if found.empty or spec.get("mean"):
        return "" if spec.get("mean") else "-"
    row = found.iloc[-1]
    if row["status"] not in ("ok", "unchecked"):
        return row["status"]
    mark = DISTURBED if row["disturbed"] == "yes" else ""
    name = f" (`{row['note']}`)" if spec.get("named") else ""
    return f"{mark}{row[spec.get('show', 'value')] * spec.get('times', 1):{spec.get('form', '.4f')}}{name}"


def _ratio(data: Data, spec: Spec) -> str:
    """The ratio of one pair, or the column of `Data.pairs` that `show` names; of several pairs of a line of means the
    geometric mean of their ratios over real graphs."""
    found, shown = quiet(data.pairs(spec)), spec.get("show", "ratio")
    if spec.get("mean"):
        found = real(found)
        if shown != "ratio":
            return ""
        return f"**{mean(found['ratio']):.2f}** (n = {len(found)})" if len(found) else "-"
    return f"{found[shown].iloc[0]:{spec.get('form', '.2f')}}" if len(found) == 1 else "-"


def _means(data: Data, spec: Spec) -> str:
    """Geometric means over real graphs and over all: "2.83 (13) / 2.46 (30)"."""
    found = quiet(data.pairs(spec))
    both = (f"{mean(some['ratio']):.2f} ({len(some)})" if len(some) else "-" for some in (real(found), found))
    return " / ".join(both) if len(found) else "-"


def _worst(data: Data, spec: Spec) -> str:
    """Geometric mean, and the graph at the end named by `worst`: "1.27 (n = 9; 1.67 on ego-twitter)"."""
    found = quiet(data.pairs(spec))
    if found.empty:
        return "-"
    end = found.loc[found["ratio"].idxmax() if spec.get("worst") == "largest" else found["ratio"].idxmin()]
    return f"{mean(found['ratio']):.2f} (n = {len(found)}; {end['ratio']:.2f} on {end['label']})"


def _range(data: Data, spec: Spec) -> str:
    """Least and largest ratio: "86 % to 142 % (n = 7)"."""
    found, form = quiet(data.pairs(spec))["ratio"], spec.get("form", ".2f")
    return f"{found.min():{form}} to {found.max():{form}} (n = {len(found)})" if len(found) else "-"


def _extreme(data: Data, spec: Spec) -> str:
    """The least or largest value and the number of rows."""
    found = data.pick(spec)["value"].dropna()
    return f"{getattr(found, spec['of'])():{spec['form']}} (n = {len(found)})" if len(found) else "-"


def chain(data: Data, spec: Spec) -> pd.DataFrame:
    """Milliseconds of the `steps` of a specification (columns), by graph and d, where all ran undisturbed."""
    steps = {name: data.measured(merged(spec, data.resolve(step))) for name, step in spec["steps"].items()}
    columns = [found.loc[found["disturbed"] != "yes", "value"] for found in steps.values()]
    return pd.concat(columns, axis=1, keys=steps, join="inner")


CELLS: dict[str, Callable[[Data, Spec], str]] = {
    "value": _value,
    "ratio": _ratio,
    "means": _means,
    "worst": _worst,
    "range": _range,
    "extreme": _extreme,
}


def cell(data: Data, *parts: Spec) -> str:
    spec = merged(*map(data.resolve, parts))
    return CELLS[spec.get("cell", "value")](data, spec)


def axis(data: Data, entries: list | str | Mapping, where: Spec) -> list[tuple[str, Spec]]:
    """Names and selections of the lines or columns of a table.

    Entries are [name, selection, ...]; or "graphs", those with rows: single ones, batches, surrogates last, by edges;
    or {each: column, of: selection, as: side, first: entries}: each value of a column, for one side or for both.
    """
    if isinstance(entries, list):
        return [(name, merged(*parts)) for name, *parts in entries]
    if isinstance(entries, Mapping):
        found, column = data.pick(merged(data.resolve(where), entries["of"])), entries["each"]
        types = found.groupby(column)["dtype"].first().replace({"float16": "fp16", "float32": "fp32"})
        side = entries.get("as")
        chosen = {name: {side: {column: name}} if side else {column: name} for name in found[column].unique()}
        each = [(f"`{name}`, {types[name]}", selection) for name, selection in chosen.items()]
        return [*axis(data, entries.get("first", []), where), *each]
    found = data.pick(where)
    found = found.assign(last=found["kind"] != "real")
    found = found.sort_values(["last", "batch", "nnz"], ascending=[True, False, True]).drop_duplicates("data_sha256")
    return [
        (label if graphs == 1 else f"{graphs:,} × {label}", {"data_sha256": sha256})
        for label, graphs, sha256 in zip(found["label"], found["graphs"], found["data_sha256"], strict=True)
    ]


def table(data: Data, spec: Spec) -> str:
    """Caption, provenance and Markdown table of an entry of tables.yaml; "" if none of its rows was recorded."""
    data.used.clear()
    where, base = spec["where"], spec.get("index", {})
    lines = axis(data, spec["lines"], merged(where, base))
    columns = axis(data, spec["columns"], merged(where, base))
    data.used.clear()  # the rows of the cells count
    cells = [[name, *(cell(data, where, line, column) for _, column in columns)] for name, line in lines]
    cells = [line for line in cells if {*line[1:]} - {"-", ""}]
    if not cells:
        return ""
    text = " ".join(spec["caption"].split())
    return f"{text} {data.provenance()}.\n\n{markdown([spec['corner'], *(name for name, _ in columns)], cells, 1)}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], left: int | None = None) -> str:
    """A Markdown table; columns after the first `left` are aligned to the right, and a | in a cell is escaped."""
    rules = ["---" if left is None or nth < left else "---:" for nth in range(len(head))]
    escaped = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rules, *escaped))
