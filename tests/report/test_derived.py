"""Bytes and rates of rows."""

import pytest
from kernel_rows import row

from report.engine import Data
from report.rows import frame


def test_achieved_rates_are_of_correct_times_with_their_bytes():
    sizes = {"metric": "gathered_bytes", "unit": "B", "launch": "none", "plan": "none"}
    streams = sizes | {"metric": "compulsory_bytes"}
    rows = [row("cora", "fused3s", 2.0, nodes=16), row("pubmed", "fused3s", 2.0, "wrong")]
    rows += [row(name, "fused3s", 875.0, "unchecked", **sizes) for name in ("cora", "pubmed")]
    rows += [row(name, "fused3s", 3000.0, "unchecked", **streams) for name in ("cora", "pubmed")]
    found = Data(frame(rows)).benches["kernels"].query("dataset == 'cora' and backend == 'fused3s'")
    values = found.set_index("metric")["value"]
    assert values["bytes"] == 3875
    assert values["tb_per_s"] == pytest.approx(3875 / 2e-3 / 1e12)
    assert values["tflop_per_s"] == pytest.approx(4 * 128 * 10_556 / 2e-3 / 1e12)
    other = Data(frame(rows)).benches["kernels"].query("dataset == 'pubmed'")
    assert "tb_per_s" not in {*other["metric"]}
