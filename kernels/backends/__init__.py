"""Attention backends; `REGISTRY` is the only list of them.

"auto" takes the first of AUTO that can run. AUTO is sorted by speed; on a GPU, backends that compute head by head come
last. All other backends run only when named, after `register`: `import baselines` registers those of a clone.
"""

from ..fused.backend import Fused3SBackend
from .base import Backend
from .csr_unfused import CSRUnfusedBackend
from .reference import ReferenceBackend
from .scatter import ScatterBackend

REGISTRY: dict[str, Backend] = {}


def register(*backends: Backend) -> None:
    """Add backends to REGISTRY, so that calls can name them."""
    REGISTRY.update({backend.name: backend for backend in backends})


register(Fused3SBackend(), CSRUnfusedBackend(), ScatterBackend(), ReferenceBackend())
AUTO = tuple(REGISTRY)
