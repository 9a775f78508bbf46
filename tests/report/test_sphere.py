"""The table of attention on the sphere: beside recorded rows, and nothing without."""

import pytest
from kernel_rows import row

from report.engine import Data
from report.rows import frame
from report.tables import render

H100 = "NVIDIA H100 80GB HBM3"  # of the recorded times of torch-harmonics
SHA256 = "b8fb4d2e0d9c3dde"  # of sphere-180x360-0.03


def sphere(edges: str, value: float, region: str = "forward", metric: str = "kernel_time", **columns):
    launch = "back_to_back" if metric == "time" else "none"
    given = {"bench": "sphere", "edges": edges, "region": region, "metric": metric, "launch": launch, "plan": "none"}
    given |= {"data_sha256": SHA256, "nnz": 2_642_400, "dim": 64, "device": H100, "out_dtype": "float16"}
    return row("sphere-180x360-0.03", "fused3s", value, **given | columns)


ROWS = [
    sphere("log_weight", 0.061),
    sphere("log_weight", 0.401, "backward"),
    sphere("log_weight", 0.06, metric="time"),
    sphere("log_weight_bias", 0.1, metric="time"),
    sphere("none", 0.05, metric="time"),
    sphere("log_weight", 10 * 2_642_400, metric="plan_bytes"),
]


def lines(rows) -> list[list[str]]:
    text = render(Data(frame(rows)), "sphere")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]


def test_times_stand_beside_those_of_torch_harmonics():
    first, mean = lines(ROWS)
    assert first == ["180x360, 0.03, 1x64", "0.244", "0.061", "4.0", "0.802", "0.401", "2.0", "1.20", "2.00", "10.0"]
    assert mean[3] == "**4.00** (n = 1)"
    assert mean[1:3] == ["", ""]


@pytest.mark.parametrize("device", ["NVIDIA H200", "Other GPU"])
def test_times_of_another_gpu_are_in_no_ratio(device):
    (line,) = lines([sphere("log_weight", 0.061, device=device)])
    assert line[1:4] == ["-", "0.061", "-"]


def test_nothing_is_drawn_without_rows():
    other = [row("cora", "fused3s", 1.0)]
    assert render(Data(frame(other)), "sphere") == ""
