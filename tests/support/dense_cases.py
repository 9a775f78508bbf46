"""Weights of a Graph Transformer block and what torch makes of them; the kernel's instances and their order of work."""

from itertools import product

import torch
import torch.nn.functional as F

from kernels.dense_block import DIMS, SLICE, DenseBlockSpec

EPS = 1e-5
SPECS = [DenseBlockSpec(torch.float16, dim, has_next) for dim, has_next in product(DIMS, (True, False))]


def parameters(dim: int, has_next: bool, dtype: torch.dtype = torch.float16, device: str = "cpu") -> dict:
    """Arguments of pack_block, as torch.nn would start them but with norms that matter."""
    generator = torch.Generator().manual_seed(dim)

    def uniform(*shape: int) -> torch.Tensor:
        bound = shape[-1] ** -0.5
        return ((torch.rand(shape, generator=generator) * 2 - 1) * bound).to(device, dtype)

    weights = {
        "out_w": uniform(dim, dim),
        "out_b": uniform(dim),
        "norm1_w": 1 + uniform(dim),
        "norm1_b": uniform(dim),
        "up_w": uniform(2 * dim, dim),
        "up_b": uniform(2 * dim),
        "down_w": uniform(dim, 2 * dim),
        "down_b": uniform(dim),
        "norm2_w": 1 + uniform(dim),
        "norm2_b": uniform(dim),
        "next_qkv_w": uniform(3 * dim, dim) if has_next else None,
    }
    return weights | {"eps": EPS}


def reference(p: dict, attended: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The block by torch, in the type of its inputs."""
    p = {name: value.to(h.dtype) if torch.is_tensor(value) else value for name, value in p.items()}
    dim = (h.shape[1],)
    h1 = F.layer_norm(h + F.linear(attended, p["out_w"], p["out_b"]), dim, p["norm1_w"], p["norm1_b"], EPS)
    hidden = F.relu(F.linear(h1, p["up_w"], p["up_b"]))
    h2 = F.layer_norm(h1 + F.linear(hidden, p["down_w"], p["down_b"]), dim, p["norm2_w"], p["norm2_b"], EPS)
    return h2, None if p["next_qkv_w"] is None else F.linear(h2, p["next_qkv_w"])


def order_of_slices(dim: int, shared_h1: bool) -> tuple[list[int], list[int]]:
    """Places in the order of tiles of each slice's up and down tile."""
    first, last = dim // SLICE, 2 * dim // SLICE - 1
    if shared_h1:
        return [first + 2 * i for i in range(last + 1)], [first + 2 * i + 1 for i in range(last + 1)]
    up = [first, *(first + 2 * i - 1 for i in range(1, last + 1))]
    return up, [*(first + 2 * i + 2 for i in range(last)), first + 2 * last + 1]
