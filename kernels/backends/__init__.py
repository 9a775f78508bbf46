"""Attention backends; `REGISTRY` is the only list of them.

"auto" takes the first of AUTO that can run. AUTO is sorted by speed; on a GPU, backends that compute head by head come
last. All other backends run only when named, after `defer` or `register`: `import bench.baselines` defers those of a
clone. The module of a deferred backend is imported on use. It ends with BACKENDS, one instance of each of its backends.
"""

from importlib import import_module
from typing import Any

import torch

from ..runtime.device import cuda_unavailable
from .base import Backend


class Deferred:
    """Stands for a backend in REGISTRY until one of its attributes is read; then its module takes its place there.

    Args:
        module: absolute name.
        on_gpu: whether it is a `CudaBackend`, which cannot run without a GPU whatever its module says.
    """

    def __init__(self, name: str, module: str, on_gpu: bool) -> None:
        self.__dict__.update(name=name, on_gpu=on_gpu, _module=module)

    def _load(self) -> Backend:
        found = {backend.name: backend for backend in import_module(self._module).BACKENDS}
        REGISTRY.update({name: found[name] for name in found if isinstance(REGISTRY.get(name), Deferred)})
        return found[self.name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._load(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._load(), name)


REGISTRY: dict[str, Backend] = {}


def register(*backends: Backend) -> None:
    """Add backends to REGISTRY, so that calls can name them."""
    REGISTRY.update({backend.name: backend for backend in backends})


def why_unavailable(backend: Backend, device: torch.device) -> str | None:
    """`backend.unavailable(device)`, without an import of CUDA kernels where no GPU is asked for."""
    is_deferred = isinstance(backend, Deferred) and backend.on_gpu and device.type != "cuda"
    return (is_deferred and cuda_unavailable(device)) or backend.unavailable(device)


def defer(module: str, *names: str, on_gpu: bool = False) -> None:
    """Add the backends of a module to REGISTRY without importing it; `on_gpu`: see `Deferred`."""
    register(*(Deferred(name, module, on_gpu) for name in names))


defer("fused3s.fused.backend", "fused3s", on_gpu=True)
for _name in ("csr_unfused", "scatter", "reference"):
    defer(f"{__name__}.{_name}", _name)
AUTO = tuple(REGISTRY)
