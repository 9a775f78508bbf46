"""Other ways to compute the same attention, to compare with: `import baselines` makes them backends by name.

    fused3s_paper          the kernel of the Fused3S paper, as published
    dfgnn_*, flashsparse_* kernels of two papers before it
    anemoi                 the Triton kernel of the package anemoi-models
    dgl, pyg               message passing of the two libraries
    flex_attention, sdpa_padded   torch's dense attention, on block masks and on padded graphs

"auto" takes none of them.
"""

from kernels.backends import REGISTRY, register

from .anemoi import AnemoiBackend
from .dfgnn import DFGNNHyperBackend, DFGNNTilingBackend
from .dgl import DGLBackend
from .flashsparse import FlashSparseBackend
from .flex_attention import FlexAttentionBackend
from .fused3s_paper import Fused3SPaperBackend
from .pyg import PyGBackend
from .sdpa_padded import SDPAPaddedBackend

__all__ = ["REGISTRY"]

register(
    Fused3SPaperBackend(),
    DGLBackend(),
    DFGNNTilingBackend(),
    DFGNNHyperBackend(),
    FlashSparseBackend(stable=False),
    FlashSparseBackend(stable=True),
    PyGBackend(),
    AnemoiBackend(),
    FlexAttentionBackend(),
    SDPAPaddedBackend(),
)
