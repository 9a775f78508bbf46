"""The kernels that make plans, on the CPU (tests/cuda_shim)."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from poison import poison

from kernels.formats import gpu_csr, gpu_edges, gpu_plan, gpu_row_items
from kernels.runtime import launch
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
    "plan_edges": {3, 4, 5},
}


@contextmanager
def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch, mode: str = "late") -> Iterator[CpuGpu]:
    """Inside, the modules of plans launch their kernels on CPU tensors, and uninitialised memory is poison."""
    gpu = CpuGpu(MODES[mode])
    empty_arrays = gpu_csr.allocate
    empty, take_back = torch.empty, cuda_on_cpu._GuardedTensor.take_back

    def poisoned(shape, *, dtype, device):  # the shim puts guards around it
        return empty(shape, dtype=dtype, device=device).fill_(poison(dtype))

    def take_back_written(tensor, label, updated):
        name, place = label.split(": tensor ")
        written = WRITTEN.get(name) or WRITTEN.get(name.partition("<")[0], ())  # (): no planning kernel
        take_back(tensor, label, updated or int(place.split()[0]) in written)

    known: list[tuple[int, torch.Tensor]] = []  # address, and what may be read and written from there on

    def allocate(sizes, device):
        memory, addresses = empty_arrays(sizes, device)
        known.extend(zip(addresses, memory[: sum(sizes)].split(sizes), strict=True))
        return memory, addresses

    def address_of(tensor):
        if tensor is not None:
            known.append((tensor.data_ptr(), tensor))
        return launch.address_of(tensor)

    def tensor_at(address):
        """Of the latest array with this address, since memory is used again, what lies behind it."""
        if address == 0:
            return None
        for start, tensor in reversed(known):
            offset = address - start
            if tensor.numel() and offset == 0:
                return tensor
            if 0 < offset < tensor.nbytes and tensor.is_contiguous():
                return tensor.flatten()[offset // tensor.itemsize :]
        return torch.empty(0, dtype=torch.int32, device="cpu")

    def launch_all(device_index, launches, zeros=(0, 0)):
        if zeros[1]:
            tensor_at(zeros[0]).view(torch.int32)[: zeros[1]] = 0
        for function, grid, block, pointers, scalars in launches:
            tensors = [tensor_at(address) for (address,) in struct.iter_unpack("<Q", pointers)]
            gpu.launch_kernel(function, grid, block, tensors, scalars)

    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", poisoned)
        for module in (gpu_csr, gpu_edges, gpu_plan, gpu_row_items):
            patch.setattr(module, "get_kernel", gpu.get_kernel)
            patch.setattr(module, "address_of", address_of, raising=False)
            patch.setattr(module, "launch_all", launch_all, raising=False)
            patch.setattr(module, "allocate", allocate, raising=False)
        patch.setattr(cuda_on_cpu._GuardedTensor, "take_back", take_back_written)
        yield gpu
