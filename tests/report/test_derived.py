"""The gather model, bytes and rates of rows, and the authors' codes beside ours."""

import pytest
from kernel_rows import row

from report.derived import PeakRates
from report.engine import Data
from report.published import published_rows
from report.rows import frame, select
from report.selections import CODES, KERNEL, PAPER, WARM

CORA = "71cccafe332d3db3"  # of results/paper/published_codes_graphs.csv


def rate(backend: str, variant: str, milliseconds: float, **changes):
    machine = {"bench": "peak_rates", "scope": "machine", "launch": "none", "plan": "none", "l2": "none", "heads": 0}
    return row("none", backend, milliseconds, variant=variant, data_source="none", **(machine | changes))


RATES = [
    rate("copy", "none", 2.0, dim=0, work=2000),  # 1000 bytes per ms
    rate("gather", "ld_global", 4.0, dim=128, work=400, working_set=1 << 10),  # 100
    rate("gather", "cp_async", 2.0, dim=128, work=400, working_set=1 << 10),  # 200: the faster path counts
    rate("gather", "ld_global", 8.0, dim=128, work=400, working_set=1 << 14),  # 50
    rate("mma", "m16n8k16", 1.0, dim=0, work=7),
    rate("copy", "none", 1.0, dim=0, work=9000, device="Other GPU"),
]


def test_rates_are_of_one_device_and_interpolated_over_the_logarithm():
    rates = PeakRates.of(frame(RATES), "NVIDIA H200")
    assert (rates.copy, rates.mma, rates.complete) == (1000, 7, True)
    sets = (1 << 10, 1 << 12, 1 << 14, 1 << 20)
    assert [rates.gather_rate(256, size) for size in sets] == pytest.approx([200, 125, 50, 50])
    assert not PeakRates.of(frame(RATES), "Other GPU").complete


def test_the_model_is_gathers_plus_streams():
    rates = PeakRates.of(frame(RATES), "NVIDIA H200")
    # K and V of 16 nodes: 2 * 16 * 256 = 8192 bytes, of which rows come at 200 - 150 * 3 / 4 = 87.5 bytes per ms
    assert rates.model_ms(16, 128, "float16", 875, 3000) == pytest.approx(10 + 3)


def test_achieved_rates_are_of_correct_times_with_their_bytes():
    sizes = {"metric": "gathered_bytes", "unit": "B", "launch": "none", "plan": "none"}
    streams = sizes | {"metric": "compulsory_bytes"}
    rows = [row("cora", "fused3s", 2.0, nodes=16), row("pubmed", "fused3s", 2.0, "wrong")]
    rows += [row(name, "fused3s", 875.0, "unchecked", **sizes) for name in ("cora", "pubmed")]
    rows += [row(name, "fused3s", 3000.0, "unchecked", **streams) for name in ("cora", "pubmed")]
    found = Data(frame([*RATES, *rows])).benches["kernels"].query("dataset == 'cora' and backend == 'fused3s'")
    values = found.set_index("metric")["value"]
    assert values["bytes"] == 3875
    assert values["tb_per_s"] == pytest.approx(3875 / 2e-3 / 1e12)
    assert values["tflop_per_s"] == pytest.approx(4 * 128 * 10_556 / 2e-3 / 1e12)
    assert values["gather_model"] == pytest.approx(13)
    other = Data(frame([*RATES, *rows])).benches["kernels"].query("dataset == 'pubmed'")
    assert "tb_per_s" not in {*other["metric"]}


def test_the_authors_codes_are_found_by_the_hash_of_the_edges():
    times = select(published_rows(), {"bench": "codes", "backend": "fused3s_paper", "dim": 128, "heads": 1})
    theirs = times.set_index("data_sha256")["value"]
    rows = [row("another name", "fused3s_paper", 0.5, data_sha256=CORA), row("cora", "fused3s_paper", 9.0)]
    found = Data(frame(rows)).pairs(KERNEL | WARM | {"dim": 128}, PAPER, CODES | PAPER, ["data_sha256"])
    assert [*found["ratio"]] == pytest.approx([theirs[CORA] / 0.5])
