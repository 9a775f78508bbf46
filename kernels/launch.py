"""Launching a CuPy function the way torch launches its own kernels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def launch_kernel(
    function: Any,
    grid: tuple[int, ...],
    block: int,
    tensors: Sequence[torch.Tensor | None],
    scalars: Sequence[np.generic] = (),
    *,
    shared_bytes: int = 0,
) -> None:
    """Queue a kernel on torch's current stream and return at once.

    Args:
        function: a CuPy function, from `kernels.jit.get_kernel`.
        grid: thread blocks.
        block: threads of a block.
        tensors: the kernel's pointers, its first parameters; all on one GPU, None for a null pointer but the first.
        scalars: its other parameters, as NumPy scalars of the widths that the kernel declares.
        shared_bytes: dynamic shared memory of a block.
    """
    import cupy

    device = tensors[0].device
    # Addresses instead of CuPy arrays: CuPy has no bfloat16.
    pointers = [np.uint64(0 if tensor is None else tensor.data_ptr()) for tensor in tensors]
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        function(grid, (block,), (*pointers, *scalars), shared_mem=shared_bytes)
