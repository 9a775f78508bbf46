"""Rows of the builds of the sparse formats, also of builds that fail; the figure."""

import time

import pytest
import torch

import data
from bench import format_build
from bench.format_build import Build, builds, measure_builds, time_build
from bench.provenance import provenance
from bench.records import Row, finished
from bench.runner import pattern_on
from kernels import BSB

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cora():
    return data.load("cora", source="synthetic", features=False)


def rows_of(loaded, **options) -> list[Row]:
    measured = measure_builds(loaded, provenance(CPU), CPU, "configs/bench/smoke.yaml", **options)
    return [row for _, rows in measured for row in rows]


def test_both_formats_are_timed_on_the_cpu(cora):
    rows = rows_of(cora)
    assert [(row.backend, row.variant) for row in rows] == [
        ("fused3s_paper", "none"),
        ("fused3s_paper", "row_window_sort"),
        ("fused3s", "bsb"),
    ]
    assert {row.status for row in rows} == {"unchecked"}
    assert all(0 < row.p10 <= row.value <= row.p90 for row in rows)
    assert {(row.dataset, row.nnz, row.scope) for row in rows} == {("cora", cora.meta.num_edges, "build")}


def test_a_graph_over_the_limit_and_a_failing_build_are_rows(cora, monkeypatch):
    limited = rows_of(cora, max_edges=10_000)
    assert {row.status for row in limited} == {"unavailable"}
    assert "the limit on this device is 10,000" in limited[0].reason

    def fail():
        raise MemoryError("no room")

    good = builds(CPU)[2]
    monkeypatch.setattr(
        format_build, "builds", lambda device: [Build("fused3s_paper", "none", lambda pattern: fail), good]
    )
    failed, fine = rows_of(cora)
    assert (failed.status, failed.reason, failed.value) == ("oom", "no room", None)
    assert fine.status == "unchecked"
    assert rows_of(cora, done=finished([fine], format_build.FINISHED))[0].status == "oom"  # only that one again
    assert len(rows_of(cora, done=finished([failed, fine], format_build.FINISHED))) == 1


def test_the_sort_that_is_timed_is_the_order_of_the_kernel(cora):
    pattern = pattern_on(CPU, cora)
    (sort,) = (build for build in builds(CPU) if build.variant == "row_window_sort")
    assert sort.prepare(pattern)().tolist() == BSB.from_graph(pattern).row_window_order.tolist()


def test_a_slow_build_is_timed_once_and_a_quick_one_often(monkeypatch):
    monkeypatch.setattr(format_build, "SECONDS", 0.02)
    assert time_build(lambda: time.sleep(0.03), CPU).repeats == 1
    assert time_build(lambda: None, CPU).repeats == format_build.REPEATS


@pytest.mark.gpu
def test_builds_on_the_gpu(cora):
    device = torch.device("cuda", torch.cuda.current_device())
    measured = measure_builds(cora, provenance(device), device, "configs/bench/smoke.yaml")
    rows = [row for _, some in measured for row in some]
    assert [(row.backend, row.variant) for row in rows][-1] == ("fused3s", "none")
    assert {row.status for row in rows} == {"unchecked"}
    times = {(row.backend, row.variant): row.value for row in rows}
    assert times["fused3s_paper", "row_window_sort"] < times["fused3s_paper", "none"]  # is a part of it
