"""The kernels that make plans, on the CPU (tests/cuda_shim)."""

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from poison import poison

from fused3s.fused.planning import gpu_csr, gpu_plan
from fused3s.runtime import launch
from tests.cuda_shim import cuda_on_cpu
from tests.cuda_shim.cuda_on_cpu import MODES, CpuGpu

# Members of struct Params that a kernel writes to, without the index of an array.
WRITTEN = {
    "plan_count": {"numbers"},
    "plan_offsets": {"offsets"},
    "plan_place": {"numbers", "keys"},
    "plan_sort": {"numbers", "keys", "column_keys", "spare_keys"}
    | {"indices", "edges", "column_indices", "column_edges"},
    "plan_tiles<false>": {"tiles"},
    "plan_tiles<true>": {"kv_tiles"},
    "plan_schedule": {"tile_offset", "numbers", "scratch"},
    "plan_items": {"work_items"},
    "plan_parts": {"items", "parts", "whole_rows", "numbers"},
    "plan_whole_rows": {"items"},
    "plan_edges": {"tile_slots", "slot_edges", "slot_places"},
}


@contextmanager
def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch, mode: str = "late") -> Iterator[CpuGpu]:
    """Inside, the modules of plans launch their kernels on CPU tensors, and uninitialised memory is poison."""
    gpu = CpuGpu(MODES[mode])
    empty_arrays = gpu_csr.allocate
    empty, take_back = torch.empty, cuda_on_cpu._GuardedTensor.take_back

    def poisoned(*shape, dtype=None, device=None, **others):  # the shim puts guards around it
        found = empty(*shape, dtype=dtype, device=device, **others)
        return found if dtype is None or others else found.fill_(poison(dtype))  # torch's own calls: as they are

    def take_back_written(tensor, label, updated):
        name, member = label.split(": tensor ")
        written = WRITTEN.get(name) or WRITTEN.get(name.partition("<")[0], ())  # (): no planning kernel
        take_back(tensor, label, updated or re.sub(r"_\d$", "", member.split()[0]) in written)

    known: list[tuple[int, torch.Tensor]] = []  # address, and what may be read and written from there on

    def allocate(sizes, device, memory=None):
        memory, addresses = empty_arrays(sizes, device, *([] if memory is None else [memory]))
        known.extend(zip(addresses, memory[: sum(sizes)].split(sizes), strict=True))
        return memory, addresses

    def address_of(tensor):
        if tensor is not None:
            known.append((tensor.data_ptr(), tensor.detach()))  # not the object: its owner may forget it
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
        for kernel, grid, block, pointers, scalars in launches:
            tensors = [tensor_at(address) for (address,) in struct.iter_unpack("<Q", pointers)]
            tensors = dict(zip(kernel.params.pointers, tensors, strict=True))
            gpu.launch_kernel(kernel, grid, block, tensors, scalars)

    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", poisoned)
        for module in (gpu_csr, gpu_plan):
            patch.setattr(module, "get_kernel", gpu.get_kernel)
            patch.setattr(module, "address_of", address_of, raising=False)
            patch.setattr(module, "launch_all", launch_all, raising=False)
            patch.setattr(module, "allocate", allocate, raising=False)
        patch.setattr(cuda_on_cpu._GuardedTensor, "take_back", take_back_written)
        yield gpu
