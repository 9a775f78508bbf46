"""Weights of a Graph Transformer block and what torch makes of them."""

import torch
import torch.nn.functional as F

EPS = 1e-5


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
