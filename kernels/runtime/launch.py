"""Launching a CuPy function the way torch launches its own kernels."""

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

OVERLAP_CAPABILITY = (9, 0)  # from which on a kernel may start while the one before it ends
SCALAR_TYPES = (np.uint64, np.int64, np.uint32, np.int32, np.float32)


def launch_kernel(
    function: Any,
    grid: tuple[int, ...],
    block: int,
    tensors: Sequence[torch.Tensor | None],
    scalars: bytes = b"",
    *,
    shared_bytes: int = 0,
    overlaps: bool = False,
) -> None:
    """Queue a kernel on torch's current stream and return at once.

    Args:
        function: a CuPy function, from `kernels.runtime.jit.get_kernel`.
        grid: thread blocks.
        block: threads of a block.
        tensors: the kernel's pointers, its first parameters; all on one GPU, None for a null pointer but the first.
        scalars: its other parameters, from `pack_scalars`.
        shared_bytes: dynamic shared memory of a block.
        overlaps: the kernel is made to start before the one in front of it on the stream is done (cuda/overlap.cuh),
            where the GPU can.
    """
    cupy, driver = _cuda_modules()
    device_index = tensors[0].get_device()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream_handle(device_index)
    if overlaps and _can_overlap(device_index):
        config.attrs, config.numAttrs = _overlap_attributes(), 1
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    _parameters.fill(pointers, scalars)
    with cupy.cuda.Device(device_index):
        (error,) = driver.cuLaunchKernelEx(config, function.kernel.ptr, _parameters.addresses_start, 0)
    if error:
        raise RuntimeError(f"a kernel could not be launched on grid {grid} and block {block}: {error.name}")


def stream_handle(device_index: int) -> int:
    """The CUDA handle of torch's current stream, without the object that `torch.cuda.current_stream` makes of it."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def pack_scalars(*scalars: np.generic) -> bytes:
    """A kernel's scalar parameters, of the types that it declares, 8 bytes each.

    Raises:
        TypeError: one is none of `SCALAR_TYPES`.
    """
    for scalar in scalars:
        if type(scalar) not in SCALAR_TYPES:
            allowed = ", ".join(one.__name__ for one in SCALAR_TYPES)
            raise TypeError(f"scalars: got {scalar!r}, a {type(scalar).__name__}; kernels declare {allowed}")
    return b"".join(scalar.tobytes().ljust(8, b"\0") for scalar in scalars)


@cache  # imported late, since a machine without a GPU has neither
def _cuda_modules() -> tuple[ModuleType, ModuleType]:
    import cupy
    from cuda.bindings import driver  # CuPy has no call for a launch with attributes

    return cupy, driver


@cache
def _can_overlap(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= OVERLAP_CAPABILITY


@cache
def _overlap_attributes() -> list:
    _, driver = _cuda_modules()
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
        memory = ctypes.create_string_buffer(8 * self.MOST)
        self.values = memoryview(memory).cast("B")
        first = ctypes.addressof(memory)
        self.addresses = (ctypes.c_void_p * self.MOST)(*range(first, first + len(memory), 8))
        self.addresses_start = ctypes.addressof(self.addresses)

    def fill(self, pointers: Sequence[int], scalars: bytes) -> None:
        end = 8 * len(pointers) + len(scalars)
        if end > len(self.values):
            raise ValueError(f"a kernel has {end // 8} parameters; {self.MOST} at most are allowed")
        struct.pack_into(f"<{len(pointers)}Q", self.values, 0, *pointers)
        self.values[8 * len(pointers) : end] = scalars


_parameters = _Parameters()
