"""The kernels that make plans, on the CPU (tests/cuda_shim)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from poison import poison

from kernels.formats import gpu_columns, gpu_edges, gpu_plan, gpu_reverse, gpu_row_items, gpu_schedule
from tests.cuda_shim import cuda_on_cpu
from tests.cuda_shim.cuda_on_cpu import MODES, CpuGpu

# Tensors that a kernel writes, by their place.
WRITTEN = {
    "plan_tiles<false, false>": {0},
    "plan_tiles<true, false>": {0},
    "plan_tiles<false, true>": {3, 4},
    "plan_tiles<true, true>": {3, 4},
    "plan_schedule<4096>": {1, 2, 3},
    "plan_schedule<64>": {1, 2, 3},
    "plan_reverse<false>": {2, 3},
    "plan_reverse<true>": {2, 3},
    "plan_items": {0},
    **{f"plan_columns<{wide}, {counts}>": {0, 4} for wide in ("false", "true") for counts in ("false", "true")},
    "plan_parts": {0, 1, 4, 5},
    "plan_whole_rows": {0},
    "plan_edges<true>": {0},
    "plan_edges<false>": {3, 4, 5, 6},
}


@contextmanager
def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch, mode: str = "late") -> Iterator[CpuGpu]:
    """Inside, the modules of plans launch their kernels on CPU tensors, and uninitialised memory is poison."""
    gpu = CpuGpu(MODES[mode])
    empty, take_back = torch.empty, cuda_on_cpu._GuardedTensor.take_back

    def poisoned(shape, *, dtype, device):  # the shim puts guards around it
        return empty(shape, dtype=dtype, device=device).fill_(poison(dtype))

    def take_back_written(tensor, label, updated):
        name, place = label.split(": tensor ")
        take_back(tensor, label, updated or int(place.split()[0]) in WRITTEN[name])

    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", poisoned)
        for module in (gpu_columns, gpu_edges, gpu_plan, gpu_reverse, gpu_row_items, gpu_schedule):
            patch.setattr(module, "get_kernel", gpu.get_kernel)
            patch.setattr(module, "launch_kernel", gpu.launch_kernel)
        patch.setattr(cuda_on_cpu._GuardedTensor, "take_back", take_back_written)
        yield gpu
