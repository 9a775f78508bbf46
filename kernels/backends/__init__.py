"""Attention backends; `REGISTRY` is the only list of them.

"auto" takes the first of AUTO that can run, so these come fastest first; on a GPU those that compute head by head come
behind the others. Other backends run only where they are named, once `register` knows them: `import baselines` does
that for those of a clone.
"""

from .base import Backend
from .csr_unfused import CSRUnfusedBackend
from .fused3s import Fused3SBackend
from .reference import ReferenceBackend
from .scatter import ScatterBackend

REGISTRY: dict[str, Backend] = {}


def register(*backends: Backend) -> None:
    """Let calls name these backends."""
    REGISTRY.update({backend.name: backend for backend in backends})


register(Fused3SBackend(), CSRUnfusedBackend(), ScatterBackend(), ReferenceBackend())
AUTO = tuple(REGISTRY)
