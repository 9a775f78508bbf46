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

OVERLAP_CAPABILITY = (9, 0)  # least compute capability for programmatic dependent launch
SCALAR_TYPES = (np.int64, np.uint32, np.int32, np.float32)


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
        tensors: the pointers, which are the first members of the kernel's struct Params; all on one GPU, None for a
            null pointer but the first.
        scalars: the other members, from `pack_scalars`.
        shared_bytes: dynamic shared memory of a block.
        overlaps: programmatic dependent launch (cuda/ptx/griddepcontrol.cuh), where the GPU has it: the kernel may
            start before the one in front of it on the stream is done, but for the first one after `next_waits`.
    """
    cupy, driver = _cuda_modules()
    device_index = tensors[0].get_device()
    stream = stream_handle(device_index)
    if overlaps and _waiting:
        key = device_index, stream
        overlaps = key not in _waiting
        _waiting.discard(key)
    config = _thread.config(grid, block, shared_bytes, overlaps and _can_overlap(device_index))
    config.hStream = stream
    _thread.fill([0 if tensor is None else tensor.data_ptr() for tensor in tensors], scalars)
    if device_index in _thread.devices and torch._C._cuda_getDevice() == device_index:
        (error,) = driver.cuLaunchKernelEx(config, function.kernel.ptr, _thread.kernel_params, 0)
    else:
        # A thread has no context, not even on its current GPU, until something makes it: autograd's threads have none.
        # cudaSetDevice makes one; CuPy's and torch's context managers leave it out where the GPU is the current one.
        current = torch._C._cuda_getDevice()
        cupy.cuda.runtime.setDevice(device_index)
        (error,) = driver.cuLaunchKernelEx(config, function.kernel.ptr, _thread.kernel_params, 0)
        if current != device_index:
            cupy.cuda.runtime.setDevice(current)
        _thread.devices.add(device_index)
    if error:
        raise RuntimeError(f"a kernel could not be launched on grid {grid} and block {block}: {error.name}")


Launch = tuple[Any, tuple[int, int, int], int, bytes, bytes]


def launch_all(device_index: int, launches: Sequence[Launch], zeros: tuple[int, int] = (0, 0)) -> None:
    """Queue kernels on torch's current stream, one after the other, and return at once.

    For kernels of memory whose addresses the caller knows: it takes half as long as `launch_kernel` of each.

    Args:
        launches: of each kernel the CuPy function, the grid, the threads of a block, the pointers that are the first
            members of its struct Params, and the other members; together at most `_Thread.MOST_BYTES`.
        zeros: address and number of 32-bit words that are set to 0 first.
    """
    cupy, driver = _cuda_modules()
    stream, current = stream_handle(device_index), torch._C._cuda_getDevice()
    is_current = device_index in _thread.devices and current == device_index
    if not is_current:  # as in `launch_kernel`
        cupy.cuda.runtime.setDevice(device_index)
        _thread.devices.add(device_index)
    launch, params, kernel_params = driver.cuLaunchKernel, _thread.params, _thread.kernel_params
    grid = block = None
    error = 0
    if zeros[1]:
        (error,) = driver.cuMemsetD32Async(zeros[0], 0, zeros[1], stream)
    for function, grid, block, pointers, scalars in launches if not error else ():
        members = pointers + scalars
        params[: len(members)] = members
        (error,) = launch(_address_of_kernel(function), *grid, block, 1, 1, 0, stream, kernel_params, 0)
        if error:
            break
    if not is_current and current != device_index:
        cupy.cuda.runtime.setDevice(current)
    if error:
        what = f"a kernel could not be launched on grid {grid} and block {block}" if block else "memory was not zeroed"
        raise RuntimeError(f"{what}: {error.name}")


def copy_to_host(target: int, source: int, num_bytes: int, event: torch.cuda.Event, device_index: int) -> None:
    """Queue a copy from a GPU to pinned memory at an address on torch's current stream, and record `event` behind it.

    A thread that launched on the GPU takes half as long as torch does.
    """
    if torch._C._cuda_getDevice() != device_index or not event.cuda_event:
        with torch.cuda.device(device_index):
            event.record()  # makes it, for this GPU
            copy_to_host(target, source, num_bytes, event, device_index)
        return
    driver, stream = _cuda_modules()[1], stream_handle(device_index)
    (error,) = driver.cuMemcpyDtoHAsync(target, source, num_bytes, stream)
    if not error:
        (error,) = driver.cuEventRecord(event.cuda_event, stream)
    if error:
        raise RuntimeError(f"{num_bytes} bytes could not be copied from cuda:{device_index}: {error.name}")


def address_of(tensor: torch.Tensor | None) -> int:
    """For `launch_all`; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def next_waits(device_index: int) -> None:
    """Let the next kernel that may overlap, on torch's current stream of this GPU, start after all that is queued now.

    Kernels with programmatic dependent launch read a plan before griddepcontrol.wait, and only that instruction makes
    what the kernels in front wrote visible. One launch without overlap behind the kernels that write a plan is enough:
    it starts when they are done and their writes visible, and whatever overlaps starts after it, or after a kernel
    that did. In a capture the same holds within the graph, since a graph does not overlap what is launched in front of
    it. Work on other streams waits for an event in any case, which nothing overlaps.
    """
    _waiting.add((device_index, stream_handle(device_index)))


def stream_handle(device_index: int) -> int:
    """The CUDA handle of torch's current stream, without the object that `torch.cuda.current_stream` makes of it."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def pack_scalars(*scalars: np.generic) -> bytes:
    """The scalar members of a kernel's struct Params, which come after its pointers, in C layout.

    Raises:
        TypeError: one is none of `SCALAR_TYPES`.
    """
    packed = b""
    for scalar in scalars:
        if type(scalar) not in SCALAR_TYPES:
            allowed = ", ".join(one.__name__ for one in SCALAR_TYPES)
            raise TypeError(f"scalars: got {scalar!r}, a {type(scalar).__name__}; kernels declare {allowed}")
        packed += bytes(-len(packed) % scalar.itemsize) + scalar.tobytes()
    return packed + bytes(-len(packed) % 8)


_waiting: set[tuple[int, int]] = set()  # GPU and stream, see `next_waits`


@cache  # imported late, since a machine without a GPU has neither
def _cuda_modules() -> tuple[ModuleType, ModuleType]:
    import cupy
    from cuda.bindings import driver  # CuPy has no call for a launch with attributes

    return cupy, driver


@cache
def _address_of_kernel(function: Any) -> int:
    """On the GPU that the function was loaded for, which must be the current one."""
    return function.kernel.ptr


@cache
def _can_overlap(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= OVERLAP_CAPABILITY


def _launch_config(grid: tuple[int, ...], block: int, shared_bytes: int, overlaps: bool) -> Any:
    _, driver = _cuda_modules()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    if overlaps:
        config.attrs, config.numAttrs = _overlap_attributes(), 1
    return config


@cache
def _overlap_attributes() -> list:
    _, driver = _cuda_modules()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


@cache
def _layout(num_pointers: int, scalar_bytes: int) -> struct.Struct:
    return struct.Struct(f"<{num_pointers}Q{scalar_bytes}s")


class _Thread(threading.local):
    """Objects of a launch that a thread makes once, since making them takes longer than filling them.

    Attributes:
        params: memory for struct Params, which a launch copies before it returns.
        kernel_params: address of the array with the address of `params`.
        devices: GPUs that this thread launched on.
    """

    MOST_BYTES = 512
    MOST_CONFIGS = 512  # grids of as many graphs

    def __init__(self) -> None:
        memory = ctypes.create_string_buffer(self.MOST_BYTES)
        self.params = memoryview(memory).cast("B")
        self._addresses = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        self.kernel_params = ctypes.addressof(self._addresses)
        self.devices: set[int] = set()
        self._configs: dict[tuple, Any] = {}

    def config(self, grid: tuple[int, ...], block: int, shared_bytes: int, overlaps: bool) -> Any:
        """The CUlaunchConfig of a launch, but for the stream."""
        key = (grid, block, shared_bytes, overlaps)
        config = self._configs.get(key)
        if config is None:
            if len(self._configs) >= self.MOST_CONFIGS:
                self._configs.clear()
            config = self._configs[key] = _launch_config(*key)
        return config

    def fill(self, pointers: Sequence[int], scalars: bytes) -> None:
        layout = _layout(len(pointers), len(scalars))
        if layout.size > self.MOST_BYTES:
            raise ValueError(f"struct Params: got {layout.size} bytes; {self.MOST_BYTES} at most are allowed")
        layout.pack_into(self.params, 0, *pointers, scalars)


_thread = _Thread()
