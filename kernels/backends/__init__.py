"""Attention back ends. `REGISTRY` is the only list of them.

"auto" takes the first that it may (`Backend.in_auto`) and that can run, so those come fastest first; the others are the
baselines of the benchmarks, which run only where they are named.
"""

from .base import Backend, ReorderingBackend
from .csr_unfused import CSRUnfusedBackend
from .dfgnn import DFGNNHyperBackend, DFGNNTilingBackend
from .dgl import DGLBackend
from .flashsparse import FlashSparseBackend
from .flex_attention import FlexAttentionBackend
from .fused3s import Fused3SBackend
from .fused3s_paper import Fused3SPaperBackend
from .pyg import PyGBackend
from .reference import ReferenceBackend
from .sdpa_padded import SDPAPaddedBackend

REGISTRY: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Fused3SBackend(),
        Fused3SPaperBackend(),
        DGLBackend(),
        CSRUnfusedBackend(),
        ReferenceBackend(),
        DFGNNTilingBackend(),
        DFGNNHyperBackend(),
        FlashSparseBackend(stable=False),
        FlashSparseBackend(stable=True),
        PyGBackend(),
        FlexAttentionBackend(),
        SDPAPaddedBackend(),
    )
}


def reordering_backends() -> list[str]:
    """Names of the back ends that take a row order."""
    return [name for name, backend in REGISTRY.items() if isinstance(backend, ReorderingBackend)]
