"""Fits find the coefficients that times were made of; what is missing is named; recorded times come back."""

from pathlib import Path

import pandas as pd
import pytest
from kernel_rows import row

from configs.bench_schema import Shape
from report.frames import frame, recorded
from simulator.fit import AttentionTimes, DenseTimes, NotRecordedError

DEVICE = "NVIDIA H200"
SHAPE = Shape(2, 32)
ROW_BYTES = 2 * 64
RATE, COPY = 2e6, 4e6  # bytes per ms
LAUNCH, GATHER, WINDOW = 0.004, 0.9, 2e-6
SIZES = [(1600 * k, 7000 * k + 11 * k * k) for k in (1, 2, 5, 9, 20, 44, 80)]  # nodes, gathered columns
HERE = Path(__file__).resolve().parents[2]


def kernel_ms(nodes: int, gathered: int) -> float:
    return LAUNCH + GATHER * 2 * gathered * ROW_BYTES / RATE + WINDOW * -(-nodes // 16)


def attention_rows(times: list[float], sizes=SIZES):
    common = {"heads": SHAPE.heads, "dim": SHAPE.dim, "out_dtype": "float16", "bench": "heads"}
    rows = []
    for place, ((nodes, gathered), ms) in enumerate(zip(sizes, times, strict=True)):
        of_graph = common | {"nodes": nodes, "nnz": gathered}
        rows.append(row(f"g{place}", "fused3s", ms, **of_graph))
        for metric, value in (("gathered_bytes", 2 * gathered * ROW_BYTES), ("compulsory_bytes", 1)):
            rows.append(row(f"g{place}", "fused3s", value, **of_graph, metric=metric, unit="B", launch="none"))
    return rows


def rate_rows():
    common = {"bench": "peak_rates", "launch": "none", "plan": "none", "scope": "machine", "nodes": 0, "nnz": 0}
    gather = {"dim": ROW_BYTES // 2, "working_set": 1 << 20, "work": int(RATE)}
    return [
        row("none", "gather", 1.0, **common, **gather),
        row("none", "copy", 1.0, **common, working_set=1 << 30, work=int(COPY)),
    ]


def fitted(times: list[float]) -> AttentionTimes:
    return AttentionTimes.of(frame([*attention_rows(times), *rate_rows()]), DEVICE, SHAPE)


def test_coefficients_come_back():
    found = fitted([kernel_ms(*size) for size in SIZES])
    assert found.fit.coefficients == pytest.approx((LAUNCH, GATHER, WINDOW), rel=1e-4)
    assert max(found.fit.errors) < 1e-4
    assert found.fit.graphs == len(SIZES)
    assert set(found.anchors) == {f"hash of g{place}" for place in range(len(SIZES))}
    assert found.ms(3200, 5000, 3200) == pytest.approx(kernel_ms(3200, 5000), rel=1e-4)
    assert found.ms(3200, 0, 3200) == pytest.approx(LAUNCH + 200 * WINDOW, rel=1e-3)  # rows without edges
    assert found.ms(0, 0, 0) == 0
    assert found.copy_ms(COPY) == pytest.approx(1)


def test_an_outlier_changes_its_anchor_and_not_the_fit():
    times = [kernel_ms(*size) for size in SIZES]
    times[3] *= 1.7
    found = fitted(times)
    assert found.fit.coefficients == pytest.approx((LAUNCH, GATHER, WINDOW), rel=1e-4)
    assert found.anchors["hash of g3"] == pytest.approx(1.7, rel=1e-4)
    assert found.anchors["hash of g4"] == pytest.approx(1, rel=1e-4)
    assert found.fit.errors[3] == pytest.approx(1 - 1 / 1.7, rel=1e-3)


def test_too_few_times_are_named():
    rows = frame([*attention_rows([1.0, 2.0], SIZES[:2]), *rate_rows()])
    with pytest.raises(NotRecordedError, match=r"attention of 2x32 on NVIDIA H200: 2 recorded graphs; 6 or more"):
        AttentionTimes.of(rows, DEVICE, SHAPE)
    with pytest.raises(NotRecordedError, match="attention of 1x128 on NVIDIA H200: 0 recorded graphs"):
        AttentionTimes.of(rows, DEVICE, Shape(1, 128))
    with pytest.raises(NotRecordedError, match=r"no peak rates are recorded; scripts/peak_rates\.py"):
        AttentionTimes.of(rows, "another GPU", SHAPE)
    with pytest.raises(NotRecordedError, match="layers of width 64 on NVIDIA H200: 0 recorded graphs"):
        DenseTimes.of(rows, DEVICE, 64)


def dense_rows(nodes: int, dense: float, qkv: float | None):
    common = {"bench": "end_to_end", "scope": "model", "launch": "eager", "dense": "fused", "blocks": 10, "dim": 64}
    values = {"dense": dense, "qkv": qkv, "embedding": 5.0}
    return [
        row(f"g{nodes}", "fused3s", ms, **common, nodes=nodes, region=region, plan="none", l2="none")
        for region, ms in values.items()
        if ms is not None
    ]


def test_layers_are_a_line_of_their_two_regions():
    sizes = (1000, 2000, 5000, 10_000, 40_000, 90_000)
    rows = [each for nodes in sizes for each in dense_rows(nodes, 10 * (0.01 + 5e-7 * nodes), 10 * 1e-7 * nodes)]
    rows += dense_rows(500, 100.0, None)  # half a block is left out
    found = DenseTimes.of(frame(rows), DEVICE, 64)
    assert found.fit.coefficients == pytest.approx((0.01, 6e-7), rel=1e-4)
    assert found.fit.graphs == len(sizes)
    assert found.ms(1_000_000) == pytest.approx(0.61, rel=1e-4)
    assert found.ms(0) == 0


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return recorded(HERE / "results" / "h200")


@pytest.mark.parametrize("dataset", ["ogbn-products", "igb-medium", "ogbn-arxiv"])
def test_a_recorded_graph_is_predicted_at_its_recorded_time(measured, dataset):
    found = AttentionTimes.of(measured, DEVICE, Shape(1, 128))
    rows = measured[(measured["dataset"] == dataset) & (measured["series"] == "fused3s") & (measured["dim"] == 128)]
    rows = rows[(rows["heads"] == 1) & (rows["out_dtype"] == "float16") & rows["bench"].isin(("kernels", "heads"))]
    time = rows[(rows["metric"] == "time") & (rows["launch"] == "back_to_back")].iloc[-1]
    columns = round(rows.loc[rows["metric"] == "gathered_bytes", "value"].iloc[-1] / 512)
    predicted = found.anchors[time["data_sha256"]] * found.ms(time["nodes"], columns, time["nodes"])
    assert predicted == pytest.approx(time["value"])


def test_the_recorded_fits_are_as_good_as_their_descriptions_say(measured):
    assert AttentionTimes.of(measured, DEVICE, Shape(1, 128)).fit.median_error < 0.12
    assert DenseTimes.of(measured, DEVICE, 128).fit.median_error < 0.02
