"""Peak rates and the gather model from recorded rows; numbers worked out by hand."""

import pytest
import torch
from kernel_rows import row

from bench.provenance import provenance
from bench.records import Row
from report.frames import frame
from report.gather_model import PeakRates, achieved, model_over_time
from report.plots.gather_model import draw

PROVENANCE = provenance(torch.device("cpu")).model_dump() | {"device": "GPU A"}


def machine(backend: str, variant: str, value: float, **changes) -> Row:
    columns = {"bench": "peak_rates", "scope": "machine", "metric": "time", "unit": "ms", "dtype": "float16"}
    columns |= {"backend": backend, "variant": variant, "value": value, "p10": value, "p90": value, "repeats": 20}
    columns |= {"status": "ok", "relative_error": 0.0, "config": "scripts/peak_rates.py", "dim": 128}
    return Row(**(PROVENANCE | columns | changes))


def gather(variant: str, working_set: int, value: float, **changes) -> Row:
    return machine("gather", variant, value, **({"working_set": working_set, "work": 1_024_000} | changes))


ROWS = [
    machine("copy", "none", 0.5, working_set=512_000, work=512_000),  # 1,024,000 bytes per ms
    machine("mma", "m16n8k16", 2.0, dim=0, work=4096 * 10**6),
    gather("ld_global", 512_000, 1.0),
    gather("cp_async", 512_000, 0.5),  # the faster path: 2,048,000 bytes per ms
    gather("ld_global", 2_048_000, 1.0),  # 1,024,000 bytes per ms
    gather("ld_global", 1_024_000, 4.0, dim=256, work=2_048_000),
    gather("ld_global", 512_000, 0.001, device="GPU B"),
]


def kernel(metric: str, value: float, unit: str = "ms", **changes) -> Row:
    columns = {"device": "GPU A", "nodes": 2000, "nnz": 5000, "metric": metric, "unit": unit}
    return row("cora", "fused3s", value, **(columns | changes))


CELL = [
    kernel("time", 2.0),
    kernel("gathered_bytes", 3_000_000.0, "B"),
    kernel("compulsory_bytes", 512_000.0, "B"),
]


def rates(rows=ROWS, device="GPU A") -> PeakRates:
    return PeakRates.of(frame(rows), device)


def test_the_faster_path_counts_and_only_on_its_device():
    found = rates()
    assert (found.copy, found.mma) == (1_024_000, 4096 * 10**6 / 2)
    assert found.gather[256].dropna().to_dict() == {512_000: 2_048_000.0, 2_048_000: 1_024_000.0}
    assert rates(device="GPU B").gather[256].tolist() == [1_024_000 / 0.001]
    latest = gather("cp_async", 512_000, 1.0)
    assert rates([*ROWS, latest]).gather.at[512_000, 256] == 1_024_000


def test_rates_are_interpolated_over_the_logarithm_and_clamped():
    found = rates()
    assert found.gather_rate(256, 1_024_000) == pytest.approx(1_536_000)  # half way from 0.5 to 2 MB
    assert found.gather_rate(256, 1) == 2_048_000
    assert found.gather_rate(256, 10**12) == 1_024_000
    assert found.gather_rate(300, 1) == 2_048_000
    assert found.gather_rate(4000, 1) == found.gather_rate(512, 1) == 2_048_000 / 4


def test_the_model_is_gathers_plus_streams():
    model = rates().model_ms(2000, 128, "float16", 3_000_000, 512_000)
    assert model == pytest.approx(3_000_000 / 1_536_000 + 0.5)
    cells = achieved(frame(CELL))
    assert model_over_time(cells, rates()).tolist() == [pytest.approx(model / 2)]
    (one,) = cells.itertuples()
    assert one.tb_per_s == pytest.approx(3_512_000 / 2e-3 / 1e12)
    assert one.tflop_per_s == pytest.approx(4 * 128 * 5000 / 2e-3 / 1e12)


def test_only_correct_times_with_their_bytes_count():
    assert achieved(frame(CELL[1:])).empty
    assert achieved(frame(CELL[:2])).empty
    assert achieved(frame([kernel("time", 2.0, status="wrong", reason="off"), *CELL[1:]])).empty
    cold = [one.model_copy(update={"l2": "cold"}) for one in CELL]
    assert achieved(frame([cold[0], *CELL[1:]])).empty
    assert list(achieved(frame([*CELL, *cold]), "cold")["l2"]) == ["cold"]
    assert achieved(frame([kernel("time", 2.0, out_dtype="float16"), *CELL[1:]])).empty


def test_a_missing_rate_is_an_error_that_names_the_script():
    nothing = rates([])
    assert not nothing.complete
    with pytest.raises(ValueError, match=r"GPU A: no gather rates.*scripts/peak_rates.py"):
        nothing.gather_rate(256, 1)
    with pytest.raises(ValueError, match=r"GPU A: no copy.*scripts/peak_rates.py"):
        nothing.model_ms(1, 128, "float16", 1, 1)


def test_figures_are_drawn_from_the_rows():
    figures = draw(frame([*ROWS, *CELL]))
    assert [*figures] == ["peak-rates_gpu-a", "gather-model_gpu-a_d128"]
    labels = [line.get_label() for line in figures["peak-rates_gpu-a"].axes[0].lines]
    assert labels[:2] == ["d = 128, cp_async", "d = 128, ld_global"]
    (dots,) = [line for line in figures["gather-model_gpu-a_d128"].axes[0].lines if line.get_label() == "fused3s"]
    assert list(dots.get_ydata()) == pytest.approx([(3_000_000 / 1_536_000 + 0.5) / 2])
    assert draw(frame(CELL)) == {}
