"""Predictions in table and figure, and their ratio to measured runs: numbers worked out by hand."""

import pandas as pd
import pytest
from kernel_rows import row
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench.records import Row
from configs.bench_schema import Shape
from report.frames import frame
from report.plots.predicted_scaling import draw
from report.predicted_scaling import (
    UPPER_BOUND,
    Predicted,
    predicted,
    predicted_over_measured,
    predicted_over_parts,
)
from report.tables.parallel import parallel_tables
from report.tables.predicted_scaling import predicted_scaling_tables

SHAPE = {"heads": 8, "dim": 16}


def cell(metric: str, value: float | None, **changes) -> Row:
    """A row of the simulator."""
    same = {"bench": "scaling", "plan": "none", "l2": "none", "launch": "none", "status": "predicted", "repeats": 0}
    same |= {"metric": metric, "p10": None, "p90": None, "relative_error": None, "reason": "by hand", "nnz": 4000}
    same |= {"nodes": 1000, "config": "configs/scaling/mine.yaml", "data_source": "file", "scope": "attention"}
    return row("g", "fused3s", value, **(same | changes))


def time(ms: float | None, ranks: int, variant: str, link: str, **changes) -> Row:
    return cell("time", ms, **(SHAPE | {"ranks": ranks, "variant": variant, "link": link, "order": "metis"} | changes))


def block(ms: float, ranks: int, variant: str, link: str) -> Row:
    return time(ms, ranks, variant, link, scope="model", region="block")


def run(ms: float, status: str = "ok", **changes) -> Row:
    """A measured row: halo on two ranks over NVLink."""
    same = SHAPE | {"bench": "parallel", "variant": "halo", "link": "NVLink", "ranks": 2, "order": "metis"}
    same |= {"launch": "eager", "plan": "none", "l2": "none", "scope": "attention", "data_source": "file"}
    same |= {"nodes": 1000, "nnz": 4000, "reason": "none" if status == "ok" else "because"}
    return row("g", "fused3s", ms, status, **(same | changes))


def part(metric: str, rank: int, value: int) -> Row:
    return cell(metric, value, ranks=2, order="metis", scope="build", region=f"rank {rank}", unit="1", dim=0, heads=0)


def received(where: str, value: float) -> Row:
    settings = SHAPE | {"ranks": 2, "order": "metis", "variant": "halo", "link": "none", "region": "largest"}
    return cell(f"bytes_per_{where}", value, **settings, unit="B")


ROWS = [
    *(cell("bandwidth", rate, link=link, scope="machine", unit="GB/s") for link, rate in (("NVLink", 350), ("IB", 45))),
    *(cell("latency", us, link=link, scope="machine", unit="us") for link, us in (("NVLink", 20), ("IB", 30))),
    cell("fit_error", 0.1, **SHAPE, region="median", scope="kernel", graphs=9, unit="1"),
    cell("fit_error", 0.5, **SHAPE, region="largest", scope="kernel", graphs=9, unit="1"),
    *(part("rows", rank, value) for rank, value in enumerate((600, 400))),
    *(part("edges", rank, value) for rank, value in enumerate((1000, 3000))),
    *(part("halo_rows", rank, value) for rank, value in enumerate((30, 50))),
    received("rank", 2.5e9),
    received("peer", 1.5e9),
    time(10.0, 1, "none", "none"),
    block(18.0, 1, "none", "none"),
    time(6.0, 2, "halo", "NVLink"),
    time(4.0, 2, "halo", "NVLink", region="own"),
    block(9.0, 2, "halo", "NVLink"),
    time(8.0, 2, "heads", "NVLink", note=UPPER_BOUND),
    time(7.5, 2, "allgather", "NVLink"),
    block(10.5, 2, "allgather", "NVLink"),
    time(None, 2, "halo", "IB", status="unsupported"),
]


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return frame(ROWS)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def test_what_was_predicted(rows):
    (graph,) = predicted(rows)
    assert isinstance(graph, Predicted)
    assert (graph.name, graph.partitions, graph.ranks("metis"), graph.links) == ("g", ["metis"], [2], ["NVLink", "IB"])
    shape = Shape(8, 16)
    assert graph.ms("metis", 2, shape, "halo", "NVLink") == 6
    assert graph.ms("metis", 2, shape, "halo", "NVLink", "own") == 4
    assert graph.ms("metis", 2, shape, "halo", "IB") is None
    assert graph.best("metis", 2, shape, "NVLink", "block") == ("halo", 9)
    assert graph.best("metis", 2, shape, "IB") is None
    edges = graph.size("metis", 2, "edges")
    assert (edges.largest, edges.balance) == (3000, 1.5)
    assert graph.is_bound("metis", 2, shape, "heads")
    assert not graph.is_bound("metis", 2, shape, "halo")


def test_tables_say_that_they_are_predicted(rows):
    text = predicted_scaling_tables(rows)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0] == "# Predicted: one graph on several GPUs"
    assert headings[3:] == [
        "## Predicted: g, 1K nodes, 4K edges, NVIDIA H200",
        "### Predicted: g, 8x16 (heads x columns)",
    ]
    assert "No predicted case was run on several GPUs" in text
    assert "| NVIDIA H200 | 8x16 | 9 | 10% | 50% |" in text
    assert "| NVLink | `mine.yaml` | by hand | 350 | 20 |" in text
    assert "| metis | 2 | 600 | 1.20 | 3K | 1.50 | 50 | 1.25 | 5.0% |" in text
    gib = 5 * 128 * 2 / 2**30
    assert f"| metis | - | 1 | 10 | - | - | 18 | - | 1.00 | - | - | {1000 * gib:.3g} |" in text
    line = f"| metis | NVLink | 2 | 6 | ≤ 8 | 7.5 | 9 | halo | 2.00 | 2.5 | 1.5 | {600 * gib:.3g} |"
    assert line in text
    assert "| metis | IB |" not in text  # nothing of it was predicted


def test_without_predictions_only_the_title():
    text = predicted_scaling_tables(frame([run(3.0)]))
    assert "\n## " not in text


def test_figures_say_that_they_are_predicted(rows):
    figures = draw(rows)
    assert [*figures] == ["predicted-scaling_nvidia-h200_g"]
    (figure,) = figures.values()
    assert any(text.startswith("Predicted, not measured: a block") for text in texts(figure))
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines == {
        "halo, NVLink": [[2, 9]],
        "allgather, NVLink": [[2, 10.5]],
        "time on one GPU / GPUs": [[1, 18], [2, 9]],
    }
    assert draw(frame([run(3.0)])) == {}


def test_predicted_over_measured():
    found = predicted_over_measured(frame([*ROWS, run(4.0), run(5.0, date="2026-02-01T00:00:00Z")]))
    assert found[["predicted", "measured", "ratio"]].values.tolist() == [[6, 5, 1.2]]  # the later run
    text = predicted_scaling_tables(frame([*ROWS, run(5.0)]))
    assert "| NVIDIA H200 | g | metis | 2 | 8 | 16 | halo | NVLink | attention | none | 6.000 | 5.000 | 1.20 |" in text
    assert "No predicted case" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"link": "gloo"},
        {"ranks": 4},
        {"order": "contiguous"},
        {"dim": 32},
        {"data_sha256": "another graph"},
        {"device": "another GPU"},
        {"variant": "heads"},  # an upper bound
        {"scope": "model"},
        {"region": "exchange"},
        {"metric": "peak_memory"},
        {"disturbed": "yes"},
        {"status": "wrong"},
    ],
    ids=str,
)
def test_other_cases_have_no_ratio(changes):
    assert predicted_over_measured(frame([*ROWS, run(4.0, **changes)])).empty


def test_several_cases_each_have_their_ratio():
    runs = [run(12.0), run(5.0, variant="allgather"), run(18.0, scope="model", region="block")]
    found = predicted_over_measured(frame([*ROWS, *runs])).set_index(["variant", "scope"])["ratio"]
    assert found.to_dict() == {("allgather", "attention"): 1.5, ("halo", "attention"): 0.5, ("halo", "model"): 0.5}


def part_run(part: str, rank: int, ms: float) -> Row:
    """A part of rank 0 or 1, measured on one GPU."""
    return run(ms, region=f"{part} of rank {rank}", link="none")


MEASURED_PARTS = [
    run(10.0, ranks=1, variant="none", link="none", order="none"),
    *(part_run(part, 0, ms) for part, ms in (("pack", 0.5), ("own", 5.0), ("halo", 1.0), ("combine", 0.5))),
    *(part_run(part, 1, ms) for part, ms in (("pack", 0.4), ("own", 4.0))),
]


def test_parts_on_one_gpu():
    text = parallel_tables(frame(MEASURED_PARTS))
    cells = ("0.900", "9.000", "1.000", "0.500", "11.400", "1.14", "7.000")
    assert f"| g | 8x16 | metis | 2 | 10.000 | {' | '.join(cells)} |" in text
    assert "\n## " not in parallel_tables(frame(ROWS))


@pytest.mark.parametrize(
    "rows",
    [
        MEASURED_PARTS[:-2],  # the run was cut off before rank 1
        [*MEASURED_PARTS, part_run("pack", 1, 0.4).model_copy(update={"disturbed": "yes"})],
        [*MEASURED_PARTS, part_run("own", 0, 5.0).model_copy(update={"status": "wrong"})],
    ],
    ids=["a rank is missing", "a part is disturbed", "a part is wrong"],
)
def test_a_partition_that_was_not_measured_as_a_whole_has_no_sum(rows):
    assert "\n## " not in parallel_tables(frame(rows))


def test_predicted_over_parts_is_of_the_slowest_rank():
    predictions = [
        time(ms, 2, "halo", link, region=part)
        for link, own in (("NVLink", 4.0), ("IB", 6.0))
        for part, ms in (("pack", 1.0), ("own", own), ("halo", 0.5), ("combine", 0.5))
    ]
    rows = frame([*ROWS, *predictions, *MEASURED_PARTS])
    found = predicted_over_parts(rows).set_index("part")["ratio"]
    assert found.to_dict() == {"pack": 2, "own": 1.2, "halo": 0.5, "combine": 1, "sum": pytest.approx(8 / 7)}
    line = "| g | 8x16 | metis | 2 | 8.000 | 7.000 | 1.14 | 2.00 | 1.20 | 0.50 | 1.00 |"
    assert line in predicted_scaling_tables(rows)
    assert predicted_over_parts(frame(MEASURED_PARTS)).empty
    assert predicted_over_parts(frame(predictions)).empty


def test_runs_on_several_gpus():
    measured = [
        run(10.0, ranks=1, variant="none", link="none", order="none"),
        run(6.25),
        run(1.5, region="exchange"),
        run(8.0, variant="heads"),
        run(5.0, variant="allgather", status="wrong"),
    ]
    text = parallel_tables(frame(measured))
    assert "## Runs, " in text
    assert "## Parts" not in text
    assert "| g | 8x16 | metis | 2 | NVLink | halo | 10.000 | 6.250 | 1.500 | 1.60 |" in text
    assert "| g | 8x16 | metis | 2 | NVLink | heads | 10.000 | 8.000 | - | 1.25 |" in text
    assert "allgather" not in text.partition("## Runs")[2]
