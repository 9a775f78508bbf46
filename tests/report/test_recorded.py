"""The recorded measurements: schema, tables as committed, and figures with all their series and long names."""

from itertools import pairwise
from pathlib import Path

import pandas as pd
import plot
import pytest

from baselines import REGISTRY
from bench.records import RUNS, read_rows
from report.frames import kernel_panels, model_panels, recorded
from report.plots import models, speedups
from report.readme import BLOCKS, fill, of_one_gpu
from report.tables.datasets import TABLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
BENCHES = {
    *("kernels", "heads", "edges", "backward", "training", "train", "end_to_end", "preprocessing", "plans"),
    *("peak_rates", "sm_active", "stability", "infer", "parallel"),
}


@pytest.fixture(scope="module")
def rows():
    return recorded(RESULTS)


def test_every_file_has_rows_of_its_benchmark():
    files = [path for folder in ("h100", "h200") for path in (RESULTS / folder).glob("*.csv") if path.name != RUNS]
    assert {path.stem for path in files if path.parent.name == "h200"} == BENCHES
    for path in files:
        assert {row.bench for row in read_rows(path)} == {path.stem}


def test_no_setting_hides_in_a_name_or_note(rows):
    micro_benchmarks = {"copy", "gather", "mma", "emulated"}
    layers = rows["bench"] == "layers"
    assert {*rows.loc[~layers, "backend"]} <= {*REGISTRY, *micro_benchmarks}
    assert {*rows.loc[layers, "backend"]} <= {"auto", "pyg"}
    assert not rows["metric"].str.contains(" ").any()
    assert not rows["note"].str.contains(r"^SM \d|^plain|^fused|^compiled|L2 (?:warm|cold)").any()
    assert {*rows.loc[rows["bench"] == "end_to_end", "launch"]} == {"eager", "cuda_graph"}


@pytest.mark.parametrize("name", plot.TABLES)
def test_tables_are_those_of_the_recorded_rows(rows, name):
    path = RESULTS / "figures" / name
    assert plot.markdown(name, rows) == (path.read_text(encoding="utf-8") if path.exists() else "")


def test_tables_of_the_readme_are_those_of_the_recorded_rows(rows):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fill(readme, of_one_gpu(rows)) == readme
    assert all(f"<!-- begin generated: {name} -->" in readme for name in BLOCKS)


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
    panels = [one for one in model_panels(rows) if (one.group, one.dim) == ("single", 128)]
    regions = {name: model_panels(rows, region=name) for name in models.REGION_COLOURS}
    drawn = [figure for panel in panels if (figure := models.draw_regions(panel, regions))]
    assert drawn
    for figure in drawn:
        figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))
