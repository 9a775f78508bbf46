"""Clock and power from NVML: of the right GPU, and nothing where there is none."""

import pytest
import torch

from common.gpu_state import clock_and_power, limits


def test_a_cpu_has_neither():
    assert limits(torch.device("cpu")) == clock_and_power(torch.device("cpu")) == {}


@pytest.mark.gpu
def test_a_gpu_under_load_draws_power_below_its_limits():
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        matrix @ matrix
    now, most = clock_and_power(device), limits(device)
    torch.cuda.synchronize()
    assert 100 < now["sm_clock"] <= most["max_sm_clock"]
    assert 10 < now["power"] < 1.5 * most["power_limit"]
