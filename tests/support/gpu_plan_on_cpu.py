"""The kernels that make plans, on the CPU (tests/cuda_shim)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from poison import poison

from kernels.formats import gpu_csr, gpu_edges, gpu_plan, gpu_row_items
from tests.cuda_shim import cuda_on_cpu
from tests.cuda_shim.cuda_on_cpu import MODES, CpuGpu

# Tensors that a kernel writes, by their place in its parameters.
WRITTEN = {
    "plan_count": {2},
    "plan_offsets": {3},
    "plan_place": {2, 4},
    "plan_sort": {2, 4, 5, 6, 7, 8, 9, 10},
    "plan_tiles<false>": {0, 1},
    "plan_tiles<true>": {6, 7},
    "plan_schedule": {2, 3, 9, 10},
    "plan_items": {6, 7, 8},
    "plan_parts": {0, 1, 2, 3, 7, 8, 9},
    "plan_whole_rows": {0, 1},
    "plan_edges<Edges::kCount>": {0},
    "plan_edges<Edges::kCsr>": {3},
    "plan_edges<Edges::kSlots>": {4, 5, 6},
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
        written = WRITTEN.get(name) or WRITTEN.get(name.partition("<")[0], ())  # (): no planning kernel
        take_back(tensor, label, updated or int(place.split()[0]) in written)

    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", poisoned)
        for module in (gpu_csr, gpu_edges, gpu_plan, gpu_row_items):
            patch.setattr(module, "get_kernel", gpu.get_kernel)
            patch.setattr(module, "launch_kernel", gpu.launch_kernel)
        patch.setattr(cuda_on_cpu._GuardedTensor, "take_back", take_back_written)
        yield gpu
