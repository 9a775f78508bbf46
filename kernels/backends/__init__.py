"""Attention backends; `REGISTRY` is the only list of them.

"auto" takes the first with `Backend.in_auto` that can run, so these come fastest first; on a GPU those that compute
head by head come behind the others where there are several heads. The rest are baselines, which run only where they
are named.
"""

from .anemoi import AnemoiBackend
from .base import Backend
from .csr_unfused import CSRUnfusedBackend
from .dfgnn import DFGNNHyperBackend, DFGNNTilingBackend
from .dgl import DGLBackend
from .flashsparse import FlashSparseBackend
from .flex_attention import FlexAttentionBackend
from .fused3s import Fused3SBackend
from .fused3s_paper import Fused3SPaperBackend
from .pyg import PyGBackend
from .reference import ReferenceBackend
from .scatter import ScatterBackend
from .sdpa_padded import SDPAPaddedBackend

REGISTRY: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Fused3SBackend(),
        Fused3SPaperBackend(),
        DGLBackend(),
        CSRUnfusedBackend(),
        ScatterBackend(),
        ReferenceBackend(),
        DFGNNTilingBackend(),
        DFGNNHyperBackend(),
        FlashSparseBackend(stable=False),
        FlashSparseBackend(stable=True),
        PyGBackend(),
        AnemoiBackend(),
        FlexAttentionBackend(),
        SDPAPaddedBackend(),
    )
}
