"""Baselines: other implementations of the same attention. `import baselines` registers them as backends.

    fused3s_paper          Algorithms 1 and 2 of the Fused3S paper
    dfgnn_*, flashsparse_* kernels of two earlier papers
    anemoi                 the Triton kernel of the package anemoi-models
    published_*, turbo_gnn the codes of other authors, where their packages are built
    torch_harmonics        the CUDA kernels of the package torch-harmonics, on grids of the sphere
    dgl, pyg               message passing of the two libraries
    flex_attention, sdpa_padded   torch's dense attention, on block masks and on padded graphs

"auto" never chooses them.
"""

from fused3s.backends import REGISTRY, register

from .anemoi import AnemoiBackend
from .dfgnn import DFGNNHyperBackend, DFGNNTilingBackend
from .dgl import DGLBackend
from .flashsparse import FlashSparseBackend
from .flex_attention import FlexAttentionBackend
from .fused3s_paper import Fused3SPaperBackend
from .published import (
    PublishedDFGNNBackend,
    PublishedFlashSparseBackend,
    PublishedFused3SBackend,
    TurboGNNBackend,
)
from .pyg import PyGBackend
from .sdpa_padded import SDPAPaddedBackend
from .torch_harmonics import TorchHarmonicsBackend

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
    TorchHarmonicsBackend(),
    FlexAttentionBackend(),
    SDPAPaddedBackend(),
    PublishedFused3SBackend(),
    PublishedFlashSparseBackend(stable=False),
    PublishedFlashSparseBackend(stable=True),
    PublishedDFGNNBackend("tiling"),
    PublishedDFGNNBackend("hyper"),
    TurboGNNBackend(),
)
