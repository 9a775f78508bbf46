"""The one operation behind tables, claims and figures: select rows, take ratios, take means.

A row counts in a ratio or mean only if its status is `ok`, or `unchecked` where nothing can be compared (bytes, rates,
published times). Rows whose output is `wrong` never count, nor do times that the host disturbed.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import pandas as pd

from report.derived import derived_rows
from report.published import with_published
from report.rows import provenance, select

PAIR = ("data_sha256", "dim")
DISTURBED = "~"
COUNTED = ("ok", "unchecked")
Where = Mapping[str, Any]  # see `report.rows.select`


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
        self.no_pairs = self.empty.assign(ratio=0.0, low=0.0, high=0.0, noisy=False, wrong=False, theirs=0.0)
        kinds = dict(zip(rows["device"], rows["device_type"], strict=True))
        self.device = device and _named(device, kinds)
        self.device_type = kinds.get(self.device, "cpu" if {*kinds.values()} == {"cpu"} else "cuda")
        self.used: list[pd.DataFrame] = []
        self.chosen: Counter[str] = Counter()  # rows by device, where the selection names none
        self.only: str | None = None  # the device of all selections that name none

    def of_one_device(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives with rows of one device, but for selections that name another."""
        self.chosen.clear()
        before = len(self.used)
        found = compute()
        if len(self.chosen) > 1:
            self.only = self.device if self.device in self.chosen else self.chosen.most_common(1)[0][0]
            del self.used[before:]
            found = compute()
            self.only = None
        return found

    def pick(self, where: Where) -> pd.DataFrame:
        """Rows of one device by number of edges: of the one that `where` names, else of the one with most of them.

        Raises:
            ValueError: a key of `where` is no column.
        """
        found = self._of_device(self._rows_of(where), where)
        self._use(found)
        return found

    def _rows_of(self, where: Where) -> pd.DataFrame:
        rows = self.benches.get(where["bench"], self.empty)
        return select(rows, {"device_type": self.device_type, **where})

    def _of_device(self, found: pd.DataFrame, where: Where, device: str | None = None) -> pd.DataFrame:
        devices, device = found["device"], self.only or device
        if device is None and devices.nunique() > 1:
            device = self._usual(found)
        if "device" not in where:
            found = found if device is None else found[devices == device]
            self.chosen.update(found["device"])
        return found.sort_values(["nnz", "label", "dim"], kind="stable")

    def _use(self, found: pd.DataFrame) -> None:
        self.used.append(found[["device", "commit", "date", "dirty"]])

    def measured(self, where: Where, by: Sequence[str] = PAIR) -> pd.DataFrame:
        """Rows that count in means, with `by` as index.

        Raises:
            ValueError: two of them have the same `by`: `where` does not tell them apart.
        """
        return _counted(self.pick(where), where, by, COUNTED)

    def pairs(
        self,
        where: Where,
        ours: Where,
        theirs: Where,
        by: Sequence[str] = PAIR,
        *,
        across: bool = False,
        statuses: Collection[str] = COUNTED,
    ) -> pd.DataFrame:
        """Rows of `ours` with the columns ratio (theirs over ours), low and high (between the percentiles), noisy and
        wrong (of either side).

        Both sides are laid over `where`, are of one device unless `across`, and have one of `statuses`; `by` identifies
        a pair. Without a row unless each d of a list of several has a pair: a mean over fewer is another quantity.
        """
        ours, theirs = {**where, **ours}, {**where, **theirs}
        mine, other = self._rows_of(ours), self._rows_of(theirs)
        if mine.empty or other.empty:
            return self.no_pairs
        device = None if across else self._device_of_both(mine, other)
        mine = _counted(self._of_device(mine, ours, device), ours, by, statuses)
        other = _counted(self._of_device(other, theirs, device), theirs, by, statuses)
        both = mine.index.intersection(other.index, sort=False)
        mine, other = mine.loc[both], other.loc[both]
        self._use(mine)
        self._use(other)
        found = mine.assign(
            ratio=other["value"] / mine["value"],
            low=other["p10"] / mine["p90"],
            high=other["p90"] / mine["p10"],
            noisy=(mine["disturbed"] == "yes") | (other["disturbed"] == "yes"),
            wrong=(mine["status"] == "wrong") | (other["status"] == "wrong"),
            theirs=other["value"],
        )
        dims = where.get("dim")
        complete = not isinstance(dims, list) or {*dims} <= {*found.loc[~found["noisy"], "dim"]}
        return found if complete else found.iloc[:0]

    def _device_of_both(self, ours: pd.DataFrame, theirs: pd.DataFrame) -> str:
        """The device of a ratio: of the devices that have rows of both sides, if there are any."""
        both = ours["device"].isin(theirs["device"])
        return self._usual(ours[both] if both.any() else ours)

    def _usual(self, rows: pd.DataFrame) -> str:
        """The device that was asked for, if it has rows, else the one with most of them, the newest of several."""
        if self.device in {*rows["device"]}:
            return self.device
        return rows.groupby("device")["date"].agg(["size", "max"]).sort_values(["size", "max"]).index[-1]

    def provenance(self) -> str:
        """Device, commits and dates of the rows used since the last call."""
        used, self.used = pd.concat([self.empty[["device", "commit", "date", "dirty"]], *self.used]), []
        return provenance(used[used["date"] != ""])


def _named(device: str, kinds: Mapping[str, str]) -> str:
    """The name that is `device`, or the only one that has, with its kind, the words of `device`."""
    words = {*re.findall(r"\w+", device.lower())}
    found = [name for name, kind in kinds.items() if words <= {*re.findall(r"\w+", name.lower()), kind}]
    if device not in found and len(found) != 1:
        recorded, some = ", ".join(sorted(kinds)), " and ".join(found)
        raise ValueError(f"--device {device}: names {some or 'no device'}; recorded are {recorded}")
    return device if device in found else found[0]


def _counted(found: pd.DataFrame, where: Where, by: Sequence[str], statuses: Collection[str]) -> pd.DataFrame:
    found = found[found["status"].isin(statuses)]
    if (twice := found.duplicated(list(by), keep=False)).any():
        several = found[twice].nunique()
        raise ValueError(f"{dict(where)}: selects several rows of one {' and '.join(by)}: {several[several > 1]}")
    return found.set_index(list(by), drop=False).rename_axis(list(range(len(by))))


def mean(ratios: Iterable[float]) -> float:
    """Geometric mean, as in the paper."""
    return geometric_mean(ratios)


def by_graph(found: pd.DataFrame) -> pd.DataFrame:
    """One row a graph with the mean of its ratios: the d or batches of one graph are not independent."""
    rows = found.reset_index(drop="dataset" in found)[["dataset", "label", "kind", "ratio"]]
    return rows.groupby(["dataset", "label", "kind"], sort=False)["ratio"].agg(mean).reset_index()


def real(found: pd.DataFrame) -> pd.DataFrame:
    return found[found["kind"] == "real"]


def quiet(found: pd.DataFrame) -> pd.DataFrame:
    """Pairs of which the host disturbed neither time."""
    return found[~found["noisy"]]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], left: int | None = None) -> str:
    """A Markdown table; columns after the first `left` are aligned to the right, and a | in a cell is escaped."""
    rules = ["---" if left is None or nth < left else "---:" for nth in range(len(head))]
    escaped = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rules, *escaped))
