"""The recorded measurements: schema, tables as committed, and figures with all their series and long names."""

from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from bench.records import read_rows
from kernels.backends import REGISTRY
from report.frames import kernel_panels, model_panels, recorded
from report.plots import models, speedups
from report.tables.beyond import beyond_tables
from report.tables.datasets import TABLES
from report.tables.kernels import kernel_tables
from report.tables.models import end_to_end_tables
from report.tables.paper import paper_tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
WRITERS = {
    "kernels.md": kernel_tables,
    "beyond.md": beyond_tables,
    "paper.md": paper_tables,
    "end-to-end.md": end_to_end_tables,
}


@pytest.fixture(scope="module")
def rows():
    return recorded(RESULTS)


def test_every_file_has_rows_of_its_benchmark():
    benches = ("kernels", "end_to_end", "preprocessing", "peak_rates", "sm_active", "stability")
    files = sorted((RESULTS / "h200").iterdir())
    assert [path.name for path in files] == sorted(f"{bench}.csv" for bench in benches)
    for path in files:
        assert {row.bench for row in read_rows(path)} == {path.stem}


def test_no_setting_hides_in_a_name_or_note(rows):
    micro_benchmarks = {"copy", "gather", "mma", "emulated"}
    assert {*rows["backend"]} <= {*REGISTRY, *micro_benchmarks}
    assert not rows["metric"].str.contains(" ").any()
    assert not rows["note"].str.contains(r"^SM \d|^plain|^fused|^compiled|L2 (?:warm|cold)").any()
    assert {*rows.loc[rows["bench"] == "end_to_end", "launch"]} == {"eager", "cuda_graph"}


@pytest.mark.parametrize("name", WRITERS)
def test_tables_are_those_of_the_recorded_rows(rows, name):
    assert WRITERS[name](rows) == (RESULTS / "figures" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TABLES)
def test_data_set_tables_are_those_of_their_csvs(name):
    table = pd.read_csv(RESULTS / "datasets" / f"{name}.csv", dtype=str, keep_default_na=False)
    assert TABLES[name](table) == (RESULTS / "datasets" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("panels", "draw"), [(model_panels, models.draw_speedups), (kernel_panels, speedups.draw_speedups)]
)
def test_no_legend_takes_the_room_of_the_axes(rows, panels, draw):
    for panel in panels(rows):
        if panel.dim == 128 and (figure := draw(panel)):
            figure.draw_without_rendering()
            assert all(axes.get_position().width > 0.8 for axes in figure.axes), panel.title


def test_names_of_graphs_do_not_overlap_below_the_regions(rows):
    (panel,) = (one for one in model_panels(rows) if (one.group, one.dim) == ("single", 128))
    regions = {name: model_panels(rows, region=name) for name in models.REGION_COLOURS}
    figure = models.draw_regions(panel, regions)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
