"""From rows of ceilings and kernels to floors and shares; numbers worked out by hand."""

import pytest
import torch

from bench import Row, provenance
from report.plots.roofline import draw
from report.roofline import Ceilings, achieved

PROVENANCE = provenance(torch.device("cpu")).model_dump() | {"device": "GPU A"}
MACHINE = {
    "data_sha256": "none",
    "data_source": "none",
    "graphs": 1,
    "heads": 1,
    "blocks": 0,
    "dtype": "float16",
    "out_dtype": "none",
    "scope": "machine",
    "metric": "time",
    "unit": "ms",
    "repeats": 20,
    "status": "ok",
    "relative_error": 0.0,
    "config": "scripts/roofline.py",
    "config_sha": "none",
}


def machine(dataset: str, backend: str, nodes: int, nnz: int, dim: int, value: float, **changes) -> Row:
    columns = {"dataset": dataset, "backend": backend, "nodes": nodes, "nnz": nnz, "dim": dim}
    return Row(**(PROVENANCE | MACHINE | columns | {"value": value, "p10": value, "p90": value} | changes))


# d = 128: K and V of 1000 and of 4000 rows are 512,000 and 2,048,000 bytes; a pair of rows is 512 bytes.
ROWS = [
    machine("copy", "copy_, add", 1000, 0, 128, 0.5),  # 2 * 256,000 bytes: 1,024,000 a ms
    machine("mma", "m16n8k16", 0, 10**6, 16, 2.0),
    machine("gather", "ld_global", 1000, 2000, 128, 1.0),
    machine("gather", "cp_async", 1000, 2000, 128, 0.5),  # the faster path: 2,048,000 bytes a ms
    machine("gather", "ld_global", 4000, 2000, 128, 1.0),  # 1,024,000 bytes a ms
    machine("gather", "ld_global", 1000, 2000, 256, 4.0),
    machine("gather", "ld_global", 1000, 2000, 128, 0.001, device="GPU B"),
]


def kernel(metric: str, value: float, unit: str = "ms", **changes) -> Row:
    columns = {"dataset": "cora", "backend": "fused3s", "nodes": 2000, "nnz": 5000, "dim": 128}
    columns |= {"scope": "kernel", "metric": metric, "unit": unit, "out_dtype": "float32", "data_source": "file"}
    columns |= {"value": value, "p10": value, "p90": value}
    return Row(**(PROVENANCE | MACHINE | columns | changes))


CELL = [
    kernel("time", 2.0),
    kernel("gathered_bytes", 3_000_000.0, "B"),
    kernel("compulsory_bytes", 512_000.0, "B"),
]


def test_the_faster_path_counts_and_only_on_its_device():
    found = Ceilings.of(ROWS, "GPU A")
    assert found.copy == 1_024_000
    assert found.mma == 4096 * 10**6 / 2
    assert found.gather[256] == ([512_000, 2_048_000], [2_048_000.0, 1_024_000.0])
    assert Ceilings.of(ROWS, "GPU B").gather[256][1] == [2000 * 512 / 0.001]
    latest = machine("gather", "cp_async", 1000, 2000, 128, 1.0)
    assert Ceilings.of([*ROWS, latest], "GPU A").gather[256][1][0] == 1_024_000


def test_rates_are_interpolated_over_the_logarithm_and_clamped():
    found = Ceilings.of(ROWS, "GPU A")
    assert found.gather_rate(256, 1_024_000) == pytest.approx(1_536_000)  # half way from 0.5 to 2 MB
    assert found.gather_rate(256, 1) == 2_048_000
    assert found.gather_rate(256, 10**12) == 1_024_000
    assert found.gather_rate(300, 1) == 2_048_000
    assert found.gather_rate(4000, 1) == found.gather_rate(512, 1) == 2000 * 1024 / 4


def test_a_floor_is_gathers_plus_streams_and_a_share_is_of_it():
    found = Ceilings.of(ROWS, "GPU A")
    floor = found.floor_ms(2000, 128, "float16", 3_000_000, 512_000)
    assert floor == pytest.approx(3_000_000 / 1_536_000 + 0.5)
    (one,) = achieved(CELL)
    assert one.share(found) == pytest.approx(floor / 2)
    assert one.tb_per_s == pytest.approx(3_512_000 / 2e-3 / 1e12)
    assert one.tflop_per_s == pytest.approx(4 * 128 * 5000 / 2e-3 / 1e12)


def test_only_right_times_with_their_bytes_have_a_share():
    assert achieved(CELL[1:]) == achieved(CELL[:2]) == []
    assert achieved([kernel("time", 2.0, status="wrong", reason="off"), *CELL[1:]]) == []
    assert achieved([kernel("time_l2_cold", 2.0), *CELL[1:]]) == []
    assert len(achieved([kernel("time_l2_cold", 2.0), *CELL[1:]], "time_l2_cold")) == 1
    assert achieved([kernel("time", 2.0, out_dtype="float16"), *CELL[1:]]) == []


def test_what_was_not_measured_is_an_error_that_says_who_measures_it():
    nothing = Ceilings.of([], "GPU A")
    with pytest.raises(ValueError, match=r"GPU A: no gather rates.*scripts/roofline.py"):
        nothing.gather_rate(256, 1)
    with pytest.raises(ValueError, match=r"GPU A: no copy.*scripts/roofline.py"):
        nothing.floor_ms(1, 128, "float16", 1, 1)


def test_figures_are_drawn_from_the_rows():
    figures = draw([*ROWS, *CELL])
    assert [*figures] == ["ceilings_gpu-a", "roofline_gpu-a_d128"]
    labels = [line.get_label() for line in figures["ceilings_gpu-a"].axes[0].lines]
    assert labels[:2] == ["d = 128, cp_async", "d = 128, ld_global"]
    (dots,) = [line for line in figures["roofline_gpu-a_d128"].axes[0].lines if line.get_label() == "fused3s"]
    (one,) = achieved(CELL)
    assert dots.get_ydata() == pytest.approx([one.share(Ceilings.of(ROWS, "GPU A"))])
    assert draw(CELL) == {}
