"""From the recorded ceilings of a machine to the floor of an attention kernel, and what share of it a time reaches.

A kernel takes at least (bytes of `report.traffic`)

    gathered / (rate at which the machine gathers rows of that size from a K and V of that size)
    + compulsory / (rate at which it copies, bytes read and written)

as its gathers and its streams share the same path to memory. Tensor cores are no limit of it: even blocks without a
zero have 16 FLOP a gathered byte in fp16. A kernel that works on more than 16 queries at a time, or finds rows of
neighbouring windows in L1, may be below the floor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.records import Row
from report.traffic import flop

MMA_FLOP = 2 * 16 * 8 * 16  # of one m16n8k16


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device.

    Attributes:
        device: its name.
        copy: bytes read and written a millisecond; None if it was not measured.
        gather: for each size of a row in bytes (working sets of K and V in bytes, bytes gathered a millisecond), both
            ascending in the working set: the faster of the two load paths.
        mma: FLOP a millisecond of mma.sync; None if it was not measured.
    """

    device: str
    copy: float | None
    gather: dict[int, tuple[list[int], list[float]]]
    mma: float | None

    @classmethod
    def of(cls, rows: Iterable[Row], device: str) -> "Ceilings":
        """From rows of scope machine, of which the latest of each kind counts."""
        latest = {
            (row.dataset, row.backend, row.nodes, row.dim): row
            for row in rows
            if row.scope == "machine" and row.device == device and row.status == "ok"
        }
        rates: dict[str, list[float]] = {"copy": [], "mma": []}
        gather: dict[int, dict[int, float]] = {}
        for (dataset, _, nodes, dim), row in latest.items():
            row_bytes = dim * _itemsize(row.dtype)
            if dataset == "copy":
                rates["copy"].append(2 * nodes * row_bytes / row.value)
            elif dataset == "mma":
                rates["mma"].append(MMA_FLOP * row.nnz / row.value)
            elif dataset == "gather":
                by_size, working_set = gather.setdefault(row_bytes, {}), 2 * nodes * row_bytes
                by_size[working_set] = max(by_size.get(working_set, 0.0), 2 * row.nnz * row_bytes / row.value)
        curves = {
            size: ([*sorted(by_size)], [by_size[at] for at in sorted(by_size)]) for size, by_size in gather.items()
        }
        return cls(device, max(rates["copy"], default=None), curves, max(rates["mma"], default=None))

    def gather_rate(self, row_bytes: int, working_set: int) -> float:
        """Bytes a millisecond for rows of `row_bytes` from K and V of `working_set` bytes in all.

        Between two measured working sets the rate is interpolated over the logarithm of the size; outside of them, and
        for other sizes of a row, the nearest one counts.

        Raises:
            ValueError: no gather was measured on this device.
        """
        if not self.gather:
            raise ValueError(f"{self.device}: no gather rates were recorded; scripts/roofline.py measures them")
        nearest = min(self.gather, key=lambda size: abs(np.log(size / row_bytes)))
        sizes, rates = self.gather[nearest]
        return float(np.interp(np.log(working_set), np.log(sizes), rates))

    def floor_ms(self, nodes: int, dim: int, dtype: str, gathered: float, compulsory: float) -> float:
        """Milliseconds that attention takes at least; K and V are [nodes, dim] of `dtype`, one head.

        Args:
            gathered, compulsory: bytes, see `report.traffic`; the output's type is in the latter.

        Raises:
            ValueError: the device's gather or copy was not measured.
        """
        if self.copy is None:
            raise ValueError(f"{self.device}: no copy was recorded; scripts/roofline.py measures it")
        row_bytes = dim * _itemsize(dtype)
        return gathered / self.gather_rate(row_bytes, 2 * nodes * row_bytes) + compulsory / self.copy


@dataclass(frozen=True)
class Achieved:
    """A kernel's recorded time with the bytes of its cell."""

    row: Row
    gathered: float
    compulsory: float

    @property
    def tb_per_s(self) -> float:
        """Gathered and compulsory bytes over the time."""
        return (self.gathered + self.compulsory) / self.row.value / 1e9

    @property
    def tflop_per_s(self) -> float:
        return flop(self.row.nnz, self.row.dim, self.row.heads) / self.row.value / 1e9

    def share(self, ceilings: Ceilings) -> float:
        """Of the floor in the time: 1 is as fast as the machine allows."""
        row = self.row
        return ceilings.floor_ms(row.nodes, row.dim, row.dtype, self.gathered, self.compulsory) / row.value


def achieved(rows: Sequence[Row], time_metric: str = "time") -> list[Achieved]:
    """The latest right time of each cell that has its bytes beside it, in the order of the rows."""

    def cell(row: Row) -> tuple:
        return (
            *(row.device, row.dataset, row.data_sha256, row.dim, row.heads),
            *(row.dtype, row.out_dtype, row.backend),
        )

    cells: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row.scope == "kernel":
            cells.setdefault(cell(row), {})[row.metric] = row
    found = []
    for metrics in cells.values():
        time, gathered, compulsory = (metrics.get(key) for key in (time_metric, "gathered_bytes", "compulsory_bytes"))
        if time and time.status == "ok" and gathered and compulsory:
            found.append(Achieved(time, gathered.value, compulsory.value))
    return found


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
