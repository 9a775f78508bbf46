"""Clock and power of a GPU, from NVML; no columns where NVML is missing or does not report them."""

from collections.abc import Callable
from contextlib import suppress

import pynvml
import torch

Queries = dict[str, Callable[[object], float | int]]  # of a handle, by column
LIMITS: Queries = {
    "max_sm_clock": lambda handle: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "power_limit": lambda handle: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
}
NOW: Queries = {
    "sm_clock": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "power": lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
}


def limits(device: torch.device) -> dict[str, float | int]:
    """Columns max_sm_clock (MHz) and power_limit (W)."""
    return _read(device, LIMITS)


def clock_and_power(device: torch.device) -> dict[str, float | int]:
    """Columns sm_clock (MHz) and power (W, averaged by the GPU over up to a second), now."""
    return _read(device, NOW)


def _read(device: torch.device, queries: Queries) -> dict[str, float | int]:
    """NVML counts GPUs differently from CUDA: a GPU is found by its UUID."""
    found: dict[str, float | int] = {}
    if device.type != "cuda":
        return found
    with suppress(pynvml.NVMLError):  # no NVML, a MIG instance, or a driver that hides UUIDs
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            for column, query in queries.items():
                with suppress(pynvml.NVMLError):  # this GPU does not report it
                    found[column] = query(handle)
        finally:
            pynvml.nvmlShutdown()
    return found
