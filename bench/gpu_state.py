"""Clock and power of a GPU, from NVML. Empty where NVML is missing or does not say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pynvml
import torch


def limits(device: torch.device) -> dict[str, float | int]:
    """Columns max_sm_clock (MHz) and power_limit (W)."""
    found: dict[str, float | int] = {}
    with _handle(device) as handle:
        if handle is not None:
            _read(found, "max_sm_clock", lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
            _read(found, "power_limit", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
    return found


def clock_and_power(device: torch.device) -> dict[str, float | int]:
    """Columns sm_clock (MHz) and power (W, averaged by the GPU over up to a second), now."""
    found: dict[str, float | int] = {}
    with _handle(device) as handle:
        if handle is not None:
            _read(found, "sm_clock", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            _read(found, "power", lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
    return found


@contextmanager
def _handle(device: torch.device) -> Iterator["object | None"]:
    """NVML's handle of a CUDA device; NVML counts GPUs differently from CUDA, so it is found by its UUID."""
    if device.type != "cuda":
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:  # a MIG instance, or a driver that hides UUIDs
            handle = None
        yield handle
    finally:
        pynvml.nvmlShutdown()


def _read(found: dict[str, float | int], column: str, query: Callable[[], float | int]) -> None:
    with suppress(pynvml.NVMLError):  # this GPU does not report it
        found[column] = query()
