"""Weights of a Graph Transformer block, torch's result, and the bound for the kernel's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerance import FLOOR, assert_errors, row_errors

from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER

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


def block(
    p: dict, attn_out: torch.Tensor, h: torch.Tensor, units: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """All that the block computes, by torch, in the type of its inputs; `units`: factors of hidden units, not ReLU."""
    p = {name: value.to(h.dtype) if torch.is_tensor(value) else value for name, value in p.items()}
    dim = (h.shape[1],)
    sum1 = h + F.linear(attn_out, p["out_w"], p["out_b"])
    h1 = F.layer_norm(sum1, dim, p["norm1_w"], p["norm1_b"], EPS)
    before = F.linear(h1, p["up_w"], p["up_b"])
    hidden = F.relu(before) if units is None else before * units.to(h.dtype)
    sum2 = h1 + F.linear(hidden, p["down_w"], p["down_b"])
    h_next = F.layer_norm(sum2, dim, p["norm2_w"], p["norm2_b"], EPS)
    found = {"sum1": sum1, "h1": h1, "before": before, "hidden": hidden, "sum2": sum2, "h_next": h_next}
    return found if p["next_qkv_w"] is None else found | {"qkv": F.linear(h_next, p["next_qkv_w"])}


def assert_block(
    outputs: tuple[torch.Tensor, torch.Tensor | None], p: dict, attn_out: torch.Tensor, h: torch.Tensor, label: str
) -> None:
    """No row of h_next or qkv is further from float64 than twice torch's worst row in the same type."""
    same_types, exact = block(p, attn_out, h), block(p, attn_out.double(), h.double())
    for name, output in zip(("h_next", "qkv"), outputs, strict=True):
        if name not in exact:
            assert output is None
            continue
        plain, expected = same_types[name], exact[name]
        assert output.dtype == h.dtype
        unwritten = torch.nonzero(~torch.isfinite(output))
        assert len(unwritten) == 0, (
            f"{label}, {name}: {len(unwritten)} not finite, the first at {unwritten[0].tolist()}"
        )
        errors, allowed = row_errors(output, expected), 2 * row_errors(plain, expected).max() + FLOOR
        assert_errors(errors, allowed, output, expected, f"{label}, {name}")


def unusual_rows(kind: str, p: dict, attn_out: torch.Tensor, h: torch.Tensor) -> None:
    """Make inputs of ordinary size unusual, in place; one of UNUSUAL."""
    if kind == "zeros":
        attn_out.zero_(), h.zero_()
    elif kind == "far negative":
        attn_out -= 100
        h -= 1000
    elif kind == "one huge":
        h[17, 5] = 30000
    elif kind == "ramp":
        h.copy_(torch.arange(h.shape[1], device=h.device).expand_as(h))
    else:  # rows whose variance is below eps
        attn_out *= 1e-3
        h *= 1e-3
        p["out_b"].zero_()


UNUSUAL = ("zeros", "far negative", "one huge", "ramp", "small")


def on(place: str, *values: Any) -> Any:
    """Parameters of a test on the CPU (tests/cuda_shim), or on a GPU; their first is the device."""
    return pytest.param(place, *values, marks=NEEDS_COMPILER if place == "cpu" else pytest.mark.gpu)


PLACES = [on("cpu"), on("cuda")]
