"""SM active time: clocks to cycles, rows, the figure."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from bench.provenance import provenance
from bench.records import Row
from bench.sm_activity import SmActivityBench, active_cycles, check_config
from configs import load_config
from configs.bench import VARIANTS, BenchConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/bench/sm_active.yaml"
CPU = torch.device("cpu")
WITHOUT, WITH = "F3S_splitC", "F3S_reorderRW"
TIME, SHARE = "sm_active_time", "sm_active_share"


def config(*overrides: str) -> BenchConfig:
    return load_config(ROOT / CONFIG, overrides, BenchConfig)


@pytest.fixture(scope="module")
def graph() -> data.LoadedGraph:
    return data.load("cora", source="synthetic", features=False)


def rows_of(graph: data.LoadedGraph, variant: str, launches: list[dict[int, int]], error: float = 1e-4) -> list[Row]:
    settings = config("kernel.dims=[64]")
    bench = SmActivityBench(graph, settings, CONFIG, provenance(CPU), CPU)
    (cell,) = (cell for cell in bench.cells(settings) if cell.variant == variant)
    return bench.rows_of_launches(cell, launches, error)


def test_the_two_sides_differ_in_the_order_alone():
    without, reordered = VARIANTS[WITHOUT], VARIANTS[WITH]
    assert without | {"reordered": True} == reordered
    assert not without["reordered"]


def test_active_cycles_of_overlapping_nested_and_separate_blocks():
    clocks = [
        (5, 100, 200),
        (5, 150, 250),  # overlaps
        (5, 160, 170),  # inside
        (5, 250, 260),  # follows at once
        (5, 400, 450),  # after a gap
        (0, 10**12, 10**12 + 7),  # another clock
    ]
    for order in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]):
        assert active_cycles(np.array(clocks)[order], num_sms=2) == {5: 210, 0: 7}


def test_active_cycles_are_those_with_a_block():
    rng = np.random.default_rng(0)
    start = rng.integers(0, 2000, 300)
    clocks = np.stack([rng.integers(0, 4, 300), start, start + rng.integers(1, 30, 300)], axis=1)
    expected = {sm: len({t for s, a, b in clocks if s == sm for t in range(a, b)}) for sm in range(4)}
    assert active_cycles(clocks, num_sms=4) == expected


def test_an_sm_without_a_block_counts_with_0():
    assert active_cycles(np.array([(1, 5, 8)]), num_sms=3) == {0: 0, 1: 3, 2: 0}
    # SM numbers may have gaps: no other SM is added.
    assert active_cycles(np.array([(1, 5, 8), (7, 0, 2)]), num_sms=2) == {1: 3, 7: 2}


def test_rows_are_of_the_median_launch_and_the_share_of_all(graph):
    launches = [{0: 90, 1: 100}, {0: 50, 1: 50}, {0: 20, 1: 300}]
    share, *times = rows_of(graph, WITHOUT, launches)
    assert (share.metric, share.unit, share.repeats, share.status) == (SHARE, "1", 3, "ok")
    assert share.value == pytest.approx(0.95)  # of 0.95, 1 and 160 / 300
    assert share.p90 == pytest.approx(0.99)
    assert [(row.metric, row.unit, row.value, row.p10, row.repeats) for row in times] == [
        (TIME, "cycles", 90, 90, 1),
        (TIME, "cycles", 100, 100, 1),
    ]
    assert [row.sm for row in times] == [0, 1]
    assert {row.config for row in times} == {CONFIG}
    assert {(row.scope, row.dataset, row.data_source, row.dim) for row in times} == {
        ("kernel", "cora", "synthetic", 64)
    }


@pytest.mark.parametrize("error", [3e-3, float("nan")])
def test_a_wrong_output_is_a_status_of_every_row(graph, error):
    rows = rows_of(graph, WITHOUT, [{0: 1}], error)
    assert {row.status for row in rows} == {"wrong"}
    assert "allowed 2.0e-03" in rows[0].reason


def test_a_backend_without_a_clocked_build_is_refused():
    check_config(config())
    with pytest.raises(ValueError, match=r"kernel\.backends: fused3s has no clocked build; allowed are F3S_splitR"):
        check_config(config("kernel.backends=[F3S_splitC, fused3s]"))
    with pytest.raises(ValueError, match=r"kernel\.plans = \['fixed', 'rebuilt'\]"):
        check_config(config("kernel.plans=[fixed, rebuilt]"))
    with pytest.raises(ValueError, match=r"kernel\.shapes and kernel\.edges: .* one head without edge data"):
        check_config(config("kernel.edges=[bias]"))


def test_without_a_gpu_the_script_reports_it(tmp_path):
    command = [sys.executable, "scripts/sm_active_time.py", "--results", str(tmp_path / "r.csv")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "an NVIDIA GPU, and none was found" in done.stderr) == (2, True)
    assert not (tmp_path / "r.csv").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_measured_on_a_gpu(graph, variant):
    device = torch.device("cuda", torch.cuda.current_device())
    settings = config("kernel.dims=[64]", f"kernel.backends=[{variant}]")
    ((_, rows),) = SmActivityBench(graph, settings, CONFIG, provenance(device), device).measure({})
    share, *times = rows
    assert share.status == "ok", share.reason
    assert 0 < share.p10 <= share.value <= share.p90 <= 1
    assert len(times) == torch.cuda.get_device_properties(device).multi_processor_count
    assert sum(row.value > 0 for row in times) >= len(times) / 2  # cora has more row windows than a GPU SMs
    assert max(row.value for row in times) < 1e7
