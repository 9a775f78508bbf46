"""The recorded rows of one GPU that the claims are judged by."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from bench.csv_files import AS_TEXT, read_table
from report.frames import LOCAL, Panel, ablation, kernel_panels, latest
from report.paper import DIM

# Columns of the data set tables that are read, and those that hold numbers.
TABLES = {
    "datasets": (("dataset", "source", "metric", "status"), ()),
    "deciles": (("dataset", "source", "ours_min", "ours_max", "paper_min", "paper_max"), ()),
    "formats": (("dataset", "source", "format"), ("formula_bits", "built_bits")),
}


@dataclass(frozen=True, eq=False)
class Evidence:
    """
    Attributes:
        every: recorded rows of all devices, see `report.frames.frame`.
        datasets: folder of the data set tables.
        durations: step, seconds, commit and device of recorded steps of `scripts/reproduce_figures.py`; may be empty.
    """

    every: pd.DataFrame
    datasets: Path
    durations: pd.DataFrame

    @classmethod
    def of(cls, results: Path, every: pd.DataFrame) -> "Evidence":
        """Of a folder of CSVs and the rows recorded in it; files that are not there leave their claims unchecked."""
        found = sorted(results.rglob("durations.csv"))
        columns = ["step", "seconds", "commit", "device"]
        recorded = [path for path in found if LOCAL not in path.relative_to(results).parts]
        tables = [read_table(path, columns, numbers=("seconds",)) for path in recorded]
        durations = pd.concat(tables) if tables else pd.DataFrame(columns=columns)
        return cls(every, results / "datasets", durations)

    @cached_property
    def device(self) -> str:
        """The GPU with most rows; "none" if there is none."""
        devices = self.every.loc[self.every["device_type"] == "cuda", "device"]
        return devices.mode().iloc[0] if len(devices) else "none"

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Rows of the device."""
        return self.every[self.every["device"] == self.device]

    @cached_property
    def panels(self) -> list[Panel]:
        """Kernel times of the paper's shape: fp32 output, back to back, L2 warm, one head."""
        return [panel for panel in kernel_panels(self.rows) if panel.of_paper]

    def panel(self, group: str, dim: int = DIM) -> Panel | None:
        return next((panel for panel in self.panels if (panel.group, panel.dim) == (group, dim)), None)

    def ablation(self, group: str, dim: int = DIM) -> Panel | None:
        panel = self.panel(group, dim)
        return ablation(panel) if panel else None

    def status(self, dataset: str, backend: str, dim: int | None = None) -> set[str]:
        """Statuses of the kernel times of a backend on a data set, at one head dimension or at all."""
        rows = self.rows[(self.rows["bench"] == "kernels") & (self.rows["metric"] == "time")]
        rows = rows[(rows["dataset"] == dataset) & (rows["series"] == backend) & (rows["out_dtype"] == "float32")]
        return {*rows.loc[rows["dim"] == dim if dim else rows["dim"] > 0, "status"]}

    def memory(self, dataset: str, dim: int = DIM) -> dict[str, float]:
        """Peak memory in GiB of one run with its inputs and format, by backend, fp32 output."""
        rows = self.rows[(self.rows["bench"] == "kernels") & (self.rows["metric"] == "peak_memory")]
        rows = rows[(rows["dataset"] == dataset) & (rows["dim"] == dim) & (rows["out_dtype"] == "float32")]
        rows = latest(rows[rows["value"].notna()], "series")
        return {series: value / 1024 for series, value in zip(rows["series"], rows["value"], strict=True)}

    def data_sets(self, table: str) -> pd.DataFrame:
        """A data set table as text, such as "formats"; empty if it was not recorded."""
        path = self.datasets / f"{table}.csv"
        return read_table(path, *TABLES[table], **AS_TEXT) if path.exists() else pd.DataFrame()

    def seconds(self, step: str) -> float | None:
        """Recorded run time of a step; None if it was not recorded."""
        found = self.durations.loc[self.durations["step"] == step, "seconds"]
        return float(found.iloc[-1]) if len(found) else None
