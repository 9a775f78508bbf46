"""Backends with CUDA kernels of this repository: requirements on GPU and inputs, and alignment of tensors."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from ..runtime.device import cuda_unavailable
from ..runtime.jit import Kernel, KernelInstance, get_kernel
from ..runtime.semaphores import semaphores
from .base import Backend, forward_only

MAX_DIM = 256
HALF_TYPES = (torch.float16, torch.bfloat16)
LOAD_BYTES = 16  # largest load of a lane in the fused kernels
LOG2E = math.log2(math.e)


class CudaBackend(Backend):
    """A backend with kernels compiled by CuPy; forward pass only, unless it sets `has_backward`."""

    autograd = False
    traceable = False

    def unavailable(self, device: torch.device) -> str | None:
        return cuda_unavailable(device)


def planned_kernel(instance: KernelInstance, query: torch.Tensor) -> Kernel:
    """`get_kernel` for a call whose plan chose the work items per block.

    Raises:
        ValueError: the GPU has too little shared memory for so many of these heads.
    """
    try:
        return get_kernel(instance, query.device.index)
    except ValueError as error:
        raise ValueError(
            f"q: got {query.shape[2]} columns a head of {query.dtype}, for which the blocks of this plan are too large "
            f"({error}); make it with plan_attention(..., head_dim={query.shape[2]}, dtype={query.dtype})"
        ) from error


def product_type(dtype: torch.dtype) -> torch.dtype:
    """The type that `fused3s` rounds its inputs to: bfloat16 for float32 if torch.get_float32_matmul_precision() is
    "medium" now, else `dtype`."""
    is_rounded = dtype == torch.float32 and torch.get_float32_matmul_precision() == "medium"
    return torch.bfloat16 if is_rounded else dtype


def check_out_dtype(out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Raise a ValueError if `out_dtype` is neither float32 nor the inputs' type."""
    if out_dtype not in (torch.float32, dtype):
        raise ValueError(f"out_dtype: got {out_dtype}; torch.float32 and {dtype} are allowed")


def refuse_gradients(name: str, *tensors: torch.Tensor) -> None:
    """Raise a ValueError if autograd would need a backward pass."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise forward_only(name)


@lru_cache  # a model repeats the same arguments at every call
def load_bytes(dim: int, itemsize: int, most: int = LOAD_BYTES) -> int:
    """Bytes per load of the fused kernels for heads of `dim` columns: the alignment that each row needs."""
    return math.gcd(dim * itemsize, most)


def aligned_rows(
    tensors: Iterable[torch.Tensor], num_bytes: int = LOAD_BYTES, side_by_side: int = 0
) -> list[torch.Tensor]:
    """Each tensor of one type itself if its rows [..., :] are contiguous and aligned to `num_bytes`, as in views of a
    fused [N, 3, H, d] projection; else a contiguous copy.

    Args:
        side_by_side: columns of a head that shares aligned blocks with its neighbours: its stride is this number plus
            a multiple of `num_bytes`. 0: each head is aligned.
    """
    given = list(tensors)
    if _are_aligned(given, num_bytes, side_by_side):  # without a loop in Python: the host time of a call counts
        return given
    return [
        each if _are_aligned([each], num_bytes, side_by_side) else each.clone(memory_format=torch.contiguous_format)
        for each in given
    ]


def _are_aligned(tensors: list[torch.Tensor], num_bytes: int, side_by_side: int) -> bool:
    strides = tuple(map(torch.Tensor.stride, tensors))
    fit = _rows_fit(strides, num_bytes // tensors[0].itemsize, side_by_side)
    return fit and math.gcd(*map(torch.Tensor.data_ptr, tensors)) % num_bytes == 0


@lru_cache(1024)  # a model repeats the same arguments at every call
def _rows_fit(strides: tuple[tuple[int, ...], ...], num_elements: int, side_by_side: int) -> bool:
    return all(
        last == 1 and math.gcd(*others, of_head - side_by_side) % num_elements == 0
        for *others, of_head, last in strides
    )


def split_scratch(
    kernel: Kernel, num_partials: int, num_semaphores: int, like: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Members of struct Params for results of parts that the last block to arrive combines. Memory of one call: a plan
    may run on several streams at once."""
    if not num_partials:
        return {"partial": None, "semaphores": None}
    partial = like.new_empty(num_partials * kernel.sizes.partial_floats, dtype=torch.float32)
    return {"partial": partial, "semaphores": semaphores(num_semaphores, like.device)}


def stride_scalars(names: Sequence[str], strides: Sequence[tuple[int, int, int]], itemsize: int) -> dict[str, int]:
    """Members of struct Params for the strides of tensors [N, H, d]: `NAME_head_stride` and `NAME_row_bytes`."""
    members = {}
    for name, (row, head, _) in zip(names, strides, strict=True):
        members |= {f"{name}_head_stride": head, f"{name}_row_bytes": row * itemsize}
    return members
