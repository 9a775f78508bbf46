"""Edge features inside of additive attention, <a, leaky_relu(q_i + k_j + W a_ij)>, in the edge-by-edge kernels.

The leaky ReLU is between W a_ij and the sum over columns, so that W cannot move to the rows as in <q_i, W a_ij>. Both
passes compute W a_ij of a lane's columns in registers (cuda/edges/additive_score.cuh), for any number of features. The
gradients of W and a_ij read a bit for each edge and column, and ds (cuda/features/added_features.cu).
"""

from functools import lru_cache

import torch

from ...runtime.device import WARP_SIZE, gpu_limits
from ...runtime.jit import KernelInstance, get_kernel
from ...runtime.launch import launch_kernel
from ...terms.edge_data import BoundEdges
from ..data import Fused3SData

STEP, WARPS = 8, 4  # as in cuda/features/added_features.cu
LEAST_WARP_EDGES = 64  # of a warp: fewer cost more in partial sums than in time


def with_added_features(edges: BoundEdges | None) -> BoundEdges | None:
    """With additive attention, the key_weight [H, d, r] as the key_factor [r, H, d] that kernels add to the keys."""
    if edges is None or edges.additive_weight is None or edges.key_weight is None:
        return edges
    return edges.changed(key_weight=None, key_factor=edges.key_weight.permute(2, 0, 1).contiguous())


@lru_cache
def added_instance(
    dtype: torch.dtype, out_dtype: torch.dtype, dim: int, heads: int, of_weight: bool, of_features: bool
) -> KernelInstance:
    """The instance for `heads` heads of a lane group."""
    arguments = dtype, out_dtype, dim, heads, of_weight, of_features
    return KernelInstance("features/added_features.cu", "gradients_of_added_features", arguments)


def added_gradients(
    data: Fused3SData,
    edges: BoundEdges,
    heads: int,
    weights: torch.Tensor,
    signs: torch.Tensor,
    wanted: frozenset[str],
) -> dict[str, torch.Tensor]:
    """The wanted gradients of key_weight [H, d, r] and padded_features [nnz, `padded_columns(r)`].

    Args:
        edges: from `with_added_features`.
        heads: of a lane group.
        weights, signs: [nnz, H, ..] float32 and [nnz, lanes of all head groups] uint8, from the pass over rows.
    """
    features, weight = edges.padded_features.contiguous(), edges.key_factor
    (num_features, num_heads, dim), num_edges = weight.shape, data.indices.numel()
    groups, columns = -(-num_heads // heads), features.shape[1]
    of_weight, of_features = "key_weight" in wanted, "padded_features" in wanted
    out_dtype = features.dtype if groups == 1 else torch.float32
    kernel = get_kernel(
        added_instance(features.dtype, out_dtype, dim, heads, of_weight, of_features), features.device.index
    )
    steps = -(-num_features // STEP)
    resident = gpu_limits(features.device).num_sms * kernel.sizes.blocks_per_sm
    warps = min(max(1, resident // (groups * steps)) * WARPS, -(-num_edges // LEAST_WARP_EDGES))
    blocks = -(-max(warps, 1) // WARPS)
    of_edges = of_weights = None
    if of_features:  # the padding behind the last step is not written
        of_edges = features.new_zeros((groups, num_edges, columns), dtype=out_dtype)
    if of_weight:
        of_weights = features.new_empty((blocks * WARPS, num_features, num_heads, dim), dtype=torch.float32)
    launch_kernel(
        kernel,
        (blocks, groups, steps),
        WARPS * WARP_SIZE,
        {
            "features": features,
            "key_factor": weight,
            "additive_weight": edges.additive_weight.contiguous(),
            "edge_weights": weights,
            "signs": signs,
            "weight_gradient": of_weights,
            "feature_gradient": of_edges,
        },
        kernel.scalars(
            num_edges=num_edges,
            warp_edges=-(-num_edges // (blocks * WARPS)),
            num_heads=num_heads,
            num_weights=weights.shape[2],
            num_features=num_features,
            feature_columns=columns,
            slope=edges.additive_slope,
        ),
        overlaps=True,
    )
    found = {}
    if of_weight:
        found["key_weight"] = of_weights.sum(0).permute(1, 2, 0).to(weight.dtype, memory_format=torch.contiguous_format)
    if of_features:
        found["padded_features"] = of_edges[0] if groups == 1 else of_edges.sum(0).to(features.dtype)
    return found
