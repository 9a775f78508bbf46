"""Launching a CuPy function the way torch launches its own kernels."""

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

OVERLAP_CAPABILITY = (9, 0)  # from which on a kernel may start while the one before it ends


def launch_kernel(
    function: Any,
    grid: tuple[int, ...],
    block: int,
    tensors: Sequence[torch.Tensor | None],
    scalars: Sequence[np.generic] = (),
    *,
    shared_bytes: int = 0,
    overlaps: bool = False,
) -> None:
    """Queue a kernel on torch's current stream and return at once.

    Args:
        function: a CuPy function, from `kernels.jit.get_kernel`.
        grid: thread blocks.
        block: threads of a block.
        tensors: the kernel's pointers, its first parameters; all on one GPU, None for a null pointer but the first.
        scalars: its other parameters, as NumPy scalars of the widths that the kernel declares.
        shared_bytes: dynamic shared memory of a block.
        overlaps: the kernel is made to start before the one in front of it on the stream is done (cuda/overlap.cuh),
            where the GPU can.
    """
    import cupy
    from cuda.bindings import driver  # CuPy has no call for a launch with attributes

    device = tensors[0].device
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    if overlaps and _can_overlap(device.index):
        config.attrs, config.numAttrs = _overlap_attributes(), 1
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    _layout(len(pointers), tuple(map(type, scalars))).pack_into(_parameters.values, 0, *pointers, *scalars)
    with cupy.cuda.Device(device.index):
        (error,) = driver.cuLaunchKernelEx(config, function.kernel.ptr, _parameters.addresses_start, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a kernel could not be launched on grid {grid} and block {block}: {error.name}")


@cache
def _can_overlap(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= OVERLAP_CAPABILITY


@cache
def _overlap_attributes() -> list:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


class _Parameters(threading.local):
    """Parameters of a launch, 8 bytes each, and their addresses: a launch copies them before it returns.

    They are made once a thread, since making them takes longer than filling them.
    """

    MOST = 32

    def __init__(self) -> None:
        self.values = ctypes.create_string_buffer(8 * self.MOST)
        first = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * self.MOST)(*range(first, first + len(self.values), 8))
        self.addresses_start = ctypes.addressof(self.addresses)


_parameters = _Parameters()


@cache
def _layout(num_pointers: int, types: tuple[type[np.generic], ...]) -> struct.Struct:
    """Pointers and scalars one after the other, 8 bytes each."""
    formats = {np.uint64: "Q", np.int64: "q", np.uint32: "I4x", np.int32: "i4x", np.float32: "f4x"}
    return struct.Struct(f"<{num_pointers}Q" + "".join(formats[one] for one in types))
