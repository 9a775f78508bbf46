"""Launching a CuPy function the way torch launches its own kernels."""

import ctypes
import struct
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

    device = tensors[0].device
    stream = torch.cuda.current_stream(device)
    # Addresses instead of CuPy arrays: CuPy has no bfloat16.
    pointers = [np.uint64(0 if tensor is None else tensor.data_ptr()) for tensor in tensors]
    with cupy.cuda.Device(device.index):
        if overlaps and torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY:
            _launch_overlapping(function, grid, block, [*pointers, *scalars], shared_bytes, stream.cuda_stream)
            return
        with cupy.cuda.Stream.from_external(stream):
            function(grid, (block,), (*pointers, *scalars), shared_mem=shared_bytes)


def _launch_overlapping(
    function: Any, grid: tuple[int, ...], block: int, parameters: list[np.generic], shared_bytes: int, stream: int
) -> None:
    """A launch with an attribute, for which CuPy has no call."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    config.attrs, config.numAttrs = _overlap_attributes(), 1
    packed = _layout(tuple(map(type, parameters))).pack(*parameters)
    values = ctypes.create_string_buffer(packed, len(packed))
    first = ctypes.addressof(values)
    addresses = (ctypes.c_void_p * len(parameters))(*range(first, first + len(packed), 8))
    (error,) = driver.cuLaunchKernelEx(config, function.kernel.ptr, ctypes.addressof(addresses), 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a kernel could not be launched on grid {grid} and block {block}: {error.name}")


@cache
def _overlap_attributes() -> list:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


@cache
def _layout(types: tuple[type[np.generic], ...]) -> struct.Struct:
    """Parameters one after the other, 8 bytes each."""
    formats = {np.uint64: "Q", np.int64: "q", np.uint32: "I4x", np.int32: "i4x", np.float32: "f4x"}
    return struct.Struct("<" + "".join(formats[one] for one in types))
