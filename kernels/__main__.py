"""`python -m fused3s`: versions, GPUs and backends, to paste into an issue."""

import ctypes
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from . import __file__ as package_file
from . import __version__, list_backends
from .runtime.kernel_cache import cache_folder, import_cupy, keeps_nothing, write_error

OTHERS = "numpy", "torch-geometric", "dgl"


def lines() -> Iterator[str]:
    yield f"fused3s {__version__}: {package_file}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    yield f"torch {torch.__version__}, " + (f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    yield ", ".join(each for each in map(installed, OTHERS) if each)
    yield f"driver {driver_version()}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / (1 << 30)
        yield f"GPU {index}: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory:.0f} GiB"
    if not count:
        yield "GPU: torch finds none"
    if find_spec("cupy") is None:
        yield "CuPy: not installed"
    else:
        yield f"kernel cache {cache_state()}"  # before `import_cupy`, which changes it
        yield cupy_versions()
    for name, backend in list_backends().items():
        yield f"backend {name}: {backend.unavailable or 'runs'}"


def installed(name: str) -> str | None:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return None


def driver_version() -> str:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "not found"
    text = ctypes.create_string_buffer(80)
    if error := nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return f"unknown: NVML error {error}"
    return text.value.decode()


def cache_state() -> str:
    folder = cache_folder()
    if keeps_nothing():
        return "in memory: CUPY_CACHE_IN_MEMORY is 1"
    error = write_error(folder)
    return f"{folder}, " + (f"which cannot be written: {error.strerror}" if error else "which can be written")


def cupy_versions() -> str:
    """Versions of CuPy and of NVRTC, or the error that importing them raises: the text must show a broken
    installation."""
    try:
        cupy = import_cupy()
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except Exception as error:
        return f"CuPy: {type(error).__name__}: {error}"
    return f"CuPy {cupy.__version__}, NVRTC {nvrtc}"


if __name__ == "__main__":
    print(*lines(), sep="\n")
