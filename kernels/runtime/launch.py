"""Launches kernels on torch's current stream with little host time.

The driver is called through ctypes: CuPy has no launch with attributes, and filling a struct takes less time than
creating wrapper objects.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..torch_side.torch_private import current_device_index, raw_stream
from . import debug

if TYPE_CHECKING:
    from .jit import Kernel

OVERLAP_CAPABILITY = (9, 0)  # least compute capability for programmatic dependent launch
# From cuda.h: CUlaunchConfig (grid, block, shared memory; stream; attributes and their number), and a CUlaunchAttribute
# (CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).
CONFIG, ATTRIBUTE = struct.Struct("<7I4x2QI4x"), struct.Struct("<I4xi60x")
PROGRAMMATIC_STREAM_SERIALIZATION = 6
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def launch_kernel(
    kernel: "Kernel",
    grid: tuple[int, ...],
    block: int,
    tensors: Mapping[str, torch.Tensor | None],
    scalars: bytes,
    *,
    shared_bytes: int | None = None,
    overlaps: bool = False,
) -> None:
    """Queue a kernel on torch's current stream and return at once.

    Args:
        kernel: from `fused3s.runtime.jit.get_kernel`.
        grid: number of thread blocks, up to three dimensions.
        block: threads per block.
        tensors: by pointer name in the kernel's struct Params, all on one GPU. The first must be a tensor; None, or a
            missing name, is a null pointer.
        scalars: all other members, from `kernel.scalars`.
        shared_bytes: dynamic shared memory of a block; None: `kernel.sizes` has it.
        overlaps: programmatic dependent launch (cuda/ptx/griddepcontrol.cuh), if the GPU has it: the kernel may start
            before the previous kernel of the stream is done. Ignored for the first launch after `next_waits`.

    Raises:
        TypeError: a name is unknown.
        RuntimeError: the driver refused the launch.
    """
    device_index = next(iter(tensors.values())).get_device()
    stream = stream_handle(device_index)
    if overlaps and _waiting:
        key = device_index, stream
        overlaps = key not in _waiting
        _waiting.discard(key)
    overlaps = overlaps and _can_overlap(device_index)
    if shared_bytes is None:
        shared_bytes = kernel.sizes.shared_bytes
    kernel.params.pack_into(_thread.params, tensors, scalars)
    if debug.ENABLED:
        debug.report(
            f"launch {kernel.name}: grid {grid}, block {block}, {shared_bytes} bytes of shared memory, {overlaps=}"
        )
    current = _enter(device_index)
    try:
        error = _thread.launch(kernel.address, (*grid, 1, 1), block, shared_bytes, stream, overlaps)
    finally:
        _leave(device_index, current)
    if error:
        raise _launch_error(error, grid, block)


Launch = tuple["Kernel", tuple[int, int, int], int, bytes, bytes]


def launch_all(device_index: int, launches: Sequence[Launch], zeros: tuple[int, int] = (0, 0)) -> None:
    """Queue several kernels on torch's current stream and return at once; pointers are given as addresses.

    Args:
        launches: (kernel, grid, threads per block, pointers from `kernel.params.pack_pointers`, scalars from
            `kernel.scalars`).
        zeros: address and number of 32-bit words to zero first.
    """
    stream, thread, current = stream_handle(device_index), _thread, _enter(device_index)
    params, launch, error = thread.params, thread.launch, 0
    grid = block = None
    try:
        if zeros[1]:
            error = _driver().cuMemsetD32Async(zeros[0], 0, zeros[1], stream)
        for kernel, grid, block, pointers, scalars in launches if not error else ():
            members = pointers + scalars
            params[: len(members)] = members
            if debug.ENABLED:
                debug.report(f"launch {kernel.name}: grid {grid}, block {block}, no overlap")
            if error := launch(kernel.address, grid, block, 0, stream, False):
                break
    finally:
        _leave(device_index, current)
    if error and block is None:
        raise RuntimeError(f"memory was not zeroed: {_error_name(error)}")
    if error:
        raise _launch_error(error, grid, block)


def copy_to_host(target: int, source: int, num_bytes: int, event: torch.cuda.Event, device_index: int) -> None:
    """Queue a copy from a GPU to pinned memory at an address on torch's current stream, and record `event`."""
    if current_gpu() != device_index or not event.cuda_event:
        with torch.cuda.device(device_index):
            event.record()  # creates the event on this GPU
            copy_to_host(target, source, num_bytes, event, device_index)
        return
    driver, stream = _driver(), stream_handle(device_index)
    error = driver.cuMemcpyDtoHAsync_v2(target, source, num_bytes, stream)
    error = error or driver.cuEventRecord(event.cuda_event, stream)
    if error:
        raise RuntimeError(f"{num_bytes} bytes could not be copied from cuda:{device_index}: {_error_name(error)}")


@contextmanager
def outside_of_captures() -> Iterator[None]:
    """Inside, this thread may ask for events and allocate memory while another thread captures a CUDA graph."""
    mode = ctypes.c_int(RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def address_of(tensor: torch.Tensor | None) -> int:
    """Address for `launch_all`; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def next_waits(device_index: int) -> None:
    """Launch the next overlapping kernel on torch's current stream of this GPU without overlap.

    Kernels with programmatic dependent launch read a plan before griddepcontrol.wait, which is what makes writes of
    earlier kernels visible. One launch without overlap after the kernels that write a plan is enough: it starts when
    their writes are visible, and every overlapping kernel starts after it. The same holds inside a capture, since a
    graph does not overlap with earlier work. Other streams synchronise by events, which do not overlap either.
    """
    _waiting.add((device_index, stream_handle(device_index)))


def stream_handle(device_index: int) -> int:
    """The CUDA handle of torch's current stream, without creating a Stream object."""
    return raw_stream(device_index)


def current_gpu() -> int:
    """Index of the current GPU, without the check that CUDA is initialised."""
    return current_device_index()


# Key: GPU, stream; at most one entry per stream, until its next overlapping launch (`next_waits`).
_waiting: set[tuple[int, int]] = set()


@cache  # lazy: a machine without a GPU has no driver
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    address, number, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
    library.cuLaunchKernelEx.argtypes = (address,) * 4
    library.cuMemsetD32Async.argtypes = (address, number, size, address)
    library.cuMemcpyDtoHAsync_v2.argtypes = (address, address, size, address)
    library.cuEventRecord.argtypes = (address,) * 2
    library.cuGetErrorName.argtypes = (number, address)
    return library


def _enter(device_index: int) -> int:
    """Make a GPU current and return the previous one. A new thread, such as autograd's, has no CUDA context until
    cudaSetDevice creates one; the context managers of CuPy and torch skip that call if the GPU is current already."""
    current = current_gpu()
    if current != device_index or device_index not in _thread.devices:
        _set_device(device_index)
        _thread.devices.add(device_index)
    return current


def _leave(device_index: int, current: int) -> None:
    if current != device_index:
        _set_device(current)


def _set_device(index: int) -> None:
    from cupy.cuda import runtime

    runtime.setDevice(index)


def _launch_error(error: int, grid: tuple[int, ...], block: int) -> RuntimeError:
    return RuntimeError(f"a kernel could not be launched on grid {grid} and block {block}: {_error_name(error)}")


def _error_name(error: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(error, ctypes.addressof(name))
    return name.value.decode() if name.value else f"CUresult {error}"


@cache
def _can_overlap(device_index: int) -> bool:
    return debug.ALLOWS_OVERLAP and torch.cuda.get_device_capability(device_index) >= OVERLAP_CAPABILITY


_overlap = ctypes.create_string_buffer(ATTRIBUTE.pack(PROGRAMMATIC_STREAM_SERIALIZATION, 1), ATTRIBUTE.size)
_address_of_overlap = ctypes.addressof(_overlap)


class _Thread(threading.local):
    """Launch buffers of a thread, of fixed size, as long as it lives; the driver copies them before it returns.

    Attributes:
        params: buffer of struct Params.
        kernel_params: address of an array that holds the address of `params`.
        devices: GPUs on which this thread has a context.
    """

    MOST_BYTES = 512

    def __init__(self) -> None:
        config, params = ctypes.create_string_buffer(CONFIG.size), ctypes.create_string_buffer(self.MOST_BYTES)
        self._config, self.params = memoryview(config).cast("B"), memoryview(params).cast("B")
        self._addresses = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._address_of_config = ctypes.addressof(config)
        self.kernel_params = ctypes.addressof(self._addresses)
        self.devices: set[int] = set()

    def launch(
        self, function: int, grid: tuple[int, ...], block: int, shared_bytes: int, stream: int, overlaps: bool
    ) -> int:
        """The CUresult of a launch with the current `params`, on the current GPU.

        Args:
            grid: at least three numbers; the first three are used.
        """
        attributes = _address_of_overlap if overlaps else 0
        CONFIG.pack_into(self._config, 0, *grid[:3], block, 1, 1, shared_bytes, stream, attributes, overlaps)
        return _driver().cuLaunchKernelEx(self._address_of_config, function, self.kernel_params, None)


_thread = _Thread()
