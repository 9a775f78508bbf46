"""Where a test runs the kernels of `fused3s`: on the CPU by tests/cuda_shim, or on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES, CpuGpu, cuda_on_cpu


def on_cpu(*values: object, id: str | None = None) -> object:
    """Parameters of a case, behind the device."""
    return pytest.param("cpu", *values, id=id)


def on_gpu(*values: object, id: str | None = None) -> object:
    return pytest.param("cuda", *values, marks=pytest.mark.gpu, id=id)


both_devices = pytest.mark.parametrize("device", [on_cpu(), on_gpu()])


@contextmanager
def kernels_of(device: str, mode: str = "late", **options: object) -> Iterator[CpuGpu | None]:
    """Inside, calls on the device run the kernels; on the CPU by the shim, in the order of events `mode`."""
    if device == "cuda":
        yield None
        return
    if COMPILER is None:
        pytest.skip("no C++ compiler found (g++ or clang++)")
    with cuda_on_cpu(MODES[mode], **options) as gpu:
        yield gpu
