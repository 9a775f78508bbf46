"""Baselines: other implementations of the same attention. `import bench.baselines` registers them as backends.

    fused3s_paper          Algorithms 1 and 2 of the Fused3S paper
    dfgnn_*, flashsparse_* kernels of two earlier papers
    published_*, turbo_gnn the codes of other authors, where their packages are built
    dgl, pyg               message passing of the two libraries
    flex_attention, sdpa_padded   torch's dense attention, on block masks and on padded graphs

"auto" never chooses them.
"""

from fused3s.backends import REGISTRY, defer

__all__ = ["REGISTRY"]

# The backends of each module, which ends with their instances, BACKENDS.
KERNELS_OF_CLONE = {
    "fused3s_paper": ("fused3s_paper",),
    "dfgnn": ("dfgnn_tiling", "dfgnn_hyper"),
    "flashsparse": ("flashsparse_naive", "flashsparse_stable"),
}
LIBRARIES = {
    "dgl": ("dgl",),
    "pyg": ("pyg",),
    "flex_attention": ("flex_attention",),
    "sdpa_padded": ("sdpa_padded",),
    "published": (
        *("published_fused3s", "published_flashsparse_naive", "published_flashsparse_stable"),
        *("published_dfgnn_tiling", "published_dfgnn_hyper", "turbo_gnn"),
    ),
}
for _module, _names in (KERNELS_OF_CLONE | LIBRARIES).items():
    defer(f"{__name__}.{_module}", *_names, on_gpu=_module in KERNELS_OF_CLONE)
